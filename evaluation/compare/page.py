"""The page and the Markdown of a comparison, from the same texts, tables and figures."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from evaluation.compare import tables
from evaluation.compare.comparison import Comparison
from evaluation.compare.lines import plots
from evaluation.compare.pictures import as_svg, draw, draw_finals, look
from evaluation.compare.reading import EVALUATED, FINISHED, NATS
from evaluation.compare.tables import Table
from evaluation.significance import RULE
from evaluation.tables import UNDECIDED

HERE = Path(__file__).resolve().parent
NUMBER = re.compile(r"[-+]?[\d.,]+[kMB]?( ± [\d.]+)?( \(.*\))?")
DASHES = {"-": "", "--": "7 4", ":": "2 4", "-.": "8 3 2 3"}
OF_SEQUENCES = (
    "Without noise over seeds, two runs are compared on the sequences of a text that job=evaluate "
    "benchmark=perplexity_by_position has measured both on: two standard errors decide. That is a difference of two "
    "checkpoints, not of their settings: another seed may move it. All else is undecided with one seed."
)


@dataclass(frozen=True)
class Picture:
    """A figure with its words. key: of the file's name. table: its numbers."""

    key: str
    title: str
    caption: str
    figure: Figure
    table: Table | None

    @property
    def svg(self) -> str:
        """The figure as an SVG element for the page."""
        return as_svg(self.figure, self.key, f"{self.title}. {self.caption}")

    @property
    def file(self) -> str:
        """The name of its PNG file."""
        return f"compare_{self.key}.png"


def pictures(comparison: Comparison) -> list[Picture]:
    """Draw all figures of a comparison."""
    found = []
    finals = draw_finals(comparison)
    if finals is not None:
        caption = "A dot for each seed, a stroke for their mean; the dashed line is the baseline. A mean is decided to "
        caption += "differ from the baseline where the bar around it does not reach the dashed line."
        found.append(Picture("final", "Final held-out loss", caption, finals, None))
    for plot in plots(comparison):
        found.append(Picture(plot.key, plot.title, plot.caption, draw(plot), tables.plot_table(plot)))
    return found


def as_html(comparison: Comparison, drawn: Sequence[Picture]) -> str:
    """Return the page: one file that loads nothing."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.tests["number_like"] = lambda text: NUMBER.fullmatch(text) is not None
    looks = [dict(zip(("color", "dashes"), look(number), strict=True)) for number in range(len(comparison.groups))]
    return environment.get_template("page.html.jinja").render(
        title=title(comparison),
        introduction=introduction(comparison),
        first_tables=first_tables(comparison),
        last_tables=last_tables(comparison),
        notes=comparison.notes,
        figures=drawn,
        rules=rules(),
        looks=[each | {"dashes": DASHES[each["dashes"]]} for each in looks],
    )


def as_markdown(comparison: Comparison, drawn: Sequence[Picture]) -> str:
    """Return the same in Markdown, with the figures as files beside it."""
    parts = [f"# {title(comparison)}", *introduction(comparison)]
    parts += [table.markdown() for table in first_tables(comparison)]
    parts += ["\n".join(f"- {note}" for note in comparison.notes)] * bool(comparison.notes)
    parts += [f"## {each.title}\n\n![{each.title}]({each.file})\n\n{each.caption}" for each in drawn]
    parts += [f"## {table.caption}\n\n{table.markdown()}" for table in last_tables(comparison)]
    parts += ["## How differences are judged", *rules()]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def first_tables(comparison: Comparison) -> list[Table]:
    """Return the tables above the figures: settings with losses, and results of `job=evaluate`."""
    trained = any(run.state != EVALUATED for run in comparison.runs)
    found = [tables.main_table(comparison) if trained else None, tables.results_table(comparison)]
    return [table for table in found if table is not None]


def last_tables(comparison: Comparison) -> list[Table]:
    """Return the tables below the figures: the other settings, and the runs one by one."""
    return [table for table in (tables.settings_table(comparison), tables.runs_table(comparison)) if table is not None]


def title(comparison: Comparison) -> str:
    return f"Comparison of {len(comparison.runs)} run{'s' * (len(comparison.runs) > 1)}"


def introduction(comparison: Comparison) -> list[str]:
    """Return what is compared, with what, in which unit."""
    runs, groups = comparison.runs, comparison.groups
    done = sum(run.state == FINISHED for run in runs)
    lines = [
        f"{len(runs)} runs in {len(groups)} settings, {done} of them finished; {datetime.now():%Y-%m-%d %H:%M}. Runs "
        "that differ by their seed alone are one row: means with standard errors."
    ]
    if comparison.baseline is not None:
        lines.append(f"The baseline is row {groups.index(comparison.baseline) + 1}: {comparison.baseline.name}.")
    if comparison.unit != NATS:
        lines.append(
            "The runs have different tokenizers, so losses are in bits per byte of the held-out text: nats per token "
            "of different tokens cannot be compared. Curves are scaled by each run's bytes per held-out token."
        )
    return lines


def rules() -> list[str]:
    """Return how differences are judged."""
    return [RULE, OF_SEQUENCES, f"Results of job=evaluate: {UNDECIDED}"]
