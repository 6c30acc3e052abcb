"""Consistency of the ranks of a run: code, folder, devices and world size."""

import hashlib
import logging
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from common.settings import SettingError, check_whole, is_whole
from data_pipeline.workers import most_processes
from lit_modules.launching import rendezvous, run_folder
from lit_modules.launching.failures import host_name
from lit_modules.launching.process import ProcessInfo, this_process
from lit_modules.launching.run_folder import ROOT

log = logging.getLogger(__name__)

PARTS = ("palimpsest.py", "common/**/*.py", "lit_modules/**/*.py", "data_pipeline/**/*.py", "kernels/**/*.py")
MAX_CLOCK_SKEW = 30.0  # seconds of clock difference between nodes worth a warning; the run itself needs no clocks


def apply_launcher_sizes(trainer: DictConfig, here: ProcessInfo) -> None:
    """Set trainer.devices and trainer.num_nodes to the launcher's sizes where they are left open.

    Raises:
        ValueError: they are given and differ from what was started.
    """
    check_whole("trainer.num_nodes", trainer.num_nodes, 1)
    check_devices(trainer.accelerator, trainer.devices)
    if not here.from_outside:
        if trainer.num_nodes != 1:
            fix = (
                "start the command on each node with srun or torchrun, or give -m hydra/launcher=slurm "
                f"hydra.launcher.nodes={trainer.num_nodes}"
            )
            problem = "needs a process on each node, and one was started"
            raise SettingError("trainer.num_nodes", trainer.num_nodes, fix, problem)
        return
    if not here.even:
        raise ValueError(
            f"srun started {here.world_size} tasks on {here.nodes} nodes, not as many on each: give --ntasks-per-node"
        )
    if trainer.num_nodes == 1:
        trainer.num_nodes = here.nodes
    found = devices_per_node(trainer.devices)
    if found is None:
        trainer.devices = here.local_size
    elif (found, trainer.num_nodes) != (here.local_size, here.nodes):
        assert here.launcher is not None
        needed = found * trainer.num_nodes
        options = {"srun": "--nodes={} --ntasks-per-node={}", "torchrun": "--nnodes={} --nproc-per-node={}"}
        raise ValueError(
            f"trainer.devices={trainer.devices} on trainer.num_nodes={trainer.num_nodes} are {needed} processes, and "
            f"{here.launcher} started {here.world_size} on {here.nodes} node{'s' * (here.nodes > 1)}: give "
            f"{here.launcher} {options[here.launcher].format(trainer.num_nodes, found)}, or trainer.devices="
            f"{here.local_size} trainer.num_nodes={here.nodes}"
        )


def check_devices(accelerator: str, asked: Any) -> None:
    """Raise ValueError unless trainer.devices is a count, "auto" or, on GPUs, -1 or a list of device indices."""
    asked = list(asked) if OmegaConf.is_list(asked) else asked
    given = asked.strip(",").split(",") if isinstance(asked, str) else asked if isinstance(asked, list) else []
    numbered = bool(given) and all(str(each).strip().isdigit() for each in given)
    if asked == "auto" or (accelerator != "cpu" and (numbered or asked in (-1, "-1"))):
        return
    if not is_whole(asked) or not 1 <= asked <= most_processes():
        gpus = "" if accelerator == "cpu" else ", the numbers of GPUs as [0,1]"
        raise SettingError("trainer.devices", asked, f"give a whole number from 1 to {most_processes()}{gpus}, or auto")


def devices_per_node(asked: Any) -> int | None:
    """Return the number of devices per node that trainer.devices asks for; None if it leaves that open."""
    if asked in ("auto", -1, "-1"):
        return None
    if isinstance(asked, str):
        return len(asked.strip(",").split(",")) if "," in asked else int(asked)
    return asked if isinstance(asked, int) else len(asked)


def check_consistency(cfg: DictConfig, folder: Path) -> None:
    """Check that all ranks agree on code, folder and devices; then apply the launcher's sizes.

    Raises:
        ValueError: the ranks cannot run together; raised on rank 0, which reports it.
        run_folder.SilentExit: the same, on the other ranks.
    """
    met = rendezvous.current_rendezvous()
    if met is None:
        apply_launcher_sizes(cfg.trainer, this_process())
        return
    announced = met.broadcast("token", lambda: [time.time(), rendezvous.write_token(folder)])
    # read the clock before looking for the folder, which can be slow
    now = time.time()
    mine = rank_report(met.here) | {"time": now, "sees": rendezvous.is_token_visible(folder, announced[1])}
    if not mine["sees"]:
        run_folder.discard_unstarted(folder)  # Hydra created it on this node's local disk

    def judge_them() -> None:
        reports = met.gather("report", mine)
        (folder / rendezvous.TOKEN_FILE).unlink(missing_ok=True)
        apply_launcher_sizes(cfg.trainer, met.here)
        check_ranks_agree(reports, cfg, folder)
        warn_of_clock_skew(reports, announced[0], time.time())

    if met.here.rank > 0:
        met.gather("report", mine)
    met.broadcast("verdict", judge_them)
    apply_launcher_sizes(cfg.trainer, met.here)


def rank_report(here: ProcessInfo) -> dict[str, Any]:
    """Return this rank's report, without its clock and whether it sees the folder."""
    import torch

    return {
        "rank": here.rank,
        "host": host_name(),
        "commit": run_folder.code_commit() if here.local_rank == 0 else None,
        "code": code_fingerprint(),
        "torch": torch.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "gpus": torch.cuda.device_count(),
    }


@cache
def code_fingerprint() -> str:
    """Return eight hexadecimal digits that identify this installation's Python files."""
    digest = hashlib.sha256()
    for path in sorted(file for part in PARTS for file in ROOT.glob(part)):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def check_ranks_agree(reports: list[dict[str, Any]], cfg: DictConfig, folder: Path) -> None:
    """Raise ValueError for the first disagreement between the ranks' reports."""
    first = reports[0]
    blind = next((each for each in reports if not each["sees"]), None)
    if blind is not None:
        problem = f"is not shared: {blind['host']} does not see {folder}, which {first['host']} made"
        raise SettingError("runs_dir", cfg.runs_dir, "give one on a file system that all nodes share", problem)
    for name, words in (("code", "versions of the code"), ("torch", "torch"), ("python", "Python")):
        other = next((each for each in reports if each[name] != first[name]), None)
        if other is not None:
            here, there = (version(each, name) for each in (first, other))
            raise ValueError(
                f"the nodes have different {words}: {here} on {first['host']}, {there} on {other['host']}: run all "
                "nodes from one checkout and one environment, on a file system that they share"
            )
    if cfg.trainer.accelerator in ("gpu", "cuda") or any(each["gpus"] for each in reports):
        if cfg.trainer.accelerator == "cpu":
            return
        asked = devices_per_node(cfg.trainer.devices) or 1
        poor = next((each for each in reports if each["gpus"] < asked), None)
        if poor is not None:
            fix = f"ask for more, for all tasks of a node together (--gpus-per-node={asked}), or give fewer devices"
            problem = f"is more than the {poor['gpus']} GPUs that rank {poor['rank']} on {poor['host']} finds"
            raise SettingError("trainer.devices", cfg.trainer.devices, fix, problem)


def version(each: dict[str, Any], name: str) -> str:
    """Return the version in a report; for the code, with its commit."""
    return f"{each['commit']} ({each[name]})" if name == "code" and each["commit"] else each[name]


def warn_of_clock_skew(reports: list[dict[str, Any]], asked: float, heard: float) -> None:
    """Warn about the first node whose clock is far from rank 0's.

    Args:
        asked: rank 0's clock before the others read theirs.
        heard: rank 0's clock after all have reported.
    """
    for each in reports:
        skew = each["time"] - heard if each["time"] > heard else min(0.0, each["time"] - asked)
        if abs(skew) > MAX_CLOCK_SKEW:
            log.warning(
                "the clock of %s is %.0f s %s that of %s: times in logs do not compare (the run itself "
                "needs no clocks)",
                each["host"],
                abs(skew),
                "before" if skew > 0 else "behind",
                reports[0]["host"],
            )
            return
