"""Input files named by a source's setting."""

import glob
from collections.abc import Iterable
from pathlib import Path


def as_list(paths: str | Path | Iterable[str]) -> list[str]:
    """Return a path, or a list of paths (Hydra has its own list type), as a list of strings."""
    return [str(paths)] if isinstance(paths, str | Path) else [str(path) for path in paths]


def find_files(key: str, paths: list[str], endings: tuple[str, ...]) -> list[Path]:
    """Return the files with one of the endings that paths name: files, folders (recursive) and globs, sorted.

    Raises:
        ValueError: a path has no such file; the line names `key`.
    """
    found: set[Path] = set()
    for path in paths:
        expanded = Path(path).expanduser()
        names = expanded.rglob("*") if expanded.is_dir() else map(Path, glob.iglob(str(expanded), recursive=True))
        matched = [name for name in names if name.name.lower().endswith(endings) and name.is_file()]
        if not matched:
            state = f"no file that ends in {' '.join(endings)}" if expanded.exists() else "no such file"
            raise ValueError(f"{key}={path}: {state}; give files, folders or globs of them")
        found.update(matched)
    return sorted(found)
