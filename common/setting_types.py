"""Check settings against the type hints of a function's arguments."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from common.settings import SettingError, is_number, is_whole, shown

PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
LISTS = (list, tuple, set, frozenset, Sequence, Set)
MAPPINGS = (dict, Mapping)


def check_type(key: str, value: Any, hint: Any) -> None:
    """Check that a value of a configuration matches a type hint.

    A whole number is also a number, true is not, and a number is finite.

    Raises:
        SettingError: it does not match.
    """
    if not fits(value, hint):
        raise SettingError(key, value, f"give {describe_hint(hint)}")


def type_hints(function: Callable) -> dict[str, Any]:
    """Return the type hints of a function's or class's arguments; where text among them is unreadable, the others."""
    called = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(called)
    except (NameError, TypeError, AttributeError):
        hints = getattr(called, "__annotations__", {})
        return {name: hint for name, hint in hints.items() if not isinstance(hint, str)}


def fits(value: Any, hint: Any) -> bool:
    """Return whether a configuration value (text, number, switch, null, list or mapping) matches a type hint."""
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in arguments)
    if kind is typing.Literal:
        return value in arguments
    if kind in LISTS:
        return isinstance(value, list | tuple) and _elements_fit(value, kind, arguments)
    if kind in MAPPINGS:
        return isinstance(value, Mapping) and all(fits(each, (*arguments, Any, Any)[1]) for each in value.values())
    if kind is float:
        return is_number(value)
    if kind is int:
        return is_whole(value)
    if kind is Path:
        return isinstance(value, str | Path)
    if kind is None:
        return value is None
    return isinstance(value, kind) if inspect.isclass(kind) and kind not in (Any, Callable) else True


def describe_hint(hint: Any) -> str:
    """Describe to a user the values that a type hint allows."""
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        words = list(dict.fromkeys(describe_hint(each) for each in arguments if each is not typing.Any))
        words = [word for word in words if word != "its keys"] or words  # classes, which no plain value matches
        return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    if kind is typing.Literal:
        return " or ".join(map(shown, arguments))
    if kind in LISTS:
        if kind is tuple and Ellipsis not in arguments:
            return (
                f"a list of {len(arguments)} values, each {' or '.join(dict.fromkeys(map(describe_hint, arguments)))}"
            )
        return "a list of text, as [a, b]" if str in arguments else "a list, as [1, 2]"
    if kind is Path:
        return PLAIN[str]
    return PLAIN.get(type(None) if kind is None else kind, "its keys")


def _elements_fit(values: Sequence, kind: Any, arguments: tuple) -> bool:
    if kind is tuple and arguments and Ellipsis not in arguments:
        return len(values) == len(arguments) and all(map(fits, values, arguments))
    return all(fits(value, (*arguments, Any)[0]) for value in values)
