"""Initial weights for a model that no rank could hold whole, the same as if one had made it.

    with torch.device("meta"):
        model = PalimpsestForCausalLM(config)
    ...                      # split and shard it
    materialize(model, torch.device("cuda"))

Beside its own shards a rank holds one block of the whole model at a time, or the embedding, in main memory.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_modules.networks import PalimpsestForCausalLM
from lit_modules.networks.causal_lm import PalimpsestModel


@torch.no_grad()
def materialize(model: PalimpsestForCausalLM, device: torch.device) -> None:
    """Give `model`, made on the meta device and spread over ranks since, its weights on `device`.

    Bit for bit those of `PalimpsestForCausalLM(model.config)` on the CPU: every rank draws all numbers of its generator
    in the same order, which therefore has to start alike, and keeps those of its shards. It ends alike, too.
    """
    config = model.config
    model.to_empty(device=device)
    model.tie_weights()
    parameters = dict(model.named_parameters())
    with torch.device("meta"), _DrawnForNothing():
        stack = PalimpsestModel(config)
    for name, part in _parts(stack):
        _fill(parameters, f"model.{name}", part, stack)
    with torch.device("meta"), _DrawnForNothing():
        head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    _fill(parameters, "lm_head", head, stack)  # where it shares the embedding, parameters lacks it


class _DrawnForNothing(TorchDispatchMode):
    """Draws, and drops, what constructors would draw on the CPU: the initial weights come after it in the stream."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default):
            function(torch.empty(args[0].shape, dtype=args[0].dtype, device="cpu"), *args[1:], **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _parts(stack: PalimpsestModel) -> list[tuple[str, nn.Module]]:
    """Embedding, each block, and so on, by name, in the order in which Hugging Face initializes them."""
    parts = []
    for name, child in stack.named_children():
        blocks = child.named_children() if isinstance(child, nn.ModuleList) else ()
        parts += [(f"{name}.{number}", block) for number, block in blocks] or [(name, child)]
    return parts


def _fill(parameters: dict[str, Tensor], prefix: str, part: nn.Module, stack: PalimpsestModel) -> None:
    """Initialize `part`, which is on the meta device, and copy this rank's share of it into `parameters`."""
    part.to_empty(device="cpu").apply(stack._init_weights)
    for name, whole in part.named_parameters(prefix):
        if name in parameters:
            target = parameters[name]
            target = target.to_local() if isinstance(target, DTensor) else target
            target.copy_(own_part(whole, parameters[name]))
    part.to("meta")


def own_part(whole: Tensor, spread: Tensor) -> Tensor:
    """What this rank has of `whole`, which is spread as `spread` is: FSDP cut what tensor parallelism had cut."""
    if not isinstance(spread, DTensor):
        return whole
    mesh = spread.device_mesh
    for dimension in reversed(range(mesh.ndim)):
        placement = spread.placements[dimension]
        if not placement.is_replicate():
            parts, rank = whole.chunk(mesh.size(dimension), placement.dim), mesh.get_local_rank(dimension)
            whole = parts[rank] if rank < len(parts) else whole.narrow(placement.dim, 0, 0)
    return whole
