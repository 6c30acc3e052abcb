"""Report out-of-memory errors in one line: the request, the available memory, and what `job=plan` would lower."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace

import hydra
import psutil
import torch
from omegaconf import DictConfig, OmegaConf

from common.setting_nodes import plain_dict

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
REQUESTED = re.compile(r"allocate ([\d.]+) ?([KMGTP]iB|bytes)")
GIB = 2**30
LOWERABLE = 0.95  # target share of the estimated peak, because an estimate that fits was too low


@contextlib.contextmanager
def explain_out_of_memory(cfg: DictConfig, lower: str | None = None) -> Iterator[None]:
    """Turn an out-of-memory error within into a ValueError that says what to lower.

    Args:
        lower: what to lower; None for a training, whose plan decides.
    """
    try:
        yield
    except Exception as error:
        said = explain_error(cfg, error, lower)
        if said is error:
            raise
        raise said from error


def explain_error(cfg: DictConfig, error: BaseException, lower: str | None = None) -> BaseException:
    """Return the ValueError for an out-of-memory error; any other error itself."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if not known and not (isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)):
        return error
    cache = vars(error)  # a plan takes seconds, and a rank calls this twice
    if "said" not in cache:
        cache["said"] = ValueError(error_line(cfg, str(error), lower))
    return cache["said"]


def error_line(cfg: DictConfig, message: str, lower: str | None) -> str:
    """Format the error line for an allocator's message."""
    on_gpu = "CUDA" in message or "CUBLAS" in message
    where, total, others = gpu_memory() if on_gpu else host_memory()
    asked = REQUESTED.search(message)
    more = f"{in_gib(asked[1], asked[2])} more asked for, " if asked else ""
    held = f", {others / GIB:.1f} GiB of them held by other processes" if others > GIB / 10 else ""
    lower = lower or advice(cfg, total - others, on_gpu)
    return f"out of memory on {where}: {more}{total / GIB:.1f} GiB in all{held}; {lower}"


def gpu_memory() -> tuple[str, float, float]:
    """Return the GPU's name, its bytes, and the bytes that other processes hold."""
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.get_device_name(), total, max(0, total - free - torch.cuda.memory_reserved())


def host_memory() -> tuple[str, float, float]:
    """Return the same for the machine's main memory."""
    memory = psutil.virtual_memory()
    return "the CPU", memory.total, max(0, memory.total - memory.available - psutil.Process().memory_info().rss)


def in_gib(number: str, unit: str) -> str:
    size = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}[unit]
    return f"{float(number) * size / GIB:,.2f} GiB"


def advice(cfg: DictConfig, available: float, on_gpu: bool) -> str:
    """Say what to lower, by the plan if one can be made."""
    sizes = f"data.micro_batch_size={cfg.data.micro_batch_size} x data.sequence_length={cfg.data.sequence_length}"
    try:
        peak, overrides = planned_memory(cfg, available, on_gpu)
    except Exception:  # a failing plan must not hide the out-of-memory error
        return f"lower {sizes}, or give activation_checkpointing=full"
    estimate = f"job=plan estimates {peak / GIB:,.1f} GiB for {sizes}"
    return f"{estimate}: give {overrides}" if overrides else f"{estimate}: take a smaller model"


def planned_memory(cfg: DictConfig, available: float, on_gpu: bool) -> tuple[float, str | None]:
    """Return the estimated peak in bytes, and the cheapest overrides that fit `available` bytes, or None."""
    from common.gpus import find_gpu
    from lit_modules.planning.estimating import Planner
    from lit_modules.planning.from_config import setup_of
    from lit_modules.planning.memory import USABLE

    given = plain_dict(cfg) | {"plan": {"gpu": "h200", "network": 50}}
    setup = setup_of(OmegaConf.create(given))
    planner = Planner(hydra.utils.instantiate(cfg.model, _convert_="all"))
    if cfg.strategy._target_ is None:
        setup = planner.with_default_strategy(setup)
    peak = planner.estimate(setup).memory.peak
    card = replace(find_gpu(setup.gpu), memory=min(available, LOWERABLE * peak / USABLE))
    for change in planner.changes_to_fit(replace(setup, gpu=card)):
        if change.estimate.fits and (on_gpu or "trainer." not in change.overrides):
            return peak, change.overrides
    return peak, None
