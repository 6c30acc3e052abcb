"""Folders of runs as trainings leave them, written in milliseconds."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

SETTINGS: dict[str, Any] = {
    "max_tokens": 4000,
    "log_every_tokens": 1000,
    "seed": 0,
    "compile": False,
    "resume": None,
    "job": {"_target_": "lit_modules.jobs.pretrain.run"},
    "model": {"hidden_size": 32, "output_gate": False, "num_key_heads": 4, "num_value_heads": 4},
    "tokenizer": {"vocab_size": 384},
    "data": {"seed": "${seed}", "tokenizer": "${tokenizer}", "batch_tokens": 500, "num_workers": 0},
    "optimizer": {"lr": 1e-3},
}
CHOICES = {"model": "fox_pro_tiny", "data": "text_files", "experiment": None, "job": "pretrain", "logger": "csv"}
BYTES, TOKENS = 8000, 2000  # of the held-out text


def write_run(
    folder: Path,
    loss: float = 3.0,
    *,
    changes: Mapping[str, Any] | None = None,
    choices: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    tokenizer: str = "one",
    rates: Sequence[float] = (1000.0, 2000.0, 2000.0, 2000.0),
    gpus: int = 2,
    finished: bool = True,
) -> Path:
    """Write a run with the final loss, which its curves reach from above.

    Args:
        changes: of settings, by dotted keys; None removes a key.
        summary: further entries of summary.json.
        rates: tokens per second of all GPUs before each line of the log.
        gpus: 0: a CPU.
    """
    settings = OmegaConf.create(SETTINGS)
    for key, value in (changes or {}).items():
        OmegaConf.update(settings, key, value)
    write_yaml(folder / ".hydra" / "config.yaml", settings)
    write_yaml(folder / "config.yaml", OmegaConf.to_container(settings, resolve=True))
    write_yaml(folder / ".hydra" / "hydra.yaml", {"hydra": {"runtime": {"choices": {**CHOICES, **(choices or {})}}}})
    gpu = "NVIDIA H200" if gpus else None
    (folder / "starts.jsonl").write_text(json.dumps({"world_size": gpus or 1, "gpu": gpu}) + "\n")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps({"name": tokenizer}))
    write_metrics(folder / "metrics.csv", loss, rates, gpus)
    write_positions(folder / "figures" / "position_loss.csv", loss)
    if finished:
        found = {
            "tokens": 4000, "parameters": 47_800, "validation_loss": loss, "validation_tokens": TOKENS,
            "validation_bytes": BYTES, "bits_per_byte": loss * TOKENS / BYTES / 0.6931471805599453, "commit": "c" * 40,
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(found | dict(summary or {})))
    return folder


def write_yaml(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(content)))


def write_metrics(path: Path, loss: float, rates: Sequence[float], gpus: int) -> None:
    """A line of the log each 1000 tokens, a validation each 2000, and a checkpoint's line that says nothing here."""
    header = ["step", "tokens", "train/loss", "tokens_per_second", "tokens_per_second_per_gpu", "validation/loss",
              "checkpoint/write_seconds"]  # fmt: skip
    rows: list[list[Any]] = [header]
    for number, rate in enumerate(rates, 1):
        tokens = 1000 * number
        rows.append([2 * number, tokens, loss + 1 / number, rate, rate / gpus if gpus else "", "", ""])
        if number % 2 == 0:
            rows.append([2 * number, tokens, "", "", "", loss + 0.5 / number, ""])
            rows.append([2 * number, tokens, "", "", "", "", 0.1])
    with open(path, "w", newline="") as handle:
        csv.writer(handle).writerows(rows)


def write_positions(path: Path, loss: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{place},{loss + 2 / place:.6f},{40 if place <= 64 else 0}" for place in range(1, 129)]
    path.write_text("\n".join(["context_tokens,loss,tokens", *lines]) + "\n")


def write_sweep(folder: Path, losses: Mapping[str, Sequence[float]], key: str = "model.output_gate") -> Path:
    """Write a sweep over a setting's values (YAML), with as many seeds as there are losses of each."""
    number = 0
    for value, finals in losses.items():
        for seed, loss in enumerate(finals):
            changes = {key: OmegaConf.create(f"value: {value}").value, "seed": seed}
            write_run(folder / str(number), loss, changes=changes)
            number += 1
    return folder
