"""Markdown tables, and values with their standard errors."""

from collections.abc import Sequence

from evaluation.uncertainty import Estimate

UNDECIDED = "An asterisk marks a difference of two standard errors or more; the others are undecided."


def table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Format lines as a Markdown table; the first is the header."""
    rows = ["| " + " | ".join(cells) + " |" for cells in lines]
    return [rows[0], "|" + "---|" * len(lines[0]), *rows[1:]]


def shown(value: float | None, error: float | None, share: bool) -> str:
    """Format a value with its standard error; a share in percent."""
    if value is None:
        return "-"
    if share:
        return f"{100 * value:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
    return f"{value:.4g}" + ("" if error is None else f" ± {error:.2g}")


def difference(found: Estimate, decided: bool) -> str:
    """Format a difference with its standard error, and an asterisk if it is decided."""
    error = "" if found.standard_error is None else f" ± {found.standard_error:.2g}"
    return f"{found.value:+.3g}{error}{'*' if decided else ''}"
