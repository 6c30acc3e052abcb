"""The strategy of a run that names none: the simplest that a model and its devices allow."""

from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.strategies import Strategy

from lit_modules.parallel.strategies import DataParallel, OneDevice, Sharded

# Bytes for each parameter in float32 training: the weight, its gradient, AdamW's two moments, and autocast's copy.
TRAINING_BYTES = 4 + 4 + 8 + 2
ROOM = 0.5  # of a device's memory for these; the rest is for activations


def choose(accelerator: str, devices: Any, num_nodes: int, parameters: int) -> Strategy:
    """The strategy that `simplest` names for the devices of this machine and as many on each other node."""
    name = simplest(parameters, count_devices(accelerator, devices), num_nodes, memory_of_a_device(accelerator))
    if name == "one":
        return OneDevice(device_of(accelerator, devices))
    if name == "ddp":
        return DataParallel(gradient_as_bucket_view=True)
    return Sharded(shard_size="node" if name == "hsdp" else None)


def simplest(parameters: int, devices: int, num_nodes: int, memory: float | None) -> str:
    """ "one" device; "ddp" where a device holds the training of all `parameters`; "hsdp", shards within each node,
    where the `devices` of a node hold it; else "fsdp" over all.

    Args:
        memory: bytes of a device; None where it is not divided.
    """
    needed = TRAINING_BYTES * parameters
    if devices * num_nodes == 1:
        return "one"
    if memory is None or needed <= ROOM * memory:
        return "ddp"
    return "hsdp" if num_nodes > 1 and needed / devices <= ROOM * memory else "fsdp"


def on_gpu(accelerator: str) -> bool:
    """Whether the trainer's `accelerator` means GPUs here."""
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def count_devices(accelerator: str, devices: Any) -> int:
    """How many devices of this machine the trainer's `accelerator` and `devices` mean."""
    kind = CUDAAccelerator if on_gpu(accelerator) else CPUAccelerator
    if devices in ("auto", -1, "-1"):
        return kind.auto_device_count()
    parsed = kind.parse_devices(devices)
    return len(parsed) if isinstance(parsed, list) else int(parsed or 0)


def device_of(accelerator: str, devices: Any) -> torch.device:
    """The one device that the trainer's `accelerator` and `devices` mean."""
    if not on_gpu(accelerator):
        return torch.device("cpu")
    chosen = CUDAAccelerator.parse_devices(1 if devices in ("auto", -1, "-1") else devices)
    return torch.device("cuda", chosen[0])


def memory_of_a_device(accelerator: str) -> int | None:
    """Bytes of a GPU of this machine; None for a processor, whose memory is not divided."""
    return torch.cuda.get_device_properties(0).total_memory if on_gpu(accelerator) else None
