"""Shard a model with FSDP2, block by block."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lit_modules.networks import PalimpsestForCausalLM


def shard_model(
    model: PalimpsestForCausalLM,
    mesh: DeviceMesh,
    rest_mesh: DeviceMesh,
    *,
    precision: str,
    reshard_after_forward: bool = True,
) -> None:
    """Shard every block's parameters over the ranks of `mesh`, and the rest of the model's over `rest_mesh`.

    Under mixed precision the blocks' weights are gathered and used in bfloat16, and their gradients are reduced in
    float32. Embedding, final norm and head stay float32: the embedding starts the float32 residual stream, and the
    head's gradient accumulates in float32.

    Args:
        mesh, rest_mesh: one dimension, or two: replicas and shards.
        precision: the trainer's precision.
    """
    lowered = precision.startswith("bf16")
    blocks = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if lowered else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the residual stream keeps its dtype
    )
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=blocks, reshard_after_forward=reshard_after_forward)
    rest = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(model, mesh=rest_mesh, mp_policy=rest, reshard_after_forward=False)  # the head is used last and first
