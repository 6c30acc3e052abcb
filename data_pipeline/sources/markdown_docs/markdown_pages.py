"""Convert one page of a documentation repository to plain Markdown: generator syntax becomes text or is removed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.documents import Unreadable
from data_pipeline.sources.markdown_docs.markdown_includes import FRONT_MATTER, Includes, Repository, front_matter

DATES = ("ms.date", "lastmod", "last_modified_at", "last_updated", "updated", "date")
FENCE = re.compile(r"^([ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(`{3,}|~{3,})([^`\n]*)$")
HIGHLIGHT = re.compile(r"^[ \t]*\{(?:\{<|%)-?[ ]*highlight[ ]+\"?([\w+#.-]{1,30})[^\n]*$")
HIGHLIGHT_END = re.compile(r"^[ \t]*\{(?:\{<[ ]*/[ ]*highlight|%-?[ ]*endhighlight)[^\n]*$")
RAW = re.compile(r"\{%-?\s*(?:end)?raw\s*-?%\}")
CODE_SPAN = re.compile(r"(?<!`)(`{1,8})(?!`)(?:(?!\n\n).){1,1000}?(?<!`)\1(?!`)", re.DOTALL)
# Lines that start a block indented by four: mkdocs' tabs and admonitions.
INDENTED = re.compile(r"^([ ]*)(===\+?!?|!!!|\?\?\?\+?)[ ]+([\w-]*)[^\"\n]*?(?:\"([^\"\n]*)\")?[^\"\n]*$")
DOCFX_TAB = re.compile(r"^#{1,6}[ ]+\[([^\]\n]+)\]\(#tabs?/[^)\n]*\)[ \t]*$")
CALL_OUT = re.compile(r"^([ \t>]*>[ \t]*)\[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\][ \t]*(.*)$", re.IGNORECASE)
DOCFX_MARK = re.compile(r"^[ \t>]*\[!(?:div|VIDEO|TAB|INCLUDE|code)[^\n]*$", re.IGNORECASE)
COLONS = re.compile(r"^[ \t>]*:{3,}[ \t]*\{?([\w-]*)\}?(?:[ \t]*\[([^\]\n]*)\])?([^\n]*)$")
CALL_OUTS = frozenset(
    ["note", "tip", "info", "important", "warning", "caution", "danger", "success", "attention", "hint", "example"]
)
HEADING_WORDS = {"whatsnext": "What's next", "seealso": "See also"}
LINK = re.compile(
    r"(!?)\[((?:[^\[\]\n]|\n(?!\n)|\\.|\[[^\[\]\n]{0,300}\]){0,1000})\]"
    r"\(\s*(<[^<>\n]{0,1000}>|(?:[^()\s]|\([^()\s]{0,300}\)){0,1000})(?:\s+(?:\"[^\"\n]{0,500}\"|'[^'\n]{0,500}'))?\s*\)(?:\{:[^}\n]{0,200}\})?"
)
REFERENCE = re.compile(r"!?\[([^\[\]]{1,500})\]\[([^\[\]]{0,200})\]")
DEFINITION = re.compile(r"^[ ]{0,3}\[([^\[\]\n]{1,200})\]:[ \t]+\S[^\n]*\n?", re.MULTILINE)
SHORTCUT = re.compile(r"!?\[([^\[\]]{1,200})\](?![\[(:])")
SHORTCODE = re.compile(r"\{\{([<%])-?\s*(/?\s*[\w/.-]*)([^{}\n]{0,600}?)-?([>%])\}\}")
ARGUMENT = re.compile(r"([\w-]+)\s*=\s*(?:\"([^\"\n]*)\"|`([^`\n]*)`|([^\s\"]+))|\"([^\"\n]*)\"")
LIQUID_TAG = re.compile(r"\{%-?[^%\n]{0,400}-?%\}")
LIQUID_VALUE = re.compile(r"\{\{-?\s*(?:site|page|include|layout)\.[^{}\n]{0,200}\}\}")
ATTRIBUTES = re.compile(r"^[ \t]*\{:[^}\n]{0,300}\}[ \t]*$|[ \t]*\{#[\w.:-]{1,200}\}(?=[ \t]*$)", re.MULTILINE)
IMAGE_TAG = re.compile(
    r"<img\b[^<>]{0,1500}?\balt\s*=\s*[\"']([^\"'<>]{0,500})[\"'][^<>]{0,1500}>|<img\b[^<>]{0,1500}>"
)
TAGS = re.compile(
    r"</?(?:a|div|span|p|details|summary|center|font|kbd|sub|sup|section|figure|figcaption|picture|source|u|ins|br|video"
    r"|iframe)\b[^<>]{0,1500}>",
    re.IGNORECASE,
)
COMPONENT = re.compile(r"</?[A-Z][\w.]*\b(?:[^<>]|=>){0,1500}>")
MODULE_LINE = re.compile(
    r"^(?:import\s[^\n]*\sfrom\s|import\s+['\"]|export\s+(?:const|default)\s)[^\n]*\n?", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class MarkdownPage:
    """A page's text, its date (ISO 8601, or empty), and the number of includes missing from its repository."""

    text: str
    date: str
    missing: int


def read_page(path: Path, repository: Repository, max_characters: int) -> MarkdownPage:
    """Read a page with its includes; raise Unreadable, or OSError if the file cannot be read."""
    text = repository.text(path)
    head = FRONT_MATTER.match(text)
    about = front_matter(head[2]) if head is not None and head[1] == "---" else {}
    includes = Includes(repository)
    text = includes.resolve(text[head.end() :] if head is not None else text, path)
    if len(text) > max_characters:
        raise Unreadable("file too large", f"over {max_characters} characters with its includes")
    text = plain_markdown(text, components=path.suffix.lower() == ".mdx")
    title = includes.resolve(about["title"], path) if isinstance(about.get("title"), str) else ""
    title = " ".join(LIQUID_TAG.sub("", title).split())
    if title and text and not re.match(r"#[ ]", text):
        text = f"# {title}\n\n{text}"
    return MarkdownPage(text, _date(about), includes.missing)


def plain_markdown(text: str, components: bool = False) -> str:
    """Return Markdown without comments, shortcodes, anchors and relative links; code blocks stay unchanged.

    With `components`, MDX syntax is removed too: imports and elements with capital letters.
    """
    pieces: list[str] = []
    segments = list(_segments(_dedented(text.split("\n"))))
    labels = {
        " ".join(match[1].split()).casefold()
        for is_code, lines in segments
        if not is_code
        for match in DEFINITION.finditer("\n".join(lines))
    }
    for is_code, lines in segments:
        if is_code:
            pieces.append("\n".join(RAW.sub("", line) for line in lines))
        else:
            prose = "\n".join(_line(line) for line in _without_tab_rules(lines))
            pieces.append(re.sub(r"\n[ \t]*\n(?:[ \t]*\n)+", "\n\n", _prose(prose, labels, components)))
    joined = "\n".join(pieces)
    return "\n".join(line.rstrip() for line in joined.split("\n")).strip("\n")


def _date(about: dict) -> str:
    for name in DATES:
        said = about.get(name)
        if not isinstance(said, str):
            continue
        american = re.match(r"(\d{1,2})/(\d{1,2})/(\d{4})$", said)
        if american:
            return f"{american[3]}-{int(american[1]):02d}-{int(american[2]):02d}"
        iso = re.match(r"\d{4}-\d{2}-\d{2}", said)
        if iso:
            return iso[0]
    return ""


def _dedented(lines: list[str]) -> Iterator[str]:
    """Yield lines with mkdocs' blocks dedented, their titles in bold above them."""
    inner: list[int] = []  # indentation of the enclosing blocks
    fence = ""
    for line in lines:
        indent = len(line) - len(line.lstrip(" "))
        if line.strip():
            while inner and indent < inner[-1]:
                inner.pop()
                fence = ""
        if fence:
            if line.strip().startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
        elif (opened := FENCE.match(line)) is not None:
            fence = opened[2]
        elif (block := INDENTED.match(line)) is not None:
            yield line[4 * len(inner) : indent] + _bold(block[4] or block[3])
            yield ""
            inner.append(indent + 4)
            continue
        yield line[4 * len(inner) :] if line.strip() else ""


def _bold(title: str) -> str:
    return f"**{title[:1].upper()}{title[1:]}**" if title else ""


def _segments(lines: Iterator[str]) -> Iterator[tuple[bool, list[str]]]:
    """Yield (is code, lines) runs without comments; highlight tags become fences."""
    run: list[str] = []
    fence, commented = "", False
    for line in lines:
        if fence:
            run.append(line)
            stripped = line.strip(" \t>")
            if fence == "highlight":
                if HIGHLIGHT_END.match(line):
                    run[-1] = "```"
                    yield True, run
                    run, fence = [], ""
            elif stripped.startswith(fence) and not stripped.strip(fence[0]):
                yield True, run
                run, fence = [], ""
            continue
        if not commented:
            highlight = HIGHLIGHT.match(line)
            opened = FENCE.match(line)
            if highlight or opened:
                yield False, run
                run = [f"```{highlight[1]}" if highlight else line]
                fence = opened[2] if opened and not highlight else "highlight"
                continue
        kept, commented = _without_comments(line, commented)
        if kept.strip() or not line.strip():
            run.append(kept)
    yield bool(fence), run


def _without_comments(line: str, commented: bool) -> tuple[str, bool]:
    """Return a line without HTML comments, and whether one continues on the next line; code spans are left alone."""
    kept: list[str] = []
    at = 0
    while at < len(line):
        if commented:
            end = line.find("-->", at)
            if end < 0:
                return "".join(kept), True
            at, commented = end + 3, False
            continue
        start = line.find("<!--", at)
        if start < 0 or line[:start].count("`") % 2:
            kept.append(line[at:])
            break
        kept.append(line[at:start])
        at, commented = start + 4, True
    return "".join(kept), commented


def _without_tab_rules(lines: list[str]) -> Iterator[str]:
    """Yield lines with docfx' tabs as bold titles, without the rule that ends the tabs."""
    in_tabs = False
    for line in lines:
        tab = DOCFX_TAB.match(line)
        if tab:
            in_tabs = True
            yield _bold(tab[1])
        elif in_tabs and re.match(r"^[ ]{0,3}(?:-{3,}|\*{3,}|_{3,})[ ]*$", line):
            in_tabs = False
        else:
            yield line


def _line(line: str) -> str:
    """Return a line with admonition labels in bold, and without the marks of docfx' and Docusaurus' blocks."""
    call_out = CALL_OUT.match(line)
    if call_out:
        return f"{call_out[1]}{_bold(call_out[2].lower() + ':')} {call_out[3]}".rstrip()
    if DOCFX_MARK.match(line):
        return ""
    colons = COLONS.match(line)
    if colons is None:
        return line
    name, title, rest = colons.groups()
    if name.lower() in CALL_OUTS:
        return _bold(title or rest.strip(" :") or name)
    described = re.search(r"\balt-text=\"([^\"]*)\"", rest) if name == "image" else None
    return described[1] if described else ""


def _prose(text: str, labels: set[str], components: bool) -> str:
    """Convert prose but not its code spans, which may be in a link's text."""
    spans: list[str] = []

    def put_away(match: re.Match) -> str:
        spans.append(match[0])
        return f"\0{len(spans) - 1}\0"  # pages contain no NUL

    def named(match: re.Match) -> str:
        text, label = match[1], match[2] if match.lastindex == 2 and match[2] else match[1]
        return text if " ".join(label.split()).casefold() in labels else match[0]

    text = CODE_SPAN.sub(put_away, text)
    text = DEFINITION.sub("", MODULE_LINE.sub("", text) if components else text)
    text = LINK.sub(_link, text)
    text = SHORTCUT.sub(named, REFERENCE.sub(named, text))
    text = SHORTCODE.sub(_shortcode, text)
    text = LIQUID_VALUE.sub("", LIQUID_TAG.sub("", text))
    text = IMAGE_TAG.sub(lambda match: match[1] or "", text)
    text = TAGS.sub(lambda match: " " if match[0][:3].lower() == "<br" else "", text)
    if components:
        text = COMPONENT.sub(_component, text)
    text = ATTRIBUTES.sub("", text)
    return re.sub(r"\0(\d+)\0", lambda match: spans[int(match[1])], text)


def _link(match: re.Match) -> str:
    """Return a link's text, with its URL if that is a web address; for an image, its description."""
    image, text, target = match.groups()
    if image:
        return text
    text = LINK.sub(_link, text)  # a link's text may be an image
    target = target.strip("<>")
    return f"[{text}]({target})" if re.match(r"https?://", target) and text and text != target else text or ""


def _shortcode(match: re.Match) -> str:
    """Return the words of a Hugo shortcode: a heading, a tab's name, a term, a picture's description."""
    name = match[2].strip()
    named = {key: a or b or c for key, a, b, c, bare in ARGUMENT.findall(match[3]) if key}
    bare = [bare for key, *_, bare in ARGUMENT.findall(match[3]) if bare]
    if name == "heading" and bare:
        return HEADING_WORDS.get(bare[0], bare[0].capitalize())
    if name == "tab":
        return _bold(named.get("name") or named.get("header") or (bare[0] if bare else ""))
    if name in ("note", "caution", "warning", "tip"):
        return f"**{name.capitalize()}:** "
    return named.get("text") or named.get("alt") or named.get("term_id", "").replace("-", " ")


def _component(match: re.Match) -> str:
    """Return the words of an MDX element: a tab's label, an admonition's title."""
    label = re.search(r"\b(?:label|title)=[\"']([^\"'\n]{1,200})[\"']", match[0])
    return _bold(label[1]) if label else ""
