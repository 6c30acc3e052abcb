"""Manual pages to plain text: enough of man(7) and mdoc(7) for readable prose, not a formatter."""

import re
from collections.abc import Iterator

GLYPHS = {
    "aq": "'", "bu": "•", "co": "©", "cq": "’", "dq": '"', "em": "—", "en": "–", "ga": "`", "ha": "^", "hy": "-",
    "lq": "“", "oq": "‘", "rq": "”", "rs": "\\", "ti": "~", "mi": "−", "mu": "×", "+-": "±", "->": "→", "<-": "←",
    "<=": "≤", ">=": "≥", "!=": "≠", "de": "°", "or": "|", "rg": "®", "tm": "™", "Aq": "'", "L\"": "“", "R\"": "”",
    "C`": "", "C'": "", "--": "—", "Tm": "™", "lB": "[", "rB": "]", "lC": "{", "rC": "}", "la": "<", "ra": ">",
    "sl": "/", "ul": "_", "at": "@", "sh": "#", "Do": "$", "dg": "†", "ss": "ß", "mc": "µ", "12": "½", "14": "¼",
}  # fmt: skip
SINGLE = {"-": "-", "e": "\\", " ": " ", "~": " ", "0": " ", "t": "\t", "'": "'", "`": "`", ".": ".", "\\": "\\"}
_NAME = r"(?:\((?P<{0}2>..)|\[(?P<{0}l>[^\]]*)\]|(?P<{0}1>.))"
ESCAPE = re.compile(
    r"\\(?:"
    r'["#].*'  # a comment
    r"|(?:f|F|m|M|n[+-]?|g|k|Y)(?:\(..|\[[^\]]*\]|.)"  # fonts, colours, registers: no output
    r"|s[+-]?(?:\(..|\[[^\]]*\]|'[^']*'|[1-3]\d|\d)"  # point sizes
    r"|[bBDhHlLNoRSvwxXZ]'[^']*'"  # motions, widths, drawings
    r"|\*" + _NAME.format("s") + r"|\((?P<g2>..)|\[(?P<gl>[^\]]*)\]"  # strings and glyphs
    r"|(?P<one>.)|$)"
)
ARGUMENT = re.compile(r'"((?:[^"\\]|""|\\.)*)"?|((?:\\.|[^\s\\])+)')
ALTERNATING = {"BR", "RB", "IR", "RI", "BI", "IB"}
SPACED = {"B", "I", "R", "SM", "SB", "UR", "MT", "OP", "SY"}
HEADINGS = {"SH", "SS", "Sh", "Ss"}
TAGS = {"IP", "It"}
VERBATIM_ON = {"nf", "EX", "Vb", "Bd"}
VERBATIM_OFF = {"fi", "EE", "Ve", "Ed"}
SILENT = {
    "IX",
    "TH",
    "Dd",
    "Os",
    "Dt",
    "ds",
    "nr",
    "ft",
    "ad",
    "hy",
    "ne",
    "in",
    "ta",
    "ie",
    "el",
    "if",
    "PD",
    "DT",
    "UE",
}
MDOC_NAMES = (
    "Ad An Ao Ap Aq Ar At Bo Bq Bsx Bx Cd Cm Do Dq Dv Dx Em Eo Er Ev Fa Fc Fl Fn Fo Ft Fx Ic In Lb Li Lk Ms Mt Nd Nm No"
    " Ns Nx Op Ox Pa Pf Po Pq Pc Ql Qo Qq So Sq Sx Sy Ta Tn Va Vt Xo Xc Xr Bc Ac Dc Qc Sc Oo Oc Brq Bro Brc"
)
MDOC = frozenset(MDOC_NAMES.split())


def plain_text(roff: str) -> str:
    """Return the text of a manual page: filled paragraphs, headings on separate lines.

    Returns "" for a page that only includes another (`.so`).
    """
    return _Page().read(roff)


def unescape(text: str) -> str:
    """Return `text` with roff's escape sequences replaced by their output."""

    def replace(match: re.Match) -> str:
        name = match["s2"] or match["sl"] or match["s1"] or match["g2"] or match["gl"]
        if name is None:
            return SINGLE.get(match["one"] or "", "")
        if re.fullmatch(r"u[0-9A-F]{4,5}", name):
            return chr(int(name[1:], 16))
        return GLYPHS.get(name, "")

    return ESCAPE.sub(replace, text)


class _Page:
    def __init__(self) -> None:
        self.paragraphs: list[str] = []
        self.words: list[str] = []
        self.verbatim = False
        self.name = ""  # output of mdoc's .Nm

    def read(self, roff: str) -> str:
        lines = iter(roff.splitlines())
        for line in lines:
            if not line.startswith((".", "'")):
                self._text(unescape(line))
                continue
            name, _, rest = line[1:].strip().replace("\t", " ").partition(" ")
            if name == "so":
                return ""
            if name in ("de", "de1", "am", "ig"):
                _skip_until(lines, f".{rest.split()[1]}" if len(rest.split()) > 1 and name != "ig" else "..")
            elif name in ("if", "ie", "el"):
                _skip_braces(line, lines)
            elif name == "TS":
                self._table(lines)
            elif name == "EQ":
                _skip_until(lines, ".EN")
            elif not name.startswith("\\"):
                self._macro(name, _arguments(rest))
        self._break()
        return "\n\n".join(self.paragraphs)

    def _macro(self, name: str, arguments: list[str]) -> None:
        if name in HEADINGS:
            self._break()
            self.paragraphs.append(" ".join(arguments))
        elif name in ALTERNATING:
            self._text("".join(arguments))
        elif name in SPACED:
            self._text(" ".join(arguments))
        elif name in TAGS:
            self._break()
            self._text(_inline(arguments if name == "It" else arguments[:1]))
        elif name in VERBATIM_ON or name in VERBATIM_OFF:
            self._break()
            self.verbatim = name in VERBATIM_ON
        elif name == "Nm":
            self.name = arguments[0] if arguments else self.name
            self._text(_inline(arguments) or self.name)
        elif name == "Nd":
            self._text("- " + " ".join(arguments))
        elif name in MDOC:
            self._text(_inline([name, *arguments]))
        elif name == "br":
            self.words.append("\n")
        elif name not in SILENT:
            self._break()  # .PP, .TP, .RS, .sp and macros that a page defines itself

    def _text(self, text: str) -> None:
        if not text.strip() and not self.verbatim:
            self._break()
        else:
            self.words.append(text if self.verbatim else text.strip())

    def _break(self) -> None:
        """Finish the paragraph."""
        joined = ("\n" if self.verbatim else " ").join(self.words).replace(" \n ", "\n").strip("\n ")
        if joined:
            self.paragraphs.append(joined)
        self.words = []

    def _table(self, lines: Iterator[str]) -> None:
        """Keep the cells of a tbl(1) table; its format section ends at the first line that ends in a full stop."""
        self._break()
        rows, in_format = [], True
        for line in lines:
            if line.startswith(".TE"):
                break
            if in_format:
                in_format = not line.rstrip().endswith(".")
            elif not line.startswith(".") and line.strip() not in ("_", "="):
                rows.append(unescape(line.replace("T{", "").replace("T}", "")).replace("\t", "  ").rstrip())
        self.paragraphs.append("\n".join(row for row in rows if row.strip()))


def _arguments(rest: str) -> list[str]:
    return [
        unescape(match[1].replace('""', '"') if match[1] is not None else match[2]) for match in ARGUMENT.finditer(rest)
    ]


def _inline(arguments: list[str]) -> str:
    """Return an mdoc line's words without the macros in it (`Op Fl a Ar file` -> `-a file`)."""
    words, flag = [], ""
    for argument in arguments:
        if argument == "Fl":
            flag = "-"
        elif argument not in MDOC:
            words.append(flag + argument)
            flag = ""
    return " ".join(words) + (f" {flag}" if flag else "")


def _skip_until(lines: Iterator[str], end: str) -> None:
    for line in lines:
        if line.replace(" ", "") == end:
            return


def _skip_braces(line: str, lines: Iterator[str]) -> None:
    """Skip a conditional: its line, or its block in braces."""
    depth = line.count("\\{") - line.count("\\}")
    while depth > 0 and (following := next(lines, None)) is not None:
        depth += following.count("\\{") - following.count("\\}")
