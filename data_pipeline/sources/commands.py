"""Command references: manual pages, and the help texts of programs."""

import bz2
import contextlib
import gzip
import hashlib
import itertools
import lzma
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.settings import SettingError
from data_pipeline.documents import Document, Problems, Unreadable
from data_pipeline.identity import SAMPLE, file_identity, settings_identity
from data_pipeline.markup.blocks import fence
from data_pipeline.sources.manual_pages import is_alias, read_manual_page
from data_pipeline.sources.parts import SourceInParts, groups, part_names, read_part, write_parts

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".lzma": lzma.open}
CODING = re.compile(rb"coding:\s*([\w.-]{1,30})")
PAGE_BYTES = 4 * 1024 * 1024
HELP_BYTES = 256 * 1024
HELP_SECONDS = 10
MINIMUM_CHARACTERS = 100
PART_BYTES = 8 * 1024 * 1024  # of pages as stored, mostly compressed
PARTS = "commands.jsonl"


@dataclass(frozen=True)
class Commands(SourceInParts):
    """Manual pages in English as Markdown, and help texts of programs.

    Pages that only include another one, and repeated texts, are dropped.

    Args:
        man_pages: a folder that contains man1, man2, ..., or None.
        sections: numbers of the sections to read, in this order.
        help_texts: a folder of .txt files, or None. The first line is a command (`tar --help`), the rest its output.
        run_help: programs to run with --help only, one after the other: without a shell, in an empty folder that is
            also their home, with standard input closed, limited to HELP_SECONDS and HELP_BYTES of output. They run
            with this user's rights: list only programs that you would run yourself.
    """

    man_pages: str | None = "/usr/share/man"
    sections: list[int] | None = None
    help_texts: str | None = None
    run_help: list[str] | None = None
    category: str = "commands"

    def __post_init__(self) -> None:
        sections = [1, 8, 2, 3, 5, 7] if self.sections is None else list(self.sections)
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "run_help", list(self.run_help or ()))
        for section in sections:
            if section not in range(1, 10):
                raise SettingError("sections", sections, "give numbers from 1 to 9")
        for key in ("man_pages", "help_texts"):
            folder = getattr(self, key)
            if folder is not None and not Path(folder).expanduser().is_dir():
                raise SettingError(key, folder, "give a folder, or null to leave these out", "is not a folder")

    def identity(self, by: str = SAMPLE) -> dict:
        """Return the settings, and the content of every page, help text and program."""
        paths = [path for _, path in self._files()] + list(self._programs().values())
        return {"commands": settings_identity(self, by), "files": file_identity(paths, by)}

    def prepare(self, scratch: Path, problems: Problems) -> None:
        """Read every page once to drop aliases and duplicates, and write the list of parts into `scratch`."""
        items = itertools.chain(self._pages(problems), ((["run", program], 0) for program in self._programs()))
        write_parts(scratch / PARTS, groups(items, PART_BYTES))

    def _pages(self, problems: Problems) -> Iterator[tuple[list[str], int]]:
        """Yield ([kind, path], bytes) of the pages that are not aliases, each text once."""
        seen: set[bytes] = set()
        for kind, path in self._files():
            text = _text(path, problems)
            if text is None or (kind == "man" and is_alias(text)):
                continue
            digest = hashlib.sha256(text.encode()).digest()[:16]
            if digest not in seen:
                seen.add(digest)
                yield [kind, str(path)], path.stat().st_size

    def parts(self, scratch: Path) -> list[str]:
        """Return the parts' names; raise ValueError, naming the keys, if there is nothing to read."""
        names = part_names(scratch / PARTS)
        if not names:
            problem = f"and help_texts={self.help_texts} have no page"
            raise SettingError("man_pages", self.man_pages, "give a folder with man1, man2, ... or .txt files", problem)
        return names

    def read(self, part: str, scratch: Path, problems: Problems) -> Iterator[Document]:
        """Yield a part's pages and help texts; programs without output are reported to `problems`."""
        for kind, name in read_part(scratch / PARTS, part):
            if kind == "man":
                document = self._page(Path(name), problems)
            elif kind == "help":
                assert self.help_texts is not None  # where the page is from
                command, _, output = (_text(Path(name), problems) or "").partition("\n")
                identity = Path(name).relative_to(Path(self.help_texts).expanduser())
                document = self._help(command, output, f"commands:help/{identity}", name)
            else:
                output = _run_help(self._programs()[name], problems)
                document = self._help(f"{name} --help", output, f"commands:run/{name}", f"{name} --help")
            if document is not None and len(document.text) >= MINIMUM_CHARACTERS:
                yield document

    def _page(self, path: Path, problems: Problems) -> Document | None:
        text = _text(path, problems)
        if text is None:
            return None
        assert self.man_pages is not None  # where the page is from
        inside = path.relative_to(Path(self.man_pages).expanduser())
        stem = path.name.removesuffix(path.suffix) if path.suffix in OPENERS else path.name
        page = read_manual_page(text, stem)
        about = {"category": self.category, "origin": str(path), "date": page.date, "licence": page.licence}
        metadata = {"source": "commands", **{key: value for key, value in about.items() if value}}
        return Document(page.markdown, f"commands:{inside.parent}/{stem}", metadata)

    def _help(self, command: str, output: str, identity: str, origin: str) -> Document | None:
        lines = [line.rstrip() for line in output.split("\n")]
        text = "\n".join(lines).strip("\n")
        if not command.strip() or not text:
            return None
        metadata = {"source": "commands", "category": self.category, "origin": origin}
        return Document(f"# `{command.strip()}`\n\n{fence(text)}", identity, metadata)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Yield ("man" or "help", path) in order, without links, which are other names of pages."""
        if self.man_pages is not None:
            for section in self.sections or ():
                for path in sorted(Path(self.man_pages).expanduser().glob(f"man{section}/*")):
                    if path.is_file() and not path.is_symlink():
                        yield "man", path
        if self.help_texts is not None:
            for path in sorted(Path(self.help_texts).expanduser().rglob("*.txt")):
                if path.is_file() and not path.is_symlink():
                    yield "help", path

    def _programs(self) -> dict[str, Path]:
        """Return the files of the programs in `run_help`; raise ValueError for a missing one."""
        found = {}
        for name in self.run_help or ():
            path = shutil.which(name)
            if path is None:
                raise SettingError("run_help", name, "install it, or take it off the list", "is not a program here")
            found[name] = Path(path)
        return found


def _text(path: Path, problems: Problems) -> str | None:
    """Return a file's decompressed text; report a broken or oversized file and return None."""
    try:
        return _readable_text(path)
    except Unreadable as error:
        problems.skip(str(path), error.kind, error.detail)
        return None


def _readable_text(path: Path) -> str:
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            content = file.read(PAGE_BYTES + 1)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise Unreadable("corrupt file", "its compression is broken or cut off") from error
    except OSError as error:
        raise Unreadable("unreadable file", str(error.strerror or error)) from error
    if len(content) > PAGE_BYTES:
        raise Unreadable("page too large", f"over {PAGE_BYTES} bytes")
    if b"\0" in content:
        raise Unreadable("NUL byte", f"byte {content.index(0)}")
    named = CODING.search(content[:200])
    try:
        return content.decode(named[1].decode() if named else "utf-8")
    except (UnicodeDecodeError, LookupError) as error:
        raise Unreadable("undecodable text", str(error)[:100]) from error


def _run_help(program: Path, problems: Problems) -> str:
    """Return what a program prints when run with --help; report a failure or no output and return ""."""
    with tempfile.TemporaryDirectory(prefix="palimpsest-help-") as home:
        try:
            process = subprocess.Popen(
                [program, "--help"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=home,
                env={"HOME": home, "PATH": os.defpath, "LC_ALL": "C.UTF-8"},
                start_new_session=True,  # so that its child processes can be killed with it
            )
        except OSError as error:
            problems.skip(f"{program} --help", "cannot be run", str(error.strerror or error))
            return ""
        output, ended = _bounded_output(process)
    if not ended:
        problems.skip(f"{program} --help", "no end", f"after {HELP_SECONDS} s or {HELP_BYTES} bytes")
        return ""
    text = output.decode("utf-8", "replace").replace("\0", "")
    if process.returncode != 0 and len(text) < MINIMUM_CHARACTERS:
        problems.skip(f"{program} --help", "no help text", f"exit status {process.returncode}")
        return ""
    return text


def _bounded_output(process: subprocess.Popen) -> tuple[bytes, bool]:
    """Return a process's output, and whether it finished within the limits; it is killed in any case."""
    pieces, length, end = [], 0, time.monotonic() + HELP_SECONDS
    finished = False
    assert process.stdout is not None  # a pipe
    with process.stdout as stream:
        while length <= HELP_BYTES and (left := end - time.monotonic()) > 0:
            if not select.select([stream], [], [], left)[0]:
                break
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                finished = True
                break
            pieces.append(piece)
            length += len(piece)
    if finished:
        try:
            process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            finished = False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return b"".join(pieces), finished
