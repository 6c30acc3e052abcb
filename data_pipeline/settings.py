"""What checks of settings share."""

import math
from typing import Any


def check_whole(key: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise ValueError, naming the key, unless the value is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"from {least} to {most}"
        raise ValueError(f"{key}={value}: give a whole number, {limits}")


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
