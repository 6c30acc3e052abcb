"""A model trained on a cleaned corpus against one trained on unfiltered text, on the same held-out text.

`python -m benchmarks.data.corpus_comparison prepare CLEANED UNFILTERED OUT` takes two corpora of `job=corpus` and
writes the same amount of training text of each below OUT, so that both models train on the same number of tokens
without repeats. Files that either corpus holds out are in neither training text. It prints the two commands; afterwards
`python -m benchmarks.data.corpus_comparison report RUN_CLEANED RUN_UNFILTERED` writes the table.
"""

import argparse
import datetime
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring.report import CommandLine, page, publish
from benchmarks.measuring.tables import table
from data_pipeline.corpus.finish import contents

ROWS_IN_GROUP = 512


def rows_of(corpus: Path, split: str) -> Iterator[dict]:
    """Yield the documents of a split, category by category."""
    for path in sorted((corpus / "documents").glob(f"*/{split}-*.parquet")):
        yield from pq.read_table(path).to_pylist()


def prepare(corpora: dict[str, Path], out: Path, size: int) -> None:
    """Write `size` bytes of training text of each corpus, and all of its held-out text."""
    held_out = {row["origin"] for corpus in corpora.values() for row in rows_of(corpus, "validation")}
    for name, corpus in corpora.items():
        rows = [row for row in rows_of(corpus, "train") if row["origin"] not in held_out]
        random.Random(0).shuffle(rows)
        taken, total = [], 0
        for row in rows:
            if total >= size:
                break
            taken.append(row)
            total += row["length"]
        if total < size:
            raise SystemExit(f"{corpus}: only {total / 1e6:.1f} MB of training text: give a lesser --megabytes")
        _write(out / name, "train", taken)
        _write(out / name, "validation", list(rows_of(corpus, "validation")))
        found = contents(out / name / "documents")
        (out / name / "manifest.json").write_text(json.dumps({"identity": name, **found}))
        print(f"{name}: {len(taken):,} documents, {total / 1e6:.1f} MB")
    weights = {
        name: counts["train"]["bytes"] for name, counts in contents(out / "cleaned" / "documents")["categories"].items()
    }
    for chosen in (weights, {"unfiltered": 1}):
        mixed = ", ".join(f"{name}: {weight}" for name, weight in chosen.items())
        print(
            f"palimpsest data=mixture data.corpus={out / 'cleaned'} "
            f"+data.components.unfiltered.path={out / 'unfiltered'} "
            f"'data.phases=[{{weights: {{{mixed}}}}}]' model=... max_tokens=..."
        )


def _write(folder: Path, split: str, rows: list[dict]) -> None:
    for category in sorted({row["category"] for row in rows}):
        path = folder / "documents" / category / f"{split}-00000-00000.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        mine = pa.Table.from_pylist([row for row in rows if row["category"] == category])
        pq.write_table(mine, path, compression="zstd", compression_level=19, row_group_size=ROWS_IN_GROUP)


def report(cleaned: Path, unfiltered: Path) -> str:
    """Return the page with both runs' held-out bits per byte for each component."""
    runs = [json.loads((run / "summary.json").read_text()) for run in (cleaned, unfiltered)]
    found = [run["validation_by_component"] for run in runs]
    lines = []
    for name in found[0]:
        bits = [components[name]["bits_per_byte"] for components in found]
        losses = [components[name]["loss"] for components in found]
        text = f"{found[0][name]['bytes'] / 1e6:.2f}"
        lines.append(
            [name, text, *(f"{loss:.3f}" for loss in losses), *(f"{b:.3f}" for b in bits), f"{bits[0] / bits[1]:.3f}"]
        )
    header = ["held-out text of", "MB", "loss, cleaned", "loss, unfiltered"]
    header += ["bits per byte, cleaned", "unfiltered", "ratio"]
    tokens = " and ".join(f"{run['tokens']:,}" for run in runs)
    size = f"{runs[0]['parameters'] / 1e6:.1f}M parameters"
    return page(
        "A cleaned corpus beside unfiltered text",
        f"{datetime.date.today()}; FoX of {size}, trained for {tokens} tokens; equally much text of each. By "
        "`python -m benchmarks.data.corpus_comparison`.",
        table(header, lines),
    )


def main() -> None:
    """Prepare, or report."""
    parser = CommandLine(__doc__)
    commands = parser.add_subparsers(required=True, dest="command", parser_class=argparse.ArgumentParser)
    preparing, reporting = commands.add_parser("prepare"), commands.add_parser("report")
    for command in (preparing, reporting):
        command.add_argument("cleaned", type=Path)
        command.add_argument("unfiltered", type=Path)
    preparing.add_argument("out", type=Path)
    preparing.add_argument("--megabytes", type=float, default=120, help="of training text of each (10^6 bytes)")
    given = parser.parse_args()
    if given.command == "report":
        publish(given.output / "corpus_comparison.md", report(given.cleaned, given.unfiltered))
    else:
        prepare({"cleaned": given.cleaned, "unfiltered": given.unfiltered}, given.out, int(given.megabytes * 1e6))


if __name__ == "__main__":
    main()
