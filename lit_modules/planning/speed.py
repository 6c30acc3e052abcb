"""The time of a training step: a roofline by parts, with a few constants measured on one NVIDIA H200.

Constants are shares of the card's peaks, so that they transfer to other cards. For cards of another kind (other matrix
units, smaller caches) the estimate is less certain.
"""

from collections import defaultdict
from typing import NamedTuple

from common.gpus import Gpu
from lit_modules.planning.network import Network, Parts
from lit_modules.planning.setup import Setup
from lit_modules.planning.work import Mixing, Pass, Product

# Matrix products: shares of the peak and of the memory bandwidth (above 1 because of caches), whose times add up; share
# of the peak for rows not aligned to 16 bytes, and in float32; share of the bandwidth for products narrower than a
# tile.
PRODUCT, PRODUCT_TRAFFIC = 0.79, 1.6
UNALIGNED, FLOAT32, NARROW, TILE = 0.123, 0.05, 0.55, 64
# Attention: (forward, backward) shares of the peak in long sequences, by head width and gating, and the sequence length
# at which half of them is reached.
ATTENTION = {
    (64, False): (0.483, 0.514, 1300),
    (64, True): (0.460, 0.520, 1300),
    (128, False): (0.650, 0.541, 900),
    (128, True): (0.657, 0.475, 1050),
}
# Recurrences: (forward, backward) shares of the bandwidth, for gates per channel and per head.
RECURRENCE = {False: (0.19, 0.10), True: (0.35, 0.17)}
# All other traffic: shares of the bandwidth, compiled, eager (also the loss), and of the optimizer.
FUSED, EAGER, OPTIMIZER = 0.79, 0.51, 0.72
# Seconds for the host to launch an eager kernel (compiled kernels launch faster than they run), and the share of a step
# between kernels.
LAUNCH, GAPS = 5e-6, 0.01
# Bytes per parameter: AdamW's fused step reads four values and writes three, clipping reads two and writes one.
STEP_BYTES, CLIP_BYTES, FOREACH_BYTES = 28, 12, 32
# Collectives: share of the link bandwidth, and the share of them that overlaps with arithmetic.
LINKS, HIDDEN = 0.7, 0.9


class Speed(NamedTuple):
    """Seconds of a step by part; tokens per second of all ranks together; model FLOPs utilization."""

    parts: dict[str, float]
    tokens_per_second: float
    mfu: float


def speed_of(network: Network, parts: Parts, setup: Setup, gpu: Gpu, flops_per_token: int) -> Speed:
    """Estimate the speed of training the network with `setup` on this card."""
    clock = OperationTimer(gpu, setup)
    seconds: defaultdict[str, float] = defaultdict(float)
    for traced in parts.blocks:
        for one in (traced.forward, traced.backward):
            for name, value in clock.of(one, split=setup.tensor, fused=setup.compile).items():
                seconds[name] += value
    for traced in (parts.embedding, parts.loss):
        for one in (traced.forward, traced.backward):
            work = clock.of(one, split=setup.tensor if traced is parts.loss else 1, fused=False)
            seconds["loss" if traced is parts.loss else "embedding"] += sum(work.values())
    whole = {name: value * setup.accumulation for name, value in seconds.items()}
    owned = network.parameters / (setup.shards * setup.tensor)
    whole["optimizer"] = optimizer_seconds(setup, owned) / gpu.bandwidth
    whole["communication"] = exposed_seconds(network, setup, gpu, sum(seconds.values()))
    total = sum(whole.values()) * (1 + GAPS)
    rate = setup.accumulation * setup.micro_tokens * setup.readers / total
    return Speed(whole, rate, rate * flops_per_token / (gpu.flops * setup.ranks))


def optimizer_seconds(setup: Setup, parameters: float) -> float:
    """Return the optimizer's seconds times the bandwidth: bytes of step, clipping and accumulation / OPTIMIZER."""
    step = STEP_BYTES + (0 if setup.fused_optimizer else FOREACH_BYTES)
    added = 3 * setup.weight_bytes * (setup.accumulation - 1)
    return parameters * (step + CLIP_BYTES + added) / OPTIMIZER


class OperationTimer:
    """The time of passes on one card."""

    def __init__(self, gpu: Gpu, setup: Setup) -> None:
        self.gpu, self.setup = gpu, setup

    def of(self, one: Pass, *, split: int, fused: bool) -> dict[str, float]:
        """Return seconds of a pass by kind of work, if above 0; `split` is the number of ranks that share it."""
        work = one.work
        found = {
            "products": sum(number * self.product(x) for x, number in work.products.items()) / split,
            "mixing": sum(number * self.mixing(x) for x, number in work.mixing.items()) / split,
            "elementwise": work.traffic / (self.gpu.bandwidth * (FUSED if fused else EAGER)) / split,
        }
        if not fused:
            found["launching"] = work.kernels * LAUNCH - sum(found.values())
        return {name: value for name, value in found.items() if value > 0}

    def product(self, product: Product) -> float:
        """Return the seconds of a matrix product."""
        moved = product.bytes / self.gpu.bandwidth
        if min(product.rows, product.inner, product.columns) < TILE:
            return moved / NARROW
        if product.item == 4:
            return product.flops / (self.gpu.flops * FLOAT32)
        if not product.aligned:
            return product.flops / (self.gpu.flops * UNALIGNED)
        return product.flops / (self.gpu.flops * PRODUCT) + moved / PRODUCT_TRAFFIC

    def mixing(self, mixing: Mixing) -> float:
        """Return the seconds of attention or of a recurrence."""
        if not mixing.attention:
            return mixing.bytes / (self.gpu.bandwidth * RECURRENCE[mixing.per_head][mixing.backward])
        forward, backward, half = ATTENTION[64 if mixing.width <= 64 else 128, mixing.gated]
        length = self.setup.sequence_length
        flops = 2 * mixing.tokens * length * mixing.heads * mixing.width * (2.5 if mixing.backward else 1.0)
        return flops * (1 + half / length) / (self.gpu.flops * (backward if mixing.backward else forward))


def exposed_seconds(network: Network, setup: Setup, gpu: Gpu, micro_batch: float) -> float:
    """Return the seconds per step that the GPU waits for other ranks; `micro_batch` is the arithmetic time of one.

    Transfers of weights and gradients overlap with arithmetic; those of tensor and context parallelism do not.
    """
    inside = gpu.link * LINKS
    across = inside if setup.nodes == 1 else min(inside, setup.network * LINKS)
    blocks = sum(network.block_parameters) / setup.tensor
    waits = blocking_seconds(network, setup, gpu.link * LINKS) * setup.accumulation
    if setup.strategy == "ddp":
        # All GPUs of a node send to the other nodes at the same time.
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
    """Return the ring all-gather or reduce-scatter traffic per rank: (n - 1) / n of the tensor."""
    return (ranks - 1) / ranks


def blocking_seconds(network: Network, setup: Setup, rate: float) -> float:
    """Return the seconds per micro-batch of tensor parallelism's all-reduces and context parallelism's exchanges."""
    config, layers = network.config, network.config.num_layers
    stream = 2 * setup.rank_tokens * config.hidden_size
    summed = 4 * 2 * share(setup.tensor) * stream * layers  # two all-reduces per pass
    _, keys, values = config.head_counts
    pair = 2 * setup.micro_tokens * (keys * config.cached_key_dim + values * config.head_dim) / setup.tensor
    gathered = 3 * share(setup.context) * pair * layers  # forward, recomputed backward, and gradients
    return (summed + gathered) / rate
