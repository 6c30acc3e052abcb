"""LightningModule for linearization: stages of objectives against a teacher, the original model."""

import copy
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from common.settings import SettingError
from lit_modules.language_modelling import Training
from lit_modules.launching.run_folder import RunFailed
from lit_modules.linearization.stages import (
    CHANGES_BASE,
    OBJECTIVES,
    TrainingStage,
    check_groups,
    plan_stages,
    schedule_over,
)
from lit_modules.linearization.teacher_store import TeacherStore
from lit_modules.networks import count_parameters
from lit_modules.networks.linear_cross_entropy import IGNORE_INDEX, linear_cross_entropy
from lit_modules.networks.linear_kl_divergence import (
    linear_cross_entropy_and_kl,
    linear_kl_divergence,
    linear_top_k_kl,
)
from lit_modules.networks.linearized import LinearizedForCausalLM
from lit_modules.networks.linearized.fingerprints import fingerprint, has_fingerprint
from lit_modules.networks.linearized.lora import set_trainable, trainable
from lit_modules.networks.positions import Positions, locate
from lit_modules.trainer_parts import data_module

log = logging.getLogger(__name__)

# Most compilations of a layer's code, over kinds of layer, modes, and gradients on or off; dynamo runs any beyond its
# limit eagerly.
COMPILATIONS = 64


class LinearizationTraining(Training):
    """Training of a linearized model towards the text and its teacher, the original model.

    Args:
        stages: by name, in order.
        max_tokens: tokens of the whole training.
        schedule: a schedule of lit_modules.schedules; each stage runs through it from the start, on its own tokens.
        optimizer, batch_tokens, compile, activation_checkpointing: as in Training; activation_checkpointing is "none"
            or "full" (every layer).

    The model is set after the data are prepared, with `adopt`. One copy of the weights serves as student and teacher
    unless a stage trains the base's weights; then the teacher is a copy, or a `teacher_store`.

    Raises:
        ValueError: a setting cannot work.
    """

    model: LinearizedForCausalLM

    def __init__(
        self,
        *,
        stages: dict[str, TrainingStage],
        max_tokens: int,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer],
        schedule: Any,
        batch_tokens: int,
        compile: bool = False,
        activation_checkpointing: str | int = "none",
    ) -> None:
        super().__init__(
            optimizer=optimizer,
            schedule=schedule,
            batch_tokens=batch_tokens,
            compile=compile,
            activation_checkpointing=activation_checkpointing,
        )
        if activation_checkpointing not in ("none", "full"):
            raise SettingError(
                "activation_checkpointing", activation_checkpointing, "give none or full", "is not for job=linearize"
            )
        self.base_lr = optimizer([nn.Parameter(torch.ones(1))]).param_groups[0]["lr"]
        self.stages = plan_stages(stages, max_tokens, batch_tokens)
        self.schedules = [schedule_over(each.name, each.tokens, schedule) for each in self.stages]
        self.schedule = self.schedules[0]  # of the current stage
        self.phase_starts = {each.first: each.name for each in self.stages} if len(self.stages) > 1 else {}
        self.before: dict[str, float] = {}  # held-out loss of the teacher, and of the student before training
        self.groups: list[str] = []  # the kind of parameters in each optimizer group
        self.base_weights = ""  # fingerprint of the weights that the model was made from
        self.stage = -1  # the stage whose parameters have gradients
        self.changes_base = False  # whether the teacher's weights are trained too
        self.teacher_store: TeacherStore | None = None  # replaces the teacher
        self.micro_batch = 0  # the current one, counted from the start of the run
        self._teacher: list[LinearizedForCausalLM] = []  # in a list, so that it is not a submodule
        self._parts: dict[str, Tensor] = {}  # since the last report, by objective: [sum of loss * share, sum of shares]

    def adopt(self, model: LinearizedForCausalLM) -> None:
        """Take the linearized model to be trained, including LoRA.

        Raises:
            ValueError: a stage trains parameters that the model does not have.
        """
        self.model = model.train()
        self.base_weights = fingerprint(model)
        self.parameter_count = count_parameters(model)
        self.flops_per_token = self._flops_per_token()
        self.changes_base = any(CHANGES_BASE.intersection(each.stage.train) for each in self.stages)
        if self.changes_base and self.teacher_store is None and any(each.stage.kl for each in self.stages):
            self._teacher = [copy.deepcopy(model).requires_grad_(False)]
        if self.activation_checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        check_groups(model, {each.name: each.stage for each in self.stages})
        everything = {name for each in self.stages for name in each.stage.train}
        set_trainable(model, sorted(everything))  # the optimizer gets the parameters that any stage trains
        self.trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.kept = self.trained | set(model.new_parameters())
        if self.compile_blocks:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILATIONS)
            for layer in model.model.layers:
                layer.forward = torch.compile(layer.forward)

    def _flops_per_token(self) -> int:
        """Count the FLOPs per token of the projections alone, in the longest stage: two per weight and pass.

        A backward pass costs one pass for frozen weights and two for trained ones.
        """
        stage = max(self.stages, key=lambda each: each.tokens).stage
        passes = 3.0 if "all" in stage.train else 2.0
        student = passes if stage.cross_entropy or stage.kl else 0.0
        teacher = 1.0 if stage.kl or stage.attention_transfer else 0.0
        return int(2 * self.parameter_count.active * (student + teacher))

    def enter(self, stage: int) -> None:
        """Enable gradients for the parameters of a stage only."""
        if stage == self.stage:
            return
        self.stage, self.schedule = stage, self.schedules[stage]
        set_trainable(self.model, self.stages[stage].stage.train)

    def stage_at(self, step: int) -> int:
        """Return the stage of an optimizer step."""
        return max(number for number, each in enumerate(self.stages) if each.first <= step)

    @property
    def has_teacher(self) -> bool:
        """Whether the teacher's weights are still available."""
        return bool(self._teacher) or not self.changes_base

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return groups for each kind of parameter that a stage trains, with weight decay for matrices only."""
        kept = self.model.no_decay_parameters()
        parameters = dict(self.model.named_parameters())
        seen: set[str] = set()
        groups, self.groups = [], []
        for kind in dict.fromkeys(kind for each in self.stages for kind in each.stage.train):
            names = [name for name in trainable(self.model, [kind])[kind] if name not in seen]
            seen.update(names)
            for decays in (True, False):
                chosen = [parameters[name] for name in names if (name not in kept) == decays]
                if chosen:
                    groups.append({"params": chosen} if decays else {"params": chosen, "weight_decay": 0.0})
                    self.groups.append(kind)
        return groups

    def rate_factor(self, group: int, tokens: int) -> float:
        """Return the factor on a group's optimizer.lr after `tokens`; 0 in stages that do not train it."""
        number = self.stage_at(tokens // self.batch_tokens)
        first, stage = self.stages[number].first, self.stages[number].stage
        if self.groups[group] not in stage.train:
            return 0.0
        scale = 1.0 if stage.lr is None else stage.lr / self.base_lr
        return scale * self.schedules[number](tokens - first * self.batch_tokens)

    def on_fit_start(self) -> None:
        for teacher in self._teacher:
            teacher.to(self.device)  # type: ignore[arg-type]  # transformers' decorator hides that the method is bound

    def on_train_start(self) -> None:
        """Measure the held-out loss of the teacher and of the student before training."""
        if self.before:
            return
        limit = self.trainer.limit_val_batches
        for mode in ("teacher", "student"):
            last_chance = mode == "teacher" and not self.has_teacher  # so use all the text, as at the end
            self.before[mode] = self.measure(mode, None if last_chance or isinstance(limit, float) else limit)
            if not math.isfinite(self.before["teacher"]):
                raise RunFailed(
                    f"the base model itself has a held-out loss of {self.before['teacher']}: its weights are damaged, "
                    "or base_dtype and trainer.precision are too coarse for it"
                )
        if self.trainer.is_global_zero:
            log.info(
                "held-out loss: teacher %.4f, before training %.4f", self.before["teacher"], self.before["student"]
            )
        for logger in self.trainer.loggers:
            found = {f"validation/{mode}_before": loss for mode, loss in self.before.items()}
            logger.log_metrics({"tokens": 0, **found}, 0)

    @torch.no_grad()
    def measure(self, mode: str, batches: int | None = None) -> float:
        """Return the held-out loss in nats per token of the "teacher" or the "student", over all ranks.

        Args:
            batches: per rank; None: all.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        was_training = self.training
        self.eval()
        with self.trainer.precision_plugin.forward_context():
            for batch in itertools.islice(data_module(self.trainer).val_dataloader(), batches):
                batch = self.rank_part({name: tensor.to(self.device) for name, tensor in batch.items()})
                sums[0] += self.token_losses(batch, mode).double().sum()
                sums[1] += (batch["targets"] != IGNORE_INDEX).sum()
        self.train(was_training)
        total, tokens = self.trainer.strategy.reduce(sums, reduce_op="sum").tolist()
        return total / max(tokens, 1.0)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.micro_batch = batch_idx
        self.enter(self.stage_at(self.trainer.global_step))

    def share(self, batch: dict[str, Any]) -> Tensor | None:
        """Return the fraction of tokens with a target if the stage has next-token objectives, else None.

        Every target then counts equally, however targets are distributed over micro-batches and ranks.
        """
        stage = self.stages[self.stage].stage
        if not stage.cross_entropy and not stage.kl:
            return None
        return (batch["targets"] != IGNORE_INDEX).float().mean()

    def training_loss(self, batch: dict[str, Any]) -> Tensor:
        """Return the weighted sum of the stage's objectives."""
        stage, ids = self.stages[self.stage].stage, batch["input_ids"]
        positions = locate(1, ids.shape[1], 0, ids.device, cu_seqlens=batch["cu_seqlens"])
        parts: dict[str, Tensor] = {}
        loss: Tensor | float = 0.0
        teacher: Tensor | None = None
        if stage.attention_transfer:
            teacher = self.model.features(ids, positions=positions, mode="transfer").detach()
            parts["attention_transfer"] = self.model.transfer_losses().mean()
            loss = stage.attention_transfer * parts["attention_transfer"]
        if stage.cross_entropy or stage.kl:
            of_tokens, found = self.next_token_loss(batch, positions, teacher)
            loss, parts = loss + of_tokens, parts | found
        share = self.share(batch)
        share = torch.ones((), device=ids.device) if share is None else share
        for name, part in parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + torch.stack((part.detach().float() * share, share))
        assert isinstance(loss, Tensor)  # every stage has an objective
        return loss

    def next_token_loss(
        self, batch: dict[str, Any], positions: Positions, teacher: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of the stage's next-token objectives, and each one unweighted.

        Args:
            teacher: the teacher's features, if already computed.
        """
        stage, head, targets = self.stages[self.stage].stage, self.model.lm_head.weight, batch["targets"]
        ids, counted = batch["input_ids"], targets != IGNORE_INDEX
        student = self.model.features(ids, positions=positions)
        if stage.kl and self.teacher_store is None:
            if teacher is None:
                teacher = self.teacher_features(ids, positions)
            teacher_head = self._teacher[0].lm_head.weight if self._teacher else head
            if not stage.cross_entropy:
                kl = linear_kl_divergence(student, head, teacher, teacher_head, counted)
                return stage.kl * kl, {"kl": kl}
            both, cross_entropy, kl = linear_cross_entropy_and_kl(  # from one product with the head
                *(student, head, targets, teacher, teacher_head, counted),
                cross_entropy_weight=stage.cross_entropy,
                kl_weight=stage.kl,
            )
            return both, {"cross_entropy": cross_entropy, "kl": kl}
        parts: dict[str, Tensor] = {}
        if stage.cross_entropy:
            parts["cross_entropy"] = linear_cross_entropy(student, head, targets)
        if stage.kl and self.teacher_store is not None:
            loader: Any = self.trainer.train_dataloader
            sequences = loader.batch_sampler.micro_batch(self.micro_batch)
            likeliest, tokens = self.teacher_store.of(sequences, ids.device)
            parts["kl"] = linear_top_k_kl(student, head, tokens, likeliest, counted)
        return functools.reduce(torch.add, (getattr(stage, name) * part for name, part in parts.items())), parts

    @torch.no_grad()
    def teacher_features(self, ids: Tensor, positions: Positions) -> Tensor:
        """Return the head's input in the original model: `[1, N, hidden_size]`."""
        model = self._teacher[0] if self._teacher else self.model
        return model.features(ids, positions=positions, mode="teacher")

    @torch.no_grad()
    def token_losses(self, batch: dict[str, Any], mode: str = "student") -> Tensor:
        """Return the loss in nats of each token, [N], of the "student" or the "teacher"."""
        model = self._teacher[0] if self._teacher and mode == "teacher" else self.model
        hidden = model.features(batch["input_ids"], cu_seqlens=batch["cu_seqlens"], mode=mode)
        return linear_cross_entropy(hidden, model.lm_head.weight, batch["targets"], reduction="none")[0]

    def take_metrics(self) -> dict[str, float]:
        """Return the mean of each objective since the last call, over all ranks."""
        names = self.objectives()
        sums = self._part_sums()
        self._parts.clear()
        total, counts = self.trainer.strategy.reduce(sums, reduce_op="sum").T.tolist()
        found = zip(names, total, counts, strict=True)
        return {f"train/{name}": value / number for name, value, number in found if number}

    def objectives(self) -> list[str]:
        """Return the objectives of all stages, in reporting order."""
        return sorted({name for each in self.stages for name in OBJECTIVES if getattr(each.stage, name)})

    def _part_sums(self) -> Tensor:
        """Return `[objectives, 2]`: this rank's sums since the last report."""
        zero = torch.zeros(2, device=self.device)
        return torch.stack([self._parts.get(name, zero) for name in self.objectives()])

    def window(self) -> list[float]:
        return [*super().window(), *self._part_sums().flatten().tolist()]

    def restore_window(self, sums: list[float]) -> None:
        super().restore_window(sums)
        pairs = torch.tensor(sums[2:], device=self.device).reshape(-1, 2)  # older checkpoints have none
        self._parts = {name: pair for name, pair in zip(self.objectives(), pairs, strict=False) if pair.any()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["palimpsest"] |= {"before": self.before, "base_weights": self.base_weights}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        began_with = checkpoint["palimpsest"].get("base_weights", self.base_weights)  # older ones have none
        if began_with != self.base_weights and not has_fingerprint(self.model, began_with):
            raise ValueError(
                "base: its weights are not those that this run began with: bring them back, or start a new run without "
                "resume"
            )
        self.schedule = self.schedules[self.stage_at(max(0, checkpoint["global_step"] - 1))]  # its state was saved
        super().on_load_checkpoint(checkpoint)
        self.before = checkpoint["palimpsest"]["before"]

    def checkpointed(self, name: str) -> bool:
        """Return whether a tensor belongs in a checkpoint; unchanged tensors are read from the base model."""
        return name.removeprefix("model.") in self.kept
