"""Expanded LaTeX to Markdown: headings, lists, emphasis, captions, tables, code; mathematics unchanged."""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from data_pipeline.markup.blocks import inline_code
from data_pipeline.markup.latex.environments import list_items, pseudocode, table
from data_pipeline.markup.latex.macros import LatexError, after_space
from data_pipeline.markup.latex.names import (
    ACCENTS,
    CITATIONS,
    DROPPED_COMMANDS,
    DROPPED_ENVIRONMENTS,
    ENVIRONMENT_ARGUMENTS,
    FLOATS,
    FONTS,
    LENGTHS,
    LISTS,
    MARKS,
    MATHEMATICS,
    QUOTES,
    REFERENCES,
    SECTIONS,
    SYMBOLS,
    TABLES,
    THEOREMS,
)
from data_pipeline.markup.latex.reader import (
    BREAK,
    END,
    HOLD,
    OPTION,
    REFERENCE,
    LatexReader,
    Listing,
    fenced,
    flow,
    marked,
)

DEPTH = 40  # of nested environments and groups
FORMULA = 20_000  # characters per formula at most
TOKEN = re.compile(
    r"\\begin\s*\{(?P<begin>[^{}\n]{1,60})\}|\\end\s*\{[^{}\n]{1,60}\}|\\(?P<word>[a-zA-Z@]+)\*?|\\(?P<symbol>[\s\S])"
    r"|(?P<dollar>\$\$?)|(?P<brace>[{}])|(?P<break>\n[ \t]*\n\s*)|(?P<mark>~|---?|``|''|`)|(?P<held>\ue000\d+\ue001)"
)
FONT = re.compile(rf"\s*\\({'|'.join(FONTS)})(?![a-zA-Z])[ \t]*\n?")
SECTION = re.compile(rf"\\({'|'.join(SECTIONS)}|appendix|appendices)\*?\s*(?=[\[{{])|\\appendix\b")
ACKNOWLEDGEMENTS = re.compile(r"acknowledge?ments?|funding", re.IGNORECASE)
BIBLIOGRAPHY = re.compile(r"references|bibliography|literature cited", re.IGNORECASE)
LENGTH = re.compile(r"[ =]*-?(?:\d*\.?\d+ ?(?:true)?(?:pt|pc|in|cm|mm|em|ex|sp|fill?)(?: *(?:plus|minus) *)?)+")
MATH_END = re.compile(r"\\[\s\S]|\$|\n[ \t]*\n")
KNOWN_COMMANDS = frozenset(
    {*SECTIONS, *MARKS, *FONTS, *DROPPED_COMMANDS, *CITATIONS, *REFERENCES, *LISTS, *MATHEMATICS, *FLOATS, *TABLES}
    | {*QUOTES, *DROPPED_ENVIRONMENTS, "begin", "end", "item", "caption", "captionof", "subfloat", "footnote", "label"}
    | {"url", "href", "document", "verb", "algorithmic", "xspace"}
)


def convert(body: str, listings: list[Listing], theorems: dict[str, str], keep_acknowledgements: bool) -> str:
    """Return the Markdown of a document's body; raise LatexError if it is nested too deep."""
    converter = _Converter(body, listings, {**THEOREMS, **theorems}, keep_acknowledgements)
    text = "\n\n".join(converter.blocks(0, len(body), 0))
    text = re.sub(f"{REFERENCE}([^{END}]*){END}", lambda match: converter.labels.get(match[1], match[1]), text)

    def inline(match: re.Match[str]) -> str:
        return inline_code(listings[int(match[1])].code.replace("\n", " ").strip())

    return re.sub(f"{HOLD}(\\d+){END}", inline, text)


@dataclass(slots=True)
class _Page:
    """Finished blocks, and the inline text of the current one."""

    blocks: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    def end_paragraph(self) -> None:
        text = flow("".join(self.pieces))
        self.pieces.clear()
        if text:
            self.blocks.append(text)

    def block(self, text: str) -> None:
        self.end_paragraph()
        if text.strip():
            self.blocks.append(text)


class _Converter(LatexReader):
    def __init__(self, text: str, listings: list[Listing], theorems: dict[str, str], keep: bool) -> None:
        super().__init__(text)
        self.listings, self.theorems, self.keep = listings, theorems, keep
        self.labels: dict[str, str] = {}
        self._counters: Counter[str] = Counter()
        self._numbers: list[int] = []  # of the current section and its parents
        self._appendix = False
        self._here = ""  # number that a label at this position would refer to
        self._float = ""  # "Figure" or the like, inside a float
        self._words: dict[str, Callable[[_Page, int, int, int], int]] = {
            "par": self._par,
            "label": self._label,
            "caption": self._caption,
            "subcaption": self._caption,
            "captionof": self._caption_of,
            **dict.fromkeys(("footnote", "footnotetext"), self._footnote),
            **dict.fromkeys(("url", "nolinkurl"), self._url),
            "href": self._href,
            **dict.fromkeys(("subfloat", "subfigure"), self._subfloat),
            "Call": self._call,
            "cmidrule": self._middle_rule,
            **dict.fromkeys(LENGTHS, self._length),
        }
        self._top = 1 if re.search(r"\\chapter\*?\s*[\[{]", text) else 2  # the section level that becomes "##"

    def blocks(self, start: int, end: int, depth: int) -> list[str]:
        """Return the blocks of a part of the text."""
        if depth > DEPTH:
            raise LatexError(f"nested over {DEPTH} deep")
        page = _Page()
        position = start
        while position < end and (match := TOKEN.search(self.text, position, end)):
            page.pieces.append(self.text[position : match.start()])
            position = self._token(page, match, end, depth)
        page.pieces.append(self.text[position:end])
        page.end_paragraph()
        return page.blocks

    def _token(self, page: _Page, match: re.Match, end: int, depth: int) -> int:
        """Add a token's conversion to the page; return the position after it."""
        position = match.end()
        if match["begin"]:
            return self._environment(page, match, end, depth)
        if match["word"]:
            return self._word(page, match, end, depth)
        if match["symbol"]:
            return self._symbol(page, match["symbol"], position, end, depth)
        if match["dollar"]:
            return self._dollar(page, match, end)
        if match["brace"] == "{":
            return self._group(page, match.start(), end, depth)
        if match["break"]:
            page.end_paragraph()
        elif match["mark"]:
            page.pieces.append({"~": " ", "--": "–", "---": "—", "`": "'"}.get(match["mark"], '"'))
        elif match["held"]:
            self._held(page, match["held"])
        return position

    def _group(self, page: _Page, start: int, end: int, depth: int) -> int:
        r"""Convert `{\bf text}`; other groups are treated as if they had no braces."""
        close = self.pairs.get(start, end)
        font = FONT.match(self.text, start + 1)
        if font is None or close >= end:
            return start + 1
        page.pieces.append(marked(self.inline(font.end(), close, depth), FONTS[font[1]]))
        return close + 1

    def _held(self, page: _Page, sign: str) -> None:
        listing = self.listings[int(sign[1:-1])]
        if listing.inline:
            page.pieces.append(sign)
            return
        page.block(fenced(listing))
        if listing.caption:
            page.block(flow(listing.caption))

    def _symbol(self, page: _Page, symbol: str, position: int, end: int, depth: int) -> int:
        if symbol in "([":
            close = self.text.find("\\)" if symbol == "(" else "\\]", position, min(end, position + FORMULA))
            if close >= 0:
                self._mathematics(page, self.text[position:close], display=symbol == "[")
                return close + 2
        elif symbol in ACCENTS:
            return self._accent(page, symbol, position, end, depth)
        elif symbol == "\\":
            page.pieces.append(BREAK)
            return self.options(position, end)
        elif symbol in "&%$#_{}":
            page.pieces.append(symbol)
        elif symbol in " ,;:\n~":
            page.pieces.append(" ")
        return position

    def _dollar(self, page: _Page, match: re.Match, end: int) -> int:
        if match["dollar"] == "$$":
            close = self.text.find("$$", match.end(), min(end, match.end() + FORMULA))
            if close >= 0:
                self._mathematics(page, self.text[match.end() : close], display=True)
                return close + 2
            return match.end()
        for found in MATH_END.finditer(self.text, match.end(), end):
            if found[0] == "$":
                self._mathematics(page, self.text[match.end() : found.start()], display=False)
                return found.end()
            if found[0][0] == "\n":  # the paragraph ends: this dollar did not start mathematics
                break
        page.pieces.append("$")
        return match.end()

    def _mathematics(self, page: _Page, formula: str, display: bool) -> None:
        formula = formula.strip()
        if display:
            page.block(f"$$\n{_without_empty_lines(formula)}\n$$" if formula else "")
        elif formula:
            page.pieces.append(f"${' '.join(formula.split())}$")

    def _accent(self, page: _Page, accent: str, position: int, end: int, depth: int) -> int:
        start, stop, after = self.argument(position, end)
        letter = self.inline(start, stop, depth).replace("ı", "i")
        if letter[:1].isalpha():
            page.pieces.append(unicodedata.normalize("NFC", letter[0] + ACCENTS[accent] + letter[1:]))
        else:
            page.pieces.append(letter or (accent if accent in "~^" else ""))
        return after

    def _word(self, page: _Page, match: re.Match, end: int, depth: int) -> int:
        word, position = match["word"], match.end()
        if word in SECTIONS or word in ("appendix", "appendices"):
            return self._section(page, match, end, depth)
        if word in MARKS:
            start, stop, after = self.argument(position, end)
            page.pieces.append(marked(self.inline(start, stop, depth), MARKS[word]))
            return after
        if word in ACCENTS:
            return self._accent(page, word, position, end, depth)
        if word in self._words:
            return self._words[word](page, position, end, depth)
        if word in CITATIONS or word in REFERENCES:
            start, stop, after = self.argument(self.options(position, end), end)
            keys = [_key(key) for key in self.text[start:stop].split(",")]
            if word in CITATIONS:
                page.pieces.append(f"[{', '.join(keys)}]")
            else:
                page.pieces.append(REFERENCES[word].format(", ".join(f"{REFERENCE}{key}{END}" for key in keys)))
            return after
        if word in SYMBOLS:
            page.pieces.append(SYMBOLS[word])
            return after_space(self.text, position, end)
        if word == "xspace":
            after = after_space(self.text, position, end)
            page.pieces.append("" if self.text[after : after + 1] in ".,;:!?)'{}/-~\\]" else " ")
            return after
        if word in DROPPED_COMMANDS:
            position = self.options(position, end)
            for _ in range(DROPPED_COMMANDS[word]):
                position = self.options(self.argument(position, end)[2], end)
            return position
        # The braced argument of an unknown command is kept.
        return after_space(self.text, self.options(position, end), end)

    def _section(self, page: _Page, match: re.Match, end: int, depth: int) -> int:
        word = match["word"]
        page.end_paragraph()
        if word not in SECTIONS:
            self._appendix, self._numbers = True, []
            return match.end()
        start, stop, after = self.argument(self.options(match.end(), end), end)
        title, level = self.inline(start, stop, depth), SECTIONS[word]
        is_thanks = ACKNOWLEDGEMENTS.match(title) and not self.keep
        if is_thanks or BIBLIOGRAPHY.fullmatch(title.rstrip(". :")):
            for following in SECTION.finditer(self.text, after, end):
                if SECTIONS.get(following[1], 0) <= level:
                    return following.start()
            return end
        if level >= SECTIONS["paragraph"]:
            page.pieces.append(marked(title, "**") + " ")
            return after
        number = "" if match[0].endswith("*") else self._section_number(level)
        hashes = "#" * max(2, level - self._top + 2)
        page.block(f"{hashes} {number} {title}".replace("  ", " ") if title else "")
        return after

    def _section_number(self, level: int) -> str:
        place = level - self._top
        if place < 0:
            return ""
        numbers = [*self._numbers[: place + 1], *[0] * (place + 1 - len(self._numbers))]
        numbers[place] += 1
        self._numbers = numbers
        first = chr(ord("A") + (numbers[0] - 1) % 26) if self._appendix and numbers[0] else str(numbers[0])
        self._here = ".".join([first, *map(str, numbers[1:])])
        return self._here

    def _par(self, page: _Page, position: int, end: int, depth: int) -> int:
        page.end_paragraph()
        return position

    def _label(self, page: _Page, position: int, end: int, depth: int) -> int:
        start, stop, after = self.argument(position, end)
        if self._here:
            self.labels[_key(self.text[start:stop])] = self._here
        return after

    def _caption(self, page: _Page, position: int, end: int, depth: int) -> int:
        start, stop, after = self.argument(self.options(position, end), end)
        caption = self.inline(start, stop, depth)
        if self._float:
            self._counters[self._float] += 1
            self._here = str(self._counters[self._float])
            caption = f"**{self._float} {self._here}:** {caption}"
        page.block(caption)
        return after

    def _footnote(self, page: _Page, position: int, end: int, depth: int) -> int:
        start, stop, after = self.argument(self.options(position, end), end)
        if note := self.inline(start, stop, depth):
            page.pieces.append(f" ({note})")
        return after

    def _url(self, page: _Page, position: int, end: int, depth: int) -> int:
        start, stop, after = self.argument(position, end)
        page.pieces.append(re.sub(r"\\([%#&_~{}])", r"\1", self.text[start:stop].strip()))
        return after

    def _href(self, page: _Page, position: int, end: int, depth: int) -> int:
        start, stop, after = self.argument(position, end)
        address = re.sub(r"\\([%#&_~{}])", r"\1", self.text[start:stop].strip())
        start, stop, after = self.argument(after, end)
        title = self.inline(start, stop, depth)
        page.pieces.append(f"[{title}]({address})" if title and title != address else address)
        return after

    def _subfloat(self, page: _Page, position: int, end: int, depth: int) -> int:
        r"""Convert `\subfloat[caption]{content}`."""
        if option := OPTION.match(self.text, position, end):
            page.block(self.inline(*option.span(1), depth))
            return option.end()
        return position

    def _caption_of(self, page: _Page, position: int, end: int, depth: int) -> int:
        start, stop, after = self.argument(position, end)
        around, self._float = self._float, self.text[start:stop].capitalize()
        after = self._caption(page, after, end, depth)
        self._float = around
        return after

    def _call(self, page: _Page, position: int, end: int, depth: int) -> int:
        start, stop, after = self.argument(position, end)
        name = self.inline(start, stop, depth)
        start, stop, after = self.argument(after, end)
        page.pieces.append(f"{name}({self.inline(start, stop, depth)})")
        return after

    def _middle_rule(self, page: _Page, position: int, end: int, depth: int) -> int:
        r"""Skip `\cmidrule(lr){2-3}`."""
        trim = re.compile(r"\([lr]*\)").match(self.text, position, end)
        return self.argument(trim.end() if trim else position, end)[2]

    def _length(self, page: _Page, position: int, end: int, depth: int) -> int:
        r"""Skip a length without braces, such as `\vskip 5pt plus 1pt`."""
        given = LENGTH.match(self.text, position, end)
        return given.end() if given else position

    def _environment(self, page: _Page, match: re.Match, end: int, depth: int) -> int:
        name, start = match["begin"].strip(), match.end()
        stop, after = self.environments.get(match.start(), (end, end))
        stop, after = min(stop, end), min(after, end)
        plain = name.rstrip("*")
        if plain in MATHEMATICS:
            content = self.text[start:stop].strip()
            if plain == "math":
                self._mathematics(page, content, display=False)
            elif plain in ("equation", "displaymath"):
                self._mathematics(page, content, display=True)
            else:
                page.block(_without_empty_lines(self.text[match.start() : after].strip()))
            return after
        if plain in DROPPED_ENVIRONMENTS or ((ACKNOWLEDGEMENTS.fullmatch(plain) or plain == "acks") and not self.keep):
            return after
        option = OPTION.match(self.text, start, stop)
        start = self.options(option.end() if option else start, stop)
        for _ in range(ENVIRONMENT_ARGUMENTS.get(plain, 0)):
            start = self.options(self.argument(start, stop)[2], stop)
        if plain in LISTS:
            page.block("\n".join(list_items(self, plain, start, stop, depth)))
        elif plain in TABLES:
            page.block(table(self, start, stop, depth))
        elif plain in QUOTES:
            lines = "\n\n".join(self.blocks(start, stop, depth + 1)).splitlines()
            page.block("\n".join(f"> {line}".rstrip() for line in lines))
        elif plain == "algorithmic":
            page.block(pseudocode(self, start, stop, depth))
        elif plain in self.theorems:
            page.end_paragraph()
            page.blocks += self._theorem(plain, option, start, stop, depth)
        else:
            page.end_paragraph()
            around, self._float = self._float, FLOATS.get(plain, self._float)
            page.blocks += self.blocks(start, stop, depth + 1)
            self._float = around
        return after

    def _theorem(self, name: str, option: re.Match | None, start: int, stop: int, depth: int) -> list[str]:
        title = self.theorems[name]
        if name != "proof":
            self._counters[title] += 1
            self._here = str(self._counters[title])
            title = f"{title} {self._here}"
        if option:
            title += f" ({self.inline(*option.span(1), depth)})"
        first, *others = self.blocks(start, stop, depth + 1) or [""]
        return [f"**{title}.** {first}", *others]


def _key(text: str) -> str:
    return " ".join(re.sub(f"[{HOLD}{END}{REFERENCE}{BREAK}]", "", text).split())


def _without_empty_lines(formula: str) -> str:
    return re.sub(r"\n\s*\n", "\n", formula)
