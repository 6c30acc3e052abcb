"""Check of the settings of `hydra/launcher=slurm` before sbatch sees them, with one line that names the key."""

import re
from typing import Any

from omegaconf import DictConfig, ListConfig

from common.settings import NO_VALUE, SettingError, check_number, check_whole, instead
from lit_modules.launching.consistency import devices_per_node

# As in sbatch's manual: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes ...
TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|unlimited|infinite", re.IGNORECASE)
MOST_DELAY = 65535  # seconds; the most that sbatch's --signal takes


def check_launcher(config: DictConfig, known: set[str]) -> None:
    """Raise ValueError for the first setting that is not valid for any job.

    Args:
        config: the whole configuration of the command, including Hydra's part.
        known: the names of the launcher's settings.
    """
    launcher = config.hydra.launcher
    strange = [name for name in launcher if name not in known]
    if strange:
        fix = instead(strange[0], sorted(known), "hydra.launcher.")
        raise SettingError(f"hydra.launcher.{strange[0]}", NO_VALUE, fix, "is not known")
    _check_numbers(launcher)
    if not isinstance(launcher.time, str):
        raise SettingError("hydra.launcher.time", launcher.time, 'give it in quotes, such as "24:00:00"')
    if not TIME.fullmatch(launcher.time):
        raise SettingError(
            "hydra.launcher.time", launcher.time, 'give hours:minutes:seconds, such as "24:00:00"', "is not a time"
        )
    for name in ("name", "partition", "account", "qos"):
        if isinstance(launcher[name], DictConfig | ListConfig | bool):
            raise SettingError(f"hydra.launcher.{name}", launcher[name], "give one name")
    for name in ("setup", "srun_args"):
        if launcher[name] is not None and not _is_list_of_texts(launcher[name]):
            raise SettingError(f"hydra.launcher.{name}", launcher[name], 'give a list of texts, such as ["..."]')
    if not isinstance(launcher.additional_parameters, DictConfig | None):
        fix = "give sbatch's options by name, such as {exclusive: true}"
        raise SettingError("hydra.launcher.additional_parameters", launcher.additional_parameters, fix)
    _check_ranks(config)


def _check_numbers(launcher: DictConfig) -> None:
    for name in ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task"):
        try:
            check_whole(f"hydra.launcher.{name}", launcher[name], 1, null=name in ("gpus_per_node", "cpus_per_task"))
        except SettingError as error:
            error.fix += " (it follows trainer.devices)" * (name in ("tasks_per_node", "gpus_per_node"))
            raise
    check_whole("hydra.launcher.array_parallelism", launcher.array_parallelism, 1)
    check_whole("hydra.launcher.signal_delay_s", launcher.signal_delay_s, 1, MOST_DELAY)
    check_number("hydra.launcher.mem_gb", launcher.mem_gb, above=0, null=True)


def _check_ranks(config: DictConfig) -> None:
    """Raise ValueError for trainer sizes that differ from what the launcher starts."""
    launcher, trainer = config.hydra.launcher, config.trainer
    if trainer.num_nodes not in (1, launcher.nodes):
        problem = f"is not hydra.launcher.nodes={launcher.nodes}"
        raise SettingError("trainer.num_nodes", trainer.num_nodes, "leave trainer.num_nodes out, it follows", problem)
    if isinstance(trainer.devices, int) and devices_per_node(trainer.devices) not in (None, launcher.tasks_per_node):
        problem = f"is not trainer.devices={trainer.devices}"
        fix = "leave hydra.launcher.tasks_per_node out, it follows"
        raise SettingError("hydra.launcher.tasks_per_node", launcher.tasks_per_node, fix, problem)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, ListConfig) and all(isinstance(each, str) for each in value)
