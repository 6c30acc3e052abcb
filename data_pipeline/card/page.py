"""Page corpus.md: what a corpus contains, and how it was built."""

import json
from pathlib import Path

from common.atomic_files import write_atomic
from data_pipeline.card.contents import composition, lengths, licences, quality, summary
from data_pipeline.card.dates import by_month
from data_pipeline.card.facts import read_facts, summed
from data_pipeline.card.history import by_step, problems, rates, samples
from data_pipeline.card.markdown import picture, plain
from data_pipeline.card.rates import read_rates

PAGE, FIGURES = "corpus.md", "figures"
RECORD = Path("record", "merged.json")
LABELS_REPORT = Path("labels", "report")
AGREEMENT = "agreement.md"


def write_page(folder: Path, title: str, bytes_per_token: float) -> None:
    """Write the page and its pictures."""
    record, figures = folder / RECORD, folder / FIGURES
    steps = json.loads(record.read_text(encoding="utf-8"))["steps"] if record.is_file() else []
    facts = read_facts(folder / "documents")
    for stale in figures.glob("*.png"):  # this time there may be nothing to draw
        stale.unlink()
    text_bytes = sum(amount.bytes for amount in summed(facts.parts).values())
    sections = [
        ("Composition", composition(facts, bytes_per_token, figures)),
        ("By step", by_step(steps, figures)),
        ("Lengths", lengths(facts, figures)),
        ("By month", by_month(facts, figures)),
        ("Licences", licences(facts)),
        ("Quality", quality(facts)),
        ("Labels", _labels(folder)),
        ("Problems", problems(folder / "problems")),
        ("Rates", rates(read_rates(folder / "logs", steps, text_bytes))),
        ("Samples", samples(steps)),
    ]
    parts = [f"# {plain(title)}", summary(facts, bytes_per_token)]
    parts += [f"## {heading}\n\n{content}" for heading, content in sections if content]
    write_atomic(folder / PAGE, "\n\n".join(parts) + "\n")


def _labels(folder: Path) -> str:
    """Return the report on the labels, if any, with its headings nested below the page's."""
    report = folder / LABELS_REPORT
    if not (report / AGREEMENT).is_file():
        return ""
    lines = (report / AGREEMENT).read_text(encoding="utf-8").strip().split("\n")
    text = "\n".join(f"##{line}" if line.startswith("#") else line for line in lines)
    missing = []
    for path in sorted(report.glob("*.png")):
        from_here = str(LABELS_REPORT / path.name)
        if f"]({path.name})" in text:
            text = text.replace(f"]({path.name})", f"]({from_here})")
        else:
            missing.append(picture(from_here, path.stem))
    return "\n\n".join([text, *missing])
