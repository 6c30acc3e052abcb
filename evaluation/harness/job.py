"""The job: from settings over tasks and model to results."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from common.setting_nodes import plain_dict
from common.settings import NO_VALUE, SettingError, check_choice, check_switch, check_whole
from evaluation import result_folder, results
from evaluation.harness.published import NO_SUITE, SUITES, PublishedSuite
from evaluation.loading import check_loading, load_checkpoint

PACKAGES = ("lm_eval", "transformers", "torch", "datasets")


@dataclass(frozen=True)
class Settings:
    """Checked settings of the values, besides the checkpoint: conf/job/evaluate.yaml and conf/benchmark/harness.yaml.

    Raises:
        ValueError: if a value is invalid; the line names its key.
    """

    tasks: tuple[str, ...]
    published: str | None
    num_fewshot: dict[str, int]
    run_generated_code: bool
    limit: int | None
    batch_size: int | str
    max_length: int | None
    dtype: str
    seed: int

    def __post_init__(self) -> None:
        if not self.tasks:
            raise SettingError("benchmark.tasks", NO_VALUE, "name one or more tasks of lm-eval", "is empty")
        check_choice("benchmark.published", self.published, (*SUITES, None))
        check_switch("benchmark.run_generated_code", self.run_generated_code)
        for name, number in self.num_fewshot.items():
            check_whole(f"benchmark.num_fewshot.{name}", number, 0)
            if name not in self.tasks and name not in self.suite.columns:
                raise ValueError(f"benchmark.num_fewshot.{name} is for none of benchmark.tasks={list(self.tasks)}")
        for key in ("limit", "max_length"):
            check_whole(f"benchmark.{key}", getattr(self, key), 1, null=True)

    @property
    def suite(self) -> PublishedSuite:
        """The paper's suite that the results are compared with."""
        return NO_SUITE if self.published is None else SUITES[self.published]

    @property
    def result_name(self) -> str:
        """Name of the result files: each suite has its own, so that one does not displace another's."""
        return "harness" if self.published in (None, "liger") else f"harness_{self.published}"


def run(cfg: DictConfig) -> None:
    """Evaluate a checkpoint; print the table, write it as .json, .md and .png, log to the run.

    Raises:
        ValueError: if a setting is invalid, a task or its data is not available, or there is no checkpoint.
    """
    # Imported here so that a missing extra is named: Hydra hides import errors of this module.
    from evaluation.harness.generated_code import allow_generated_code
    from evaluation.harness.tasks import load_suite, silence_loggers

    settings = settings_of(cfg)
    check_loading(cfg)
    place = result_folder.result_folder_of(cfg)
    with allow_generated_code(settings.run_generated_code):
        with silence_loggers():
            suite = load_suite(
                settings.tasks,
                settings.num_fewshot,
                folder(cfg.benchmark.tasks_folder),
                datasets_folder(cfg),
                settings.run_generated_code,
            )
        place.make()
        report = measured(cfg, settings, suite, place)
    write(report, settings.result_name, place)


def settings_of(cfg: DictConfig) -> Settings:
    """Read the settings from the configuration."""
    asked, examples = cfg.benchmark.tasks, cfg.benchmark.num_fewshot or OmegaConf.create({})
    if not OmegaConf.is_dict(examples):
        raise SettingError("benchmark.num_fewshot", examples, "name the tasks, as +benchmark.num_fewshot.piqa=2")
    return Settings(
        tasks=tuple(map(str, asked)) if isinstance(asked, ListConfig) else (str(asked),) if asked else (),
        published=cfg.benchmark.published,
        num_fewshot=plain_dict(examples),
        run_generated_code=cfg.benchmark.run_generated_code,
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
    from evaluation.harness.scoring import averages, rows, score
    from lit_modules.generation import job

    device = job.choose_device(cfg.device)
    said = results.conditions(device, PACKAGES)
    identity = {
        "weights": result_folder.weights_identity(str(cfg.checkpoint)),
        "commit": said["commit"],
        "versions": {name: said["versions"][name] for name in PACKAGES},
        "dtype": settings.dtype,
        "max_length": settings.max_length,
        "limit": settings.limit,
        "seed": settings.seed,
    }
    records = score(suite, lambda: load(cfg, settings, device), identity, settings.limit, place.folder / "harness")
    found = rows(suite, records, settings.suite)
    return {
        "checkpoint": str(cfg.checkpoint),
        "tasks": found,
        "averages": averages(found, settings.suite),
        "subtasks": records,
        "settings": asdict(settings),
        **said,
    }


def load(cfg: DictConfig, settings: Settings, device: Any) -> Any:
    """Return the checkpoint on its device, with lm-eval's interface."""
    from evaluation.harness.model import CheckpointLM
    from evaluation.harness.tasks import silence_loggers

    model, tokenizer = load_checkpoint(cfg, device)
    with silence_loggers():
        return CheckpointLM(model, tokenizer, settings.batch_size, settings.max_length)


def write(report: dict[str, Any], name: str, place: result_folder.ResultFolder) -> None:
    """Write the report, the table and the picture, and log the values."""
    from evaluation.harness.report import as_markdown, draw

    values = {f"{task}_{row['metric']}": row["value"] for task, row in report["tasks"].items()}
    values |= {mean: row["value"] for mean, row in report["averages"].items()}
    results.write_results(name, report, place, as_markdown, draw, values)
