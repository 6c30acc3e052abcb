"""Damage to files on disk."""

import os
from pathlib import Path


def damaged(path: Path, how: str) -> None:
    """Delete, cut, or change one byte of a file."""
    if how == "deleted":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
