"""Stages of a linearization's training: settings, checks, and their token counts."""

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.settings import NO_VALUE, SettingError, check_number, check_whole, under
from lit_modules.networks.linearized.lora import trainable
from lit_modules.networks.linearized.models import LinearizedForCausalLM

CHANGES_BASE = {"projections", "all"}  # groups of weights that the teacher shares
OBJECTIVES = ("cross_entropy", "kl", "attention_transfer")


@dataclass(frozen=True)
class TrainingStage:
    """A part of a linearization's training: which parameters, how many tokens, and which objectives.

    The loss is the weighted sum of the objectives; one of weight 0 is not computed. Next-token objectives are means
    over all targets of an optimizer step, however it is split into micro-batches and ranks.

    Args:
        tokens: tokens to read; None: the rest of max_tokens.
        train: groups of parameters (lit_modules.networks.linearized.lora): lora, feature_maps, scalars, norms, gates,
            projections, or all.
        lr: peak learning rate; None: optimizer.lr.
        cross_entropy: weight of the next tokens' cross-entropy.
        kl: weight of KL(teacher || student) of the next tokens' distributions.
        attention_transfer: weight of the squared error of the layers' attention outputs, the mean over layers, each
            computed from the output of the teacher's previous layer (arXiv 2410.10254, eq. 6).

    Raises:
        ValueError: a value is out of range; the line names the key.
    """

    tokens: int | None = None
    train: tuple[str, ...] = ("lora",)
    lr: float | None = None
    cross_entropy: float = 1.0
    kl: float = 0.0
    attention_transfer: float = 0.0

    def check(self, name: str) -> None:
        """Raise ValueError for a setting that cannot work; `name` is the stage's."""
        check_whole(f"stages.{name}.tokens", self.tokens, 1, null=True)
        for key in OBJECTIVES:
            check_number(f"stages.{name}.{key}", getattr(self, key), least=0)
        if not any(getattr(self, key) for key in OBJECTIVES):
            raise ValueError(f"stages.{name}: {', '.join(OBJECTIVES)} are all 0: give one of them a weight")
        if not self.train:
            fix = "name the groups of parameters that it trains, as [lora]"
            raise SettingError(f"stages.{name}.train", NO_VALUE, fix, "is empty")
        if CHANGES_BASE.intersection(self.train) and self.attention_transfer:
            raise ValueError(
                f"stages.{name}: train={list(self.train)} would change the layers that attention_transfer learns from: "
                "train feature_maps, scalars or lora"
            )
        check_number(f"stages.{name}.lr", self.lr, above=0, null=True)


class PlannedStage(NamedTuple):
    """A stage with its name, its first optimizer step, and its tokens in whole steps."""

    first: int
    name: str
    tokens: int
    stage: TrainingStage


def plan_stages(stages: dict[str, TrainingStage], max_tokens: int, batch_tokens: int) -> list[PlannedStage]:
    """Return the stages in order, each with its first optimizer step and its tokens rounded to whole steps.

    Raises:
        ValueError: the stages do not fill max_tokens, or a stage cannot work.
    """
    if not stages:
        raise SettingError("stages", NO_VALUE, "give at least one, as +stages.finetuning.train=[lora]", "is empty")
    for name, stage in stages.items():
        stage.check(name)
    open_ended = [name for name, stage in stages.items() if stage.tokens is None]
    if len(open_ended) > 1:
        problem = f"{' and '.join(open_ended)} have no tokens"
        raise SettingError("stages", NO_VALUE, "only one can take the rest of max_tokens", problem)
    given = sum(stage.tokens for stage in stages.values() if stage.tokens is not None)
    rest = max_tokens - given
    if rest < 0 or (rest == 0) == bool(open_ended):
        change = "raise max_tokens, or lower theirs" if open_ended else "give one of them tokens=null, for the rest"
        raise ValueError(f"max_tokens={max_tokens}, and the stages that say their tokens have {given}: {change}")
    planned, first, end = [], 0, 0
    for name, stage in stages.items():
        end += rest if stage.tokens is None else stage.tokens
        last = math.ceil(end / batch_tokens)
        if last == first:
            raise ValueError(f"stages.{name}.tokens={stage.tokens} makes no step of data.batch_tokens={batch_tokens}")
        planned.append(PlannedStage(first, name, (last - first) * batch_tokens, stage))
        first = last
    return planned


def check_groups(model: LinearizedForCausalLM, stages: dict[str, TrainingStage]) -> None:
    """Raise ValueError, naming the key, if a stage trains parameters that the model with its LoRA lacks."""
    for name, stage in stages.items():
        with under(f"stages.{name}"):
            trainable(model, stage.train)


def schedule_over(stage: str, tokens: int, schedule: Any) -> Any:
    """Return a fresh schedule, fitted to a stage's tokens if it has a length.

    Raises:
        ValueError: they are too few for it; the line names the stage.
    """
    if not hasattr(schedule, "max_tokens"):
        return copy.deepcopy(schedule)
    try:
        return dataclasses.replace(schedule, max_tokens=tokens)
    except ValueError as error:
        raise ValueError(f"stages.{stage}: {error}") from error
