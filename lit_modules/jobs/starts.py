"""The starts of a run: what ran where, and with which settings, so that one can see why a resumed run differs."""

import importlib.metadata
import json
import logging
import platform
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning
from omegaconf import OmegaConf

from common.atomic_files import write_atomic
from common.moved_targets import with_current_targets
from common.settings import differences, shown
from lit_modules.callbacks.device_stats import describe_ranks
from lit_modules.launching import run_folder
from lit_modules.launching.failures import host_name

log = logging.getLogger(__name__)

FILE = "starts.jsonl"
PACKAGES = ("torch", "triton", "lightning", "transformers")
OF_THE_COMMAND = ("resume", "runs_dir")
"""Settings that say nothing of the training."""


def record_start(trainer: lightning.Trainer, folder: Path, config: dict[str, Any], checkpoint: Path | None) -> None:
    """Append a line to starts.jsonl, and log what differs from the start before.

    Args:
        trainer: of rank 0.
        folder: of the run, with `config.yaml`.
        config: the resolved settings of this start.
        checkpoint: from which it goes on, or None.
    """
    initial = with_current_targets(OmegaConf.to_container(OmegaConf.load(folder / run_folder.CONFIG)))
    changed = {key: after for key, (_, after) in differences(initial, config).items() if key not in OF_THE_COMMAND}
    facts = {
        "host": host_name(),
        "commit": run_folder.code_commit(),
        **describe_ranks(trainer),
        **{name: installed_version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "settings": changed,
    }
    path = folder / FILE
    before = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if before:
        words = [f"{key} {was} -> {now}" for key, was, now in changes(json.loads(before[-1]), facts, initial)]
        if words:
            log.info("since the last start: %s", "; ".join(words))
    origin = None if checkpoint is None else checkpoint.name
    start = {"time": datetime.now().isoformat(timespec="seconds"), "from": origin}
    write_atomic(path, "\n".join([*before, json.dumps(start | facts)]) + "\n")


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def changes(last: dict[str, Any], now: dict[str, Any], initial: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return each fact and setting that differs between two starts: its name, and both values.

    Args:
        last, now: lines of starts.jsonl, whose `settings` are those that differ from `initial`.
        initial: the settings of the first start.
    """
    found = [(key, shown(last.get(key)), shown(value)) for key, value in now.items() if last.get(key) != value]
    found = [change for change in found if change[0] != "settings"]
    settings = OmegaConf.create(initial)
    for key in dict.fromkeys([*last["settings"], *now["settings"]]):
        was, value = (line["settings"].get(key, OmegaConf.select(settings, key)) for line in (last, now))
        if was != value:
            found.append((key, shown(was), shown(value)))
    return found
