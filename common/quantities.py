"""Readable durations and token counts."""


def duration(seconds: float) -> str:
    """Format seconds: 41 s, 3 min 05 s, 2 h 10 min, 3 d 4 h."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def count(tokens: float) -> str:
    """Format a number of tokens with a unit: 512, 33.6k, 1.2M, 2.7B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.{2 if tokens < 10 * size else 1}f}{unit}"
    return f"{tokens:.0f}"
