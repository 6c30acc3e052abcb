"""What is measured of a model under one cache: losses, answers, and what becomes of attention."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cache.study.cases import Case, Sizes
from evaluation.answering import answers
from evaluation.cache_analysis.coverage import Coverage
from evaluation.cache_analysis.distortion import AttentionError, Rounding
from evaluation.cache_analysis.heads import key_heads
from evaluation.cache_analysis.values import Values, mean_of_heads
from evaluation.caches import NamedCache, bits_per_element
from evaluation.loading import cut_text
from evaluation.perplexity_by_position.scoring import token_losses
from evaluation.recall.questions import Question, Recall, is_right
from lit_modules.generation.job import text_ends
from lit_modules.networks.attention_inputs import AttentionInputs, watched_attention
from lit_modules.networks.caches.rotations import Rotations, model_identity
from lit_modules.networks.caches.settings import BLOCK

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

Losses = tuple[list[float], list[float], float]
"""The mean loss of each sequence, that of its second half, and the bits for each number at its end."""


@dataclass(frozen=True)
class Subject:
    """A model that is measured, and its tokenizer.

    Attributes:
        name: in tables.
        rotations: the file that was fitted to it.
        chunk: tokens that pass through the model at a time.
    """

    name: str
    model: Any
    tokenizer: Any
    rotations: Path
    chunk: int

    def sizes(self, length: int) -> Sizes:
        """Return what equal bytes depend on at this length."""
        identity = model_identity(self.model.config)
        return Sizes(length, *(identity[f"{of}_{what}"] for of in ("key", "value") for what in ("heads", "dim")))

    def cache(self, case: Case, length: int) -> NamedCache:
        """Return the cache of a case, for texts of this length."""
        settings = case.settings(self.sizes(length), str(self.rotations))
        return NamedCache(case.name, {}, settings)

    @cached_property
    def has_gates(self) -> bool:
        """Whether its attention has forget gates."""
        return getattr(self.model.config, "forget_gate", "none") != "none"

    def sequences(self, text: str, length: int, number: int, seed: int) -> Tensor:
        """Return sequences `[number, length]` of a text that do not overlap, drawn by a seed, or all that there are."""
        rows = cut_text(self.tokenizer, text, length)
        drawn = random.Random(seed).sample(range(len(rows)), min(number, len(rows)))
        return rows[sorted(drawn)]

    def losses(self, case: Case, sequences: Tensor) -> Losses:
        """Pass sequences `[N, T]` through a fresh cache, all at once."""
        filled = self.cache(case, sequences.shape[1]).new(self.model)
        losses = token_losses(self.model, filled, sequences.to(self.model.device), self.chunk)
        half = losses.shape[1] // 2
        bits = bits_per_element(filled, self.model.dtype)
        return losses.mean(1).tolist(), losses[:, half:].mean(1).tolist(), bits

    def questions(self, kind: str, length: int, number: int, seed: int, text: str) -> list[Question]:
        """Return `number` questions of a kind for each depth; their prompts are equally long.

        Line ends are put before the shorter ones: rows without padding share one schedule, which takes less time.
        """
        recall = Recall(self.tokenizer, text if kind == "needles" else None, 4, seed)
        found = [recall.question(kind, length, depth, each) for depth in DEPTHS for each in range(number)]
        longest = max(len(question.prompt) for question in found)
        begin = len(self.tokenizer("", add_special_tokens=True)["input_ids"])
        blank = self.tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]

        def filled(question: Question) -> Question:
            prompt = question.prompt
            more = blank * (longest - len(prompt))
            return replace(question, prompt=(*prompt[:begin], *more, *prompt[begin:]))

        return [filled(question) for question in found]

    def answered(self, case: Case, questions: Sequence[Question], chunk: int) -> tuple[list[float], float]:
        """Ask all questions at once; return 1 for each right answer and 0 for others, and the bits for each number.

        Args:
            case: the cache.
            questions: with prompts of one length.
            chunk: tokens of a prompt that pass through the model at a time.
        """
        cache = self.cache(case, len(questions[0].prompt)).new(self.model)
        texts = answers(
            self.model,
            self.tokenizer,
            [question.prompt for question in questions],
            cache,
            max_new_tokens=questions[0].max_new_tokens,
            chunk=chunk,
            ends=text_ends(self.model, self.tokenizer),
        )
        right = [float(is_right(text, each.answer)) for text, each in zip(texts, questions, strict=True)]
        return right, bits_per_element(cache, self.model.dtype)


@dataclass(frozen=True)
class Attention:
    """Coverage and L1 error of the attention of the last queries of sequences.

    Args:
        subject: the model.
        rotations: its maps.
        reserved: reserved lengths.
        length: tokens of a sequence.
        queries: the last ones, which are measured.
    """

    subject: Subject
    rotations: Rotations
    reserved: tuple[int, ...]
    length: int
    queries: int

    def roundings(self) -> list[Rounding]:
        """Return what becomes of quantized keys: 2 and 4 bits, plain as KiVi has it, and with each map."""
        ways = (("tokens", "plain"), ("channels", "hadamard"), ("channels", "clipped"), ("channels", "balanced"))
        return [Rounding(bits, along, way, BLOCK, self.rotations) for bits in (2, 4) for along, way in ways]

    def measure(self, sequences: Tensor) -> Values:
        """Return what was found in each layer and head, for each of the sequences `[N, T]`."""
        device, values = self.subject.model.device, Values()
        rows = range(self.length - self.queries, self.length)
        coverage = Coverage(self.reserved, rows, device)
        errors = AttentionError(self.reserved, self.roundings(), rows, device)

        def see(layer: int, inputs: AttentionInputs) -> None:
            heads = key_heads(inputs, self.queries, self.reserved)
            found = [coverage.of_head(head) | errors.of_head(head, layer) for head in heads]
            values.add(layer, {key: torch.cat([each[key] for each in found]) for key in found[0]})

        with torch.no_grad(), watched_attention(self.subject.model, see):
            for row in sequences:
                values.begin_sequence()
                self.subject.model(input_ids=row[None].to(device), use_cache=False, logits_to_keep=1)
        return values


def attention_values(values: Values) -> dict[tuple[str, str, int, str], tuple[list[float], float]]:
    """Return the means over heads and layers, one number for each sequence, and the tokens kept.

    Returns:
        By measure (`coverage` or `l1`), selection, reserved length, and what becomes of the others (nothing for
        coverage).
    """
    found = {}
    for key in values.keys:
        measure, selection, reserved, *how = key
        means = values.by_layer(key, mean_of_heads).mean(1)
        if measure == "coverage":
            found[measure, selection, reserved, ""] = means[:, 0].tolist(), float(means[:, 2].mean())
        elif measure == "l1":
            kept = values.by_layer(("kept", selection, reserved), mean_of_heads)
            found[measure, selection, reserved, how[0]] = means.tolist(), float(kept.mean())
    return found
