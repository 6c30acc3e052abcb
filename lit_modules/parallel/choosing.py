"""Choose the strategy of a run that names none: the simplest that the model and its devices allow."""

from typing import Any

import psutil
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig

from lit_modules.networks import PalimpsestConfig
from lit_modules.networks.counting import planned_parameters, sizes_of
from lit_modules.parallel.strategies import DataParallel, OneDevice, Sharded

# Bytes per parameter in float32 training: the weight, its gradient, AdamW's two moments, and autocast's copy.
TRAINING_BYTES = 4 + 4 + 8 + 2
MEMORY_SHARE = 0.5  # share of a device's memory for these; the rest is for activations


def choose_strategy(accelerator: str, devices: Any, num_nodes: int, parameters: int) -> Strategy:
    """Create the strategy that `simplest_strategy` names for this machine's devices and as many on each other node."""
    name = simplest_strategy(parameters, count_devices(accelerator, devices), num_nodes, device_memory(accelerator))
    if name == "one":
        return OneDevice(single_device(accelerator, devices))
    if name == "ddp":
        return DataParallel(gradient_as_bucket_view=True)
    return Sharded(shard_size="node" if name == "hsdp" else None)


def simplest_strategy(parameters: int, devices: int, num_nodes: int, memory: float | None) -> str:
    """Return the simplest strategy: "one", "ddp", "hsdp" or "fsdp".

    "one" is for a single device. "ddp" needs a device that holds the training of all `parameters`. "hsdp", shards
    within each node, needs a node whose `devices` hold it. Else "fsdp" shards over all.

    Args:
        memory: bytes of a device; None if the devices share one memory.
    """
    needed = TRAINING_BYTES * parameters
    if devices * num_nodes == 1:
        return "one"
    if memory is None or needed <= MEMORY_SHARE * memory:
        return "ddp"
    return "hsdp" if num_nodes > 1 and needed / devices <= MEMORY_SHARE * memory else "fsdp"


def check_memory(config: PalimpsestConfig, cfg: DictConfig, strategy: Strategy) -> None:
    """Refuse a model whose training cannot fit into this machine's memory, before allocating any.

    Only the certain parts count: weights, gradients and AdamW's two moments, sharded over as many ranks as possible.

    Raises:
        ValueError: if it cannot fit; the line gives the needed and the available memory.
    """
    accelerator, devices, num_nodes = cfg.trainer.accelerator, cfg.trainer.devices, cfg.trainer.num_nodes
    here = count_devices(accelerator, devices)
    each = 2 if cfg.trainer.precision == "bf16-true" else 4
    held = 4 if "Adam" in cfg.optimizer._target_ else 2
    parameters = planned_parameters(config)
    needed = parameters * each * held / (here * num_nodes if isinstance(strategy, Sharded) else 1)
    memory, where = device_memory(accelerator), "a GPU here"
    if memory is None:
        memory, where, needed = psutil.virtual_memory().total, "this machine", needed * here
    if needed > memory:
        raise ValueError(
            f"{sizes_of(config)}: to train {parameters / 1e9:,.1f}B parameters takes {needed / 2**30:,.0f} GiB for "
            f"weights, gradients and the optimizer alone, and {where} has {memory / 2**30:,.0f} GiB: lower one of "
            "them, or ask job=plan on what it would fit"
        )


def uses_gpu(accelerator: str) -> bool:
    """Return whether the trainer's `accelerator` means GPUs on this machine."""
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def count_devices(accelerator: str, devices: Any) -> int:
    """Count the devices of this machine that the trainer's `accelerator` and `devices` mean."""
    found = devices_here(accelerator, devices)
    return len(found) if isinstance(found, list) else found


def single_device(accelerator: str, devices: Any) -> torch.device:
    """Return the first device that the trainer's `accelerator` and `devices` mean."""
    found = devices_here(accelerator, devices)
    return torch.device("cuda", found[0]) if isinstance(found, list) else torch.device("cpu")


def devices_here(accelerator: str, devices: Any) -> int | list[int]:
    """Return the number of CPU devices, or the indices of the GPUs, that the trainer's settings mean.

    Raises:
        ValueError: this machine does not have them.
    """
    kind, every = (CUDAAccelerator, -1) if uses_gpu(accelerator) else (CPUAccelerator, 1)
    try:
        found = kind.parse_devices(every if devices in ("auto", -1, "-1") else devices)
    except (MisconfigurationException, TypeError):
        found = None
    if not found:
        number = torch.cuda.device_count()
        has = f"has GPUs 0 to {number - 1}: give some of these" if number else "has no GPU: give trainer=cpu"
        raise ValueError(f"trainer.accelerator={accelerator}, trainer.devices={devices}: this machine {has}")
    return found


def device_memory(accelerator: str) -> int | None:
    """Return the bytes of a GPU of this machine; None for CPU devices, which share one memory."""
    return torch.cuda.get_device_properties(0).total_memory if uses_gpu(accelerator) else None
