"""The files that a measurement leaves: NAME.json, NAME.md and NAME.png."""

import contextlib
import json
import logging
import platform
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from common.atomic_files import write_atomic
from evaluation.result_folder import ResultFolder, weights_identity
from evaluation.run_log import log_to_run
from lit_modules.launching import run_folder

log = logging.getLogger(__name__)

PACKAGES = ("transformers", "torch")


def conditions(device: torch.device, packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """Return what every report says of its making: device, versions, commit and date."""
    versions = {name: metadata.version(name) for name in packages}
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "versions": {"python": platform.python_version(), **versions},
        "commit": run_folder.code_commit(),
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
    }


def identity(cfg: DictConfig, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the results of any measurement of a checkpoint: weights, dtype, commit and versions.

    Args:
        said: `conditions`.
    """
    return {
        "weights": weights_identity(str(cfg.checkpoint)),
        "dtype": str(cfg.dtype),
        "commit": said["commit"],
        "versions": said["versions"],
    }


def conditions_line(report: Mapping[str, Any], dtype: str) -> str:
    """Format the conditions for the end of a table."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return f"- {dtype}, {report['device']}; {versions}; commit {report['commit']}; {report['date']}"


def write_results(
    name: str,
    report: dict[str, Any],
    place: ResultFolder,
    as_markdown: Callable[[dict], str],
    draw: Callable[[dict, Path], Path | None],
    values: Mapping[str, float],
    csv: str | None = None,
) -> None:
    """Write the three files, log to the run's wandb run, and print the table.

    Args:
        draw: draws the picture, and others as NAME.WHAT.png, and returns its path, or None where there is nothing to
            draw.
        values: what is logged, below the measurement's name.
        csv: a table of all numbers, for NAME.csv; None for none.
    """
    text = as_markdown(report)
    keep_earlier(name, report, place.folder)
    write_atomic(place.folder / f"{name}.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    write_atomic(place.folder / f"{name}.md", text)
    if csv is not None:
        write_atomic(place.folder / f"{name}.csv", csv)
    picture = draw(report, place.folder / f"{name}.png")
    if place.run is not None:
        pictures = {} if picture is None else {f"{name}/picture": picture}
        log_to_run(place.run, {f"{name}/{key}": value for key, value in values.items()}, pictures)
    print(text)
    others = (", .csv" if csv is not None else "") + ("" if picture is None else " and .png")
    log.info("written: %s/%s.json, .md%s", place.folder, name, others)


def keep_earlier(name: str, report: dict[str, Any], folder: Path) -> None:
    """Rename the files of an earlier, different measurement to `NAME_TIME.*`, by their modification time."""
    earlier = folder / f"{name}.json"
    if not earlier.is_file():
        return
    text, written = earlier.read_text(encoding="utf-8"), datetime.fromtimestamp(earlier.stat().st_mtime)
    with contextlib.suppress(json.JSONDecodeError):
        if json.loads(text) | {"date": ""} == json.loads(json.dumps(report)) | {"date": ""}:
            return
    for path in sorted(folder.glob(f"{name}.*")):  # also NAME.WHAT.png
        path.rename(folder / f"{name}_{written:%Y-%m-%d_%H-%M-%S}{path.name.removeprefix(name)}")
