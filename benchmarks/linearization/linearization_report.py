"""Report of the training benchmark: its rows and those of earlier runs, tables, verdicts."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.linearization.linearization_peers import WINDOW
from benchmarks.linearization.linearization_steps import SHAPES
from benchmarks.measuring import comparison_run, tables
from benchmarks.measuring.report import device_name, page, versions
from benchmarks.measuring.tables import read_csv, shown, table

TRAINING, LARGE = "training", "large"
OFFICIAL = "fla, float32 q, k, v"
COMPILED = f"{OFFICIAL}, compiled"
OURS = ("ours", "ours, compiled")
TARGET = 1.5


@dataclass(frozen=True, kw_only=True)
class Row(tables.Row):
    """A measurement.

    milliseconds: of a step. parameter: sequences per micro-batch. first_seconds: of the first micro-batch and then the
    first step, including torch.compile but not Triton's earlier compilation. loss_error, gradient_error: relative to
    the first implementation at the same micro-batch. date, machine: of the run that measured it.
    """

    tokens_per_second: float | None = None
    peak_gib: float | None = None
    first_seconds: float | None = None
    loss_error: float | None = None
    gradient_error: float | None = None
    date: str
    machine: str


@dataclass(kw_only=True)
class Run(comparison_run.Run):
    """The report. A section that is not measured again keeps the rows of an earlier run in the folder."""

    name = "linearization.linearization_training"
    title = "Training speed of linearization"
    preamble = (
        f"Liger-GLA (window {WINDOW}) with LoRA of rank 8 on q, k and v, bfloat16 weights. A step is forward, backward "
        "and clipping over a whole batch, and AdamW on LoRA's weights; random weights and tokens. Medians; "
        "implementations take turns. GiB: the peak of allocated memory, each with its own copy of the weights."
    )
    row = Row
    packages = (*comparison_run.Run.packages, "transformers", "peft", "flash-linear-attention")
    date: str = field(default_factory=lambda: datetime.datetime.now().isoformat(" ", "seconds"))

    def __post_init__(self) -> None:
        self.machine = f"{device_name()}, {versions(*self.packages)}"
        self.rows = read_csv(self.files.with_suffix(".csv"), Row)
        self.verdicts = judged(self.rows)

    def add_rows(self, rows: Sequence[Row]) -> None:
        """Replace the earlier rows of the measured sections, and write the report."""
        sections = {row.section for row in rows}
        self.rows = [row for row in self.rows if row.date == self.date or row.section not in sections]
        self.verdicts = judged([*self.rows, *rows])
        super().add_rows(rows)

    def text(self) -> str:
        """Return the report: this run's sections, and each section's rows of this or an earlier run."""
        return super().text() + "".join(f"\n{section}" for section in speed_sections(self.rows))


def micro_batch(row: Row) -> int:
    return int(row.parameter.rpartition(" ")[2])


def best(rows: Sequence[Row], names: Sequence[str]) -> Row | None:
    """Return the fastest row of these implementations, at any micro-batch."""
    timed = [row for row in rows if row.implementation in names and row.tokens_per_second]
    return max(timed, key=lambda row: row.tokens_per_second, default=None)


def judged(rows: Sequence[Row]) -> list[comparison_run.Verdict]:
    """Compare our best with the official code in its own configuration, and with its best configuration."""
    rows = [row for row in rows if row.section == TRAINING]
    ours = best(rows, OURS)
    peers = {
        "the official layers as their code runs: not compiled, micro-batch 1, accumulated over the batch": best(
            [row for row in rows if micro_batch(row) == 1], [OFFICIAL]
        ),
        "the official layers at their best": best(rows, [OFFICIAL, COMPILED]),
    }
    verdicts = []
    for what, peer in peers.items():
        if ours and peer:
            at_best = f" ({_configuration(peer)})" if what.endswith("best") else ""
            words = f"tokens/s of ours at its best ({_configuration(ours)}), to {what}{at_best}"
            ratio = ours.tokens_per_second / peer.tokens_per_second
            verdicts.append(comparison_run.Verdict(words, ratio, TARGET, None, at_least=True))
    return verdicts


def _configuration(row: Row) -> str:
    return f"{'compiled' if row.implementation.endswith(', compiled') else 'not compiled'}, {row.parameter}"


def speed_sections(rows: Sequence[Row]) -> list[str]:
    """Return the table of each section and shape, under a heading."""
    explained = {
        TRAINING: "Ratios, at the same micro-batch: to the official layers on fla's ops as their code runs, not "
        "compiled, and to the same compiled. Apart: relative errors from the first line of a micro-batch. What the "
        "official trainer does: anomaly detection in the backward pass, logits copied to the host, the pooling of "
        "gates as a layer (one round). Compiled: each decoder layer's forward. bfloat16 q, k, v: kinder than their "
        "code, which has float32.",
        LARGE: "On one device, without activation checkpointing.",
    }
    found = []
    for name, about in explained.items():
        for shape in SHAPES.values():
            own = [row for row in rows if row.section == name and str(row.shape) == str(shape)]
            if own:
                title = f"{shape}, {shape.batch} x {shape.length} tokens a step"
                measured = f"Measured {own[0].date}: {own[0].machine}."
                found.append(page(title, f"{about} {measured}", speed_table(own), level=2))
    return found


def speed_table(rows: Sequence[Row]) -> str:
    """Return a table with a line for each implementation and micro-batch."""
    rates = {(row.implementation, row.parameter): row.tokens_per_second for row in rows}
    compared = any(row.implementation == OFFICIAL for row in rows)
    lines = []
    for row in rows:
        if row.tokens_per_second is None:
            lines.append([row.implementation, micro_batch(row), row.note])
            continue
        peers = [rates.get((name, row.parameter)) for name in (OFFICIAL, COMPILED)]
        ratios = [f"{row.tokens_per_second / rate:.2f}" if rate else "" for rate in peers]
        apart = ["" if x is None else f"{x:.1e}" for x in (row.loss_error, row.gradient_error)]
        cells = [f"{row.tokens_per_second:,.0f}", *(ratios if compared else []), f"{row.milliseconds:.0f}"]
        cells += [shown(row.peak_gib, ".1f"), f"{row.first_seconds:.0f}", *(apart if compared else [])]
        lines.append([row.implementation, micro_batch(row), *cells])
    ratios = ["to not compiled", "to compiled"] if compared else []
    apart = ["loss apart", "gradients apart"] if compared else []
    header = ["", "micro-batch", "tokens/s", *ratios, "step, ms", "peak GiB", "first step, s", *apart]
    return table(header, lines)
