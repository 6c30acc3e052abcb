"""The ablations beside the paper's numbers: `python -m benchmarks.pretraining.sigma_ablations.report`.

Reads sigma_ablations.csv in --output; writes sigma_ablations.md there, and a picture for each comparable set of runs.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.measuring.records import latest
from benchmarks.measuring.report import CommandLine, page
from benchmarks.measuring.tables import read_csv, table
from benchmarks.pretraining.sigma_ablations.cases import CASES, SELECTED, Pair, Published, pairs, published
from benchmarks.pretraining.sigma_ablations.records import FILE, Result
from common.atomic_files import write_atomic, write_figure
from evaluation.significance import RULE, Comparison, Sample, compare, pooled

OURS, PAPERS, INK = "#2f7fc1", "#8a8f98", "black"
AGREES, DISAGREES, UNDECIDED, NOT_RUN = "agrees", "disagrees", "undecided", "not run"
HOW_SELECTED = (
    "Sel.V trains nothing. `palimpsest job=evaluate benchmark=perplexity_by_position checkpoint=RUN "
    "benchmark.text=TEXT benchmark.length=1024 benchmark.chunk=1 'benchmark.caches=[full,selective_v]'` measures the "
    "finished runs of MHA, GQA-8 and GQA-4. "
    "The program that trained them gathers it with `--minutes 0`: a run's loss, plus what the cache adds on that text."
)


@dataclass(frozen=True)
class Study:
    """All runs with the same tokens, held-out text and overrides: losses by case and seed."""

    results: Sequence[Result]

    @property
    def samples(self) -> dict[str, Sample]:
        """Losses by case, in nats per token."""
        found: dict[str, dict[int, float]] = {}
        for result in self.results:
            found.setdefault(result.case, {})[result.seed] = result.held_out_loss
        return {case: Sample(values) for case, values in found.items()}

    def compared(self, pair: Pair) -> Comparison | None:
        """Return the difference of a pair; None if one of the two was not run."""
        samples = self.samples
        if pair.first not in samples or pair.second not in samples:
            return None
        trained = [sample for case, sample in samples.items() if not case.endswith(SELECTED)]
        return compare(samples[pair.first], samples[pair.second], pooled(trained))


def studies(results: Sequence[Result]) -> list[Study]:
    """Return the counted runs by their setup, the one with most runs first."""
    results = latest(results)
    setups = dict.fromkeys(result.setup for result in results)
    found = [Study([result for result in results if result.setup == setup]) for setup in setups]
    return sorted(found, key=lambda study: -len(study.results))


def gain(pair: Pair) -> float:
    """Return the paper's difference in mean accuracy, in points: above 0 the second case is better."""
    overall = {(row.table, row.case): row.overall for row in published()}
    return overall[pair.table, pair.second] - overall[pair.table, pair.first]


def verdict(points: float, found: Comparison | None) -> str:
    """Return whether our losses agree with the direction of the paper's accuracies."""
    if found is None:
        return NOT_RUN
    if not found.decided:
        return UNDECIDED
    return AGREES if (points > 0) == (found.difference < 0) else DISAGREES


def pairs_table(study: Study) -> str:
    """Return a row for each comparison: the paper's difference, ours, its noise, and whether they agree."""
    rows = []
    for pair in pairs():
        found, points = study.compared(pair), gain(pair)
        ours, noise = ("", "") if found is None else (f"{found.difference:+.4f}", margin(found))
        seeds = "" if found is None else f"{found.seeds} paired" if found.seeds else "not paired"
        rows.append([pair.change, pair.table, f"{points:+.2f}", ours, noise, seeds, verdict(points, found)])
    verdicts = [row[-1] for row in rows]
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in (AGREES, DISAGREES, UNDECIDED, NOT_RUN))
    header = ["change", "table", "paper: points", "here: nats per token", "noise", "seeds", "here"]
    return table(header, rows) + f"\nOf {len(rows)} comparisons: {counts}.\n"


def margin(found: Comparison) -> str:
    return "not known" if found.margin is None else f"{found.margin:.4f}"


def paper_table(study: Study, number: int) -> str:
    """Return one of the paper's tables with the losses here beside its accuracies."""
    rows = [case_row(study, row) for row in published() if row.table == number]
    header = ["paper's row", "paper: accuracy, %", "here", "nats per token", "bits per byte", "seeds", "parameters"]
    return table(header, rows)


def case_row(study: Study, row: Published) -> list[str]:
    """Return the row of a case; without runs its losses stay empty."""
    mine = [result for result in study.results if result.case == row.case]
    settings = " ".join(override for case in CASES if case.name == row.case for override in case.overrides)
    cells = [row.row, f"{row.overall:.2f}", row.case + (f" (`{settings}`)" if settings else "")]
    if not mine:
        return [*cells, "not measured" if row.case.endswith(SELECTED) else NOT_RUN]
    losses = [result.held_out_loss for result in mine]
    spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
    bits = statistics.fmean(result.bits_per_byte for result in mine)
    seeds = ", ".join(str(result.seed) for result in sorted(mine, key=lambda result: result.seed))
    return [*cells, f"{statistics.fmean(losses):.4f}{spread}", f"{bits:.4f}", seeds, f"{mine[0].parameters / 1e6:.1f}M"]


def draw(study: Study, path: Path) -> Path:
    """Draw the comparisons that were run: the paper's points to the left, ours with their noise to the right."""
    shown = [(pair, found) for pair in pairs() if (found := study.compared(pair)) is not None]
    figure = Figure(figsize=(12, 1.2 + 0.34 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.3))
    for place, (pair, found) in enumerate(shown):
        left.barh(place, gain(pair), color=PAPERS)
        color = OURS if found.decided else PAPERS
        right.errorbar(-found.difference, place, xerr=found.margin, fmt="o", color=color, capsize=3)
    left.set_yticks(range(len(shown)), [f"table {pair.table}: {pair.change}" for pair, _ in shown])
    left.set_ylim(len(shown) - 0.4, -0.6)
    left.set_xlabel("paper: accuracy gained, points")
    right.set_xlabel("here: loss saved, nats per token (gray: undecided)")
    for axes in (left, right):
        around_zero(axes)
    return write_figure(path, figure)


def around_zero(axes: Axes) -> None:
    """Mark zero, and give both sides of it as much room."""
    most = max(map(abs, axes.get_xlim()))
    axes.set_xlim(-most, most)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)


def section(study: Study, picture: str) -> str:
    """Return the part of the page on one setup."""
    results = study.results
    parts = [pairs_table(study), f"![The paper's differences and ours]({picture})"]
    for number in range(1, 7):
        note = HOW_SELECTED if number == 3 else ""
        parts.append(page(f"Table {number}", paper_table(study, number), note, level=3))
    gpus, commits = (", ".join(sorted({getattr(r, name) for r in results})) for name in ("gpu", "commit"))
    dates = [result.date[:10] for result in results]
    tokens, held_out, shared = results[0].setup
    parts.append(
        f"{len(results)} results, {min(dates)} to {max(dates)}; {gpus}, runs side by side; commits {commits}; "
        f"overrides for all: {f'`{shared}`' if shared else 'none'}."
    )
    return page(f"{tokens / 1e6:.3g}M tokens, {held_out / 1e6:.3g} MB of held-out text", *parts, level=2)


def write(folder: Path) -> Path:
    """Write the page of the folder's results, and its pictures, beside them; return the page's path.

    Raises:
        ValueError: there are no results, or they cannot be read.
    """
    found = studies(read_csv(folder / FILE, Result))
    if not found:
        raise ValueError(f"{folder / FILE} has no results: run benchmarks.pretraining.sigma_ablations.runs first")
    sections = []
    for number, study in enumerate(found, 1):
        name = f"{Path(FILE).stem}{'' if number == 1 else f'_{number}'}.png"
        draw(study, folder / name)
        sections.append(section(study, name))
    text = page(
        "DiffQKV's ablations at small scale",
        "The paper's tables 1 to 6 (arXiv 2501.13629) have models of about 1B parameters, trained on 100B tokens, and "
        "the mean accuracy of nine tasks, of which it gives no noise. Here are models of about 28M parameters "
        "(`experiment=sigma/ablation_small`) and their loss on held-out text: directions can be compared, sizes "
        "cannot. By `python -m benchmarks.pretraining.sigma_ablations.report`.",
        RULE,
        *sections,
    )
    path = folder / FILE.replace(".csv", ".md")
    write_atomic(path, text)
    return path


def main() -> int:
    """Write the page; return the exit status."""
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
