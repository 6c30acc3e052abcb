"""README.md, CONTRIBUTING.md and docs/: links, files, functions, and the choices and keys of commands exist.

Keys are looked for by their last part in all of conf/: to compose each command would take seconds.
"""

import functools
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("benchmarks", "common", "conf", "data_pipeline", "docs", "evaluation", "kernels", "lit_modules", "tests")
LINK = re.compile(r"\]\(([^)#:\s]+)[)#]")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[^`\s:<]*|palimpsest\.py)(?:::(\w+))?`")
YOURS = ("conf/local/", "conf/experiment/mine.yaml")  # files that a user may have


def commands(page: Path) -> list[str]:
    """The `palimpsest` commands in a page's blocks of code, each on one line, without those that have a `...`."""
    lines = "\n".join(FENCE.findall(page.read_text(encoding="utf-8"))).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("palimpsest ") and "..." not in line.partition(" #")[0]]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "data_pipeline/README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_to_files(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_functions_exist(page: Path) -> None:
    missing = []
    for path, name in NAMED.findall(page.read_text(encoding="utf-8")):
        if path.startswith(YOURS):
            continue
        if not (ROOT / path).exists():
            missing.append(path)
        elif name and not re.search(
            rf"^(?:(?:def|class) {name}\b|{name} = )", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE
        ):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_folders_of_the_layout_exist() -> None:
    layout = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Layout")[2]
    folder, missing = ROOT, []
    for indent, name in re.findall(r"^( *)([\w.]+/?)  +\S", FENCE.search(layout)[0], re.MULTILINE):
        folder = folder if indent else ROOT / name
        path = folder / name if indent else ROOT / name
        missing += [] if path.exists() else [str(path)]
    assert missing == []


@functools.cache
def declared_keys() -> set[str]:
    """The last part of every key in conf/, also of lines that a comment shows."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "conf").rglob("*.yaml")]
    return {key for text in texts for key in re.findall(r"(?<![\w.])([a-z_]\w*):(?=\s|$)", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_choices_and_keys_of_commands_exist(page: Path) -> None:
    unknown = []
    for command in commands(page):
        for word in shlex.split(command, comments=True)[1:]:
            if word.startswith("-") or word == "job":  # --cfg job
                continue
            key, _, value = word.lstrip("+").partition("=")
            group = key.partition("@")[0]
            if (ROOT / "conf" / group).is_dir():
                chosen = value.strip("[]").split(",")
                unknown += [word for each in chosen if not (ROOT / "conf" / group / f"{each}.yaml").is_file()]
            elif key.rpartition(".")[2] not in declared_keys():
                unknown.append(word)
    assert unknown == []
