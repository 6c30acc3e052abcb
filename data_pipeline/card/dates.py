"""Dates of the documents of a corpus."""

from collections import defaultdict
from pathlib import Path

import numpy as np

from data_pipeline.card.facts import NO_DATE, UNKNOWN, Amount, Amounts, Facts, summed
from data_pipeline.card.markdown import count, counted, percent, picture, plain, size, table
from data_pipeline.card.pictures import OTHERS, draw_months

YEARS_AROUND = 30  # around the median date; dates further away are mostly mistakes
PICTURE_SOURCES = 9
TABLE_SOURCES = 6
MONTHS_IN_ROWS = 24  # a longer time is shown by year
WIDTHS = ((72, 1), (240, 3))  # up to 72 months are drawn by month, up to 240 by quarter, more by year


def date_range(facts: Facts) -> str:
    """Return a sentence with the first and the last date."""
    near = _near(_dated(facts))
    if not near:
        return "No document has a date."
    first, last = min(near)[0], max(near)[0]
    return f"Dates are of {first}." if first == last else f"Dates are from {first} to {last}."


def by_month(facts: Facts, figures: Path) -> str:
    """Return documents by source and year (by month for short times), and draw bytes by date."""
    if not facts.parts:
        return ""
    dated = _dated(facts)
    near = _near(dated)
    words = _undated(facts)
    far = sum(amount.documents for key, amount in dated.items() if key not in near)
    if far:
        words.append(f"{counted(far, 'document')} dated over {YEARS_AROUND} years from the median date: not shown.")
    if not near:
        return " ".join(words)
    _draw(near, figures / "months.png")
    shown = [_table(near), picture("figures/months.png", "Text by date and source")]
    return "\n\n".join([" ".join(words), *shown] if words else shown)


def _dated(facts: Facts) -> Amounts:
    return {key: amount for key, amount in facts.months.items() if key[0] not in (UNKNOWN, NO_DATE)}


def _undated(facts: Facts) -> list[str]:
    total, months = summed(facts.parts)[()].documents, summed(facts.months, 0)
    sentences = []
    for name, what in ((UNKNOWN, "without a date"), (NO_DATE, "with a date that cannot be read")):
        if (name,) in months:
            number = months[name,].documents
            sentences.append(f"{counted(number, 'document')} ({percent(number, total)}) {what}.")
    return sentences


def _near(dated: Amounts) -> Amounts:
    """Return the amounts within YEARS_AROUND of the median document."""
    if not dated:
        return {}
    by_month = sorted((_number(month), amount.documents) for (month,), amount in summed(dated, 0).items())
    so_far = np.cumsum([number for _, number in by_month])
    middle = by_month[int(np.searchsorted(so_far, so_far[-1] / 2))][0]
    return {key: amount for key, amount in dated.items() if abs(_number(key[0]) - middle) <= 12 * YEARS_AROUND}


def _number(month: str) -> int:
    """Return a month's number, counted from year 0."""
    year, _, number = month.partition("-")
    return 12 * int(year) + int(number) - 1


def _largest_sources(near: Amounts, limit: int) -> list[str]:
    """Return the names of the largest sources; all of them if only one would be dropped."""
    ordered = sorted(summed(near, 1).items(), key=lambda item: (-item[1].bytes, item[0]))
    return [source for (source,), _ in ordered[: limit if len(ordered) > limit + 1 else None]]


def _draw(near: Amounts, path: Path) -> None:
    months = [_number(month) for month, _ in near]
    span = max(months) - min(months) + 1
    width = next((width for limit, width in WIDTHS if span <= limit), 12)
    first = min(months) // width * width
    shown = _largest_sources(near, PICTURE_SOURCES)
    heights = {source: np.zeros((max(months) - first) // width + 1) for source in [*shown, OTHERS]}
    for (month, source), amount in near.items():
        heights[source if source in shown else OTHERS][(_number(month) - first) // width] += amount.bytes
    if not heights[OTHERS].any():
        del heights[OTHERS]
    draw_months(first, heights, width, path)


def _table(near: Amounts) -> str:
    months = [_number(month) for month, _ in near]
    by_year = max(months) - min(months) >= MONTHS_IN_ROWS
    shown = _largest_sources(near, TABLE_SOURCES)
    totals: defaultdict[str, Amount] = defaultdict(Amount)
    cells: defaultdict[tuple[str, str], int] = defaultdict(int)
    for (month, source), amount in near.items():
        period = month[:4] if by_year else month
        totals[period].add(amount.documents, amount.bytes)
        cells[period, source if source in shown else OTHERS] += amount.documents
    columns = [*shown, OTHERS] if any(source == OTHERS for _, source in cells) and OTHERS not in shown else shown
    rows = []
    for period, total in sorted(totals.items()):
        numbers = [count(cells[period, source]) if cells[period, source] else "" for source in columns]
        rows.append([period, count(total.documents), size(total.bytes), *numbers])
    header = ["Year" if by_year else "Month", "Documents", "Size", *map(plain, columns)]
    return f"Documents by source:\n\n{table(header, rows)}"
