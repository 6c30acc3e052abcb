"""Includes of Markdown pages from their repository, in the syntaxes of docfx, mkdocs and Liquid."""

import re
from pathlib import Path

import yaml

from data_pipeline.documents import Unreadable

FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\n(.*?)(?:\n|\A)\1[ \t]*(?:\n|\Z)", re.DOTALL)
FRONT_MATTER_CHARACTERS = 64 * 1024
DOCFX = re.compile(r"\[!INCLUDE\s*\[[^\]\n]{0,200}\]\s*\(([^)\s]{1,400})(?:\s+\"[^\"\n]{0,200}\")?\)\]", re.IGNORECASE)
SNIPPET = re.compile(r"^([ \t]*)-{1,}8<-{1,}[ \t]+[\"']([^\"'\n]{1,400})[\"'][ \t]*$", re.MULTILINE)
LIQUID = re.compile(
    r"\{%-?\s*(?:data|indented_data_reference)\s+(variables|reusables)\.([\w.-]{1,200})[^%\n]{0,100}%\}"
)
HUGO = re.compile(r"\{\{[<%]\s*include\s+(?:file\s*=\s*)?\"([^\"\n]{1,400})\"[^\n]{0,100}?[>%]\}\}")
BRACKETS = 2000  # in front matter: PyYAML's time grows with the square of the nesting depth
DEPTH = 10
INCLUDES = 1000  # per page, nested ones included


class Repository:
    """Files of one repository, for the includes of its pages."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root, self.max_bytes = root.resolve(), max_bytes
        self._variables: dict[str, dict] = {}  # file -> its mapping; these files are few and small

    def find(self, target: str, page: Path) -> Path | None:
        """Return the file that an include on `page` names, or None if it is missing or outside the repository."""
        target = target.partition("#")[0].partition("?")[0].partition(":")[0]  # mkdocs: "file.md:section"
        near = [self.root / target.lstrip("~/")] if target[:1] in ("~", "/") else [page.parent / target]
        for candidate in (*near, self.root / target.lstrip("~/"), self.root / "docs" / target.lstrip("~/")):
            try:
                resolved = candidate.resolve()
            except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL in the name
                continue
            if resolved.is_relative_to(self.root) and resolved.is_file():
                return resolved
        return None

    def text(self, path: Path) -> str:
        r"""Return a file's text with \n line ends; raise Unreadable if it is not text, or over max_bytes."""
        with path.open("rb") as file:
            content = file.read(self.max_bytes + 1)
        if len(content) > self.max_bytes:
            raise Unreadable("file too large", f"over {self.max_bytes} bytes")
        if b"\0" in content:
            raise Unreadable("NUL byte", f"byte {content.index(0)}")
        try:
            return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            raise Unreadable("not UTF-8", f"byte {error.start}") from error

    def variable(self, name: str) -> str | None:
        """Return the value of `file.key.key` in data/variables, or None."""
        file, *keys = name.split(".")
        if file not in self._variables:
            path = self.find(f"~/data/variables/{file}.yml", self.root)
            try:
                self._variables[file] = front_matter(self.text(path)) if path is not None else {}
            except Unreadable:
                self._variables[file] = {}
        value: object = self._variables[file]
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value.strip() if isinstance(value, str) else None


class Includes:
    """Resolver of the includes of one page."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.missing = self._count = self._bytes = 0

    def resolve(self, text: str, page: Path) -> str:
        """Return `text` with its includes inserted; missing ones are dropped, and counted in `missing`.

        Raises:
            Unreadable: includes are circular, too many, or too long together.
        """
        return self._resolve(text, page, (page.resolve(),))

    def _resolve(self, text: str, page: Path, above: tuple[Path, ...]) -> str:
        def file(target: str, indent: str = "") -> str:
            path = self.repository.find(target, page)
            if path is None:
                self.missing += 1
                return ""
            return self._file(path, above).replace("\n", f"\n{indent}") if indent else self._file(path, above)

        def data(match: re.Match) -> str:
            kind, name = match.groups()
            if kind == "reusables":
                return file(f"~/data/reusables/{name.replace('.', '/')}.md").strip()
            value = self.repository.variable(name)
            if value is None:
                self.missing += 1
                return ""
            self._add(len(value))
            return self._resolve(value, page, (*above, Path(name))) if "{%" in value and len(above) < DEPTH else value

        text = DOCFX.sub(lambda match: file(match[1]), text)
        text = HUGO.sub(lambda match: file(match[1]), text)
        text = SNIPPET.sub(lambda match: match[1] + file(match[2], match[1]), text)
        return LIQUID.sub(data, text)

    def _file(self, path: Path, above: tuple[Path, ...]) -> str:
        if path in above:
            raise Unreadable("includes in a circle", f"{path.name} includes itself")
        if len(above) > DEPTH:
            raise Unreadable("includes without end", f"over {DEPTH} deep")
        text = FRONT_MATTER.sub("", self.repository.text(path), count=1)
        self._add(len(text))
        return self._resolve(text, path, (*above, path)).strip("\n")

    def _add(self, length: int) -> None:
        self._count += 1
        self._bytes += length
        if self._count > INCLUDES:
            raise Unreadable("includes without end", f"over {INCLUDES} of them")
        if self._bytes > self.repository.max_bytes:
            raise Unreadable("includes without end", f"over {self.repository.max_bytes} bytes")


def front_matter(text: str) -> dict:
    """Return a page's front matter, every value a string, list or mapping of strings.

    PyYAML's BaseLoader knows no types and no merging of mappings, and resolves aliases to references, so nothing grows.
    It is pure Python, so endless nesting is an exception and not a crash.

    Raises:
        Unreadable: the front matter is broken or too large.
    """
    if len(text) > FRONT_MATTER_CHARACTERS:
        raise Unreadable("broken front matter", f"over {FRONT_MATTER_CHARACTERS} characters")
    if text.count("[") + text.count("{") > BRACKETS:
        raise Unreadable("broken front matter", f"over {BRACKETS} brackets")
    try:
        found = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = getattr(error, "problem", None) or type(error).__name__
        raise Unreadable("broken front matter", str(reason)[:200]) from error
    return found if isinstance(found, dict) else {}
