import bz2
import gzip
import json
import lzma
import os
import time

import pytest

from data_pipeline.documents import Problems
from data_pipeline.sources import commands
from data_pipeline.sources.commands import Commands
from data_pipeline.sources.manual_pages import read_manual_page

PROSE = (
    "This sentence is long enough to be kept as a document by itself, for it has over one hundred characters in all."
)
PAGE = f".TH TOOL 1 2024-02-03\n.SH NAME\ntool \\- a tool\n.SH DESCRIPTION\n.B tool\n{PROSE}\n"


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(strict=False, man_pages=None, **settings):
    problems = Problems(strict)
    source = Commands(man_pages=str(man_pages) if man_pages else None, **settings)
    return {d.id.removeprefix("commands:"): d for d in source.documents(problems, 1)}, problems


def test_pages_of_the_sections_are_read_once_and_in_english(tmp_path):
    write(tmp_path, "man1/tool.1.gz", gzip.compress(PAGE.encode()))
    write(tmp_path, "man1/same-tool.1.bz2", bz2.compress(PAGE.encode()))
    write(tmp_path, "man1/alias.1", '.\\" a comment\n.so man1/tool.1\n')
    write(tmp_path, "man8/daemon.8.xz", lzma.compress(PAGE.replace("tool", "daemon").encode()))
    write(tmp_path, "man4/device.4", PAGE.replace("tool", "device"))
    write(tmp_path, "fr/man1/tool.1", PAGE.replace("tool", "outil"))
    write(tmp_path, "man5/empty.5", ".TH EMPTY 5\n")
    (tmp_path / "man1" / "link.1.gz").symlink_to(tmp_path / "man1" / "tool.1.gz")
    found, problems = read(man_pages=tmp_path)
    assert not problems.counts
    assert set(found) == {"man1/same-tool.1", "man8/daemon.8"}
    assert found["man8/daemon.8"].metadata == {
        "source": "commands",
        "category": "commands",
        "origin": str(tmp_path / "man8/daemon.8.xz"),
        "date": "2024-02-03",
    }
    assert set(read(man_pages=tmp_path, sections=[4])[0]) == {"man4/device.4"}


def test_a_page_becomes_markdown():
    page = r""".\" SPDX-License-Identifier: GPL-2.0-or-later OR MIT
.TH MY\-TOOL 1 2024-02-03
.SH NAME
my\-tool \- does it
.SH SYNOPSIS
.nf
.B #include <x.h>
.PP
.BI "int f(int " a );
.fi
.SH OPTIONS
.TP
\fB\-a\fR, \fB\-\-all\fR
Everything, even
.B hidden_files
ones.
.TP
.B \-b
.TQ
.BI \-\-block= SIZE
Of `that' size.
.IP "\-c num" 4
Count.
.IP \(bu 2
A bullet.
.SH EMPTY
.SH
EXAMPLES
Run
.EX
my\-tool \-a |
    grep x

my\-tool
.EE
.SS More
End.
"""
    found = read_manual_page(page, "my-tool")
    assert (found.date, found.licence) == ("2024-02-03", "GPL-2.0-or-later OR MIT")
    assert found.markdown == (
        "# my-tool(1)\n\n## NAME\n\nmy-tool - does it\n\n## SYNOPSIS\n\n"
        "```\n#include <x.h>\n\nint f(int a);\n```\n\n## OPTIONS\n\n"
        "- `-a, --all`: Everything, even hidden_files ones.\n- `-b, --block=SIZE`: Of `that' size.\n"
        "- `-c num`: Count.\n- A bullet.\n\n"
        "## EXAMPLES\n\nRun\n\n```\nmy-tool -a |\n    grep x\n\nmy-tool\n```\n\n### More\n\nEnd."
    )


def test_mdoc_pages_become_markdown():
    page = (
        ".Dd March 4, 2021\n.Dt CAT 1\n.Sh NAME\n.Nm cat\n.Nd print files\n.Sh OPTIONS\n.Bl\n.It Fl n\nNumber.\n.El\n"
    )
    found = read_manual_page(page, "cat")
    assert found.date == "2021-03-04"
    assert found.markdown == "# cat(1)\n\n## NAME\n\ncat - print files\n\n## OPTIONS\n\n- `-n`: Number."


def test_characters_that_carry_marks_are_taken_out_of_pages():
    found = read_manual_page(".TH X 1\n.SH NAME\n\x11a \x13 b\x15 c\x00\n", "x").markdown
    assert found == "# x(1)\n\n## NAME\n\na  b c"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("man1/cut.1.gz", gzip.compress(PAGE.encode())[:-9], "corrupt file"),
        ("man1/noise.1.gz", b"this is no gzip file", "corrupt file"),
        ("man1/cut.1.xz", lzma.compress(PAGE.encode())[:-9], "corrupt file"),
        ("man1/bomb.1.gz", gzip.compress(bytes(60_000_000)), "page too large (over 4194304 bytes)"),
        ("man1/nul.1", PAGE.encode() + b"\0", "NUL byte"),
        ("man1/latin.1", PAGE.encode() + b"caf\xe9", "undecodable text"),
    ],
)
def test_what_cannot_be_read_is_named_once_and_stepped_over(tmp_path, name, content, words):
    write(tmp_path, name, content)
    write(tmp_path, "man1/tool.1", PAGE)
    found, problems = read(man_pages=tmp_path)
    assert set(found) == {"man1/tool.1"}
    assert problems.counts.total() == 1
    assert f"{tmp_path / name}: {words}" in problems.lines[0]
    with pytest.raises(ValueError, match="strict=false"):
        read(strict=True, man_pages=tmp_path)


def test_a_page_that_names_its_encoding_is_read_in_it(tmp_path):
    write(tmp_path, "man1/latin.1", b"'\\\" -*- coding: latin-1 -*-\n" + PAGE.encode() + b"caf\xe9")
    assert read(man_pages=tmp_path)[0]["man1/latin.1"].text.endswith("café")


def test_help_texts_are_read_with_their_command(tmp_path):
    write(tmp_path, "deep/tool.txt", f"tool sub --help\nUsage: tool sub\n   -a  all  \n```\n{PROSE}\n")
    write(tmp_path, "empty.txt", "tool --help\n\n")
    found, problems = read(help_texts=str(tmp_path))
    assert not problems.counts
    assert found["help/deep/tool.txt"].text == (
        f"# `tool sub --help`\n\n````\nUsage: tool sub\n   -a  all\n```\n{PROSE}\n````"
    )
    assert len(found) == 1


@pytest.fixture
def program(tmp_path):
    """Return a function that writes a shell script and returns its path."""

    def make(name, script):
        path = write(tmp_path, name, f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_a_program_is_run_with_help_alone_away_from_home(program, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    script = f'echo "$# $1 $HOME $(pwd) {PROSE}"; env >&2; cat; touch here; ls "$HOME"; exit 1'
    found, problems = read(run_help=[program("tool; touch x", script)])
    ((text),) = [document.text for document in found.values()]
    assert not problems.counts
    arguments, option, home, folder = text.split("\n")[3].split(" ")[:4]
    assert (arguments, option, home) == ("1", "--help", folder)
    assert home != os.path.expanduser("~")
    assert not os.path.exists(home)
    assert "hunter2" not in text
    assert text.endswith("here\n```")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("sleep 60", "no end"),
        ("sleep 60 & echo x", "no end"),
        ("yes", "no end"),
        ("exec >&- 2>&-; sleep 60", "no end"),
        ("echo wrong option >&2; exit 2", "no help text (exit status 2)"),
    ],
)
def test_a_program_without_end_is_named_and_ended(program, monkeypatch, script, words):
    monkeypatch.setattr(commands, "HELP_SECONDS", 1)
    name = program("tool", script)
    start = time.monotonic()
    found, problems = read(run_help=[name])
    assert time.monotonic() - start < 8
    assert not found
    assert f"{name} --help: {words}" in problems.lines[0]


def test_a_program_that_prints_without_end_is_ended_before_its_time(program, monkeypatch):
    monkeypatch.setattr(commands, "HELP_SECONDS", 60)
    start = time.monotonic()
    assert "no end" in read(run_help=[program("tool", "yes")])[1].lines[0]
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"man_pages": "/nowhere/man"}, r"^man_pages=/nowhere/man is not a folder"),
        ({"man_pages": None, "help_texts": "/nowhere"}, r"^help_texts=/nowhere is not a folder"),
        ({"man_pages": None, "sections": [1, 12]}, r"^sections=\[1, 12\]: give numbers"),
        ({"man_pages": None, "run_help": ["no-such-program-here"]}, r"^run_help=no-such-program-here is not"),
        ({"man_pages": None}, r"^man_pages=null and .*no page"),
    ],
)
def test_wrong_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words) as error:
        list(Commands(**settings).documents(Problems(), 1))
    assert "\n" not in str(error.value)


def test_parts_are_groups_of_pages_and_together_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "PART_BYTES", 1000)
    for number in range(30):
        write(tmp_path, f"man1/{number:02d}.1", PAGE + f"{number}\n")
    source, scratch = Commands(man_pages=str(tmp_path)), tmp_path / "scratch"
    scratch.mkdir()
    source.prepare(scratch, Problems())
    parts = source.parts(scratch)
    assert len(parts) == 5
    alone = [d.id for part in reversed(parts) for d in source.read(part, scratch, Problems())]
    assert sorted(alone) == [f"commands:man1/{n:02d}.1" for n in range(30)]


def test_identity_changes_with_a_page_and_a_setting(tmp_path):
    path = write(tmp_path, "man1/tool.1", PAGE)
    before = Commands(man_pages=str(tmp_path)).identity()
    assert Commands(man_pages=str(tmp_path)).identity() == before
    json.dumps(before)
    assert Commands(man_pages=str(tmp_path), sections=[1]).identity() != before
    path.write_text(PAGE + "more\n")
    assert Commands(man_pages=str(tmp_path)).identity() != before
