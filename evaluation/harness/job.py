"""The job: from settings over tasks and model to results."""

import contextlib
import importlib.metadata
import json
import logging
import platform
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from common.atomic_files import write_atomic
from common.settings import NO_VALUE, SettingError, check_choice, check_whole
from evaluation import result_folder
from evaluation.harness.published import METRICS
from lit_modules.launching import run_folder

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
PACKAGES = ("lm_eval", "transformers", "torch", "datasets")


@dataclass(frozen=True)
class Settings:
    """Checked settings of the values, besides the checkpoint: conf/job/evaluate.yaml and conf/benchmark/harness.yaml.

    Raises:
        ValueError: if a value is invalid; the line names its key.
    """

    tasks: tuple[str, ...]
    num_fewshot: dict[str, int]
    limit: int | None
    batch_size: int | str
    max_length: int | None
    dtype: str
    seed: int

    def __post_init__(self) -> None:
        if not self.tasks:
            raise SettingError("benchmark.tasks", NO_VALUE, "name one or more tasks of lm-eval", "is empty")
        for name, number in self.num_fewshot.items():
            check_whole(f"benchmark.num_fewshot.{name}", number, 0)
            if name not in self.tasks and name not in METRICS:
                raise ValueError(f"benchmark.num_fewshot.{name} is for none of benchmark.tasks={list(self.tasks)}")
        for key in ("limit", "max_length"):
            check_whole(f"benchmark.{key}", getattr(self, key), 1, null=True)
        if self.batch_size != "auto":
            check_whole("batch_size", self.batch_size, 1)
        check_choice("dtype", self.dtype, DTYPES)


def run(cfg: DictConfig) -> None:
    """Evaluate a checkpoint; print the table, write harness.json, harness.md and harness.png, log to the run.

    Raises:
        ValueError: if a setting is invalid, a task or its data is not available, or there is no checkpoint.
    """
    # Imported here so that a missing extra is named: Hydra hides import errors of this module.
    from evaluation.harness.tasks import load_suite, silence_loggers
    from lit_modules.generation import job

    settings = settings_of(cfg)
    job.check_is_folder(str(cfg.checkpoint))
    place = result_folder.result_folder(str(cfg.checkpoint), None if cfg.output is None else str(cfg.output))
    with silence_loggers():
        suite = load_suite(
            settings.tasks, settings.num_fewshot, folder(cfg.benchmark.tasks_folder), datasets_folder(cfg)
        )
    place.make()
    report = measured(cfg, settings, suite, place)
    write(report, place)


def settings_of(cfg: DictConfig) -> Settings:
    """Read the settings from the configuration."""
    asked, examples = cfg.benchmark.tasks, cfg.benchmark.num_fewshot or OmegaConf.create({})
    if not OmegaConf.is_dict(examples):
        raise SettingError("benchmark.num_fewshot", examples, "name the tasks, as +benchmark.num_fewshot.piqa=2")
    return Settings(
        tasks=tuple(map(str, asked)) if isinstance(asked, ListConfig) else (str(asked),) if asked else (),
        num_fewshot=OmegaConf.to_container(examples, resolve=True),
        limit=cfg.benchmark.limit,
        batch_size=cfg.batch_size,
        max_length=cfg.benchmark.max_length,
        dtype=str(cfg.dtype),
        seed=cfg.seed,
    )


def folder(path: str | None) -> Path | None:
    return None if path is None else Path(str(path))


def datasets_folder(cfg: DictConfig) -> Path | None:
    """Return the folder of copies, or None.

    Raises:
        ValueError: if it is not a folder.
    """
    found = folder(cfg.benchmark.datasets_folder)
    if found is not None and not found.is_dir():
        raise SettingError("benchmark.datasets_folder", found, "give one with copies of data sets", "is not a folder")
    return found


def measured(cfg: DictConfig, settings: Settings, suite: Any, place: result_folder.ResultFolder) -> dict[str, Any]:
    """Return the values and the conditions of their measurement."""
    import torch

    from evaluation.harness.scoring import averages, rows, score
    from lit_modules.generation import job

    device = job.choose_device(cfg.device)
    commit, versions = run_folder.code_commit(), {name: importlib.metadata.version(name) for name in PACKAGES}
    identity = {
        "weights": result_folder.weights_identity(str(cfg.checkpoint)),
        "commit": commit,
        "versions": versions,
        "dtype": settings.dtype,
        "max_length": settings.max_length,
        "limit": settings.limit,
        "seed": settings.seed,
    }
    records = score(suite, lambda: load(cfg, settings, device), identity, settings.limit, place.folder / "harness")
    found = rows(suite, records)
    return {
        "checkpoint": str(cfg.checkpoint),
        "tasks": found,
        "averages": averages(found),
        "subtasks": records,
        "settings": asdict(settings),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "versions": {"python": platform.python_version(), **versions},
        "commit": commit,
        "date": datetime.now().strftime("%Y-%m-%d %H:%M"),
    }


def load(cfg: DictConfig, settings: Settings, device: Any) -> Any:
    """Return the checkpoint on its device, with lm-eval's interface."""
    import torch
    import transformers

    from evaluation.harness.model import CheckpointLM
    from evaluation.harness.tasks import silence_loggers
    from lit_modules.generation import job
    from lit_modules.planning import out_of_memory

    transformers.logging.disable_progress_bar()
    with out_of_memory.explain_out_of_memory(cfg, "give dtype=bfloat16, or device=cpu"):
        model, tokenizer = job.load(str(cfg.checkpoint))
        model.to(device=device, dtype=None if settings.dtype == "auto" else getattr(torch, settings.dtype)).eval()
    with silence_loggers():
        return CheckpointLM(model, tokenizer, settings.batch_size, settings.max_length)


def write(report: dict[str, Any], place: result_folder.ResultFolder) -> None:
    """Write the three files, log to the run's wandb run, and print the table."""
    from evaluation.harness.report import as_markdown, draw
    from evaluation.run_log import log_to_run

    text = as_markdown(report)
    keep_earlier(report, place.folder)
    write_atomic(place.folder / "harness.json", json.dumps(report, indent=2) + "\n")
    write_atomic(place.folder / "harness.md", text)
    picture = draw(report, place.folder / "harness.png")
    if place.run is not None:
        values = {f"harness/{name}_{row['metric']}": row["value"] for name, row in report["tasks"].items()}
        values |= {f"harness/{name}": row["value"] for name, row in report["averages"].items()}
        log_to_run(place.run, values, {} if picture is None else {"harness/picture": picture})
    print(text)
    log.info("written: %s/harness.json, .md%s", place.folder, "" if picture is None else " and .png")


def keep_earlier(report: dict[str, Any], folder: Path) -> None:
    """Rename the files of an earlier, different evaluation to `harness_TIME.*`, by their modification time."""
    earlier = folder / "harness.json"
    if not earlier.is_file():
        return
    text, written = earlier.read_text(encoding="utf-8"), datetime.fromtimestamp(earlier.stat().st_mtime)
    with contextlib.suppress(json.JSONDecodeError):
        if json.loads(text) | {"date": ""} == json.loads(json.dumps(report)) | {"date": ""}:
            return
    for path in (earlier.with_suffix(kind) for kind in (".json", ".md", ".png")):
        if path.is_file():
            path.rename(path.with_stem(f"harness_{written:%Y-%m-%d_%H-%M-%S}"))
