"""Runs and evaluations below the folders that a user names."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.settings import SettingError
from evaluation.compare.measured import has_results
from lit_modules.launching.run_folder import CONFIG, SUMMARY

TRACES = ("metrics.csv", SUMMARY, "starts.jsonl", "checkpoints", "tokenizer")
"""What a run leaves beside its configuration: a folder of settings alone, such as conf/, is no run."""

FIX = "give the folder of a run, of a sweep, or of several runs, such as runs/demo"


def find_runs(given: Sequence[str]) -> list[Path]:
    """Return the folders of runs and of evaluations in or below the given ones, each once, in their order.

    Raises:
        SettingError: a given folder does not exist, or there is neither a run nor an evaluation in it.
    """
    found: dict[Path, Path] = {}
    for name in given:
        folder = Path(name)
        if not folder.is_dir():
            raise SettingError("runs", name, FIX, "is a file" if folder.exists() else "does not exist")
        try:
            here = list(runs_below(folder, set()))
        except OSError as error:
            problem = f"cannot be read ({error.filename}: {error.strerror})"
            raise SettingError("runs", name, FIX, problem) from error
        if not here:
            problem = "holds no run and no evaluation" if any(folder.iterdir()) else "is empty"
            raise SettingError("runs", name, FIX, problem)
        for each in here:
            found.setdefault(each.resolve(), each)
    return list(found.values())


def runs_below(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the folder if it is a run or an evaluation, else those below it; a sweep's run 10 comes after its run 9.

    Args:
        seen: folders that were looked into: links may lead back to them.
    """
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    if is_run(folder) or has_results(folder):
        yield folder
        return
    inside = [each for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")]
    for each in sorted(inside, key=by_number):
        yield from runs_below(each, seen)


def is_run(folder: Path) -> bool:
    """Return whether a training has run in the folder."""
    return (folder / CONFIG).is_file() and any((folder / name).exists() for name in TRACES)


def by_number(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts names by the numbers in them."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]
