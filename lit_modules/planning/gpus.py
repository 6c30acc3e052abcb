"""The cards that a plan can be made for."""

from dataclasses import dataclass

from lit_modules.callbacks.progress import PEAK_TFLOPS


@dataclass(frozen=True)
class Gpu:
    """One card.

    Attributes:
        name: as in PEAK_TFLOPS.
        memory: bytes that torch finds on it.
        flops: dense bfloat16 peak, FLOP/s.
        bandwidth: of its memory, bytes a second.
        link: to the other cards of its node, bytes a second in each direction.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float


# GiB that torch finds, TB/s of memory, GB/s between the cards of a node (NVLink where it is built in, else PCIe): from
# the makers' data sheets, the larger kind where a card comes in two.
SHEETS = {
    "GB200": (184.0, 8.0, 900.0),
    "B200": (178.4, 8.0, 900.0),
    "GH200": (94.5, 4.0, 450.0),
    "H200": (139.8, 4.8, 450.0),
    "H100 NVL": (93.1, 3.9, 300.0),
    "H100 PCIe": (79.2, 2.0, 64.0),
    "H100": (79.2, 3.35, 450.0),
    "A100": (79.2, 2.04, 300.0),
    "A10G": (22.2, 0.6, 32.0),
    "L40S": (44.4, 0.864, 32.0),
    "L40": (44.4, 0.864, 32.0),
    "L4": (22.2, 0.3, 32.0),
    "RTX 5090": (31.4, 1.79, 64.0),
    "RTX 4090": (23.5, 1.01, 32.0),
    "RTX 3090": (23.6, 0.936, 32.0),
}


def find_gpu(name: str) -> Gpu:
    """The card that `name` means: "h200", "rtx_4090", or what the driver calls it ("NVIDIA H200").

    Raises:
        ValueError: no such card is known; the line lists those that are.
    """
    words = " ".join(str(name).lower().replace("_", " ").replace("-", " ").split())
    for known, (gib, terabytes, gigabytes) in SHEETS.items():
        if f" {known.lower()} " in f" {words} ":
            return Gpu(known, gib * 2**30, PEAK_TFLOPS[known] * 1e12, terabytes * 1e12, gigabytes * 1e9)
    raise ValueError(f"plan.gpu={name} is not a card that is known: give one of {', '.join(SHEETS)}")
