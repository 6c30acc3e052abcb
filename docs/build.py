"""Collect what the site is made of in build/docs/: `make docs` calls it before the site generator.

The pages link to each other as they do in the repository, so they keep their places: README.md at the top, docs/ and
benchmarks/ below it. docs/configuration.md gets every group of conf/ appended, with the files as they are: their keys,
values and comments cannot differ from what a run composes.
"""

import re
import shutil
import subprocess
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build/docs"
LINK = re.compile(r"\]\(([^)#:\s]+)[)#]")  # of a page or a file: neither an address nor a place in the same page


def main() -> None:
    """Write build/docs/, in place of an earlier one."""
    shutil.rmtree(SITE, ignore_errors=True)
    for page in tracked("*.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for path in [ROOT / page, *((ROOT / page).parent / link for link in LINK.findall(text))]:
            place = SITE / path.resolve().relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    with (SITE / "docs/configuration.md").open("a", encoding="utf-8") as page:
        page.write(every_group())


def tracked(pattern: str) -> list[Path]:
    """The files of the repository that match a pattern, also new ones that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [Path(line) for line in sorted(set(lines)) if (ROOT / line).is_file()]


def every_group() -> str:
    """The YAML files of conf/ as Markdown, a section for each group."""
    files = [path.relative_to("conf") for path in tracked("conf/*.yaml")]
    sections = ["\n## Every group and key\n"]
    files.sort(key=lambda path: (path.parent.as_posix(), path.name))
    for group, members in groupby(files, lambda path: path.parent):
        sections.append(f"### `{group.as_posix()}`\n" if group.name else "### The defaults\n")
        sections += [section(path) for path in members]
    return "\n".join(sections)


def section(path: Path) -> str:
    """One file: how it is chosen, and what it says."""
    group = path.parent.as_posix()
    if path.stem.startswith("_"):
        title = f"`conf/{path.as_posix()}`, a part that other files include"
    else:
        title = f"`{group}={path.stem}`" if path.parent.name else f"`conf/{path.name}`"
    text = (ROOT / "conf" / path).read_text(encoding="utf-8").strip()
    return f"**{title}**\n\n```yaml\n{text}\n```\n"


if __name__ == "__main__":
    main()
