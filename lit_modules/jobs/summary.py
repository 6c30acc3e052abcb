"""Summary of a training: the numbers of summary.json, and the lines for the terminal."""

import logging
import math
from pathlib import Path
from typing import Any

import lightning

from common.quantities import count
from data_pipeline.mixtures.card import draw_held_out
from data_pipeline.tokens.token_data import TokenData
from lit_modules.callbacks.pictures import ignore_disk_errors, log_picture
from lit_modules.callbacks.samples import Samples
from lit_modules.language_modelling import Training
from lit_modules.launching import run_folder
from lit_modules.trainer_parts import find_callback

log = logging.getLogger(__name__)


def measured_values(trainer: lightning.Trainer, module: Training, data: TokenData) -> dict[str, Any]:
    """Return the entries of summary.json for any training: lengths, sizes, and the loss on the held-out text."""
    found = module.validation
    assert found is not None  # every training ends with one
    summary: dict[str, Any] = {
        "tokens": trainer.global_step * module.batch_tokens,
        "steps": trainer.global_step,
        "parameters": module.parameter_count.total,
        "parameters_without_embedding": module.parameter_count.active,
        "skipped_steps": module.skipped_steps,
        "validation_loss": found.loss,
        "validation_perplexity": math.exp(min(found.loss, 700.0)),
        "validation_tokens": found.tokens,
        "commit": run_folder.code_commit(),
    }
    if data.validation_bytes:
        bits = found.loss * found.tokens / math.log(2) / data.validation_bytes
        summary |= {"bits_per_byte": bits, "validation_bytes": data.validation_bytes, **data.yardsticks()}
    if found.components:
        summary["validation_by_component"] = loss_by_component(found.components, data.component_bytes)
    return summary


def loss_by_component(found: dict[str, tuple[float, int]], held_out: dict[str, int]) -> dict[str, dict[str, float]]:
    """Return the loss, tokens, held-out bytes and bits per byte of each component of a mixture."""
    return {
        name: {
            "loss": loss,
            "tokens": tokens,
            "bytes": held_out[name],
            "bits_per_byte": loss * tokens / math.log(2) / held_out[name],
        }
        for name, (loss, tokens) in found.items()
    }


def write_and_print(trainer: lightning.Trainer, summary: dict[str, Any], folder: Path, closing: list[str]) -> None:
    """Log a training's final numbers, write summary.json, and print the results, `closing` lines last."""
    if "validation_by_component" in summary:
        draw_component_bits(trainer, summary, folder / "figures" / "validation_by_component.png")
    for logger in trainer.loggers:
        logger.log_metrics({f"final/{k}": v for k, v in summary.items() if isinstance(v, float)}, trainer.global_step)
    run_folder.write_summary(folder, summary)
    log.info("\n".join([*held_out_lines(summary, trainer), "", f"pictures: {folder}/figures/", *closing]))


@ignore_disk_errors()
def draw_component_bits(trainer: lightning.Trainer, summary: dict[str, Any], path: Path) -> None:
    """Draw the bits per byte of each component."""
    bits = {name: found["bits_per_byte"] for name, found in summary["validation_by_component"].items()}
    draw_held_out(list(bits), list(bits.values()), summary["bits_per_byte"], path)
    log_picture(trainer, "validation_by_component", path)


def held_out_lines(summary: dict[str, Any], trainer: lightning.Trainer) -> list[str]:
    """Return the lines for the terminal: results on the held-out text, and a sample of generated text."""
    lines = ["", f"held-out text: loss {summary['validation_loss']:.4f} nats per token"]
    if "bits_per_byte" in summary:
        rows = [
            ("this model", summary["bits_per_byte"]),
            ("xz -9 after training text", summary["xz_after_training_bits_per_byte"]),
            ("xz -9 of this text alone", summary["xz_bits_per_byte"]),
            ("token unigram model", summary["unigram_bits_per_byte"]),
        ]
        lines.append(f"bits per byte of the {count(summary['validation_bytes'])} held-out bytes:")
        lines += [f"  {name:<26}{value:.3f}" for name, value in rows if value is not None]
    if "validation_by_component" in summary:
        lines.append("of this model, by component:")
        lines += [f"  {n:<26}{found['bits_per_byte']:.3f}" for n, found in summary["validation_by_component"].items()]
    samples = sample_text(trainer)
    if samples:
        lines += ["", "a sample of its writing:", *(f"  | {line}" for line in samples.splitlines())]
    return lines


def sample_text(trainer: lightning.Trainer) -> str | None:
    """Return the run's last sample, with its prompt."""
    found = find_callback(trainer, Samples)
    return found.prompts[-1] + found.texts[-1] if found is not None and found.texts else None
