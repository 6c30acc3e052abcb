"""The study's report: `python -m benchmarks.linearization.study.report`.

Reads the runs' records (records.py), writes tables by variant, and compares the order of the paper's variants pairwise.
"""

import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.linearization.study import pictures
from benchmarks.linearization.study.memory import cache_bytes, settings_of
from benchmarks.linearization.study.records import CURVES, RUNS, TEACHER, UNIGRAM, Point, Result, Teacher
from benchmarks.measuring.records import latest
from benchmarks.measuring.report import CommandLine, page
from benchmarks.measuring.tables import read_csv, table
from common.atomic_files import write_atomic
from evaluation.harness.published.liger import ROWS
from evaluation.significance import RULE, Comparison, Noise, Sample, compare, pooled

REFERENCE = "Liger-GLA"


@dataclass(frozen=True)
class Published:
    """The paper's results for a variant of Llama-3-8B.

    They are validation perplexity (table 6) and the mean accuracy on six tasks, in percent (tables 2, 3, 6 and 9; arXiv
    2503.01496); None if not given.
    """

    perplexity: float | None
    accuracy: float | None


AVERAGES = {row.model: row.means[0] for row in ROWS}  # of six tasks

PAPER = {
    TEACHER: Published(None, AVERAGES["Llama-3-8B"]),
    REFERENCE: Published(2.96, AVERAGES["Liger-GLA-Llama-3-8B"]),
    "Liger-HGRN2": Published(None, AVERAGES["Liger-HGRN2-Llama-3-8B"]),
    "Liger-GSA": Published(None, AVERAGES["Liger-GSA-Llama-3-8B"]),
    "Liger-GLA, hybrid": Published(None, AVERAGES["Liger-GLA-Llama-3-8B-H"]),
    "LoLCATs": Published(None, AVERAGES["LoLCATs-Llama-3-8B"]),
    "SUPRA": Published(None, AVERAGES["SUPRA-Llama-3-8B"]),
    "random gate projection": Published(3.16, 63.8),
    "learned feature map": Published(9.04, 40.2),
    "no LoRA": Published(3.23, 61.7),
    "no SWA": Published(3.75, 54.2),
}

# A state with a window, and the window alone with the same memory or less.
CONTROLS = {
    "recipe, window of 124, most sensitive layer kept": (
        "window of 250 and sinks, all of the recipe, most sensitive layer kept",
        "window of 124 and sinks, all of the recipe, most sensitive layer kept",
    ),
    "recipe, window of 124": (
        "window of 250 and sinks, all of the recipe",
        "window of 124 and sinks, all of the recipe",
    ),
    "recipe": ("window of 124 and sinks, all of the recipe",),
}


@dataclass(frozen=True)
class Study:
    """All counted runs on one teacher, nats per token of each variant, and the runs that diverged."""

    teacher: Teacher
    results: Sequence[Result]
    samples: Mapping[str, Sample]
    diverged: Sequence[Result]

    @cached_property
    def cached(self) -> dict[str, int]:
        """Return each variant's cached bytes in a linearized layer, per key/value head of width 64 in bfloat16."""
        overrides = {run.variant: run.settings for run in self.results if run.variant not in (TEACHER, UNIGRAM)}
        return {variant: cache_bytes(settings_of(json.loads(given))) for variant, given in overrides.items()}

    @property
    def noise(self) -> Noise:
        return pooled(self.samples.values())

    def recovery(self, variant: str) -> Sample | None:
        """Return the fraction kept of the teacher's advantage over the unigram model; None if either is missing."""
        if TEACHER not in self.samples or UNIGRAM not in self.samples:
            return None
        unigram = self.samples[UNIGRAM].mean
        advantage = unigram - self.samples[TEACHER].mean
        sample = self.samples[variant]
        return Sample({seed: (unigram - nats) / advantage for seed, nats in sample.values.items()}, sample.exact)


def studies(results: Sequence[Result]) -> list[Study]:
    """Group the counted runs by teacher; variants are sorted, the best first.

    Raises:
        ValueError: runs of one variant have different settings or tokens of adaptation.
    """
    found = []
    results = latest(results)
    for teacher in dict.fromkeys(result.teacher for result in results):
        mine = [result for result in results if result.teacher == teacher]
        finite = [result for result in mine if math.isfinite(result.held_out_nats)]
        _check_alike(finite)
        samples = {}
        for variant in dict.fromkeys(result.variant for result in finite):
            runs = [result for result in finite if result.variant == variant]
            values = {run.seed: run.held_out_nats for run in runs}
            same = len(set(values.values())) == 1
            samples[variant] = Sample(values, exact=same and runs[0].adaptation_tokens == 0)
        samples = dict(sorted(samples.items(), key=lambda item: item[1].mean))
        found.append(Study(teacher, finite, samples, [result for result in mine if result not in finite]))
    return found


def _check_alike(results: Sequence[Result]) -> None:
    known: dict[str, Result] = {}
    for result in results:
        first = known.setdefault(result.variant, result)
        if (first.settings, first.adaptation_tokens) != (result.settings, result.adaptation_tokens):
            raise ValueError(
                f"{result.variant}: seed {first.seed} was run with {first.settings} for {first.adaptation_tokens} "
                f"tokens, seed {result.seed} with {result.settings} for {result.adaptation_tokens}: run the older of "
                "the two again, or give one another name"
            )


def variants_table(study: Study) -> str:
    """Return a table with a line for each variant, the best first."""
    header = ["", "seeds", "tokens", "bytes cached", "nats per token", "perplexity", f"minus {REFERENCE}", "recovery"]
    header += ["paper: perplexity", "paper: accuracy, %"]
    tokens = {result.variant: result.adaptation_tokens for result in study.results}
    rows = []
    for variant, sample in study.samples.items():
        recovery, published = study.recovery(variant), PAPER.get(variant)
        rows.append(
            [
                variant,
                "any" if sample.exact else len(sample.values),
                f"{tokens[variant]:,}",
                f"{study.cached[variant]:,}" if variant in study.cached else "",
                with_deviation(sample, ".4f"),
                f"{math.exp(sample.mean):.2f}",
                _against_reference(study, variant),
                "" if recovery is None else with_deviation(recovery, ".1%"),
                f"{published.perplexity:.2f}" if published and published.perplexity else "",
                f"{published.accuracy:.1f}" if published and published.accuracy else "",
            ]
        )
    return table(header, rows)


def _margin(found: Comparison) -> str:
    return "not known" if found.margin is None else f"{found.margin:.4f}"


def with_deviation(sample: Sample, form: str) -> str:
    """Format the mean, and the standard deviation over seeds if known."""
    mean = format(sample.mean, form)
    return mean if not sample.deviation else f"{mean} ± {format(sample.deviation, form)}"


def _against_reference(study: Study, variant: str) -> str:
    if variant == REFERENCE or REFERENCE not in study.samples:
        return ""
    found = compare(study.samples[REFERENCE], study.samples[variant], study.noise)
    margin = "" if found.margin is None else f" (noise {found.margin:.4f})"
    return f"{found.difference:+.4f}{margin}{'' if found.decided else ', undecided'}"


def memory_table(study: Study) -> str:
    """Return a table of variants with a state, each against the window alone at the same memory or less.

    Pairs without runs are left out.
    """
    rows = []
    for variant, controls in CONTROLS.items():
        for control in controls:
            if variant not in study.samples or control not in study.samples:
                continue
            found = compare(study.samples[variant], study.samples[control], study.noise)
            verdict = "undecided"
            if found.decided:
                verdict = "the state" if found.difference > 0 else "the window"
            rows.append(
                [
                    variant,
                    f"{study.cached[variant]:,}",
                    control,
                    f"{study.cached[control]:,}",
                    f"{found.difference:+.4f}",
                    _margin(found),
                    verdict,
                ]
            )
    header = ["state and window", "bytes", "window alone", "bytes", "nats per token apart", "noise", "better"]
    return table(header, rows) if rows else ""


def paper_pairs() -> list[tuple[str, str, str]]:
    """Return (better, worse, metric) of every two variants that the paper compares by one metric.

    The ablation is compared by perplexity, the others by accuracy. No pair has the teacher.
    """
    by_perplexity = {name: each.perplexity for name, each in PAPER.items() if each.perplexity is not None}
    others = {name: -each.accuracy for name, each in PAPER.items() if name not in (TEACHER, *by_perplexity)}
    others[REFERENCE] = -PAPER[REFERENCE].accuracy
    pairs = []
    for published, by in ((by_perplexity, "perplexity"), (others, "accuracy")):
        order = sorted(published, key=published.get)
        pairs += [(better, worse, by) for better, worse in itertools.combinations(order, 2)]
    return pairs


def order_table(study: Study) -> str:
    """Return a table of the paper's order, pair by pair, with the result here. Pairs that were not run are left out."""
    rows = []
    for better, worse, by in paper_pairs():
        if better not in study.samples or worse not in study.samples:
            continue
        found = compare(study.samples[better], study.samples[worse], study.noise)
        verdict = "undecided"
        if found.decided:
            verdict = "as in the paper" if found.difference > 0 else "reversed"
        first, second = (getattr(PAPER[name], by) for name in (better, worse))
        rows.append(
            [
                f"{better} before {worse}",
                f"{by} {first:.2f}, {second:.2f}" if by == "perplexity" else f"{by} {first:.1f}, {second:.1f}",
                f"{found.difference:+.4f}",
                _margin(found),
                f"{found.seeds} paired" if found.seeds else "not paired",
                verdict,
            ]
        )
    counts = {name: sum(row[-1] == name for row in rows) for name in ("as in the paper", "reversed", "undecided")}
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    header = ["order in the paper", "by", "nats per token apart", "noise", "seeds", "here"]
    return table(header, rows) + f"\nOf {len(rows)} pairs: {summary}.\n" if rows else ""


def section(study: Study, drawn: Mapping[str, str]) -> str:
    """Return one teacher's part of the page. drawn: captions of its plots, by file name."""
    noise = study.noise
    parts = [
        variants_table(study),
        "Mean ± standard deviation over seeds. Recovery: (unigram - variant) / (unigram - teacher), in nats per token. "
        f"Noise of all variants together: {'not known' if noise.deviation is None else f'{noise.deviation:.4f}'} nats "
        f"per token, {noise.freedom} degrees of freedom. Bytes cached: by each linearized layer for a key/value head "
        "of 64, keys and values in bfloat16 and states in float32. A layer that stays softmax attention caches 256 a "
        "token.",
    ]
    if study.diverged:
        names = ", ".join(f"{result.variant} (seed {result.seed})" for result in study.diverged)
        parts.append(f"Diverged, and left out: {names}.")
    memory, order = memory_table(study), order_table(study)
    parts += [page("A state or a longer window", memory, level=3)] * bool(memory)
    parts += [page("The order of the paper's variants", order, level=3)] * bool(order)
    parts += [f"![{caption}]({name})" for name, caption in drawn.items()]
    runs = [*study.results, *study.diverged]
    sources = [", ".join(sorted({getattr(run, name) for run in runs})) for name in ("gpu", "commit")]
    first, last = (f([run.date[:10] for run in runs]) for f in (min, max))
    parts.append(f"{first} to {last}; {sources[0]}; commits {sources[1]}.")
    teacher = study.teacher
    title = f"Teacher: {teacher.parameters / 1e6:.1f}M parameters, {teacher.tokens / 1e6:.1f}M tokens"
    return page(title, *parts, level=2)


def whole(found: Sequence[Study], drawn: Mapping[Teacher, Mapping[str, str]]) -> str:
    """Return the whole report."""
    return page(
        "Linearization at small scale",
        "A model that was pretrained here, and what is left of it after its attention was replaced and adapted, on "
        "text that none of them was trained on. The paper's numbers (arXiv 2503.01496) are of Llama-3-8B: the orders "
        "can be compared, the values cannot. What came out, and why: "
        "[README](../linearization/study/README.md). By `python -m benchmarks.linearization.study.report`.",
        f"{RULE} What nothing was drawn for (no tokens of adaptation) has no noise of its own.",
        *(section(study, drawn.get(study.teacher, {})) for study in found),
    )


def write(folder: Path) -> Path:
    """Write the page of the folder's runs, and its pictures, beside them; return the page's path.

    Raises:
        ValueError: there are no runs, or they cannot be read.
    """
    found = studies(read_csv(folder / RUNS, Result))
    if not found:
        raise ValueError(f"{folder / RUNS} has no runs: run the study first")
    points = latest(read_csv(folder / CURVES, Point))
    drawn = {}
    for study in found:
        name = f"linearization_study_{study.teacher.parameters / 1e6:.0f}m_{study.teacher.tokens / 1e6:.0f}m"
        mine = [point for point in points if point.teacher == study.teacher and math.isfinite(point.held_out_nats)]
        captions = {}
        if mine:
            pictures.draw_curves(mine, folder / f"{name}_curves.png")
            captions[f"{name}_curves.png"] = "perplexity of a part of the held-out text against tokens of adaptation"
        recovered = {variant: study.recovery(variant) for variant in study.samples if variant not in (TEACHER, UNIGRAM)}
        if recovered and None not in recovered.values():
            pictures.draw_recovery(recovered, folder / f"{name}_recovery.png")
            captions[f"{name}_recovery.png"] = "recovery of each variant"
        drawn[study.teacher] = captions
    path = folder / RUNS.replace(".csv", ".md")
    write_atomic(path, whole(found, drawn))
    return path


def main() -> int:
    """Write the report; return the exit status."""
    arguments = CommandLine(__doc__).parse_args()
    try:
        path = write(arguments.output)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(path.read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
