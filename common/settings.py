"""Settings that users give: the error about one, shared checks, configurations flattened and compared."""

import contextlib
import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

NO_VALUE: Any = ...  # for an error that is not about a key's value; equal to itself after pickling


class SettingError(ValueError):
    """A user's mistake in a setting; its text is `key=value problem: fix`.

    Attributes:
        key: the dotted key. A class that does not know where it is configured gives its argument's name; see `under`.
        value: the value found, or NO_VALUE.
        fix: what to give instead, as an instruction: "give a number above 0".
        problem: what is wrong, where the fix does not say it: "is longer than the run".
    """

    def __init__(self, key: str, value: Any, fix: str, problem: str = "") -> None:
        super().__init__(key, value, fix, problem)  # pickling calls the class with these
        self.key, self.value, self.fix, self.problem = key, value, fix, problem

    def __str__(self) -> str:
        value = "" if self.value is NO_VALUE else f"={shown(self.value)}"
        return f"{self.key}{value}{self.problem and f' {self.problem}'}: {self.fix}"

    def __repr__(self) -> str:
        return f"SettingError({str(self)!r})"  # Hydra shows an error by its repr

    def under(self, place: str) -> "SettingError":
        """Put `place`, such as `data.source`, before a key that is an argument's name alone; return this error."""
        if "." not in self.key:
            self.key = f"{place}.{self.key}"
        return self


@contextlib.contextmanager
def under(place: str) -> Iterator[None]:
    """Put the key of a SettingError that is raised inside under `place`."""
    try:
        yield
    except SettingError as error:
        error.under(place)
        raise


def check_whole(key: str, value: Any, least: int, most: int | None = None, *, null: bool = False) -> None:
    """Check that a value is a whole number from `least` to `most`; with `null`, null is allowed too.

    Raises:
        SettingError: it is not.
    """
    if null and value is None:
        return
    if not is_whole(value) or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"from {least} to {most}"
        raise SettingError(key, value, f"give a whole number, {limits}{', or null' if null else ''}")


def check_number(
    key: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    null: bool = False,
) -> None:
    """Check that a value is a finite number within limits; `least` and `most` are allowed, `above` and `below` are not.

    Args:
        null: whether null is allowed too.

    Raises:
        SettingError: it is not.
    """
    if null and value is None:
        return
    fits = is_number(value) and (
        (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
    )
    if not fits:
        words = (("at least", least), ("above", above), ("at most", most), ("below", below))
        limits = [f"{word} {limit:g}" for word, limit in words if limit is not None]
        raise SettingError(key, value, f"give a number {' and '.join(limits)}".strip() + ", or null" * null)


def check_choice(key: str, value: Any, known: Iterable[Any]) -> None:
    """Check that a value is one of the known ones.

    Raises:
        SettingError: it is not.
    """
    known = list(known)
    if value not in known:
        raise SettingError(key, value, f"give one of {', '.join(map(shown, known))}")


def check_switch(key: str, value: Any) -> None:
    """Check that a value is true or false.

    Raises:
        SettingError: it is not.
    """
    if not isinstance(value, bool):
        raise SettingError(key, value, "give true or false")


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def shown(value: Any) -> str:
    """Format a value as a user writes it: null, true, [1, 2]."""
    if (value and isinstance(value, str)) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    plain = value is None or isinstance(value, str | int | float | list | tuple | dict)
    return json.dumps(value, default=str) if plain else str(value)


def check_keys(place: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Check that every given key of `place` is known.

    Raises:
        SettingError: for the first unknown key, with the nearest known one.
    """
    for key in given:
        if key not in known:
            raise SettingError(f"{place}.{key}", NO_VALUE, instead(str(key), known, f"{place}."), "is not known")


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


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys; a mapping without keys leaves none."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
