"""Run, within a minute or so, the tests nearest to what changed: a program, `make quick`.

Changed is what differs from main, or on main from the commit before, committed or not. Nearest are the test files that
changed, then those that import what changed, then those that import that. Where nothing changed, or what is no Python,
the files marked `core` run. Tests marked `long` are left to `make test`, and so is what the time does not suffice for:
it is counted as skipped.
"""

import ast
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

SECONDS = 35  # of tests; to import what they use takes ten more
CORE = "pytestmark = pytest.mark.core"  # in a test file
FILES = 25  # at most


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout


def changed_files() -> list[str]:
    """What changed since the branch left main, or on main in the last commit, and what git neither has nor ignores."""
    head = git("rev-parse", "HEAD").strip()
    bases = (git("merge-base", name, "HEAD").strip() for name in ("main", "origin/main", "HEAD~"))
    base = next((found for found in bases if found not in ("", head)), head)
    names = git("diff", "--name-only", "--diff-filter=d", base) + git("ls-files", "--others", "--exclude-standard")
    return sorted(set(names.splitlines()))


def imported(path: Path) -> Iterator[str]:
    """Names of modules that a file may import; `from a import b` may mean a or a.b."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def users(files: list[str]) -> dict[str, set[str]]:
    """By file those that import it; a conftest.py is imported by all files below its folder."""
    by_module = {file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in files}
    found: dict[str, set[str]] = {file: set() for file in files}
    for file in files:
        for name in imported(Path(file)):
            if name in by_module:
                found[by_module[name]].add(file)
        for folder in Path(file).parents:
            if (conftest := f"{folder}/conftest.py") in found and conftest != file:
                found[conftest].add(file)
    return found


def nearest_tests(changed: list[str], importers: dict[str, set[str]]) -> list[str]:
    """The test files that reach a changed file by imports, by the number of steps. A file that nothing imports, such as
    a program of a test's, stands for the test files of its folder."""
    tests = []
    seen, waiting = set(changed), deque(changed)
    while waiting:
        file = waiting.popleft()
        if Path(file).name.startswith("test_"):
            tests.append(file)
            continue
        next_to_it = {other for other in importers if Path(other).parent == Path(file).parent}
        after = sorted((importers[file] or next_to_it) - seen)
        seen.update(after)
        waiting.extend(after)
    return tests


def main() -> None:
    changed = [name for name in changed_files() if not name.endswith(".md")]
    python = [name for name in changed if name.endswith(".py")]
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").splitlines()
    files = [file for file in listed if Path(file).is_file()]
    tests = nearest_tests(python, users(files)) if python else []
    options = [
        f"--seconds={SECONDS}",
        "--numprocesses=2",
        "--dist=load",
        "--maxschedchunk=4",
        "--durations=0",
        "--durations-min=5",
    ]
    if not tests or len(python) < len(changed):
        tests += [file for file in files if Path(file).name.startswith("test_") and CORE in Path(file).read_text()]
    print(f"make quick: {len(changed)} files changed, {len(tests)} test files", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *options, "-m", "not long", *dict.fromkeys(tests[:FILES])]
    sys.exit(subprocess.call(command, env=environment))


if __name__ == "__main__":
    main()
