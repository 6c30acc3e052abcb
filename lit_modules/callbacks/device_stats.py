"""Load of each GPU and host of a run, and detection of the rank that slows the others down."""

import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning
import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from common.settings import check_whole
from lit_modules.callbacks.progress import is_report_due
from lit_modules.loggers.csv import MetricsCsv
from lit_modules.parallel.gathering import all_gather_tensors

log = logging.getLogger(__name__)

TIMED_BATCHES = 8  # micro-batches timed between two reports; a rank's pace is the median of the last that many
FORWARD_EQUIVALENTS = 3.0  # a forward and a backward pass cost three forward passes
SLOW_RATIO = 1.2  # times the median: a rank this slow is reported
SLOW_REPORTS = 2  # consecutive slow reports before a rank is named; a single one may be due to longer documents
QUIET_REPORTS = 10  # reports without a warning after one that names a slow rank

GPU = ("utilization", "memory_gib", "temperature", "power")  # percent, GiB in use on the device, degrees C, watts
HOST = ("cpu_percent", "host_memory_gib")
TIMES = ("forward_seconds", "data_seconds")  # per micro-batch, measured by RankTimer


class DeviceStats(Callback):
    """Callback that logs all ranks' device statistics on rank 0, every `every_tokens`, from one collective.

    To wandb, for each host and each of its GPUs: `system/<host>/gpu0_utilization` (percent), `..._memory_gib`,
    `..._temperature` (degrees C), `..._power` (watts), `..._forward_seconds`, `..._data_seconds`, and
    `system/<host>/cpu_percent`, `system/<host>/host_memory_gib`. Ranks without a GPU appear as `rank0`, `rank1`, ...
    Values that a machine does not provide are omitted.

    To every logger: `system/gpu_utilization_lowest`, `system/gpu_temperature_highest`, `system/gpu_power_total`; with
    several ranks also `straggler/slowest_rank`, `straggler/slowdown` (the rank's own time per micro-batch over the
    median rank's) and `straggler/longest_data_seconds`. A rank that takes at least 1.2 times the median's time in two
    consecutive reports is named in the log.

    Args:
        every_tokens: tokens between two reports, as in Progress.

    Raises:
        ValueError: `every_tokens` is not a whole number above 0.
    """

    def __init__(self, every_tokens: int) -> None:
        check_whole("callbacks.machines.every_tokens", every_tokens, 1)
        self.every_tokens = every_tokens
        self.rank_devices: list[Device] = []
        self.timer = RankTimer([], torch.device("cpu"), every=1)  # until training starts
        self.slow: tuple[int | None, int] = (None, 0)  # the slow rank, and its consecutive slow reports
        self.quiet = 0  # reports until the next warning is allowed

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.rank_devices = gather_devices(trainer, module.device)
        interval = module.steps_for_tokens(self.every_tokens) * trainer.accumulate_grad_batches
        self.timer = RankTimer(module.model.model.layers, module.device, every=max(1, interval // TIMED_BATCHES))
        psutil.cpu_percent()  # starts the interval that the next call measures
        hosts: dict[str, list[str]] = {}
        for place in self.rank_devices:
            hosts.setdefault(place.host, []).append(place.device)
        for logger in trainer.loggers:
            logger.log_hyperparams({"hosts": hosts})

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.timer.start_batch()

    def on_before_backward(self, trainer: lightning.Trainer, module: Any, loss: torch.Tensor) -> None:
        self.timer.end_forward()

    def on_validation_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.timer.cancel_wait()

    def on_save_checkpoint(self, trainer: lightning.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.timer.cancel_wait()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_report_due(trainer, module, batch_idx, self.every_tokens):
            self.report(trainer, module)
        self.timer.start_wait(ends_step=module.ends_step(batch_idx))

    def on_train_end(self, trainer: lightning.Trainer, module: Any) -> None:
        self.timer.remove_hooks()

    def report(self, trainer: lightning.Trainer, module: Any) -> None:
        """Gather one vector from each rank, and log the values."""
        mine = torch.tensor([*read_gpu(module.device), *read_host(), *self.timer.take_times()], device=module.device)
        gathered = all_gather_tensors(mine, trainer.world_size)
        if not trainer.is_global_zero:
            return
        found = [dict(zip((*GPU, *HOST, *TIMES), values, strict=True)) for values in torch.stack(gathered).tolist()]
        summary = summarize(found)
        everything = {**summary, **host_metrics(self.rank_devices, found)}
        for logger in trainer.loggers:
            metrics = summary if isinstance(logger, MetricsCsv) else everything
            if metrics:
                logger.log_metrics(metrics, trainer.global_step)
        self.name_slow_rank(summary, found)

    def name_slow_rank(self, summary: dict[str, float], found: list[dict[str, float]]) -> None:
        """Warn about a rank that stays slow, then suppress warnings for some reports."""
        self.quiet = max(0, self.quiet - 1)
        is_slow = summary.get("straggler/slowdown", 0.0) >= SLOW_RATIO
        rank = int(summary["straggler/slowest_rank"]) if is_slow else None
        self.slow = (rank, self.slow[1] + 1 if rank == self.slow[0] else 1)
        if rank is None or self.quiet or self.slow[1] < SLOW_REPORTS:
            return
        self.quiet = QUIET_REPORTS
        place, pace = self.rank_devices[rank], found[rank]
        log.warning(
            "rank %s (%s, %s: %s) is slow: a micro-batch costs it %.2f times the median rank's time "
            "(%.3g s of computing, %.3g s of waiting for data)",
            rank,
            place.host,
            place.slot,
            place.device,
            summary["straggler/slowdown"],
            FORWARD_EQUIVALENTS * pace["forward_seconds"],
            pace["data_seconds"],
        )


class Device(NamedTuple):
    """A rank's device: its host, its slot there (gpu0, or rank0 without a GPU) and the device's name."""

    host: str
    slot: str
    device: str


def gather_devices(trainer: lightning.Trainer, device: torch.device) -> list[Device]:
    """Return the devices of all ranks, in rank order."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    if device.type == "cuda":
        mine = Device(host, f"gpu{trainer.local_rank}", torch.cuda.get_device_name(device))
    else:
        mine = Device(host, f"rank{trainer.global_rank}", device.type)
    if trainer.world_size == 1:
        return [mine]
    found: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(found, mine)
    return found


class RankTimer:
    """Timer of a rank's own work: computing and waiting for data, without waiting for other ranks.

    A step takes equally long on all ranks, since collectives wait for the slowest. What differs is timed here: the
    forward pass of each block and the wait for the next batch. The block hooks run inside FSDP's (after its all-gather
    of weights) and outside compiled code. On a GPU, CUDA events take the times; they are read at a report, when they
    have long completed. Ranks that share a sequence or a layer wait for one another inside a block, so they show the
    pace of the slowest of them.

    Args:
        blocks: the network's blocks.
        device: the device that they compute on.
        every: time one in `every` micro-batches, except in the first optimizer step, which compiles.
    """

    def __init__(self, blocks: Any, device: torch.device, every: int) -> None:
        self.device, self.every = device, every
        self.hooks = [hook for block in blocks for hook in self.add_hooks(block)]
        self.seen, self.steps, self.timing = 0, 0, False
        self.marks: list[Any] = []  # of the current timed micro-batch
        self.timed: list[list[Any]] = []  # marks of earlier micro-batches since the last report
        self.seconds: deque[float] = deque(maxlen=TIMED_BATCHES)
        self.waiting_since: float | None = None
        self.waited, self.waits = 0.0, 0

    def add_hooks(self, block: torch.nn.Module) -> tuple[Any, Any]:
        def mark(*_: Any) -> None:
            if self.timing:
                self.marks.append(record_time(self.device))

        return block.register_forward_pre_hook(mark), block.register_forward_hook(mark, prepend=True)

    def start_batch(self) -> None:
        """End the wait for data: a micro-batch has arrived."""
        if self.waiting_since is not None:
            self.waited, self.waits = self.waited + time.perf_counter() - self.waiting_since, self.waits + 1
        self.timing = self.steps > 0 and self.seen % self.every == 0
        self.seen += 1

    def end_forward(self) -> None:
        """End the forward pass, so that blocks recomputed in the backward pass are not timed."""
        if self.timing:
            self.timed.append(self.marks)
            self.timing, self.marks = False, []

    def start_wait(self, ends_step: bool) -> None:
        """Start the wait for the next micro-batch; `ends_step`: the last one completed an optimizer step."""
        self.steps += ends_step
        self.waiting_since = time.perf_counter()

    def cancel_wait(self) -> None:
        """Cancel the wait: the time until the next micro-batch includes other work."""
        self.waiting_since = None

    def take_times(self) -> tuple[float, float]:
        """Return (forward, wait) in seconds per micro-batch, NaN where nothing was timed.

        forward: all blocks together, the median of the last timed micro-batches. wait: the mean wait for data since the
        last call.
        """
        for marks in self.timed:
            self.seconds.append(sum(seconds_between(*pair) for pair in zip(marks[::2], marks[1::2], strict=True)))
        waited = self.waited / self.waits if self.waits else math.nan
        self.timed, self.waited, self.waits = [], 0.0, 0
        return (sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else math.nan), waited

    def remove_hooks(self) -> None:
        """Remove the hooks from the blocks."""
        for hook in self.hooks:
            hook.remove()


def record_time(device: torch.device) -> Any:
    """Record the current time: a CUDA event, or the clock on other devices."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds between two times of `record_time`."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


def read_gpu(device: torch.device) -> list[float]:
    """Return the values named in GPU; NaN where unavailable."""
    if device.type != "cuda":
        return [math.nan] * len(GPU)
    free, total = torch.cuda.mem_get_info(device)
    return [
        reading_or_nan(lambda: torch.cuda.utilization(device)),
        (total - free) / 2**30,
        reading_or_nan(lambda: torch.cuda.temperature(device)),
        reading_or_nan(lambda: torch.cuda.power_draw(device) / 1000),
    ]


def reading_or_nan(ask: Callable[[], float]) -> float:
    """Return a reading as a float; NaN without NVIDIA's library or the driver's support."""
    try:
        return float(ask())
    except Exception:
        # NVIDIA's error classes do not exist without its library; a failed reading must never end a run
        return math.nan


def read_host() -> list[float]:
    """Return the values named in HOST."""
    return [psutil.cpu_percent(), psutil.virtual_memory().used / 2**30]


def host_metrics(places: list[Device], found: list[dict[str, float]]) -> dict[str, float]:
    """Return the values of each rank's GPU, and of each host as read by its first rank, without NaNs."""
    metrics: dict[str, float] = {}
    for place, values in zip(places, found, strict=True):
        for name in (*GPU, *TIMES):
            metrics[f"system/{place.host}/{place.slot}_{name}"] = values[name]
        for name in HOST:
            metrics.setdefault(f"system/{place.host}/{name}", values[name])
    return {key: value for key, value in metrics.items() if not math.isnan(value)}


def summarize(found: list[dict[str, float]]) -> dict[str, float]:
    """Summarize all ranks: the extremes over GPUs, and the rank that the others wait for."""
    metrics: dict[str, float] = {}
    for key, name, together in (
        ("system/gpu_utilization_lowest", "utilization", min),
        ("system/gpu_temperature_highest", "temperature", max),
        ("system/gpu_power_total", "power", sum),
    ):
        if known := [values[name] for values in found if not math.isnan(values[name])]:
            metrics[key] = together(known)
    waits = [0.0 if math.isnan(values["data_seconds"]) else values["data_seconds"] for values in found]
    own = [FORWARD_EQUIVALENTS * values["forward_seconds"] + wait for values, wait in zip(found, waits, strict=True)]
    if len(own) > 1 and not any(math.isnan(seconds) for seconds in own):
        median = sorted(own)[(len(own) - 1) // 2]  # of two ranks, the faster one
        metrics["straggler/slowest_rank"] = own.index(max(own))
        metrics["straggler/slowdown"] = max(own) / median
        metrics["straggler/longest_data_seconds"] = max(waits)
    return metrics


def describe_ranks(trainer: lightning.Trainer) -> dict[str, Any]:
    """Describe the ranks of a run, for wandb's config."""
    on_gpu = trainer.strategy.root_device.type == "cuda"
    return {
        "world_size": trainer.world_size,
        "nodes": trainer.num_nodes,
        "strategy": type(trainer.strategy).__name__,
        "gpu": torch.cuda.get_device_name(trainer.strategy.root_device) if on_gpu else None,
    }
