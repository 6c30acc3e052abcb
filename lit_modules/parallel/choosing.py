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
ROOM = 0.5  # share of a device's memory for these; the rest is for activations


def choose(accelerator: str, devices: Any, num_nodes: int, parameters: int) -> Strategy:
    """Create the strategy that `simplest` names for this machine's devices and as many on each other node."""
    name = simplest(parameters, count_devices(accelerator, devices), num_nodes, memory_of_a_device(accelerator))
    if name == "one":
        return OneDevice(device_of(accelerator, devices))
    if name == "ddp":
        return DataParallel(gradient_as_bucket_view=True)
    return Sharded(shard_size="node" if name == "hsdp" else None)


def simplest(parameters: int, devices: int, num_nodes: int, memory: float | None) -> str:
    """Return the simplest strategy: "one", "ddp", "hsdp" or "fsdp".

    "one" is for a single device. "ddp" needs a device that holds the training of all `parameters`. "hsdp", shards
    within each node, needs a node whose `devices` hold it. Else "fsdp" shards over all.

    Args:
        memory: bytes of a device; None if the devices share one memory.
    """
    needed = TRAINING_BYTES * parameters
    if devices * num_nodes == 1:
        return "one"
    if memory is None or needed <= ROOM * memory:
        return "ddp"
    return "hsdp" if num_nodes > 1 and needed / devices <= ROOM * memory else "fsdp"


def check_memory(config: PalimpsestConfig, cfg: DictConfig, strategy: Strategy) -> None:
    """Refuse a model whose training cannot fit into this machine's memory, before allocating any.

    Only the certain parts count: weights, gradients and AdamW's two moments, sharded over as many ranks as possible.

    Raises:
        ValueError: if it cannot fit; the line gives the needed and the available memory.
    """
    accelerator, devices, num_nodes = cfg.trainer.accelerator, cfg.trainer.devices, cfg.trainer.num_nodes
    try:
        here = count_devices(accelerator, devices)
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise ValueError(f"trainer: {error}") from error
    each = 2 if cfg.trainer.precision == "bf16-true" else 4
    held = 4 if "Adam" in cfg.optimizer._target_ else 2
    parameters = planned_parameters(config)
    needed = parameters * each * held / (here * num_nodes if isinstance(strategy, Sharded) else 1)
    memory, where = memory_of_a_device(accelerator), "a GPU here"
    if memory is None:
        memory, where, needed = psutil.virtual_memory().total, "this machine", needed * here
    if needed > memory:
        raise ValueError(
            f"{sizes_of(config)}: to train {parameters / 1e9:,.1f}B parameters takes {needed / 2**30:,.0f} GiB for "
            f"weights, gradients and the optimizer alone, and {where} has {memory / 2**30:,.0f} GiB: lower one of "
            "them, or ask job=plan on what it would fit"
        )


def on_gpu(accelerator: str) -> bool:
    """Return whether the trainer's `accelerator` means GPUs on this machine."""
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def count_devices(accelerator: str, devices: Any) -> int:
    """Count the devices of this machine that the trainer's `accelerator` and `devices` mean."""
    kind = CUDAAccelerator if on_gpu(accelerator) else CPUAccelerator
    if devices in ("auto", -1, "-1"):
        return kind.auto_device_count()
    parsed = kind.parse_devices(devices)
    return len(parsed) if isinstance(parsed, list) else int(parsed or 0)


def device_of(accelerator: str, devices: Any) -> torch.device:
    """Return the one device that the trainer's `accelerator` and `devices` mean."""
    if not on_gpu(accelerator):
        return torch.device("cpu")
    chosen = CUDAAccelerator.parse_devices(1 if devices in ("auto", -1, "-1") else devices)
    return torch.device("cuda", chosen[0])


def memory_of_a_device(accelerator: str) -> int | None:
    """Return the bytes of a GPU of this machine; None for CPU devices, which share one memory."""
    return torch.cuda.get_device_properties(0).total_memory if on_gpu(accelerator) else None
