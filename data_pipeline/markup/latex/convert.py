"""LaTeX sources to Markdown: find the main file, join files, remove comments, expand macros, convert."""

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from data_pipeline.markup.latex.macros import Expander, LatexError
from data_pipeline.markup.latex.markdown import KNOWN_COMMANDS, convert
from data_pipeline.markup.latex.reader import Listing, placeholder

JOINED_CHARACTERS = 16_000_000  # for a paper's files together; a book has 5 million
INPUT_DEPTH = 20
# Characters reserved as placeholders for verbatim text and references: removed from the input.
UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f\ue000-\ue003]+")
CLASS = re.compile(r"^[^%\n]*\\document(?:class|style)\b", re.MULTILINE)
USUAL_NAMES = ("main", "ms", "paper", "article", "manuscript", "root", "template")
VERBATIM = ("verbatim", "verbatim*", "Verbatim", "Verbatim*", "BVerbatim", "lstlisting", "minted", "alltt")
DROPPED = ("comment", "filecontents", "filecontents*")
# Possessive where a part is optional, and bounded: hostile text must not cost more than one pass.
DEFINES_VERBATIM = re.compile(
    r"\\(?:lstnewenvironment|DefineVerbatimEnvironment|newtcblisting|DeclareTCBListing)\s*+(?:\[[^\]\n]{0,200}\])?+\s*+"
    r"\{(\w{1,60})\}|\\newminted\s*+(?:\[(\w{1,60})\])?+\s*+\{(\w{1,60})\}"
)
OPTIONS = r"\[[^\[\]]{0,400}(?:\[[^\[\]]{0,100}\][^\[\]]{0,400}){0,3}\]"
LANGUAGE = re.compile(r"\blanguage\s*=\s*\{?\s*(?:\[[^\]]*\])?\s*([\w+#-]+)")
CAPTION = re.compile(r"\bcaption\s*=\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\}|([^,{}\]]+))")
INPUT = re.compile(
    r"\\(?:(?:sub)?(?:import|inputfrom|includefrom)\s*+\{(?P<folder>[^{}\n]{0,200})\}\s*+\{(?P<inside>[^{}\n]{0,200})\}"
    r"|(?:input|include|subfile|subfileinclude)(?![a-zA-Z])\s*+(?:\{(?P<braced>[^{}\n]{0,200})\}|(?P<bare>[\w./-]{1,200}))"
    rf"|(?:lstinputlisting\s*+(?P<options>{OPTIONS})?+|inputminted\s*+(?:{OPTIONS})?+\s*+\{{(?P<language>\w+)\}}"
    r"|verbatiminput\*?)\s*+\{(?P<listing>[^{}\n]{0,200})\})"
)
LINE_START = re.compile(r"[ \t]*(\n?)")
HEAD = re.compile(rf"[ \t]*+(?P<options>{OPTIONS})?+[ \t]*+(?:\{{(?P<language>[\w+#-]+)\}})?")  # after \begin{minted}
PACKAGES = re.compile(r"\\(?:usepackage|RequirePackage)\s*+(?:\[[^\]]{0,500}\])?+\s*+\{([^{}]{0,2000})\}")


def decode(data: bytes) -> str:
    r"""Return the text of a source file: UTF-8, else Latin-1; with \n line ends, without control characters."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return UNWANTED.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def latex_markdown(files: Mapping[str, str], keep_acknowledgements: bool = False) -> str:
    """Return the Markdown of a paper's body, given its files by path.

    Title and abstract come from the paper's metadata; the bibliography is dropped.

    Raises:
        LatexError: there is no main file, or the files or their macros grow beyond the limits.
    """
    main = main_file(files)
    if main is None:
        raise LatexError("no main file: none has \\documentclass")
    sources = _Sources(files)
    text = sources.join(main)
    expander = Expander(KNOWN_COMMANDS)
    for package in sources.own_packages(text):
        expander.define(package)
    expanded = expander.expand(text)
    begin = re.search(r"\\begin\s*\{document\}", expanded)
    body = expanded[begin.end() if begin else 0 :]
    end = re.search(r"\\end\s*\{document\}", body)
    body = body[: end.start()] if end else body
    return convert(body, sources.listings, expander.theorems, keep_acknowledgements)


def main_file(files: Mapping[str, str]) -> str | None:
    r"""Return the path of the file that a paper is compiled from, or None.

    arXiv's 00README decides, else the best file with \documentclass, by these criteria in order: it has a body, is not
    a subfile, is near the top folder, has a usual name, is long.
    """
    for name, text in files.items():
        if posixpath.basename(name).upper().startswith("00README"):
            for named in _toplevel(text):
                if named in files:
                    return named
    ranks = []
    for name, text in files.items():
        stem, ending = posixpath.splitext(posixpath.basename(name).lower())
        if ending in (".sty", ".cls", ".clo", ".bst", ".bbl", ".dtx") or not CLASS.search(text):
            continue
        is_part = re.search(r"\\document(?:class|style)\s*(?:\[[^\]]*\])?\s*\{(?:subfiles|standalone)\}", text)
        rank = ("\\begin{document}" not in text, is_part is not None, name.count("/"), stem not in USUAL_NAMES)
        ranks.append((*rank, -len(text), name))
    return min(ranks)[-1] if ranks else None


def _toplevel(readme: str) -> Iterator[str]:
    """Yield the main files named by a 00README, in either of its formats."""
    try:
        sources = json.loads(readme).get("sources", [])
        yield from (source["filename"] for source in sources if source.get("usage") == "toplevel")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        yield from re.findall(r"^\s*(\S+)\s+toplevelfile\b", readme, re.MULTILINE)


@dataclass
class _Sources:
    """A paper's files, joined into one text; verbatim text is moved to `listings`, out of reach of later steps."""

    files: Mapping[str, str]
    listings: list[Listing] = field(default_factory=list)
    _prepared: dict[str, str] = field(default_factory=dict)
    _characters: int = 0

    def __post_init__(self) -> None:
        names = {*VERBATIM, *DROPPED}
        for text in self.files.values():
            for environment, minted, language in DEFINES_VERBATIM.findall(text):
                names.add(environment or minted or f"{language}code")
        # One pass, as in TeX: a comment may contain a \begin{verbatim}, and a verbatim text a comment sign.
        self._scan = re.compile(
            rf"\\begin\s*\{{(?P<environment>{'|'.join(map(re.escape, sorted(names)))})\}}"
            r"|\\verb\*?(?P<mark>[^\sA-Za-z0-9*])(?P<verb>[^\n]{0,500}?)(?P=mark)"
            r"|\\(?:lstinline\s?(?:\[[^\]\n]{0,200}\])?|mintinline\s?(?:\[[^\]\n]{0,200}\])?\{\w+\})"
            r"(?:\{(?P<braced>(?:[^{}\n]|\{[^{}\n]{0,200}\}){0,500})\}"
            r"|(?P<bound>[^\sA-Za-z0-9\[{])(?P<inline>[^\n]{0,500}?)(?P=bound))"
            r"|\\(?:url|nolinkurl|path|href)\s?\{[^{}\n]{0,2000}\}"  # a % here belongs to the URL
            r"|(?P<comment>%)|\\[\s\S]"
        )

    def join(self, name: str, above: tuple[str, ...] = ()) -> str:
        """Return a file's text with its inputs inserted; raise LatexError if that is too long."""
        if name not in self._prepared:
            self._prepared[name] = self._set_aside(self.files[name])
        text = self._prepared[name]
        self._characters += len(text)
        if self._characters > JOINED_CHARACTERS:
            raise LatexError(f"its files join into over {JOINED_CHARACTERS:,} characters")
        if above and (begin := text.find("\\begin{document}")) >= 0:  # a subfile has its own preamble
            text = text[begin + len("\\begin{document}") :].partition("\\end{document}")[0]
        text = re.split(r"\\endinput\b", text, maxsplit=1)[0]
        return INPUT.sub(lambda match: self._input(match, name, (*above, name)), text)

    def own_packages(self, text: str) -> Iterator[str]:
        """Yield the texts of loaded packages that are among the paper's files."""
        for names in PACKAGES.findall(text):
            for name in names.split(","):
                path = f"{name.strip()}.sty"
                if path in self.files:
                    yield self._set_aside(self.files[path])

    def _input(self, match: re.Match, name: str, above: tuple[str, ...]) -> str:
        if (listing := match["listing"]) is not None:
            path = self._find(listing, name)
            language, options = match["language"] or "", match["options"] or ""
            return "" if path is None else self._keep(self.files[path], language, options)
        wanted = match["braced"] or match["bare"] or posixpath.join(match["folder"] or "", match["inside"] or "")
        path = self._find(wanted, name)
        if path is None or path in above or len(above) > INPUT_DEPTH:
            return ""
        return self.join(path, above)

    def _find(self, wanted: str, origin: str) -> str | None:
        """Return the file for a name, among the paper's files only."""
        wanted = wanted.strip().strip('"')
        for folder in ("", posixpath.dirname(origin)):
            path = posixpath.normpath(posixpath.join(folder, wanted))
            for ending in ("", ".tex"):
                if path + ending in self.files:
                    return path + ending
        return None

    def _set_aside(self, text: str) -> str:
        """Return the text without comments, and with a placeholder for each verbatim text."""
        out: list[str] = []
        position = 0
        unclosed: set[str] = set()  # so that a thousand unclosed ones do not cost a thousand searches
        while match := self._scan.search(text, position):
            out.append(text[position : match.start()])
            position = match.end()
            environment = match["environment"]
            if match["comment"]:
                position = _after_comment(text, position)
            elif environment and environment not in unclosed:
                end = text.find(f"\\end{{{environment}}}", position)
                if end < 0:
                    unclosed.add(environment)
                    out.append(match[0])
                    continue
                if environment not in DROPPED:
                    out.append(self._environment(environment, text[position:end]))
                position = end + len(f"\\end{{{environment}}}")
            else:
                code = next((match[name] for name in ("verb", "braced", "inline") if match[name] is not None), None)
                out.append(match[0] if code is None else self._keep(code, inline=True))
        out.append(text[position:])
        return "".join(out)

    def _environment(self, name: str, content: str) -> str:
        head = HEAD.match(content)
        assert head is not None  # each part is optional
        language = head["language"] if name == "minted" else None
        if language or head["options"]:
            content = content[head.end() if language else head.end("options") :]
        return self._keep(content, language or "", head["options"] or "")

    def _keep(self, code: str, language: str = "", options: str = "", inline: bool = False) -> str:
        if not language and (found := LANGUAGE.search(options)):
            language = found[1]
        found = CAPTION.search(options)
        self.listings.append(Listing(code, language.lower(), (found[1] or found[2]) if found else "", inline))
        return placeholder(len(self.listings) - 1)


def _after_comment(text: str, position: int) -> int:
    """Return the position after a comment: TeX drops its line end and the next line's leading space.

    An empty line after it still ends the paragraph.
    """
    end = text.find("\n", position)
    if end < 0:
        return len(text)
    following = LINE_START.match(text, end + 1)
    assert following is not None  # perhaps of nothing
    return end if following[1] else following.end()
