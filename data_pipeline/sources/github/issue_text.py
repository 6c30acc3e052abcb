"""Clean the text of an issue's thread: templates, logs, quotes and user names are removed or shortened."""

import re
from functools import cached_property

LINE_CHARACTERS = 1000  # longer lines are data, of which the beginning suffices
CODE_LINES = 200
FENCE = re.compile(r"[ \t>]{0,20}(`{3,100}(?=[^`]*$)|~{3,100})[ \t]*([\w+#.-]*)")
NOT_CODE = {"", "text", "txt", "log", "logs", "console", "output", "plain", "plaintext", "shell", "sh", "bash", "zsh"}
NOT_CODE |= {"shell-session", "shellsession", "terminal", "stacktrace", "pytb", "pycon"}
LOG = re.compile(
    r"\s{0,40}(?:\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d|\[?\d\d:\d\d:\d\d\b|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|"
    r"\[ *\d{1,9}\.\d{3,9}\]|\[?(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|FATAL|CRITICAL)\b|[IWEF]\d{4} |"
    r"npm (?:ERR|WARN|verb|info)\b|\d{1,3}(?:\.\d{1,3}){3} - )"
)
TRACE = re.compile(
    r"\s{0,40}(?:at [\w.$<>/\[\]]{1,300} ?\(|File \"[^\"]{1,300}\", line \d|#\d{1,4} +(?:0x|[\w:]{1,200} )|"
    r"Traceback \(|Caused by: |goroutine \d|\.\.\. \d+ more|\d{1,4}: +0x|thread '.{1,200}' panicked|"
    r"Exception in thread)"
)
WITHIN_RUN = re.compile(r"\s*$|\t| {4}|(?:[\w]{1,100}\.){0,20}\w{0,100}(?:Error|Exception)\b")
NOT_LETTERS = re.compile(r"[\W_]+")
IMAGE = re.compile(r"!\[[^\]\n]{0,500}\]\([^)\n]{0,1000}\)|<(?:img|video|source)\b[^>]{0,2000}>|\[\]\([^)\n]{0,500}\)")
MARKUP = re.compile(r"</?(?:details|summary|p|br|div|center|picture|sub|sup|kbd)\b[^>]{0,200}>", re.IGNORECASE)
TRAILER = re.compile(r"\s{0,20}(?:signed-off|co-authored|reviewed|reported|tested|acked|suggested)-by:", re.IGNORECASE)
REPLY_HEADER = re.compile(r"\s{0,20}(?:On\b.{1,300}\bwrote:|.{1,200}@.{1,200} wrote:)\s{0,20}")
NO_RESPONSE = re.compile(r"^#{1,6} [^\n]{1,300}\n\s{0,20}_No response_[ \t]{0,20}$", re.MULTILINE)
MENTION = re.compile(r"(?<![\w@/.`+-])@([A-Za-z0-9][A-Za-z0-9-]{0,38})(?![\w/.-]*[/\w])")
CODE_SPAN = re.compile(r"(`[^`\n]{1,2000}`)")
LOGIN_CHARACTERS = 4  # shorter logins are often words: they are replaced only after an @
NOTHING = re.compile(
    r"(?:\+\s?1|thumbs_?up|me,? too|same(?: here| issue| problem)?|ditto|bump|following|subscrib(?:e|ed|ing)|"
    r"(?:i )?(?:have|having|am having|got|get)(?: exactly)? (?:this|the same)(?: issue| problem| error)?|"
    r"any (?:updates?|news|progress)(?: on this)?|[\W_])*",
    re.IGNORECASE,
)


def says_nothing(text: str) -> bool:
    """Return whether a comment is empty, or only a "+1" or "me too"."""
    return len(text) < 80 and NOTHING.fullmatch(text) is not None


def roles(posts: list[tuple[str, str]]) -> dict[str, str]:
    """Return login -> role for the (login, association) pairs of posts, the opening post first."""
    found: dict[str, str] = {}
    counts = {"Maintainer": 0, "Commenter": 0}
    for login, association in posts:
        if login not in found:
            kind = "Maintainer" if association in ("OWNER", "MEMBER", "COLLABORATOR") else "Commenter"
            counts[kind] += bool(found)
            found[login] = f"{kind} {counts[kind]}" if found else "Author"
    return found


class Namer:
    """Replacer of logins, and of all @mentions outside code, by roles.

    In URLs the role has hyphens. A login under four characters is only replaced after an @.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self._lowered = {login.lower(): role for login, role in names.items()}

    @cached_property
    def _known(self) -> re.Pattern:
        every = "|".join(sorted(map(re.escape, self._names), key=len, reverse=True))
        return re.compile(rf"(?<![\w@-])(@?)({every})(?![\w-])", re.IGNORECASE)

    def code(self, text: str) -> str:
        """Return code without the thread's own logins; other @words may be decorators, and stay."""
        lowered = text.lower()
        return self._known.sub(self._role, text) if any(login in lowered for login in self._lowered) else text

    def prose(self, text: str) -> str:
        """Return prose without logins and mentions; within `code` spans only the thread's own logins are replaced."""
        text = self.code(text)
        if "@" not in text:
            return text
        parts = CODE_SPAN.split(text)
        parts[::2] = [MENTION.sub("someone", part) for part in parts[::2]]
        return "".join(parts)

    def _role(self, match: re.Match) -> str:
        at, login = match.groups()
        if not at and (len(login) < LOGIN_CHARACTERS or login not in self._names):
            return match[0]
        role = self._lowered[login.lower()]
        in_address = match.start() > 0 and match.string[match.start() - 1] == "/"
        return role.lower().replace(" ", "-") if in_address else role


def clean(body: str, previous: str, namer: Namer, log_lines: int, trace_lines: int) -> str:
    """Return a post's Markdown without HTML comments, images, trailers and quotes of the previous post, names replaced.

    Fenced blocks, and runs of log lines outside them, are cut to `log_lines` (code: 200), plus at most `trace_lines` of
    stack traces. `previous` is the body of the previous post.
    """
    body = NO_RESPONSE.sub("", body.replace("\r\n", "\n").replace("\r", "\n").replace("\0", ""))
    lines = body.split("\n")
    parts: list[str] = []
    for language, block in _blocks(_without_comments(lines) if "<!--" in body else lines):
        if language is None:
            if ">" in body:
                block = _without_quotes(block, previous)
            text = MARKUP.sub("", IMAGE.sub("", "\n".join(line for line in block if not TRAILER.match(line))))
            parts += _fold_runs(namer.prose(text).split("\n"), log_lines, trace_lines)
        else:
            limit = log_lines if language.lower() in NOT_CODE else CODE_LINES
            inside = namer.code("\n".join(fold(block[1:-1], limit, trace_lines)))
            parts += [block[0], *([inside] if len(block) > 2 else []), block[-1]]
    text = "\n".join(map(_shortened, "\n".join(parts).split("\n")))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _without_comments(lines: list[str]) -> list[str]:
    """Return the lines without HTML comments, except in fenced blocks."""
    last_end = max((number for number, line in enumerate(lines) if "-->" in line), default=-1)
    kept: list[str] = []
    fence, inside = "", False
    for number, line in enumerate(lines):
        if fence:
            fence = "" if _closes(line, fence) else fence
        elif not inside and (match := FENCE.match(line)):
            fence = match[1]
        else:
            shown, inside = _outside(line, inside, number < last_end)
            if line.strip() and not shown.strip():
                continue
            line = shown
        kept.append(line)
    return kept


def _outside(line: str, inside: bool, ends_later: bool) -> tuple[str, bool]:
    """Return the part of a line outside comments, and whether a comment continues after it."""
    shown: list[str] = []
    position = 0
    while True:
        if inside:
            end = line.find("-->", position)
            if end < 0:
                return "".join(shown), True
            position, inside = end + 3, False
        start = line.find("<!--", position)
        if start < 0 or (line.find("-->", start) < 0 and not ends_later):
            return "".join([*shown, line[position:]]), False
        shown.append(line[position:start])
        position, inside = start + 4, True


def _blocks(lines: list[str]) -> list[tuple[str | None, list[str]]]:
    """Return fenced blocks as (language, lines with both fences), and the lines between them as (None, lines).

    An open fence closes at the end, as on the site.
    """
    blocks: list[tuple[str | None, list[str]]] = [(None, [])]
    fence = ""
    for line in lines:
        if fence:
            blocks[-1][1].append(line)
            if _closes(line, fence):
                fence = ""
                blocks.append((None, []))
        elif match := FENCE.match(line):
            fence = match[1]
            blocks.append((match[2], [line]))
        else:
            blocks[-1][1].append(line)
    if fence:
        blocks[-1][1].append(fence)
    return blocks


def _closes(line: str, fence: str) -> bool:
    if fence not in line:
        return False
    stripped = line.strip(" \t>")
    return len(stripped) >= len(fence) and not stripped.strip(fence[0])


def _without_quotes(lines: list[str], previous: str) -> list[str]:
    """Drop quotes of the previous post, and the "wrote:" line that mail clients put above them."""
    before = _letters(previous)
    kept: list[str] = []
    number = 0
    while number < len(lines):
        end = number
        while end < len(lines) and lines[end].lstrip().startswith(">"):
            end += 1
        if end == number:
            if not REPLY_HEADER.fullmatch(lines[number][:600]):
                kept.append(lines[number])
            number += 1
            continue
        quoted = _letters("\n".join(lines[number:end]))
        if not quoted or quoted not in before:
            kept += lines[number:end]
        number = end
    return kept


def _letters(text: str) -> str:
    return NOT_LETTERS.sub("", text.casefold())


def _fold_runs(lines: list[str], log_lines: int, trace_lines: int) -> list[str]:
    """Fold each run of log or stack trace lines, including empty and indented lines within it."""
    folded: list[str] = []
    run: list[str] = []
    for line in lines:
        if LOG.match(line) or TRACE.match(line) or (run and WITHIN_RUN.match(line)):
            run.append(line)
            continue
        folded += fold(run, log_lines, trace_lines)
        folded.append(line)
        run = []
    return folded + fold(run, log_lines, trace_lines)


def fold(lines: list[str], limit: int, trace_lines: int) -> list[str]:
    """Return the head and tail of lines over `limit`, and stack traces between, with a line for each gap.

    Of traces, the first `trace_lines` lines are kept: each frame with the two lines after it.
    """
    if len(lines) <= limit:
        return lines
    head = (limit + 1) // 2
    keep = set(range(head)) | set(range(len(lines) - (limit - head), len(lines)))
    left = trace_lines
    for number, line in enumerate(lines):
        if left > 0 and TRACE.match(line):
            frame = [n for n in range(number, min(number + 3, len(lines))) if n not in keep]
            keep.update(frame[:left])
            left -= len(frame)
    folded: list[str] = []
    gap = 0
    for number, line in enumerate([*lines, ""]):
        if number < len(lines) and number not in keep:
            gap += 1
            continue
        if gap:
            folded.append(f"[... {gap:,} line{'s' if gap > 1 else ''} left out ...]")
            gap = 0
        if number < len(lines):
            folded.append(line)
    return folded


def _shortened(line: str) -> str:
    if len(line) <= LINE_CHARACTERS:
        return line
    return f"{line[:LINE_CHARACTERS]} [... {len(line) - LINE_CHARACTERS:,} characters left out ...]"
