"""Records of the study's runs: a line for each run, and its held-out loss during training."""

from collections.abc import Hashable
from dataclasses import dataclass

RUNS, CURVES = "linearization_study.csv", "linearization_study_curves.csv"  # in RESULTS

TEACHER, UNIGRAM, UNTRAINED = "teacher", "unigram", "untrained window and sinks"
"""Baselines of all variants: the model before linearization; token frequencies alone; the teacher's own weights limited
to a window and the first tokens, at the memory of a linearized model."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A pretrained model: its number of parameters and training tokens."""

    parameters: int
    tokens: int


class OfARun:
    """Columns of both files that identify a run: its teacher, variant and seed."""

    @property
    def teacher(self) -> Teacher:
        return Teacher(parameters=self.teacher_parameters, tokens=self.teacher_tokens)

    @property
    def key(self) -> Hashable:
        return self.teacher, self.variant, self.seed


@dataclass(frozen=True, kw_only=True)
class Result(OfARun):
    """One run.

    date: with time, ISO 8601; of two runs with the same teacher, variant and seed, the later counts. settings: the
    run's overrides, as JSON. adaptation_tokens: trained on; 0 if nothing was drawn or trained, and then all seeds give
    the same result. held_out_nats: nats per token of the held-out text, NaN if the run diverged.
    """

    date: str
    commit: str
    gpu: str
    teacher_parameters: int
    teacher_tokens: int
    variant: str
    settings: str
    seed: int
    adaptation_tokens: int
    held_out_nats: float
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Point(OfARun):
    """A run's loss after `tokens` of adaptation, on the first part of the held-out text.

    A `Result` covers all of it, so the two are not comparable.
    """

    date: str
    teacher_parameters: int
    teacher_tokens: int
    variant: str
    seed: int
    tokens: int
    held_out_nats: float
