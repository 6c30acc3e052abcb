"""The cards that a plan can be made for."""

import re
from dataclasses import dataclass

from lit_modules.callbacks.progress import OTHER_CARDS, peak_flops


@dataclass(frozen=True)
class Gpu:
    """One card.

    Attributes:
        name: as in SHEETS.
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
# the makers' data sheets; where a name does not say which of two kinds it is, the larger one.
SHEETS = {
    "GB200": (184.0, 8.0, 900.0),
    "B200": (178.4, 8.0, 900.0),
    "GH200 480GB": (94.5, 4.0, 450.0),  # the driver counts the processor's memory
    "GH200": (94.5, 4.0, 450.0),
    "H200": (139.8, 4.8, 450.0),
    "H100 NVL": (93.1, 3.9, 300.0),
    "H100 PCIe": (79.2, 2.0, 64.0),
    "H100": (79.2, 3.35, 450.0),
    "A100 40GB": (39.4, 1.555, 300.0),
    "A100": (79.2, 2.04, 300.0),
    "A10G": (22.2, 0.6, 32.0),
    "L40S": (44.4, 0.864, 32.0),
    "L40": (44.4, 0.864, 32.0),
    "L4": (22.2, 0.3, 32.0),
    "RTX 5090": (31.4, 1.79, 64.0),
    "RTX 4090": (23.5, 1.01, 32.0),
    "RTX 3090": (23.6, 0.936, 32.0),
}


SIZE = re.compile(r"\b(\d+) ?gi?b?\b")
NEAR = 0.12  # of what a name says: GB may mean GiB, and torch finds a little less


def find_gpu(name: str | Gpu) -> Gpu:
    """The card that `name` means: "h200", "a100-40gb", "rtx_4090", or what the driver calls it ("NVIDIA H200"); a card
    is itself.

    Raises:
        ValueError: no such card is known, or none with the memory that the name says; the line lists those that are.
    """
    if isinstance(name, Gpu):
        return name
    words = SIZE.sub(r"\1gb", " ".join(re.split(r"[\s_-]+", str(name).lower().strip())))
    known = next((each for each in SHEETS if set(each.lower().split()) <= set(words.split())), None)
    if known is None or OTHER_CARDS.search(words):
        raise ValueError(f"plan.gpu={name} is not a card that is known: give one of {', '.join(SHEETS)}")
    gib, terabytes, gigabytes = SHEETS[known]
    for size in SIZE.findall(words):
        if f"{size}GB" not in known and abs(gib - int(size)) > NEAR * int(size):
            raise ValueError(f"plan.gpu={name} is not known with {size} GB: give one of {', '.join(SHEETS)}")
    return Gpu(known, gib * 2**30, peak_flops(known), terabytes * 1e12, gigabytes * 1e9)
