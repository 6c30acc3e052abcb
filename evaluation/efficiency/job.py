"""The job: from settings over two models to results."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from common.setting_types import check_type
from common.settings import NO_VALUE, SettingError, check_choice, check_whole
from evaluation import result_folder, results
from evaluation.efficiency import measuring, report
from evaluation.efficiency.bytes_model import LayerBytes
from evaluation.efficiency.cells import measured_lengths
from evaluation.efficiency.models import NamedModel, check_pair, read_model
from evaluation.efficiency.pictures import draw
from evaluation.efficiency.subjects import Pool, Subject, pool_size
from lit_modules.generation import job
from lit_modules.planning import out_of_memory

log = logging.getLogger(__name__)

NAME = "efficiency"
DTYPES = ("auto", "bfloat16", "float16", "float32")  # those that the kernels compute in


@dataclass(frozen=True)
class Settings:
    """Checked settings: conf/benchmark/efficiency.yaml explains them.

    Raises:
        ValueError: if a value is invalid; the line names its key.
    """

    model: str
    against: str
    batches: tuple[int, ...]
    prefixes: tuple[int, ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        for key in ("model", "against"):
            check_type(f"benchmark.{key}", getattr(self, key), str)
        for key, least in (("batches", 1), ("prefixes", 0), ("outputs", 1)):
            if not getattr(self, key):
                raise SettingError(f"benchmark.{key}", NO_VALUE, "give one or more numbers", "is empty")
            for number in getattr(self, key):
                check_whole(f"benchmark.{key}", number, least)

    @property
    def longest(self) -> int:
        """Cached tokens at the end of the longest output."""
        return max(self.prefixes) + max(self.outputs)

    @property
    def checked(self) -> tuple[int, int]:
        """The prefix and output of the cell that is really decoded: the first prefix above 0, the first output."""
        return min(filter(None, self.prefixes), default=0), min(self.outputs)


def run(cfg: DictConfig) -> None:
    """Measure one model against another; print the tables, write efficiency.json, .md, .csv and .WHAT.png.

    Without a GPU the bytes model is all that is written, and a line says so.

    Raises:
        ValueError: if a setting is invalid, or the memory is too small.
    """
    if not OmegaConf.is_missing(cfg, "checkpoint"):
        fix = "give benchmark.model=FOLDER, and benchmark.against=FOLDER for the other"
        raise SettingError("checkpoint", cfg.checkpoint, fix, "is not read by benchmark=efficiency")
    check_choice("dtype", cfg.dtype, DTYPES)
    check_whole("seed", cfg.seed, 0)
    settings = settings_of(cfg)
    device = job.choose_device(cfg.device)
    pair = {side: read_model(f"benchmark.{side}", getattr(settings, side)) for side in report.SIDES}
    check_pair(pair["model"], pair["against"])
    place = place_of(cfg, settings)
    place.make()
    dtype = torch.bfloat16 if cfg.dtype == "auto" else getattr(torch, cfg.dtype)
    measured = None
    if device.type == "cuda":
        torch.manual_seed(cfg.seed)
        with out_of_memory.explain_out_of_memory(cfg, "give smaller benchmark.batches or benchmark.outputs"):
            measured = measure(pair, settings, dtype, device)
    else:
        log.warning("the bytes model alone: times need a GPU, and this is a %s", device)
    sizes = {side: LayerBytes.of(each.config, dtype.itemsize) for side, each in pair.items()}
    grid = (settings.batches, settings.prefixes, settings.outputs)
    found = report.make_report(sizes, *grid, measured) | {
        "names": names_of(pair),
        "layers": {side: each.config.num_layers for side, each in pair.items()},
        "settings": asdict(settings),
        "dtype": str(dtype).removeprefix("torch."),
        **results.conditions(device, ("torch",) if measured is None else ("torch", "triton")),
    }
    values = report.logged_values(found)
    results.write_results(NAME, found, place, report.as_markdown, draw, values, report.as_csv(found))


def measure(
    pair: dict[str, NamedModel], settings: Settings, dtype: torch.dtype, device: torch.device
) -> measuring.Measured:
    """Build both models' layers and the caches, and measure them."""
    with torch.no_grad():
        subjects = {side: Subject(model, dtype, device) for side, model in pair.items()}
        pool = Pool(pool_size(list(subjects.values()), list(settings.batches), settings.longest + 1), dtype, device)
    lengths = measured_lengths(settings.longest)
    return measuring.measure(subjects, settings.batches, lengths, settings.prefixes, settings.checked, pool)


def names_of(pair: dict[str, NamedModel]) -> dict[str, str]:
    """Return short names: the last part of a folder, or all of it where both folders end alike."""
    last = {side: Path(each.name).name for side, each in pair.items()}
    return last if len(set(last.values())) == len(last) else {side: each.name for side, each in pair.items()}


def settings_of(cfg: DictConfig) -> Settings:
    """Read the settings from the configuration."""
    given = cfg.benchmark
    numbers = {key: ascending(given[key]) for key in ("batches", "prefixes", "outputs")}
    return Settings(given.model, given.against, **numbers)


def ascending(given: Any) -> tuple:
    """Return the numbers of a list, each once, ascending; or a single one. What is no number stays, to be refused."""
    if not isinstance(given, ListConfig):
        return () if given is None else (given,)
    every: Sequence[Any] = list(dict.fromkeys(given))
    return tuple(sorted(every) if all(isinstance(each, int) for each in every) else every)


def place_of(cfg: DictConfig, settings: Settings) -> result_folder.ResultFolder:
    """Return where results go: `output`, or the run's folder that is measured, or `efficiency` in `runs_dir`."""
    output = cfg.output
    if output is None and result_folder.run_of_checkpoint(settings.model) is None:
        output = Path(cfg.runs_dir) / NAME
    return result_folder.result_folder(settings.model, None if output is None else str(output))
