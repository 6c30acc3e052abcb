"""Times on a GPU: of modules by CUDA events around replays of a graph, of kernels by torch's profiler."""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from evaluation.device_timing import captured, elapsed, fastest_copy, replay_seconds
from evaluation.efficiency.cells import DecodedCell, Steps
from evaluation.efficiency.subjects import UNCACHED, Pool, Subject, copies_of
from lit_modules.generation.fused_blocks import remember
from lit_modules.networks.caches import StaticAttentionCacheLayer
from lit_modules.networks.positions import Positions

log = logging.getLogger(__name__)

KERNELS = {"split": "_attend_split", "combine": "_join_splits"}
"""The kernels of decode attention (`kernels/forgetting_attention/decode/kernel.py`), by the paper's names."""
KERNEL_TOKENS = 10  # output tokens over which kernels are timed, as in the paper
CHECKED_LENGTH = 3001  # cached tokens at which results are compared
LARGEST_ERROR = 0.02  # relative, for bfloat16

Kernels = Mapping[int, Mapping[str, float]]
"""Seconds of each kernel in one step of one layer, by prefix."""


@dataclass
class Measured:
    """All that was measured.

    Attributes:
        copy_rate: bytes/s of a large copy within the device, read plus written.
        errors: the largest relative errors of queries and of attention against float32, by side.
        steps: by batch size and side.
        kernels: the same; an empty mapping where the profiler sees no kernels.
    """

    copy_rate: float
    errors: dict[str, dict[str, float]]
    steps: dict[int, dict[str, Steps]] = field(default_factory=dict)
    kernels: dict[int, dict[str, Kernels]] = field(default_factory=dict)


@torch.no_grad()
def measure(
    subjects: Mapping[str, Subject],
    batches: Sequence[int],
    lengths: Sequence[int],
    prefixes: Sequence[int],
    checked: tuple[int, int],
    pool: Pool,
) -> Measured:
    """Check the results of every subject, then time it.

    Args:
        subjects: by side.
        batches: batch sizes.
        lengths: cached tokens at which steps are timed.
        prefixes: cached tokens after which kernels are timed.
        checked: prefix and output of the cell that is really decoded.
        pool: holds the caches.

    Raises:
        RuntimeError: results are wrong.
    """
    began, length = time.perf_counter(), min(CHECKED_LENGTH, lengths[-1])
    errors = {side: largest_errors(subject, batches, length, pool) for side, subject in subjects.items()}
    found = Measured(copy_rate(pool), errors)
    log.info("results agree with float32; a copy moves %.0f GB/s", found.copy_rate / 1e9)
    for batch in batches:
        found.steps[batch], found.kernels[batch] = {}, {}
        for side, subject in subjects.items():
            found.kernels[batch][side] = kernel_times(subject, batch, prefixes, pool)
            steps = step_times(subject, batch, lengths, pool)
            decoded = decode_cell(subject, batch, *checked, pool)
            cell = DecodedCell(*checked, decoded, steps.of_output(*checked)["layer"])
            found.steps[batch][side] = replace(steps, decoded=cell)
            log.info("batch %s, %s (%.0f s)", batch, subject.name, time.perf_counter() - began)
    return found


def largest_errors(subject: Subject, batches: Sequence[int], length: int, pool: Pool) -> dict[str, float]:
    """Return the largest relative errors over all batch sizes.

    Raises:
        RuntimeError: one is larger than rounding explains.
    """
    found = [errors_of(subject, batch, length, pool) for batch in batches]
    largest = {name: max(errors[name] for errors in found) for name in found[0]}
    if not all(error < LARGEST_ERROR for errors in found for error in errors.values()):  # NaN is not either
        raise RuntimeError(f"{subject.name}: relative errors against float32 are {found}: nothing is timed")
    return largest


def errors_of(subject: Subject, batch: int, length: int, pool: Pool) -> dict[str, float]:
    """Return the relative errors of queries and of attention against their definitions in float32."""
    layer, (norm, attention) = subject.layers[0], subject.modules[0]
    (cache,) = subject.caches(pool, batch, length, length, 1)
    rows = subject.rows(batch)
    q, k, v = layer.project(rows)
    right = F.rms_norm(rows.float(), rows.shape[1:], norm.weight.float(), norm.eps) @ attention.q_proj.weight.float().mT
    if attention.augmented_q is not None:
        augmented = attention.augmented_q
        linears = (augmented.gate_proj, augmented.up_proj, augmented.down_proj)
        gate, up, down = (linear.weight.float().mT for linear in linears)
        right = (F.silu(right @ gate) * (right @ up)) @ down
    turned = remember(q, k, v, subject.positions_of(batch, length), cache)
    out = layer.attend(turned, subject.positions_of(batch, length), cache)
    heads = turned.shape[2]
    query, keys, values = (
        x.float().repeat_interleave(heads // x.shape[2], dim=2).transpose(1, 2)
        for x in (turned, cache.keys, cache.values)
    )
    exact = F.scaled_dot_product_attention(query, keys, values)
    return {"queries": relative_error(q.flatten(1), right), "attention": relative_error(out, exact.flatten(1))}


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return `||found - exact|| / ||exact||`."""
    return (torch.linalg.vector_norm(found.float() - exact) / torch.linalg.vector_norm(exact)).item()


def step_times(subject: Subject, batch: int, lengths: Sequence[int], pool: Pool) -> Steps:
    """Time the modules of a step, and the whole layer's, at each length."""
    rows = subject.rows(batch)
    ways = {name: replay_seconds([partial(way, rows) for way in each]) for name, each in subject.query_ways().items()}
    q, k, v = subject.layers[0].project(rows)
    attention, layer, cache = [], [], 0.0
    for length in lengths:
        positions = subject.positions_of(batch, length)
        nbytes = batch * length * subject.sizes.per_token
        caches = subject.caches(pool, batch, length, length, copies_of(nbytes))
        attention.append(replay_seconds([partial(subject.layers[0].attend, q, positions, each) for each in caches]))
        copies = copies_of(nbytes + subject.sizes.folded + subject.sizes.others)
        pairs = zip(itertools.cycle(subject.layers), caches[:copies], strict=False)
        layer.append(replay_seconds([partial(one.step, rows, positions, each) for one, each in pairs]))
        if not cache and length == lengths[len(lengths) // 2]:  # takes as long at any length
            cache = replay_seconds([partial(remember, q, k, v, positions, each) for each in caches])
    return Steps(lengths, attention, layer, list(ways.values())[-1], cache, ways)


def decode_cell(subject: Subject, batch: int, prefix: int, output: int, pool: Pool) -> float:
    """Decode `output` tokens, one replay of a captured step each; return the seconds of one layer.

    The step has as many copies of the layer as the model has layers, or as the pool has caches for.
    """
    caches = subject.caches(pool, batch, prefix + output + 1, prefix, subject.config.num_layers)
    held, index = caches[0].held, torch.full((batch, 1), prefix, device=subject.device)
    for cache in caches:
        cache.held = held  # counted once for all
    rows = subject.rows(batch)

    def step() -> None:
        held.add_(1)
        positions = subject.positions(index)
        for layer, cache in zip(itertools.cycle(subject.layers), caches, strict=False):
            layer.step(rows, positions, cache)
        index.add_(1)

    graph = captured(step)
    held.fill_(prefix)
    index.fill_(prefix)
    return elapsed(graph.replay, output) / len(caches)


def kernel_times(subject: Subject, batch: int, prefixes: Sequence[int], pool: Pool) -> dict[int, dict[str, float]]:
    """Return the mean seconds of each attention kernel over the first KERNEL_TOKENS tokens after each prefix.

    Empty where the profiler sees no kernels, because the machine lacks CUPTI or forbids it.
    """
    found = {}
    q = subject.layers[0].project(subject.rows(batch))[0]
    for prefix in prefixes:
        last = prefix + KERNEL_TOKENS
        copies = copies_of(batch * last * subject.sizes.per_token)
        caches = subject.caches(pool, batch, last, prefix + 1, copies)
        positions = subject.positions_of(batch, last)

        def decode(caches: list[StaticAttentionCacheLayer] = caches, positions: Positions = positions) -> None:
            for _ in range(KERNEL_TOKENS):
                for cache in caches:
                    subject.layers[0].attend(q, positions, cache)
                    cache.held += 1

        subject.layers[0].attend(q, positions, caches[0])  # compiled before
        totals, steps = profiled(decode), KERNEL_TOKENS * len(caches)
        if not totals["split"]:
            return {}
        found[prefix] = {name: seconds / steps for name, seconds in totals.items()}
    return found


def profiled(run: Callable[[], None]) -> dict[str, float]:
    """Return the seconds of each of KERNELS in what `run` launches."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_type == DeviceType.CUDA]
    return {
        name: sum(event.self_device_time_total for event in events if event.key.startswith(kernel)) / 1e6
        for name, kernel in KERNELS.items()
    }


def copy_rate(pool: Pool) -> float:
    """Return the bytes/s of a large copy within the device, read plus written."""
    half = min(len(pool.numbers) // 2, int(8 * UNCACHED) // pool.numbers.element_size())
    source, target = pool.numbers[:half], pool.numbers[half : 2 * half]
    return fastest_copy(source, target, lambda way: replay_seconds([way]))
