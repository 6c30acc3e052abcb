"""Sections of a card on the content of the corpus."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from data_pipeline.card.dates import date_range
from data_pipeline.card.facts import OTHER_LICENCES, UNKNOWN, Amount, Facts, Lengths, summed, together
from data_pipeline.card.markdown import count, counted, percent, picture, plain, size, table, tokens
from data_pipeline.card.pictures import OTHERS, draw_composition, draw_lengths

KINDS = {"general_system": "General System", "design": "Design Capability", "debug": "Debug Capability"}
PICTURE_ROWS = 25  # in the picture of the composition
PICTURE_CATEGORIES = 12  # with a length histogram each
TABLE_CATEGORIES = 6  # with a column each
TABLE_LICENCES = 40
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def kind(category: str) -> str:
    """Return a category's name on the page: as in table 9 of Sigma, or its own."""
    words = category.replace("_", " ").strip()
    return KINDS.get(category, words[:1].upper() + words[1:])


def summary(facts: Facts, bytes_per_token: float) -> str:
    """Return a summary paragraph."""
    if not facts.parts:
        return "The corpus holds no document."
    total = summed(facts.parts)[()]
    categories, sources = (len(summed(facts.parts, place)) for place in (0, 1))
    origin = f"{counted(categories, 'category', 'categories')} from {counted(sources, 'source')}"
    splits = [
        f"{plain(split)} {counted(amount.documents, 'document')} ({size(amount.bytes)})"
        for (split,), amount in sorted(summed(facts.parts, 2).items())
    ]
    estimate = f"about {tokens(total.bytes / bytes_per_token)} tokens (estimated, at {bytes_per_token:g} bytes a token)"
    return (
        f"{counted(total.documents, 'document')}, {size(total.bytes)} of text in UTF-8, {estimate}, in {origin}. "
        f"Split: {'; '.join(splits)}. {date_range(facts)}"
    )


def composition(facts: Facts, bytes_per_token: float, figures: Path) -> str:
    """Return the table of kinds and sources with sizes and tokens, and draw it."""
    if not facts.parts:
        return ""
    total, rows, bars = summed(facts.parts)[()], [], []
    for category in _categories(facts):
        mine = {source: amount for (name, source), amount in summed(facts.parts, 0, 1).items() if name == category}
        name = f"**{plain(kind(category))}**"
        for source, amount in sorted(mine.items(), key=_larger_first):
            rows.append([name, plain(source), *_amounts(amount, total, bytes_per_token)])
            bars.append((kind(category), source, amount.bytes))
            name = ""  # name a kind once for all its sources, as Sigma's table does
    rows.append(["**Total**", "", *_amounts(total, total, bytes_per_token)])
    noted = [(*bar, f"{size(bar[2])}, {tokens(bar[2] / bytes_per_token)} tokens") for bar in _largest_bars(bars)]
    draw_composition(noted, figures / "composition.png")
    header = ["Data type", "Source", "Documents", "Size", "Tokens", "Share"]
    return f"{table(header, rows, left=2)}\n\n{picture('figures/composition.png', 'Text by kind and source')}"


def lengths(facts: Facts, figures: Path) -> str:
    """Return the quantiles of document lengths by category, and draw their histograms."""
    if not facts.parts:
        return ""
    named = [(kind(category), facts.lengths[category]) for category in _categories(facts)]
    rows = [_length_row(plain(name), histogram) for name, histogram in named]
    if len(named) > 1:
        rows.append(_length_row("**All**", together(histogram for _, histogram in named)))
    if len(named) > PICTURE_CATEGORIES + 1:
        rest = together(histogram for _, histogram in named[PICTURE_CATEGORIES:])
        named = [*named[:PICTURE_CATEGORIES], (OTHERS, rest)]
    draw_lengths(named, figures / "lengths.png")
    names = ["median" if fraction == 0.5 else f"{fraction:.0%}" for fraction in QUANTILES]
    return "\n\n".join(
        [
            "UTF-8 bytes in a document. Quantiles are read from a histogram with bins 1.1% wide.",
            table(["Category", "Documents", "Shortest", *names, "Longest", "Mean"], rows),
            picture("figures/lengths.png", "Lengths of documents by category"),
        ]
    )


def licences(facts: Facts) -> str:
    """Return the amount of text under each licence, by category."""
    if not facts.parts:
        return ""
    total, by_name = summed(facts.parts)[()], summed(facts.licences, 0)
    unknown = by_name.get((UNKNOWN,), Amount())
    if unknown.documents == total.documents:
        return "No document says what licence it is under."
    columns = _categories(facts)
    shown = columns if len(columns) <= TABLE_CATEGORIES + 1 else columns[:TABLE_CATEGORIES]
    order = [name for (name,), _ in sorted(by_name.items(), key=_larger_first) if name not in (UNKNOWN, OTHER_LICENCES)]
    rows = [_licence_row(plain(name), [name], facts, shown, total) for name in order[:TABLE_LICENCES]]
    if rest := order[TABLE_LICENCES:]:
        name = f"{count(len(rest))} more"
        if (OTHER_LICENCES,) in by_name:  # more licences than were counted separately
            name, rest = f"over {name}", [*rest, OTHER_LICENCES]
        rows.append(_licence_row(name, rest, facts, shown, total))
    rows.append(_licence_row("unknown", [UNKNOWN], facts, shown, total))
    header = ["Licence", "Documents", "Size", "Share", *(plain(kind(name)) for name in shown)]
    header += [OTHERS] if len(shown) < len(columns) else []
    return "\n\n".join(
        [
            f"Of the text, {percent(total.bytes - unknown.bytes, total.bytes)} says what licence it is under.",
            table(header, rows),
        ]
    )


def quality(facts: Facts) -> str:
    """Return the shares of documents by quality and category, if they have labels."""
    if not facts.quality:
        return ""
    values = sorted({value for counts in facts.quality.values() for value in counts})
    rows = []
    for category in _categories(facts):
        counts = facts.quality.get(category)
        if counts:
            shares = [percent(counts[value], counts.total()) for value in values]
            mean = sum(value * number for value, number in counts.items()) / counts.total()
            rows.append([plain(kind(category)), count(counts.total()), f"{mean:.2f}", *shares])
    header = ["Category", "Documents with labels", "Mean", *map(str, values)]
    return f"Shares of the documents by quality, rounded.\n\n{table(header, rows)}"


def _categories(facts: Facts) -> list[str]:
    """Return the categories' names: those of Sigma's table 9 first, then by size."""
    known = {category: place for place, category in enumerate(KINDS)}
    ordered = sorted(summed(facts.parts, 0).items(), key=lambda item: (known.get(item[0][0], 99), _larger_first(item)))
    return [category for (category,), _ in ordered]


def _larger_first(item: tuple[object, Amount]) -> tuple[int, object]:
    return -item[1].bytes, item[0]


def _amounts(amount: Amount, total: Amount, bytes_per_token: float) -> list[str]:
    length = amount.bytes
    return [count(amount.documents), size(length), tokens(length / bytes_per_token), percent(length, total.bytes)]


def _largest_bars(bars: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """Return the bars (kind, source, bytes) in order, merged so that they fit into the picture.

    If two bars per kind fit, they are its largest sources and the others; else each kind is one bar.
    """
    if len(bars) <= PICTURE_ROWS:
        return bars
    kinds: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
    for bar in bars:
        kinds[bar[0]].append(bar)
    room = PICTURE_ROWS // len(kinds)
    if room >= 2:
        return [row for name, mine in kinds.items() for row in _first_bars(mine, room, name)]
    whole = sorted(((name, "", sum(bar[2] for bar in mine)) for name, mine in kinds.items()), key=lambda bar: -bar[2])
    return _first_bars(whole, PICTURE_ROWS, OTHERS)


def _first_bars(bars: list[tuple[str, str, int]], room: int, kind_of_others: str) -> list[tuple[str, str, int]]:
    if len(bars) <= room:
        return bars
    rest = bars[room - 1 :]
    return [*bars[: room - 1], (kind_of_others, f"{len(rest)} smaller", sum(bar[2] for bar in rest))]


def _length_row(name: str, histogram: Lengths) -> list[str]:
    middle = [size(histogram.quantile(fraction)) for fraction in QUANTILES]
    mean = size(histogram.total / histogram.documents)
    return [name, count(histogram.documents), size(histogram.least), *middle, size(histogram.greatest), mean]


def _licence_row(title: str, names: Sequence[str], facts: Facts, shown: Sequence[str], total: Amount) -> list[str]:
    row, chosen = Amount(), set(names)
    cells: defaultdict[str, int] = defaultdict(int)
    for (licence, category), amount in facts.licences.items():
        if licence in chosen:
            row.add(amount.documents, amount.bytes)
            cells[category if category in shown else OTHERS] += amount.bytes
    columns = [*shown, OTHERS] if len(shown) < len(facts.lengths) else shown
    sizes = [size(cells[column]) if cells[column] else "" for column in columns]
    return [title, count(row.documents), size(row.bytes), percent(row.bytes, total.bytes), *sizes]
