"""The time of a training step: a roofline by parts, with a few constants measured on one NVIDIA H200.

Constants are shares of the card's own peaks, so that they carry over to others; where those differ in kind (other
matrix units, smaller caches), the plan is less sure.
"""

from collections import Counter
from typing import NamedTuple

from common.gpus import Gpu
from lit_modules.planning.network import Network, Parts
from lit_modules.planning.setup import Setup
from lit_modules.planning.work import Mixing, Pass, Product

# Matrix products: shares of the peak and of the memory's bandwidth (caches make it more than all), one after the other;
# of the peak where rows are not whole 16 bytes apart, and in float32; of the bandwidth where they are narrow as a tile.
PRODUCT, PRODUCT_TRAFFIC = 0.79, 1.6
UNALIGNED, FLOAT32, NARROW, TILE = 0.123, 0.05, 0.55, 64
# Attention: (forward, backward) shares of the peak in long sequences, by the head's width and whether there are gates,
# and the tokens of a sequence at which half of that is reached.
ATTENTION = {
    (64, False): (0.483, 0.514, 1300),
    (64, True): (0.460, 0.520, 1300),
    (128, False): (0.650, 0.541, 900),
    (128, True): (0.657, 0.475, 1050),
}
# Recurrences: (forward, backward) shares of the bandwidth, for gates of each channel and of each head.
RECURRENCE = {False: (0.19, 0.10), True: (0.35, 0.17)}
# Traffic of everything else, compiled and operation by operation, of the loss, and of the optimizer.
FUSED, EAGER, OPTIMIZER = 0.79, 0.51, 0.72
# Seconds that the host takes to launch a kernel of PyTorch's own (what is compiled is launched faster than it runs);
# and the share of a step that passes between kernels.
LAUNCH, GAPS = 5e-6, 0.01
# Bytes for each parameter: AdamW's fused step reads four and writes three, clipping reads twice and writes once.
STEP_BYTES, CLIP_BYTES, FOREACH_BYTES = 28, 12, 32
# Collectives: a share of the links' bandwidth, and how much of them hides behind the arithmetic.
LINKS, HIDDEN = 0.7, 0.9


class Speed(NamedTuple):
    """Seconds of a step by part; and of all ranks together, tokens a second, and model FLOPs utilization."""

    parts: dict[str, float]
    tokens_per_second: float
    mfu: float


def speed_of(network: Network, parts: Parts, setup: Setup, gpu: Gpu, flops_per_token: int) -> Speed:
    """How fast `setup` trains the network on this card."""
    clock = Clock(gpu, setup)
    seconds: Counter[str] = Counter()
    for traced in parts.blocks:
        for one in (traced.forward, traced.backward):
            seconds += clock.of(one, split=setup.tensor, fused=setup.compile)
    for traced in (parts.embedding, parts.loss):
        for one in (traced.forward, traced.backward):
            work = clock.of(one, split=setup.tensor if traced is parts.loss else 1, fused=False)
            seconds["loss" if traced is parts.loss else "embedding"] += sum(work.values())
    whole = {name: value * setup.accumulation for name, value in seconds.items()}
    owned = network.parameters / (setup.shards * setup.tensor)
    whole["optimizer"] = optimizer_seconds(setup, owned) / gpu.bandwidth
    whole["communication"] = exposed(network, setup, gpu, sum(seconds.values()))
    total = sum(whole.values()) * (1 + GAPS)
    rate = setup.accumulation * setup.micro_tokens * setup.readers / total
    return Speed(whole, rate, rate * flops_per_token / (gpu.flops * setup.ranks))


def optimizer_seconds(setup: Setup, parameters: float) -> float:
    """Bytes that the optimizer's step, clipping and adding up gradients move, over their share of the bandwidth."""
    step = STEP_BYTES + (0 if setup.fused_optimizer else FOREACH_BYTES)
    added = 3 * setup.weight_bytes * (setup.accumulation - 1)
    return parameters * (step + CLIP_BYTES + added) / OPTIMIZER


class Clock:
    """Seconds of passes on one card."""

    def __init__(self, gpu: Gpu, setup: Setup) -> None:
        self.gpu, self.setup = gpu, setup

    def of(self, one: Pass, *, split: int, fused: bool) -> Counter[str]:
        """Seconds of a pass by kind of work. split: ranks that share it."""
        work = one.work
        found = Counter(
            products=sum(number * self.product(x) for x, number in work.products.items()) / split,
            mixing=sum(number * self.mixing(x) for x, number in work.mixing.items()) / split,
            elementwise=work.traffic / (self.gpu.bandwidth * (FUSED if fused else EAGER)) / split,
        )
        idle = 0.0 if fused else work.kernels * LAUNCH - sum(found.values())
        found["launching"] = max(0.0, idle)
        return found

    def product(self, product: Product) -> float:
        """Seconds of a matrix product."""
        moved = product.bytes / self.gpu.bandwidth
        if min(product.rows, product.inner, product.columns) < TILE:
            return moved / NARROW
        if product.item == 4:
            return product.flops / (self.gpu.flops * FLOAT32)
        if not product.aligned:
            return product.flops / (self.gpu.flops * UNALIGNED)
        return product.flops / (self.gpu.flops * PRODUCT) + moved / PRODUCT_TRAFFIC

    def mixing(self, mixing: Mixing) -> float:
        """Seconds of attention or of a recurrence."""
        if not mixing.attention:
            return mixing.bytes / (self.gpu.bandwidth * RECURRENCE[mixing.per_head][mixing.backward])
        forward, backward, half = ATTENTION[64 if mixing.width <= 64 else 128, mixing.gated]
        length = self.setup.sequence_length
        flops = 2 * mixing.tokens * length * mixing.heads * mixing.width * (2.5 if mixing.backward else 1.0)
        return flops * (1 + half / length) / (self.gpu.flops * (backward if mixing.backward else forward))


def exposed(network: Network, setup: Setup, gpu: Gpu, micro_batch: float) -> float:
    """Seconds of a step in which the GPU waits for the other ranks. micro_batch: seconds of one's arithmetic.

    What moves weights and gradients hides behind the arithmetic; what splits a layer or a sequence stands in its way.
    """
    inside = gpu.link * LINKS
    across = inside if setup.nodes == 1 else min(inside, setup.network * LINKS)
    blocks = sum(network.block_parameters) / setup.tensor
    waits = in_the_way(network, setup, gpu.link * LINKS) * setup.accumulation
    if setup.strategy == "ddp":
        # A node's GPUs send to the other nodes together.
        rate = inside if setup.nodes == 1 else min(inside, setup.network * setup.devices_per_node * LINKS)
        reduced = 2 * share(setup.ranks) * network.parameters * setup.weight_bytes / rate
        return waits + max(0.0, reduced - HIDDEN * micro_batch * 2 / 3)
    if not setup.sharded:
        return waits
    rate = inside if setup.shards * setup.tensor <= setup.devices_per_node else across
    gathers = (2 if setup.reshard else 1) * blocks * (2 if setup.autocast else setup.weight_bytes)
    moved = share(setup.shards) * (gathers + 4 * blocks + (setup.weight_bytes + 4) * network.others)
    copies = setup.ranks // (setup.shards * setup.tensor)
    between = 2 * share(copies) * 4 * network.parameters / (setup.shards * setup.tensor) / across
    moving = max(0.0, moved / rate + between - HIDDEN * micro_batch)
    return waits + moving * setup.accumulation


def share(ranks: int) -> float:
    """Of a whole, what a rank sends as it is gathered from, or summed over, so many."""
    return (ranks - 1) / ranks


def in_the_way(network: Network, setup: Setup, rate: float) -> float:
    """Seconds of a micro-batch for sums over the ranks of a layer's heads, and for keys and values of a sequence's."""
    config, layers = network.config, network.config.num_layers
    stream = 2 * setup.rank_tokens * config.hidden_size
    summed = 4 * 2 * share(setup.tensor) * stream * layers  # two of each pass, each a sum over all
    _, keys, values = config.head_counts
    pair = 2 * setup.micro_tokens * (keys * config.cached_key_dim + values * config.head_dim) / setup.tensor
    gathered = 3 * share(setup.context) * pair * layers  # forward, again backward, and the gradients
    return (summed + gathered) / rate
