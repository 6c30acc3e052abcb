"""Rounding up of integers for launches: Triton's own functions cost the host as much as a small operation."""


def cdiv(x: int, y: int) -> int:
    """Return x / y rounded up."""
    return (x + y - 1) // y


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()
