"""Expand a paper's own LaTeX macros, as far as they are simple, within limits."""

import re
import sys
from dataclasses import dataclass

CONTROL = re.compile(r"\\(?:([a-zA-Z@]+)|[\s\S])")
CHARACTER = re.compile(r"\ue000\d+\ue001|[^\s}]")  # or the placeholder of a verbatim text
ENDS_IN_WORD = re.compile(r"\\[a-zA-Z@]+$")
BRACE = re.compile(r"\\[\s\S]|[{}]")
SPACE = re.compile(r"[ \t]*(?:\n(?![ \t]*\n)[ \t]*)?")
NEW_COMMAND = re.compile(
    r"\*?\s*(?:\{\s*\\([a-zA-Z@]+)\s*\}|\\([a-zA-Z@]+)|\{?\\[^a-zA-Z]\}?)\s*+(?:\[\s*(\d)\s*\])?+\s*+"
    r"(?:\[([^\]]{0,200})\])?+\s*+"
)
NEW_ENVIRONMENT = re.compile(r"\*?\s*\{([\w*]+)\}\s*(?:\[\s*(\d)\s*\])?\s*(?:\[([^\]]{0,200})\])?\s*")
DEF = re.compile(r"\s*\\(?:([a-zA-Z@]+)|[^a-zA-Z@])\s*((?:#[1-9]\s*)*)([^{}\n]{0,200})")
# Possessive where a part is optional: the regex engine must not try every way to split white space.
LET = re.compile(r"\s*+\\([a-zA-Z@]+)\s*+=?+\s*+\\([a-zA-Z@]+)")
OPERATOR = re.compile(r"(\*?)\s*+\{?+\s*+\\([a-zA-Z@]+)\s*+\}?+\s*+")
THEOREM = re.compile(
    r"\*?\s*+\{([\w*-]{1,60})\}\s*+(?:\[[^\]]{0,60}\])?+\s*+\{([^{}]{0,200})\}\s*+(?:\[[^\]]{0,60}\])?+"
)
ENVIRONMENT = re.compile(r"\s*\{([\w*]+)\}")
NEW_IF = re.compile(r"\s*\\if([a-zA-Z@]+)")
BRANCH = re.compile(r"\\(if[a-zA-Z@]*|else|fi)(?![a-zA-Z@])")
TEX_IFS = frozenset(["if", "ifx", "ifnum", "ifdim", "ifcase", "ifcat", "ifodd", "ifmmode", "ifvmode", "ifhmode"]) | {
    *("ifdefined", "ifcsname", "iftrue", "iffalse", "ifeof", "ifvoid", "ifhbox", "ifvbox", "ifinner")
}
COMMANDS = ("newcommand", "renewcommand", "providecommand", "DeclareRobustCommand", "newrobustcmd")
ENVIRONMENTS = ("newenvironment", "renewenvironment")
DEFS = ("def", "gdef", "edef", "xdef")
DEFINERS = frozenset((*COMMANDS, *ENVIRONMENTS, *DEFS, "let", "DeclareMathOperator", "newtheorem", "newif"))
DEPTH = 60  # of macros within macros or their arguments


def after_space(text: str, position: int, end: int = sys.maxsize) -> int:
    """Return the position after white space, but for an empty line, which ends a paragraph."""
    match = SPACE.match(text, position, end)
    assert match is not None  # perhaps of nothing
    return match.end()


class LatexError(ValueError):
    """A paper that cannot be converted to text; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Macro:
    """Definition of a command with `arguments` arguments, the first optional if `default` is given."""

    arguments: int
    default: str | None
    body: str


def brace_pairs(text: str) -> dict[int, int]:
    """Return {opening brace: closing brace}, by position, for all matched braces."""
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for match in BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            pairs[opened.pop()] = match.start()
    return pairs


class Expander:
    r"""Expander that reads definitions in order, removes them, and expands their uses.

    `protected` commands keep their meaning even if a paper redefines them. A macro is not expanded within itself.
    `theorems` holds the titles of the environments that \newtheorem defined.
    """

    def __init__(self, protected: frozenset[str]) -> None:
        self.protected = protected
        self.theorems: dict[str, str] = {}
        self._macros: dict[str, Macro] = {}  # environments have the keys "begin name" and "end name"
        self._switches = {"true": True, "false": False}
        self._left = 0

    def define(self, package: str) -> None:
        """Read the commands defined by one of the paper's packages."""
        pairs = brace_pairs(package)
        for match in CONTROL.finditer(package):
            if match[1] in COMMANDS or match[1] == "DeclareMathOperator":
                self._define(match[1], package, match.end(), pairs)

    def expand(self, text: str) -> str:
        """Return the text without definitions, with macros expanded.

        Raises:
            LatexError: the macros would make the text grow beyond the limit.
        """
        self._left = 4 * len(text) + 500_000
        return self._expand(text, frozenset(), 0)

    def _expand(self, text: str, active: frozenset[str], depth: int) -> str:
        if "\\" not in text:
            return text
        if depth > DEPTH:
            raise LatexError(f"macros over {DEPTH} deep in one another")
        pairs = brace_pairs(text)
        out: list[str] = []
        position, closed = 0, True  # closed: every conditional so far had its \fi
        while match := CONTROL.search(text, position):
            out.append(text[position : match.start()])
            name, position = match[1], match.end()
            if name is None:
                out.append(match[0])
            elif name in DEFINERS:
                position = self._define(name, text, position, pairs)
            elif closed and name[:2] == "if" and name[2:] in self._switches:
                branch = self._branch(name[2:], text, position)
                closed = branch is not None
                if branch is not None:
                    start, end, position = branch
                    out.append(self._expand(text[start:end], active, depth + 1))
            elif (switch := _switch(name)) and switch[0] in self._switches:
                self._switches[switch[0]] = switch[1]
            else:
                made, position = self._use(match, text, pairs, active, depth)
                if ENDS_IN_WORD.search(made[-60:]) and text[position : position + 1].isalpha():
                    made += " "
                out.append(made)
        out.append(text[position:])
        return "".join(out)

    def _use(
        self, match: re.Match, text: str, pairs: dict[int, int], active: frozenset[str], depth: int
    ) -> tuple[str, int]:
        """Return a command's expansion, and the position after it."""
        name, position = match[1], match.end()
        if name in ("begin", "end") and (environment := ENVIRONMENT.match(text, position)):
            name, position = f"{name} {environment[1]}", environment.end()
        macro = self._macros.get(name)
        if macro is None or name in active:
            return match[0], match.end()
        taken = _arguments(macro, text, position, pairs)
        if taken is None:
            return match[0], match.end()
        arguments, position = taken
        arguments = [self._expand(argument, active, depth + 1) for argument in arguments]
        self._left -= sum(map(len, arguments)) * max(1, macro.body.count("#")) + len(macro.body) + 1
        if self._left < 0:
            raise LatexError("its macros expand without bound")
        return self._expand(_filled(macro.body, arguments), active | {name}, depth + 1), position

    def _define(self, name: str, text: str, position: int, pairs: dict[int, int]) -> int:
        """Read a definition; return the position after it."""
        if name in COMMANDS and (head := NEW_COMMAND.match(text, position)):
            return self._body(head[1] or head[2], head[3], head[4], text, head.end(), pairs)
        if name in ENVIRONMENTS and (head := NEW_ENVIRONMENT.match(text, position)):
            after = self._body(f"begin {head[1]}", head[2], head[3], text, head.end(), pairs)
            return self._body(f"end {head[1]}", None, None, text, after_space(text, after), pairs)
        if name in DEFS and (head := DEF.match(text, position)):
            # Macros with delimited arguments are not simple: they are dropped.
            named = head[1] if not head[3].strip() else None
            return self._body(named, str(head[2].count("#")), None, text, head.end(), pairs)
        if name == "let" and (head := LET.match(text, position)):
            self._set(head[1], self._macros.get(head[2], Macro(0, None, f"\\{head[2]}")))
            return head.end()
        if name == "DeclareMathOperator" and (head := OPERATOR.match(text, position)):
            end = pairs.get(head.end())
            if end is not None:
                self._set(head[2], Macro(0, None, f"\\operatorname{head[1]}{{{text[head.end() + 1 : end]}}}"))
                return end + 1
        if name == "newtheorem" and (head := THEOREM.match(text, position)):
            self.theorems[head[1]] = head[2].strip()
            return head.end()
        if name == "newif" and (head := NEW_IF.match(text, position)):
            self._switches[head[1]] = False
            return head.end()
        return position

    def _body(
        self, name: str | None, count: str | None, default: str | None, text: str, position: int, pairs: dict[int, int]
    ) -> int:
        end = pairs.get(position)
        if end is None:
            return position
        if name is not None:
            self._set(name, Macro(int(count or 0), default, text[position + 1 : end]))
        return end + 1

    def _set(self, name: str, macro: Macro) -> None:
        if name not in self.protected and name.removeprefix("begin ").removeprefix("end ") not in self.protected:
            self._macros[name] = macro

    def _branch(self, switch: str, text: str, position: int) -> tuple[int, int, int] | None:
        """Return the selected part of a conditional and the position after its end; None if it has no end."""
        depth = 0
        otherwise: re.Match[str] | None = None
        for match in BRANCH.finditer(text, position):
            if match[1] == "fi":
                if depth == 0:
                    first = (position, match.start() if otherwise is None else otherwise.start())
                    second = (match.start() if otherwise is None else otherwise.end(), match.start())
                    return *(first if self._switches[switch] else second), match.end()
                depth -= 1
            elif match[1] == "else":
                otherwise = match if depth == 0 and otherwise is None else otherwise
            elif match[1] in TEX_IFS or match[1][2:] in self._switches:
                depth += 1
        return None


def _switch(name: str) -> tuple[str, bool] | None:
    for ending, value in (("true", True), ("false", False)):
        if name.endswith(ending) and name != ending:
            return name.removesuffix(ending), value
    return None


def _arguments(macro: Macro, text: str, position: int, pairs: dict[int, int]) -> tuple[list[str], int] | None:
    """Return the arguments that follow and the position after them; None if one is missing."""
    arguments: list[str] = []
    if macro.arguments == 0:
        return arguments, after_space(text, position)
    if macro.default is not None:
        start = after_space(text, position)
        end = text.find("]", start, start + 1000) if text[start : start + 1] == "[" else -1
        arguments.append(text[start + 1 : end] if end > 0 else macro.default)
        position = end + 1 if end > 0 else position
    while len(arguments) < macro.arguments:
        start = after_space(text, position)
        if text[start : start + 1] == "{":
            closing = pairs.get(start)
            if closing is None:
                return None
            arguments.append(text[start + 1 : closing])
            position = closing + 1
        elif match := CONTROL.match(text, start) or CHARACTER.match(text, start):
            arguments.append(match[0])
            position = match.end()
        else:
            return None
    return arguments, position


def _filled(body: str, arguments: list[str]) -> str:
    r"""Return a macro's body with its arguments inserted; a space separates `\bf#1` from a letter."""
    pieces = re.split(r"#([1-9])", body)
    out = [pieces[0]]
    for number, rest in zip(pieces[1::2], pieces[2::2], strict=True):
        argument = arguments[int(number) - 1] if int(number) <= len(arguments) else ""
        apart = " " if argument[:1].isalpha() and ENDS_IN_WORD.search(out[-1][-60:]) else ""
        out += [apart + argument, rest]
    return "".join(out)
