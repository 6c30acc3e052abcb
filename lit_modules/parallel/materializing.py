"""Initialize a sharded model that no rank could hold whole, with the same weights as an unsharded one.

    with torch.device("meta"):
        model = PalimpsestForCausalLM(config)
    ...                      # split and shard it
    materialize(model, torch.device("cuda"))

In addition to its shards a rank holds one whole block, or the embedding, in main memory at a time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from lit_modules.networks import PalimpsestForCausalLM
from lit_modules.networks.causal_lm import PalimpsestModel
from lit_modules.parallel.gradients import local_shard


@torch.no_grad()
def materialize(model: PalimpsestForCausalLM, device: torch.device) -> None:
    """Fill `model`, made on the meta device and then sharded, with its initial weights on `device`.

    They equal `PalimpsestForCausalLM(model.config)` on the CPU bit for bit: every rank draws all random numbers in the
    same order and keeps those of its shards. The ranks' generators must start in the same state, and end in the same
    state.
    """
    config = model.config
    model.to_empty(device=device)
    model.tie_weights()
    parameters = dict(model.named_parameters())
    with torch.device("meta"), _DrawAndDrop():
        stack = PalimpsestModel(config)
    for name, part in _parts(stack):
        _fill(parameters, f"model.{name}", part, stack)
    with torch.device("meta"), _DrawAndDrop():
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    _fill(parameters, "lm_head", head, stack)  # `parameters` lacks it if it shares the embedding


class _DrawAndDrop(TorchDispatchMode):
    """Draw and drop the numbers that constructors would draw on the CPU, because they precede the initial weights."""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default):
            function(torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu"), *args[1:], **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _parts(stack: PalimpsestModel) -> list[tuple[str, nn.Module]]:
    """List embedding, each block, and so on, by name, in the order of Hugging Face's initialization."""
    parts: list[tuple[str, nn.Module]] = []
    for name, child in stack.named_children():
        blocks = child.named_children() if isinstance(child, nn.ModuleList) else ()
        parts += [(f"{name}.{number}", block) for number, block in blocks] or [(name, child)]
    return parts


def _fill(parameters: Mapping[str, Tensor], prefix: str, part: nn.Module, stack: PalimpsestModel) -> None:
    """Initialize `part`, which is on the meta device, and copy this rank's shards of it to `parameters`."""
    part.to_empty(device="cpu").apply(stack._init_weights)
    for name, whole in part.named_parameters(prefix):
        if name in parameters:
            local_shard(parameters[name]).copy_(rank_part(whole, parameters[name]))
    part.to("meta")


def rank_part(whole: Tensor, spread: Tensor) -> Tensor:
    """Return this rank's shard of `whole`, placed like `spread`: FSDP shards inside tensor parallelism's parts."""
    if not isinstance(spread, DTensor):
        return whole
    mesh = spread.device_mesh
    for dimension in reversed(range(mesh.ndim)):
        placement = spread.placements[dimension]
        if isinstance(placement, Shard | _StridedShard):
            parts, rank = whole.chunk(mesh.size(dimension), placement.dim), mesh.get_local_rank(dimension)
            whole = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole
