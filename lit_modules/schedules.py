"""Learning-rate schedules in tokens. Each maps the tokens seen so far to a factor on the peak rate.

They do not depend on steps or batches, so a schedule means the same at every batch size.
"""

import math
from dataclasses import dataclass

import torch
from torch.nn import Parameter
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

from common.settings import SettingError, check_number, check_whole


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warm-up from 0, then half a cosine down to `final` (FoX, arXiv 2503.02130, appendix B).

    Args:
        warmup_tokens: tokens of the warm-up; 0 for none.
        max_tokens: tokens of the whole run, including the warm-up.
        final: the factor at the end.

    Raises:
        ValueError: the warm-up is longer than the run, or a length is negative.
    """

    warmup_tokens: int
    max_tokens: int
    final: float = 0.0

    def __post_init__(self) -> None:
        check_lengths(self.warmup_tokens, self.max_tokens)
        check_number("schedule.final", self.final, least=0, most=1)

    def __call__(self, tokens: int) -> float:
        if tokens < self.warmup_tokens:
            return tokens / self.warmup_tokens
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * self._progress(tokens)))

    def _progress(self, tokens: int) -> float:
        return min(1.0, (tokens - self.warmup_tokens) / max(1, self.max_tokens - self.warmup_tokens))


@dataclass(frozen=True)
class WarmupLinear(WarmupCosine):
    """Linear warm-up from 0, then a straight line down to `final`. Arguments as in WarmupCosine."""

    def __call__(self, tokens: int) -> float:
        if tokens < self.warmup_tokens:
            return tokens / self.warmup_tokens
        return 1 + (self.final - 1) * self._progress(tokens)


@dataclass(frozen=True)
class WarmupStableDecay:
    """Linear warm-up, the peak rate for most of the run, then a decay `1 - sqrt(x)` (arXiv 2405.18392, eq. 2).

    Args:
        warmup_tokens, decay_tokens: tokens of the first and the last part; 0 for none.
        max_tokens: tokens of the whole run.
        final: the factor at the end of the decay.

    Raises:
        ValueError: the two parts together are longer than the run, or a length is negative.
    """

    warmup_tokens: int
    decay_tokens: int
    max_tokens: int
    final: float = 0.0

    def __post_init__(self) -> None:
        check_lengths(self.warmup_tokens, self.max_tokens)
        check_number("schedule.final", self.final, least=0, most=1)
        check_whole("schedule.decay_tokens", self.decay_tokens, 0)
        if self.warmup_tokens + self.decay_tokens > self.max_tokens:
            problem = f"and schedule.warmup_tokens={self.warmup_tokens} do not fit in max_tokens={self.max_tokens}"
            raise SettingError("schedule.decay_tokens", self.decay_tokens, "lower one of them", problem)

    def __call__(self, tokens: int) -> float:
        if tokens < self.warmup_tokens:
            return tokens / self.warmup_tokens
        left = max(0, self.max_tokens - tokens)
        if left >= self.decay_tokens:
            return 1.0
        return self.final + (1 - self.final) * (1 - math.sqrt(1 - left / self.decay_tokens))


class Plateau:
    """The peak rate, reduced whenever the held-out loss stops improving (torch's ReduceLROnPlateau).

    Args:
        factor: multiplies the rate at each reduction.
        patience: validations without improvement that are tolerated.
        least: the smallest factor on the peak rate.

    Raises:
        ValueError: a value is out of range.
    """

    def __init__(self, factor: float = 0.1, patience: int = 10, least: float = 0.01) -> None:
        check_number("schedule.factor", factor, above=0, below=1)
        check_whole("schedule.patience", patience, 0)
        check_number("schedule.least", least, least=0, most=1)
        self._rate = SGD([Parameter(torch.zeros(1))], lr=1.0)
        self._cuts = ReduceLROnPlateau(self._rate, factor=factor, patience=patience, min_lr=least)

    def __call__(self, tokens: int) -> float:
        return self._rate.param_groups[0]["lr"]

    def observe(self, loss: float) -> None:
        """Record a held-out loss."""
        self._cuts.step(loss)

    def state_dict(self) -> dict[str, float]:
        """Return the best loss, the validations since then without improvement, and the rate's factor."""
        return {"best": self._cuts.best, "bad": self._cuts.num_bad_epochs, "factor": self(0)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self._cuts.best, self._cuts.num_bad_epochs = state["best"], int(state["bad"])
        self._rate.param_groups[0]["lr"] = state["factor"]


def check_lengths(warmup_tokens: int, max_tokens: int) -> None:
    """Raise ValueError unless 0 <= warmup_tokens <= max_tokens and max_tokens > 0."""
    check_whole("schedule.warmup_tokens", warmup_tokens, 0)
    check_whole("max_tokens", max_tokens, 1)
    if warmup_tokens > max_tokens:
        problem = f"is longer than the run, max_tokens={max_tokens}"
        raise SettingError("schedule.warmup_tokens", warmup_tokens, "lower the first", problem)
