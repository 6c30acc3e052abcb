"""One run, or one evaluation of a checkpoint that is of no run: settings, summary, curves, results, state."""

import csv
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from common.moved_targets import with_current_targets
from common.settings import flattened
from evaluation.compare.finding import is_run
from evaluation.compare.measured import Results, read_results
from evaluation.compare.metrics import Curves, read_curves
from lit_modules.launching.run_folder import CONFIG, SUMMARY, is_locked
from lit_modules.loggers.wandb_sync import RUN_ID, RUN_URL

FINISHED, RUNNING, UNFINISHED, EVALUATED = "finished", "running", "unfinished", "evaluated only"
NATS, BITS = "nats per token", "bits per byte"

HYDRA = Path(".hydra")
STARTS = "starts.jsonl"
TOKENIZERS = ("tokenizer/tokenizer.json", "export/tokenizer.json")


@dataclass(frozen=True)
class Run:
    """A run as it is on disk.

    Attributes:
        settings: resolved, with dotted keys.
        written: the same before the references between them were resolved: `data.seed` is then `${seed}`.
        choices: of groups: model, data, ...
        summary: `summary.json`, empty until the run has finished.
        positions: (tokens of context, loss in nats, tokens) of the last validation.
        tokenizer: identifies the tokenizer.
        devices: what the run's starts ran on.
        notes: what could not be read, each with what to do.
    """

    folder: Path
    state: str
    settings: dict[str, Any]
    written: dict[str, Any]
    choices: dict[str, Any]
    summary: dict[str, Any]
    curves: Curves
    positions: list[tuple[float, float, float]]
    results: Results
    tokenizer: str
    devices: str
    wandb_id: str | None
    wandb_url: str | None
    notes: tuple[str, ...]

    @property
    def seed(self) -> int:
        """The seed of the weights and of the data's order."""
        return self.settings.get("seed", 0)

    @property
    def tokens(self) -> float:
        """Tokens trained so far."""
        return self.summary.get("tokens", self.curves.tokens)

    @property
    def hours(self) -> float | None:
        """Hours of training so far times GPUs."""
        return next(reversed(self.curves.hours.values()), None)

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of the held-out text for each of its tokens; None until the run has finished."""
        found, tokens = self.summary.get("validation_bytes"), self.summary.get("validation_tokens")
        return found / tokens if found and tokens else None

    @cached_property
    def scale(self) -> dict[str, float | None]:
        """The factor from nats per token to each unit; None if it is not known."""
        size = self.bytes_per_token
        return {NATS: 1.0, BITS: None if size is None else 1 / math.log(2) / size}

    def loss(self, unit: str) -> float | None:
        """Return the loss of all the held-out text at the end; None without one."""
        found = self.summary.get("validation_loss" if unit == NATS else "bits_per_byte")
        return found if isinstance(found, int | float) and math.isfinite(found) else None


def read_run(folder: Path) -> Run:
    """Read a folder that `finding` has found; what is damaged is left out, and named in `notes`."""
    notes: list[str] = []
    of_training = is_run(folder)
    written = read_yaml(folder / HYDRA / CONFIG, notes)
    settings = read_yaml(folder / CONFIG, notes) or written
    hydra = read_yaml(folder / HYDRA / "hydra.yaml", notes)
    summary = read_summary(folder / SUMMARY, notes) if of_training else {}
    curves, results = read_curves(folder / "metrics.csv"), read_results(folder)
    state = FINISHED if summary else RUNNING if is_locked(folder) else UNFINISHED
    if not of_training:
        state, settings, written = EVALUATED, {"checkpoint": results.checkpoint}, {}
    return Run(
        folder=folder,
        state=state,
        settings=flattened(settings),
        written=flattened(written or with_references(settings)),
        choices=dict(hydra.get("hydra", {}).get("runtime", {}).get("choices") or {}),
        summary=summary,
        curves=curves,
        positions=list(read_positions(folder / "figures" / "position_loss.csv", notes)),
        results=results,
        tokenizer=tokenizer_identity(folder, settings),
        devices=", ".join(dict.fromkeys(read_devices(folder / STARTS))),
        wandb_id=read_line(folder / "wandb" / RUN_ID),
        wandb_url=read_line(folder / "wandb" / RUN_URL),
        notes=(*notes, *curves.notes, *results.notes),
    )


def read_yaml(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return a file of settings as plain containers, interpolations as they are written; empty without the file."""
    if not path.is_file():
        return {}
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
        return with_current_targets(found) if isinstance(found, dict) else {}
    except (yaml.YAMLError, UnicodeDecodeError, OSError, ValueError) as error:
        notes.append(f"{path} cannot be read ({' '.join(str(error).split())}): its settings are left out")
        return {}


def with_references(settings: dict[str, Any]) -> dict[str, Any]:
    """Return resolved settings with the reference that decides which runs are seeds of each other."""
    data = settings.get("data")
    if isinstance(data, dict) and data.get("seed") == settings.get("seed"):
        return settings | {"data": data | {"seed": "${seed}"}}
    return settings


def read_summary(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return `summary.json`; empty if the run has not finished."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        notes.append(f"{path} is damaged ({error}): delete it and resume the run (resume=FOLDER), which writes it anew")
        return {}
    if not isinstance(found, dict) or "validation_loss" not in found:
        fix = "an earlier version wrote it: job=evaluate benchmark=perplexity_by_position measures the checkpoint"
        notes.append(f"{path} has no validation_loss; {fix}")
        return {}
    return found


def read_positions(path: Path, notes: list[str]) -> Iterator[tuple[float, float, float]]:
    """Yield (tokens of context, loss in nats, tokens) of the last validation, where there were tokens."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", errors="replace", newline="") as handle:
        try:
            for row in csv.DictReader(handle):
                place, loss, tokens = (float(row[key]) for key in ("context_tokens", "loss", "tokens"))
                if tokens > 0 and math.isfinite(loss):
                    yield place, loss, tokens
        except (csv.Error, KeyError, TypeError, ValueError) as error:
            notes.append(f"{path} is damaged ({type(error).__name__}: {error}): the next validation writes it anew")


def tokenizer_identity(folder: Path, settings: dict[str, Any]) -> str:
    """Return a digest of the run's tokenizer; of its settings where an earlier version saved none."""
    for name in TOKENIZERS:
        if (folder / name).is_file():
            return hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return json.dumps(settings.get("tokenizer"), sort_keys=True, default=str)


def read_devices(path: Path) -> Iterator[str]:
    """Yield what each start of the run ran on: 8 x NVIDIA H200, or 1 x CPU."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            start = json.loads(line)
            yield f"{start['world_size']} x {start['gpu'] or 'CPU'}"
        except (ValueError, KeyError, TypeError):
            continue  # a line says nothing that the comparison depends on


def read_line(path: Path) -> str | None:
    """Return a file's only line; None without the file."""
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None
