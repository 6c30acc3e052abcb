"""Shared checks of settings."""

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any


def check_whole(key: str, value: Any, least: int, most: int | None = None) -> None:
    """Check that a value is a whole number from `least` to `most`.

    Raises:
        ValueError: if it is not; the line names the key.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"from {least} to {most}"
        raise ValueError(f"{key}={shown(value)}: give a whole number, {limits}")


def check_share(key: str, value: Any) -> None:
    """Check that a value is a number above 0 and up to 1.

    Raises:
        ValueError: if it is not; the line names the key.
    """
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{key}={shown(value)}: give a number above 0 and up to 1")


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def shown(value: Any) -> str:
    """Format a value as a user writes it: null, true, [1, 2]."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def check_keys(place: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Check that every given key of `place` is known.

    Raises:
        ValueError: for the first unknown key, with the nearest known one.
    """
    for key in given:
        if key not in known:
            raise ValueError(f"{place}.{key} is not known: {instead(str(key), known, f'{place}.')}")


def instead(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Suggest a replacement for an unknown name: the nearest known one, or the list of known names."""
    near = nearest(name, known)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"give one of {', '.join(known)}"


def nearest(name: str, known: Iterable[str], number: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names most similar to `name`; `cutoff` is a similarity from 0 to 1 (equal)."""
    return difflib.get_close_matches(name, list(known), number, cutoff)


def differences(before: Any, after: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys at which two plain configurations differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in [*before, *(k for k in after if k not in before)]:
            found |= differences(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else str(key))
        return found
    return {} if before == after or (_is_null(before) and _is_null(after)) else {prefix: (before, after)}


def _is_null(value: Any) -> bool:
    """Return whether a value is null, or a mapping of nulls only."""
    return value is None or (isinstance(value, dict) and all(each is None for each in value.values()))
