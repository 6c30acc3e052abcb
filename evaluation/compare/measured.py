"""Results of `job=evaluate` in a run's folder: values with standard errors, recall by length, losses of sequences."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.uncertainty import Estimate

FOLDER = "evaluation"
Values = dict[str, Estimate]


@dataclass
class Results:
    """What was measured of a checkpoint after its training.

    Attributes:
        checkpoint: as it was given to `job=evaluate`.
        shares: scores from 0 to 1 by benchmark, task and cache.
        numbers: other values: perplexities, whose names hold the text's name.
        recall: by kind of question, the share of right answers at each length, with the first cache.
        sequences: by text, length and cache, the loss of each sequence in nats per token.
        notes: what could not be read.
    """

    checkpoint: str | None = None
    shares: Values = field(default_factory=dict)
    numbers: Values = field(default_factory=dict)
    recall: dict[str, dict[float, float]] = field(default_factory=dict)
    sequences: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def values(self) -> Values:
        """All values by name."""
        return self.shares | self.numbers


def has_results(folder: Path) -> bool:
    """Return whether `job=evaluate` has left results in the folder."""
    return any((folder / FOLDER / f"{name}.json").is_file() for name in READERS)


def read_results(folder: Path) -> Results:
    """Read the results of a run's folder, or of a folder that `job=evaluate` had as `output`."""
    results = Results()
    for name, read in READERS.items():
        path = folder / FOLDER / f"{name}.json"
        if not path.is_file():
            continue
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            read(report, results)
            results.checkpoint = results.checkpoint or report["checkpoint"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            fix = f"repeat job=evaluate benchmark={name}"
            results.notes.append(f"{path} is left out ({type(error).__name__}: {error}): {fix}")
    results.sequences = dict(sequence_losses(folder / FOLDER / "perplexity_by_position"))
    return results


def read_harness(report: Mapping[str, Any], results: Results) -> None:
    """Take the tasks of lm-eval; what is not a share of the documents goes to the numbers."""
    from evaluation.harness.report import is_share

    for task, row in report["tasks"].items():
        values = results.shares if is_share(row["metric"]) else results.numbers
        values[f"{task}, {row['metric']}"] = Estimate(row["value"], row["standard_error"])


def take_scores(benchmark: str, report: Mapping[str, Any], results: Results) -> None:
    """Take scores by task and cache."""
    for task, caches in report["score"].items():
        for cache, found in caches.items():
            results.shares[f"{benchmark} {task}, {cache}"] = Estimate(**found)


def read_gsm8k(report: Mapping[str, Any], results: Results) -> None:
    """Take the shares of right answers by lm-eval's filter."""
    take_scores("gsm8k", report, results)


def read_longbench(report: Mapping[str, Any], results: Results) -> None:
    """Take the means of groups of sets, and of all sets."""
    for part in ("groups", "overall"):
        take_scores("longbench", report[part], results)


def read_recall(report: Mapping[str, Any], results: Results) -> None:
    """Take the scores, and the first cache's share of right answers by length, over all depths."""
    take_scores("recall", report, results)
    first = next(iter(report["caches"]))
    shares: dict[tuple[str, int], list[float]] = {}
    for cell in report["cells"]:
        if cell["cache"] == first:
            shares.setdefault((cell["kind"], cell["length"]), []).append(cell["share"])
    for (kind, length), found in sorted(shares.items()):
        results.recall.setdefault(kind, {})[length] = sum(found) / len(found)


def read_perplexity(report: Mapping[str, Any], results: Results) -> None:
    """Take the loss of the text under each cache, as a perplexity."""
    from evaluation.perplexity_by_position.report import perplexity

    name = Path(report["text"]).name
    for cache, loss in report["loss"].items():
        results.numbers[f"perplexity of {name}, {report['length']} tokens, {cache}"] = perplexity(loss)


def sequence_losses(folder: Path) -> Iterator[tuple[str, list[float]]]:
    """Yield the loss of each sequence by what decides it besides the model; of two weights', the newer come later."""
    if not folder.is_dir():
        return
    from evaluation.perplexity_by_position.report import whole_losses

    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime):
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            same = {key: kept["identity"][key] for key in ("text", "length", "chunk", "cache")}
            rows = [kept["results"][str(number)] for number in range(len(kept["results"]))]
            cache = path.name.rpartition("-")[0]
            yield f"{cache} {json.dumps(same, sort_keys=True)}", whole_losses(rows, same["length"])
        except (ValueError, KeyError, TypeError):
            continue  # it only serves perplexity_by_position.json, which read_results names if it is damaged


READERS: dict[str, Callable[[Mapping[str, Any], Results], None]] = {
    "perplexity_by_position": read_perplexity,
    "recall": read_recall,
    "gsm8k": read_gsm8k,
    "longbench": read_longbench,
    "harness": read_harness,
}
