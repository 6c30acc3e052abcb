"""Agreement of the classifier with the LLM on held-out labelled documents."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from data_pipeline.labels.rubric import HIGHEST, Label
from data_pipeline.labels.sample import Sampled

AnyLabel = TypeVar("AnyLabel", str, int)
NORMAL_95 = 1.96  # standard deviations: 95% of a normal distribution


def agreement(
    learned: Sequence[tuple[Sampled, Label]],
    held_out: Sequence[tuple[Sampled, Label]],
    categories: Sequence[str],
    quality: np.ndarray,
) -> dict:
    """Return the agreement of predictions with the labels of `held_out`, with baselines.

    `categories`, `quality`: predictions for the held-out documents; categories are "" if none was learned. Baselines:
    the most frequent label among `learned`; for a category also the document's original one, for quality the most
    frequent label of learned documents with the same original category.
    """
    names = sorted({label.category for _, label in (*learned, *held_out)})
    found = {
        "learned": len(learned),
        "held_out": len(held_out),
        "quality": _quality_agreement(learned, held_out, quality),
    }
    if any(categories):
        found["category"] = _category_agreement(learned, held_out, categories, names)
    return found


def _category_agreement(
    learned: Sequence[tuple[Sampled, Label]],
    held_out: Sequence[tuple[Sampled, Label]],
    predicted: Sequence[str],
    names: Sequence[str],
) -> dict:
    true = [label.category for _, label in held_out]
    guess = _most_frequent(label.category for _, label in learned)
    pairs = Counter(zip(true, predicted, strict=True))
    came_with = [sampled.category for sampled, _ in held_out]
    found = {
        "names": list(names),
        **_share("accuracy", true, predicted),
        "macro_f1": _macro_f1(true, predicted),
        "most_frequent": {"label": guess, **_share("accuracy", true, [guess] * len(true))},
        "confusion": [[pairs[row, column] for column in names] for row in names],
    }
    if set(names).intersection(came_with):  # else the sources' categories are not the rubric's
        found["came_with"] = _share("accuracy", true, came_with)
    return found


def _quality_agreement(
    learned: Sequence[tuple[Sampled, Label]], held_out: Sequence[tuple[Sampled, Label]], predicted: np.ndarray
) -> dict:
    true = np.array([label.quality for _, label in held_out])
    guess = _most_frequent(label.quality for _, label in learned)
    by_category: dict[str, Counter] = {}
    for sampled, label in learned:
        by_category.setdefault(sampled.category, Counter())[label.quality] += 1
    usual = {category: _most_frequent(counts.elements()) for category, counts in by_category.items()}
    guesses = np.array([usual.get(sampled.category, guess) for sampled, _ in held_out])
    rounded = np.rint(predicted).astype(int)
    table = np.zeros((HIGHEST + 1, HIGHEST + 1), int)
    np.add.at(table, (true, rounded), 1)
    return {
        **_ordinal(true, rounded),
        "mean_error": float(np.abs(predicted - true).mean()),
        "most_frequent": {"label": guess, **_ordinal(true, np.full_like(true, guess))},
        "came_with": _ordinal(true, guesses),
        "labels": [sum(label.quality == points for _, label in (*learned, *held_out)) for points in range(HIGHEST + 1)],
        "confusion": table.tolist(),
    }


def _ordinal(true: np.ndarray, predicted: np.ndarray) -> dict:
    return {
        **_share("exact", true, predicted),
        "within_one": float((np.abs(true - predicted) <= 1).mean()),
        "weighted_kappa": weighted_kappa(true, predicted),
    }


def weighted_kappa(true: np.ndarray, predicted: np.ndarray) -> float:
    """Return Cohen's kappa with quadratic weights: 1 for full agreement, 0 for chance agreement."""
    expected = float(true.var() + predicted.var() + (true.mean() - predicted.mean()) ** 2)  # if independent
    return 1 - float(((true - predicted) ** 2).mean()) / expected if expected else 0.0


def _share(name: str, true: Sequence | np.ndarray, predicted: Sequence | np.ndarray) -> dict:
    """Return the share of equal labels, and its 95% interval (Wilson)."""
    total = len(true)
    share = sum(bool(t == p) for t, p in zip(true, predicted, strict=True)) / total
    spread = NORMAL_95**2 / total
    middle = (share + spread / 2) / (1 + spread)
    reach = NORMAL_95 * math.sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    return {name: share, "interval": [max(0.0, middle - reach), min(1.0, middle + reach)]}


def _macro_f1(true: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the mean of the F1 scores of the categories that occur."""
    pairs = Counter(zip(true, predicted, strict=True))
    occurring = Counter(true), Counter(predicted)
    names = set(true) | set(predicted)
    return sum(2 * pairs[name, name] / (occurring[0][name] + occurring[1][name]) for name in names) / len(names)


def _most_frequent(labels: Iterable[AnyLabel]) -> AnyLabel:
    """Return the most frequent label; of several, the lowest."""
    counts = Counter(labels)
    return min(counts, key=lambda label: (-counts[label], label))
