"""Common base of language-model training: skipping non-finite steps, schedules in tokens, validation."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch.optim.lr_scheduler import LambdaLR

from common.settings import SettingError, check_number, is_number
from data_pipeline.fingerprint import other_text
from lit_modules.launching.run_folder import RunFailed
from lit_modules.networks import ParameterCount
from lit_modules.networks.positions import locate
from lit_modules.parallel.context import ContextParallel
from lit_modules.parallel.gathering import all_gather_tensors
from lit_modules.parallel.gradients import clip_gradients, local_shard
from lit_modules.schedules import Plateau
from lit_modules.trainer_parts import data_module

log = logging.getLogger(__name__)

MOST_SKIPPED = 10  # consecutive skipped steps before the run stops


@dataclass
class Validation:
    """Results of a validation.

    Positions count from the start of the document or, if a sequence cut it, of the sequence: the context that the model
    sees.

    Attributes:
        position_loss: [positions] float64, the mean loss at each position.
        position_tokens: [positions] float64, the number of tokens in each mean, possibly 0.
        components: (loss, tokens) of each component of a mixture whose text was read.
        loss: nats per token over all `tokens`.
        tokens: number of tokens with a target.
    """

    position_loss: np.ndarray
    position_tokens: np.ndarray
    components: dict[str, tuple[float, int]] = field(default_factory=dict)
    loss: float = field(init=False)
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = int(self.position_tokens.sum())
        self.loss = float((self.position_loss * self.position_tokens).sum() / max(self.tokens, 1))


class Training(lightning.LightningModule):
    """Next-token training of a causal language model on packed batches, for any model and loss.

    Subclasses create `model`, `parameter_count` and `flops_per_token`, and define the loss of a batch.

    Args:
        optimizer: called with parameter groups, returns the optimizer.
        schedule: maps tokens seen to a factor on the peak learning rate (lit_modules.schedules).
        batch_tokens: tokens per optimizer step, over all ranks and accumulation steps.
        compile: torch.compile each block.
        activation_checkpointing: what the backward pass recomputes.

    Batches are dicts from `data_pipeline.tokens.token_data`: input_ids, targets int64 [1, N] (-100: no target),
    cu_seqlens int32 [documents + 1]; for a mixture's held-out text also component int64 [sequences].

    May be set after construction: data_fingerprint, saved in checkpoints; components, the names for the numbers in
    `component`; phase_starts, maps optimizer steps to the names of the phases that start there.

    Raises:
        ValueError: the optimizer cannot be built from its settings.
    """

    model: Any
    parameter_count: ParameterCount
    flops_per_token: int

    def __init__(
        self,
        *,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer],
        schedule: Callable[[int], float],
        batch_tokens: int,
        compile: bool,
        activation_checkpointing: str | int,
    ) -> None:
        super().__init__()
        check_optimizer(getattr(optimizer, "keywords", {}))
        try:
            trial = optimizer([torch.nn.Parameter(torch.ones(1))])
            trial.param_groups[0]["params"][0].grad = torch.ones(1)
            trial.step()
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise ValueError(f"optimizer: {error}") from error
        self.make_optimizer, self.schedule = optimizer, schedule
        self.batch_tokens = batch_tokens
        self.data_fingerprint: str | None = None
        self.components: tuple[str, ...] = ()
        self.phase_starts: dict[int, str] = {}
        self.compile_blocks, self.activation_checkpointing = compile, activation_checkpointing
        self.context: ContextParallel | None = None
        self.micro_losses: list[torch.Tensor] = []  # of the current step, each times its share
        self.micro_shares: list[torch.Tensor] = []  # the shares; empty for equal weights
        self.window_loss, self.window_steps = 0.0, 0.0  # since the last report
        self.gradient_norm, self.learning_rate = 0.0, 0.0  # of the last step
        self.skipped_steps, self.skipped_in_a_row = 0, 0
        self.asked_to_end = (False, False, False)  # this rank, in the order of SIGNALS of callbacks.preemption
        self.agreed_to_end = (False, False, False)  # any rank's signals, as of the last all-reduce
        self.validation: Validation | None = None
        self.measured_whole: int | None = None  # the last step whose validation read all the held-out text
        self._sums = self._component_sums = torch.zeros(2, 0)  # of a validation: losses and tokens

    @abstractmethod
    def training_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of this rank's part of a micro-batch, a scalar with a gradient."""

    @abstractmethod
    def token_losses(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of each token `[N]` in nats, 0 without a target; no gradient."""

    def share(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """Return the weight of this micro-batch's loss within the optimizer step, a scalar; None for equal weights."""
        return None

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups, with weight decay but for the model's `no_decay_parameters`."""
        kept = self.model.no_decay_parameters()
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        return [
            {"params": [p for name, p in named if name not in kept]},
            {"params": [p for name, p in named if name in kept], "weight_decay": 0.0},
        ]

    def take_metrics(self) -> dict[str, float]:
        """Return further metrics of the steps since the last call. Every rank takes part."""
        return {}

    def rate_factor(self, group: int, tokens: int) -> float:
        """Return the factor on a parameter group's peak learning rate after `tokens`."""
        return self.schedule(tokens)

    def steps_for_tokens(self, tokens: int) -> int:
        """Return the optimizer steps in `tokens`, rounded, at least one."""
        return max(1, round(tokens / self.batch_tokens))

    def ends_step(self, batch_idx: int) -> bool:
        """Return whether the micro-batch `batch_idx` completes an optimizer step."""
        return (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0

    def on_train_batch_start(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log the start of a phase of a mixture."""
        step = self.trainer.global_step
        if step not in self.phase_starts or batch_idx % self.trainer.accumulate_grad_batches:
            return
        number, tokens = list(self.phase_starts).index(step), step * self.batch_tokens
        for logger in self.trainer.loggers:
            logger.log_metrics({"tokens": tokens, "train/phase": number + 1}, step)
        if self.trainer.is_global_zero:
            log.info("phase %s of %s begins: %s", number + 1, len(self.phase_starts), self.phase_starts[step])

    def rank_part(self, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return this rank's part of a batch: all of it, unless ranks share sequences."""
        if self.compile_blocks:  # the number of documents varies, which would compile a second time
            torch._dynamo.maybe_mark_dynamic(batch["cu_seqlens"], 0)
        return batch if self.context is None else self.context.part(batch)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        batch = self.rank_part(batch)
        loss, share = self.training_loss(batch), self.share(batch)
        if share is not None:
            loss = loss * share
            self.micro_shares.append(share)
        self.micro_losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return the optimizer, with the schedule evaluated at the middle of each step's tokens."""
        optimizer = self.make_optimizer(self.parameter_groups())

        def factor_of(group: int) -> Callable[[int], float]:
            return lambda step: self.rate_factor(group, int((step + 0.5) * self.batch_tokens))

        factors = [factor_of(group) for group in range(len(optimizer.param_groups))]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, factors), "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the global norm; if it or the loss is not finite, drop the gradients, so that the step has no effect.

        Raises:
            RunFailed: ten consecutive steps were dropped.
        """
        limit = gradient_clip_val or float("inf")  # 0 means no limit, as in Lightning
        loss = torch.stack(self.micro_losses).mean() * self.weigh_gradients()
        norm = clip_gradients(self.parameters(), limit)
        self.learning_rate = max(group["lr"] for group in optimizer.param_groups)  # a stage may keep some groups at 0
        self.micro_losses.clear()
        if self.reduce_flags(torch.isfinite(norm) & torch.isfinite(loss)):
            self.skipped_in_a_row = 0
            self.gradient_norm = float(norm)
            self.window_loss, self.window_steps = self.window_loss + float(loss), self.window_steps + 1
            return
        for parameter in self.parameters():
            parameter.grad = None
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        step = self.trainer.global_step + 1
        found = f"loss {float(loss):g}, gradient norm {float(norm):g}"
        log.warning("step %s is skipped: it is not finite (%s); %s skipped so far", step, found, self.skipped_steps)
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise RunFailed(
                f"stopped at step {step}: {MOST_SKIPPED} steps in a row were not finite ({found}); "
                "a lower optimizer.lr, a longer schedule.warmup_tokens or trainer.precision=32-true may fix it"
            )

    def weigh_gradients(self) -> torch.Tensor | float:
        """Divide gradients by the mean micro-batch weight over all ranks; return the factor.

        The step then averages over all targets, however they were split into micro-batches.
        """
        if not self.micro_shares:
            return 1.0
        mean = self.trainer.strategy.reduce(torch.stack(self.micro_shares).mean(), reduce_op="mean")
        self.micro_shares.clear()
        factor = torch.where(mean > 0, 1 / mean, 0.0)
        torch._foreach_mul_([local_shard(p.grad) for p in self.parameters() if p.grad is not None], factor)
        return factor

    def reduce_flags(self, finite: torch.Tensor | bool) -> bool:
        """Return whether the value is finite on every rank; the same all-reduce updates `agreed_to_end`."""
        told = torch.tensor([0.0, *map(float, self.asked_to_end)], device=self.device)
        told[0] = ~torch.as_tensor(finite, device=self.device)
        found, *asked = self.trainer.strategy.reduce(told, reduce_op="sum").tolist()
        self.agreed_to_end = tuple(number > 0 for number in asked)
        return not found

    def take_mean_loss(self) -> float:
        """Return the mean loss of the steps since the last call, over all ranks; NaN if all were skipped."""
        sums = torch.tensor(Training.window(self), device=self.device)
        total, steps = self.trainer.strategy.reduce(sums, reduce_op="sum").tolist()
        self.window_loss, self.window_steps = 0.0, 0.0
        return total / steps if steps else float("nan")

    def window(self) -> list[float]:
        """Return this rank's sums over the steps since the last report."""
        return [self.window_loss, self.window_steps]

    def restore_window(self, sums: list[float]) -> None:
        """Restore the sums that `window` returned."""
        self.window_loss, self.window_steps = sums[:2]

    def on_validation_epoch_start(self) -> None:
        length = data_module(self.trainer).validation_length
        self._sums = torch.zeros(2, length, dtype=torch.float64, device=self.device)
        self._component_sums = torch.zeros(2, len(self.components), dtype=torch.float64, device=self.device)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add each token's loss to the sum of its position and, in a mixture, of its component."""
        if self.components:
            of_sequences = batch["component"]
            length = batch["targets"].shape[1] // len(of_sequences)
            batch = batch | {"component": of_sequences.repeat_interleave(length)}
        batch = self.rank_part(batch)
        losses = self.token_losses(batch).double()
        counts = (batch["targets"][0] != -100).double()
        if "positions" in batch:
            position = batch["positions"].index[0]
        else:
            position = locate(1, len(losses), 0, losses.device, cu_seqlens=batch["cu_seqlens"]).index[0]
        self._sums.index_add_(1, position, torch.stack((losses, counts)))
        if self.components:
            self._component_sums.index_add_(1, batch["component"], torch.stack((losses, counts)))

    def on_validation_epoch_end(self) -> None:
        total, tokens = self._over_ranks(self._sums).cpu().numpy()
        self.validation = Validation(total / tokens.clip(min=1), tokens, self._component_losses())
        step = self.trainer.global_step
        limit = self.trainer.limit_val_batches  # as in Lightning, 1.0 means all batches and 1 means one batch
        self.measured_whole = step if isinstance(limit, float) and limit == 1.0 else None
        if self.trainer.state.fn == TrainerFn.FITTING:  # the final one reads all the text: not comparable
            metrics = {"tokens": step * self.batch_tokens, "validation/loss": self.validation.loss}
            metrics |= {f"validation/loss/{name}": loss for name, (loss, _) in self.validation.components.items()}
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics, step)
            if isinstance(self.schedule, Plateau):
                self.schedule.observe(self.validation.loss)
        if self.trainer.is_global_zero:
            log.info("held-out loss %.4f over %s tokens", self.validation.loss, self.validation.tokens)

    def _over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks. Ranks that share heads each read all tokens, so their tokens count once."""
        layout = getattr(self.trainer.strategy, "layout", None)
        return self.trainer.strategy.reduce(sums, reduce_op="sum") / (1 if layout is None else layout.tensor)

    def _component_losses(self) -> dict[str, tuple[float, int]]:
        """Return (loss, tokens) of each component that the validation read, over all ranks."""
        if not self.components:
            return {}
        sums = self._over_ranks(self._component_sums).T.tolist()
        return {
            name: (total / tokens, int(tokens))
            for name, (total, tokens) in zip(self.components, sums, strict=True)
            if tokens
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["palimpsest"] = {
            "model_config": self.model.config.to_diff_dict(),
            "data_fingerprint": self.data_fingerprint,
            "windows": self.windows_of_all_ranks(),
            "gradient_norm": self.gradient_norm,
            "skipped": [self.skipped_steps, self.skipped_in_a_row],
        }
        if isinstance(self.schedule, Plateau):
            checkpoint["palimpsest"]["schedule"] = self.schedule.state_dict()

    def windows_of_all_ranks(self) -> list[list[float]]:
        """Return `window` of each rank. Every rank takes part."""
        own = torch.tensor(self.window(), dtype=torch.float64, device=self.device)
        return torch.stack(all_gather_tensors(own, self.trainer.world_size)).tolist()

    def own_window(self, windows: list[list[float]]) -> list[float]:
        """Return this rank's window of a checkpoint; the mean if another number of ranks wrote it."""
        if len(windows) == self.trainer.world_size:
            return windows[self.trainer.global_rank]
        return [sum(sums) / len(windows) for sums in zip(*windows, strict=True)]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the counters, and set Lightning's count of micro-batches to match the optimizer step.

        The micro-batches per step may have changed with the devices or the micro-batch size.

        Raises:
            ValueError: the checkpoint was trained on other data.
        """
        state = checkpoint["palimpsest"]
        if self.data_fingerprint is not None and state["data_fingerprint"] != self.data_fingerprint:
            raise ValueError(other_text(state["data_fingerprint"], self.data_fingerprint))
        # older checkpoints hold rank 0's only
        self.restore_window(self.own_window(state["windows"] if "windows" in state else [state["window"]]))
        self.gradient_norm = state["gradient_norm"]
        self.skipped_steps, self.skipped_in_a_row = state["skipped"]
        if isinstance(self.schedule, Plateau):
            self.schedule.load_state_dict(state["schedule"])
        done = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for part in ("total", "current"):
            # A checkpoint saved inside on_train_batch_end counts one batch less as completed than as processed.
            behind = {name: progress[part]["processed"] - number for name, number in progress[part].items()}
            progress[part] = {name: done - max(0, less) for name, less in behind.items()}


def check_optimizer(settings: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the key, for a setting that no torch optimizer accepts."""
    lr, decay = settings.get("lr", 1.0), settings.get("weight_decay", 0.0)
    check_number("optimizer.lr", lr, above=0)
    check_number("optimizer.weight_decay", decay, least=0)
    betas = settings.get("betas", (0.0, 0.0))
    if not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise SettingError("optimizer.betas", betas, "give numbers of 0 or more, below 1, as [0.9,0.95]")


def model_arguments(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the model's arguments for a batch, or for a rank's part, which has positions instead of cu_seqlens."""
    where = "positions" if "positions" in batch else "cu_seqlens"
    return {"input_ids": batch["input_ids"], "shift_labels": batch["targets"], where: batch[where]}
