"""Progress as log lines and metrics: tokens per second, model FLOPs utilization, loss, time left."""

import logging
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from common.gpus import peak_flops
from common.quantities import count, duration
from common.settings import check_whole

log = logging.getLogger(__name__)


def is_report_due(trainer: lightning.Trainer, module: Any, batch_idx: int, every_tokens: int) -> bool:
    """Return whether a report follows this micro-batch: after the first and last step and each `every_tokens`."""
    if not module.ends_step(batch_idx):
        return False
    step = trainer.global_step
    return step == 1 or step % module.steps_for_tokens(every_tokens) == 0 or step == trainer.max_steps


class Progress(Callback):
    """Callback that prints a line and logs metrics every `every_tokens` (and after the first and the last step).

    Throughput covers training only, without validations and checkpoints, and the whole run. `tokens_per_second_per_gpu`
    and `mfu` divide it by all GPUs, including those that share a sequence or a layer. `memory_gib` is the peak of the
    GPU that allocated most.

    Args:
        every_tokens: tokens between two lines; rounded to whole steps, at least one.

    Raises:
        ValueError: `every_tokens` is not a whole number above 0.
    """

    def __init__(self, every_tokens: int) -> None:
        check_whole("callbacks.progress.every_tokens", every_tokens, 1)
        self.every_tokens = every_tokens
        self.seconds = 0.0  # of training since the last line
        self.steps = 0
        self.began: float | None = None
        self.peak: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds, self.steps = state["seconds"], state["steps"]

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        on_gpu = module.device.type == "cuda"
        self.peak = peak_flops(torch.cuda.get_device_name(module.device)) if on_gpu else None

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.began is None:
            self.began = time.perf_counter()

    def on_validation_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.began = None

    def on_save_checkpoint(self, trainer: lightning.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.began = None

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not module.ends_step(batch_idx):
            return
        now = time.perf_counter()
        self.seconds += now - (self.began or now)
        self.began = now  # waiting for the next batch is training time
        self.steps += 1
        if is_report_due(trainer, module, batch_idx, self.every_tokens):
            self.report(trainer, module)

    def report(self, trainer: lightning.Trainer, module: Any) -> None:
        """Log the metrics of the steps since the last report, and print them on rank 0."""
        step = trainer.global_step
        rate = self.steps * module.batch_tokens / max(self.seconds, 1e-9)
        metrics = {
            "tokens": step * module.batch_tokens,
            "train/loss": module.take_mean_loss(),
            "train/learning_rate": module.learning_rate,
            "train/gradient_norm": module.gradient_norm,
            "train/skipped_steps": module.skipped_steps,
            "tokens_per_second": rate,
            **module.take_metrics(),
        }
        if self.peak is not None:
            metrics["mfu"] = rate * module.flops_per_token / (self.peak * trainer.world_size)
        if module.device.type == "cuda":
            metrics["tokens_per_second_per_gpu"] = rate / trainer.world_size
            most = torch.tensor(float(torch.cuda.max_memory_allocated(module.device)), device=module.device)
            metrics["memory_gib"] = float(trainer.strategy.reduce(most, reduce_op="max")) / 2**30
        self.seconds, self.steps = 0.0, 0
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step)
        if trainer.is_global_zero:
            log.info(format_line(metrics, trainer.max_steps * module.batch_tokens))


def format_line(metrics: dict[str, float], max_tokens: int) -> str:
    """Format one line of progress."""
    left = (max_tokens - metrics["tokens"]) / metrics["tokens_per_second"]
    parts = [
        f"{count(metrics['tokens']):>6} / {count(max_tokens)} tokens",
        f"loss {metrics['train/loss']:.4f}",
        f"{count(metrics['tokens_per_second'])} tokens/s",
    ]
    per_gpu = metrics.get("tokens_per_second_per_gpu", metrics["tokens_per_second"])
    if per_gpu != metrics["tokens_per_second"]:
        parts[-1] += f" ({count(per_gpu)} on each GPU)"
    if "mfu" in metrics:
        parts.append(f"MFU {metrics['mfu']:.1%}")
    if "memory_gib" in metrics:
        parts.append(f"{metrics['memory_gib']:.1f} GiB")
    parts.append(f"lr {metrics['train/learning_rate']:.1e}")
    if metrics["train/skipped_steps"]:
        parts.append(f"{metrics['train/skipped_steps']:.0f} steps skipped")
    return " · ".join([*parts, f"{duration(left)} left"])
