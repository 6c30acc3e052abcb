"""The tensors of a training by name under any strategy, and their division among ranks for writing."""

import io
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's own parameters and buffers by name: the same names under DDP, FSDP2 and torch.compile.

    If the module defines `checkpointed(name)`, only the tensors that it selects.
    """
    wanted = getattr(module, "checkpointed", lambda name: True)
    state = get_model_state_dict(module)
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and wanted(name)}


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer, *, make: bool = False) -> dict[str, Tensor]:
    """Return the optimizer's own state tensors, named `<parameter>.<key>`.

    Args:
        make: create the state of an optimizer that has not taken a step; otherwise return none for it.
    """
    if not optimizer.state and not make:
        return {}
    states: Any = get_optimizer_state_dict(module, optimizer)["state"]
    return {
        f"{parameter}.{key}": value
        for parameter, state in states.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def parameter_names(module: nn.Module) -> dict[Tensor, str]:
    """Return the names of parameters, without torch.compile's prefixes."""
    return {parameter: name.replace("_orig_mod.", "") for name, parameter in module.named_parameters()}


def learning_rates(module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, float]:
    """Return the learning rate of each parameter that an optimizer has."""
    names = parameter_names(module)
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {names[parameter]: float(group["lr"]) for group in groups for parameter in group["params"]}


def restore_learning_rates(module: nn.Module, optimizers: list[torch.optim.Optimizer], rates: dict[str, float]) -> None:
    """Set each group's learning rate from its parameters', even if the groups were split differently.

    Raises:
        ValueError: the parameters of one group had different learning rates.
    """
    names = parameter_names(module)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            known = {rates[names[parameter]] for parameter in group["params"] if names[parameter] in rates}
            if len(known) > 1:
                raise ValueError(f"optimizer: parameters of one group had learning rates {sorted(known)} when saved")
            for rate in known:
                group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate


def rank_share(tensors: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """Return the part of a state that this rank writes.

    Of each tensor that several ranks hold alike (all of the state under DDP, the shards of each copy under HSDP), one
    of them writes it, so that all write and stage about as much.
    """
    loads: dict[int, list[int]] = {}
    chosen = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].numel() * tensors[name].element_size(), name)):
        tensor = tensors[name]
        copies, mine = count_holders(tensor, rank, world_size)
        load = loads.setdefault(copies, [0] * copies)
        writer = load.index(min(load))
        load[writer] += tensor.numel() * tensor.element_size()
        if writer == mine:
            chosen[name] = tensor
    return chosen


def count_holders(tensor: Tensor, rank: int, world_size: int) -> tuple[int, int | None]:
    """Return how many ranks hold the same part of a tensor, and this rank's index among them (None: it has none)."""
    if not isinstance(tensor, DTensor):
        return world_size, rank
    mesh = tensor.device_mesh
    replicated = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    copies = math.prod(mesh.size(dim) for dim in replicated)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return copies, None
    number = 0
    for dim in replicated:
        number = number * mesh.size(dim) + coordinate[dim]
    return copies, number


def pack(state: Any) -> Tensor:
    """Serialize plain values and tensors into one uint8 tensor."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpack(tensor: Tensor) -> Any:
    """Return the input of `pack`."""
    return torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True)
