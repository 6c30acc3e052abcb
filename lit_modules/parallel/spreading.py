"""Distribute a network over the devices of a run: apply every plan in the required order."""

import torch
from lightning.pytorch.strategies import Strategy

from lit_modules.networks import PalimpsestForCausalLM
from lit_modules.parallel.context import ContextParallel, split_context
from lit_modules.parallel.recomputing import apply_recomputation
from lit_modules.parallel.sharding import shard_model
from lit_modules.parallel.strategies import Sharded
from lit_modules.parallel.tensor import split_tensors


def distribute(
    model: PalimpsestForCausalLM, strategy: Strategy | None, *, compile: bool, activation_checkpointing: str | int
) -> ContextParallel | None:
    """Change `model` in place: split heads, recompute and compile blocks, split sequences, shard weights.

    Args:
        strategy: a strategy of lit_modules.parallel.strategies after its setup; any other means one device, or DDP.
        compile: torch.compile each block's forward, not the module: FSDP hooks the module's call and must stay outside.
        activation_checkpointing: a policy of lit_modules.parallel.recomputing.

    Returns:
        The plan that splits batches, or None if sequences are not split.

    Raises:
        ValueError: if heads or sequences cannot be split so; the line names the key.
    """
    if isinstance(strategy, Sharded) and strategy.layout.tensor > 1:
        split_tensors(model, strategy.device_mesh["tensor"])
    apply_recomputation(model.model.layers, activation_checkpointing)
    group = getattr(strategy, "context_group", None)
    context = None if group is None else split_context(model, group)
    if compile:
        for block in model.model.layers:
            block.forward = torch.compile(block.forward)
    if isinstance(strategy, Sharded):
        dimensions = ("replicate", "shard") if strategy.layout.replicate > 1 else "shard"
        shard_model(
            model,
            strategy.device_mesh[dimensions],
            strategy.rest_mesh[dimensions],
            precision=strategy.precision_plugin.precision,
            reshard_after_forward=strategy.reshard_after_forward,
        )
    return context
