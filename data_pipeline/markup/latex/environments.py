"""LaTeX's lists, tables and pseudo-code as Markdown."""

import re
from collections.abc import Iterator

from data_pipeline.markup import blocks
from data_pipeline.markup.latex.names import ALGORITHM
from data_pipeline.markup.latex.reader import OPTION, LatexReader, Listing, fenced, marked

COLUMNS = 50  # per table
INDENTATION = 40  # levels of pseudo-code
CELL = re.compile(r"\\\\(?:\s*\[[^\]\n]{0,20}\])?|\\tabularnewline|\\[\s\S]|[{&$]")
ITEM = re.compile(r"\\item(?![a-zA-Z])|\\begin\s*\{")
STATEMENT = re.compile(rf"\\({'|'.join(ALGORITHM)})(?![a-zA-Z])")


def list_items(reader: LatexReader, name: str, start: int, stop: int, depth: int) -> Iterator[str]:
    """Yield the lines of each item of a list; the content of a list without items is kept as blocks."""
    positions = list(_items(reader, start, stop))
    if not positions:
        yield from reader.blocks(start, stop, depth + 1)
    for number, begin in enumerate(positions, start=1):
        end = positions[number] if number < len(positions) else stop
        content = begin + len("\\item")
        marker, lead = f"{number}. " if "enum" in name else "- ", ""
        if option := OPTION.match(reader.text, content, end):
            content, label = option.end(), reader.inline(*option.span(1), depth)
            if "desc" in name or len(label) > 3:  # shorter labels are bullets: *, --, (a)
                lead = f"{label if label.startswith('*') else marked(label, '**')} "
        body = lead + "\n\n".join(reader.blocks(content, end, depth + 1))
        if body.strip():
            yield marker + body.replace("\n", "\n" + " " * len(marker)).replace(f"\n{' ' * len(marker)}\n", "\n\n")


def _items(reader: LatexReader, start: int, stop: int) -> Iterator[int]:
    """Yield the positions of the items of a list, without those of nested lists."""
    position = start
    while match := ITEM.search(reader.text, position, stop):
        position = match.end()
        if match[0] == "\\item":
            yield match.start()
        else:
            position = max(position, reader.environments.get(match.start(), (0, 0))[1])


def table(reader: LatexReader, start: int, stop: int, depth: int) -> str:
    """Return a table with its first row as the head; a table of one column as lines."""
    rows: list[list[str]] = [[]]
    for begin, end, ends_row in _cells(reader, start, stop):
        spanned = re.search(r"\\multicolumn\s*\{\s*(\d{1,2})\s*\}", reader.text[begin:end])
        rows[-1].append(reader.inline(begin, end, depth).replace("|", "\\|"))
        rows[-1] += [""] * (min(int(spanned[1]), COLUMNS) - 1 if spanned else 0)
        if ends_row:
            rows.append([])
    rows = [row[:COLUMNS] for row in rows if any(row)]
    width = max(map(len, rows), default=0)
    if width < 2:
        return "\n".join(cell for row in rows for cell in row)
    return blocks.table(rows)


def _cells(reader: LatexReader, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the start and end of each cell of a table, and whether it ends its row."""
    position = begin = start
    while match := CELL.search(reader.text, position, stop):
        position = match.end()
        sign = match[0]
        if sign == "&" or sign.startswith(("\\\\", "\\tabularnewline")):
            yield begin, match.start(), sign != "&"
            begin = position
        elif sign == "{":
            position = max(position, reader.pairs.get(match.start(), 0) + 1)
        elif sign == "$":
            close = reader.text.find("$", position, min(stop, position + 500))
            position = close + 1 if close >= 0 else position
        elif match.start() in reader.environments:
            position = max(position, reader.environments[match.start()][1])
    yield begin, stop, True


def pseudocode(reader: LatexReader, start: int, stop: int, depth: int) -> str:
    """Return pseudo-code as a code block, one statement per line; that of unknown packages as blocks."""
    found = list(STATEMENT.finditer(reader.text, start, stop))
    if not found:
        return "\n\n".join(reader.blocks(start, stop, depth + 1))
    lines, level = [], 0
    for number, match in enumerate(found, start=1):
        end = found[number].start() if number < len(found) else stop
        before, lead, between, deeper = ALGORITHM[match[1]]
        level = max(0, level + before)
        position, condition = match.end(), ""
        if between is not None:
            begin, close, position = reader.argument(position, end)
            condition = f"{reader.inline(begin, close, depth)}{between}"
        rest = reader.inline(position, end, depth)
        if line := " ".join(part for part in (lead, condition, rest) if part):
            lines.append("  " * min(level, INDENTATION) + line)
        level += deeper
    return fenced(Listing("\n".join(lines), "", "", False))
