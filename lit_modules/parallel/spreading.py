"""A network on the devices of a run: every plan that applies, in the order in which they fit on one another."""

from typing import Any

import torch

from lit_modules.networks import PalimpsestForCausalLM
from lit_modules.parallel.context import ContextParallel, split_context
from lit_modules.parallel.recomputing import recompute
from lit_modules.parallel.sharding import shard
from lit_modules.parallel.strategies import Sharded
from lit_modules.parallel.tensor import split_tensors


def spread(
    model: PalimpsestForCausalLM, strategy: Any, *, compile: bool, activation_checkpointing: str | int
) -> ContextParallel | None:
    """Change `model` in place: its heads split, blocks recomputed and compiled, sequences split, weights sharded.

    Args:
        strategy: a strategy of lit_modules.parallel.strategies that is set up; any other means one device, or DDP.
        compile: torch.compile each block. Its forward is compiled, and not the module: what shards weights hooks into
            the module's call, and stays outside.
        activation_checkpointing: a policy of lit_modules.parallel.recomputing.

    Returns:
        What cuts batches, where sequences are split.

    Raises:
        ValueError: heads or sequences cannot be split so; the line names the key.
    """
    sharded = isinstance(strategy, Sharded)
    if sharded and strategy.layout.tensor > 1:
        split_tensors(model, strategy.device_mesh["tensor"])
    recompute(model, activation_checkpointing)
    group = getattr(strategy, "context_group", None)
    context = None if group is None else split_context(model, group)
    if compile:
        for block in model.model.layers:
            block.forward = torch.compile(block.forward)
    if sharded:
        dimensions = ("replicate", "shard") if strategy.layout.replicate > 1 else "shard"
        shard(
            model,
            strategy.device_mesh[dimensions],
            strategy.rest_mesh[dimensions],
            precision=strategy.precision_plugin.precision,
            reshard_after_forward=strategy.reshard_after_forward,
        )
    return context
