"""`job=plan`: estimate the memory and speed of a configured run, and print or write the plan."""

import json
from pathlib import Path

import hydra
from omegaconf import DictConfig

from common.atomic_files import write_atomic
from common.setting_types import check_type
from common.settings import SettingError
from lit_modules.jobs.training_job import check_settings
from lit_modules.networks.counting import planned_parameters
from lit_modules.parallel.recomputing import check_policy
from lit_modules.planning.estimating import Planner, RunPlan
from lit_modules.planning.from_config import setup_of
from lit_modules.planning.report import as_json, as_text, draw


def run(cfg: DictConfig) -> None:
    """Print the plan of the configured run; also write it if `output` is given.

    Raises:
        ValueError: a setting cannot work; the line names its key.
    """
    check_settings(cfg)
    check_type("output", cfg.output, str | None)
    setup = setup_of(cfg)
    config = hydra.utils.instantiate(cfg.model, _convert_="all")
    check_policy(cfg.activation_checkpointing, config.num_layers)
    planned_parameters(config)  # refuse a model that cannot be counted, since it cannot be planned
    planner = Planner(config)
    if cfg.strategy._target_ is None:
        setup = planner.with_default_strategy(setup)
    plan = planner.plan(setup, cfg.max_tokens)
    print(as_text(plan), flush=True)
    if cfg.output is not None:
        write(plan, Path(str(cfg.output)))


def write(plan: RunPlan, path: Path) -> None:
    """Write the plan as JSON; if the path is a folder, also write a figure.

    Raises:
        ValueError: the path cannot be written.
    """
    try:
        if path.suffix == ".json":
            write_atomic(path, json.dumps(as_json(plan), indent=2) + "\n")
            return
        write_atomic(path / "plan.json", json.dumps(as_json(plan), indent=2) + "\n")
        draw(plan, path / "memory.png")
    except OSError as error:
        raise SettingError("output", path, "give another", f"cannot be written ({error.strerror})") from error
