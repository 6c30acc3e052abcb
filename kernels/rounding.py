"""Whole numbers rounded up, for launches: Triton's own functions are made for kernels, and cost the host as much as a
small operation."""


def cdiv(x: int, y: int) -> int:
    """x / y rounded up."""
    return (x + y - 1) // y


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is n or more."""
    return 1 << (n - 1).bit_length()
