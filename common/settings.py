"""What checks of settings share."""

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any


def check_whole(key: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise ValueError, naming the key, unless the value is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"from {least} to {most}"
        raise ValueError(f"{key}={shown(value)}: give a whole number, {limits}")


def check_share(key: str, value: Any) -> None:
    """Raise ValueError, naming the key, unless the value is a number above 0 and up to 1."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{key}={shown(value)}: give a number above 0 and up to 1")


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def shown(value: Any) -> str:
    """The value as a user writes it: null, true, [1, 2]."""
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def check_keys(place: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ValueError, naming the nearest one, for the first key of `place` that is not known."""
    for key in given:
        if key not in known:
            raise ValueError(f"{place}.{key} is not known: {instead(str(key), known, f'{place}.')}")


def instead(name: str, known: Sequence[str], prefix: str = "") -> str:
    """What to give instead of a name that is not known: the nearest one, or the names that there are."""
    near = nearest(name, known)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"give one of {', '.join(known)}"


def nearest(name: str, known: Iterable[str], number: int = 1, cutoff: float = 0.6) -> list[str]:
    """Of the known names those most like this one, if any is; `cutoff`: from 0, unlike, to 1, the same."""
    return difflib.get_close_matches(name, list(known), number, cutoff)


def differences(before: Any, after: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """The dotted keys at which two plain configurations differ, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in [*before, *(k for k in after if k not in before)]:
            found |= differences(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else str(key))
        return found
    return {} if before == after or (_is_null(before) and _is_null(after)) else {prefix: (before, after)}


def _is_null(value: Any) -> bool:
    """Whether it is null, or a mapping whose keys all are."""
    return value is None or (isinstance(value, dict) and all(each is None for each in value.values()))
