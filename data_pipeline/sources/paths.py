"""Input files named by a source's setting."""

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.settings import SettingError


def as_list(paths: str | Path | Iterable[str]) -> list[str]:
    """Return a path, or a list of paths (Hydra has its own list type), as a list of strings."""
    return [str(paths)] if isinstance(paths, str | Path) else [str(path) for path in paths]


def plain(paths: str | Path | Iterable[str]) -> str | list[str]:
    """Return a path as a string, and a list of paths as a list of strings, for settings that keep the difference."""
    return str(paths) if isinstance(paths, str | Path) else as_list(paths)


def named_files(path: str) -> Iterator[Path]:
    """Yield the files that a path names: those of a folder (recursive), or those that match a glob."""
    expanded = Path(path).expanduser()
    names = expanded.rglob("*") if expanded.is_dir() else map(Path, glob.iglob(str(expanded), recursive=True))
    return (name for name in names if name.is_file())


def find_files(key: str, paths: list[str], endings: tuple[str, ...]) -> list[Path]:
    """Return the files with one of the endings that paths name: files, folders (recursive) and globs, sorted.

    Raises:
        SettingError: a path has no such file.
    """
    found: set[Path] = set()
    for path in paths:
        matched = [name for name in named_files(path) if name.name.lower().endswith(endings)]
        if not matched:
            exists = Path(path).expanduser().exists()
            problem = f"has no file that ends in {' '.join(endings)}" if exists else "does not exist"
            raise SettingError(key, path, "give files, folders or globs of them", problem)
        found.update(matched)
    return sorted(found)
