"""Graphics cards: peak speed, memory and bandwidth from the vendors' data sheets."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One card.

    Attributes:
        name: a key of SHEETS.
        memory: bytes that torch reports.
        flops: dense bfloat16 peak, FLOP/s.
        bandwidth: memory bandwidth, bytes/s.
        link: bandwidth to the other cards of its node, bytes/s per direction.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float


# Dense bfloat16 TFLOP/s, GiB that torch reports, TB/s of memory, GB/s between the cards of a node (NVLink if built in,
# else PCIe). If a name has two variants, the larger one. The first match wins.
DATA_SHEETS = {
    "GB200": (2500.0, 184.0, 8.0, 900.0),
    "B200": (2250.0, 178.4, 8.0, 900.0),
    "GH200 480GB": (989.4, 94.5, 4.0, 450.0),  # the driver's name counts the CPU's memory
    "GH200": (989.4, 94.5, 4.0, 450.0),
    "H200": (989.4, 139.8, 4.8, 450.0),
    "H100 NVL": (835.5, 93.1, 3.9, 300.0),
    "H100 PCIe": (756.0, 79.2, 2.0, 64.0),
    "H100": (989.4, 79.2, 3.35, 450.0),
    "A100 40GB": (311.9, 39.4, 1.555, 300.0),
    "A100": (311.9, 79.2, 2.04, 300.0),
    "A10G": (70.0, 22.2, 0.6, 32.0),
    "L40S": (362.1, 44.4, 0.864, 32.0),
    "L40": (181.0, 44.4, 0.864, 32.0),
    "L4": (121.0, 22.2, 0.3, 32.0),
    "RTX 5090": (209.5, 31.4, 1.79, 64.0),
    "RTX 4090": (165.2, 23.5, 1.01, 32.0),
    "RTX 3090": (71.0, 23.6, 0.936, 32.0),
}
# A partition of a card, or another card whose name starts with a known name.
OTHER_CARDS = re.compile(r"\b(MIG|Laptop|D|Ti)\b", re.IGNORECASE)
SIZE = re.compile(r"\b(\d+) ?gi?b?\b")
MEMORY_TOLERANCE = 0.12  # relative tolerance: GB may mean GiB, and torch reports a little less


def find_gpu(name: str | Gpu) -> Gpu:
    """Return the card with a name such as "h200", "a100-40gb", "rtx_4090" or the driver's "NVIDIA H200"; pass cards on.

    Raises:
        ValueError: if no such card is known, or none with the memory in the name; the line lists the known ones.
    """
    if isinstance(name, Gpu):
        return name
    words = SIZE.sub(r"\1gb", " ".join(re.split(r"[\s_-]+", str(name).lower().strip())))
    known = next((each for each in DATA_SHEETS if set(each.lower().split()) <= set(words.split())), None)
    if known is None or OTHER_CARDS.search(words):
        raise ValueError(f"plan.gpu={name} is not a card that is known: give one of {', '.join(DATA_SHEETS)}")
    tflops, gib, terabytes, gigabytes = DATA_SHEETS[known]
    for size in SIZE.findall(words):
        if f"{size}GB" not in known and abs(gib - int(size)) > MEMORY_TOLERANCE * int(size):
            raise ValueError(f"plan.gpu={name} is not known with {size} GB: give one of {', '.join(DATA_SHEETS)}")
    return Gpu(known, gib * 2**30, tflops * 1e12, terabytes * 1e12, gigabytes * 1e9)


def peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 peak in FLOP/s of the GPU with torch's name, or None if unknown."""
    if OTHER_CARDS.search(name):
        return None
    return next((sheet[0] * 1e12 for card, sheet in DATA_SHEETS.items() if re.search(rf"\b{card}\b", name)), None)
