"""Gather a whole network, or one tensor per rank."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lit_modules.networks import PalimpsestForCausalLM
from lit_modules.parallel.strategies import RankStrategy


def gather_model(model: PalimpsestForCausalLM, strategy: RankStrategy) -> PalimpsestForCausalLM | None:
    """Return the model with all weights: itself if unsharded, else a copy in main memory on rank 0 and None elsewhere.

    Every rank must call it.
    """
    if not strategy.needs_all_ranks:
        return model
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not strategy.is_global_zero:
        return None
    with torch.device("meta"):
        copy = PalimpsestForCausalLM(model.config)
    copy.load_state_dict(weights, assign=True)
    copy.tie_weights()
    copy.generation_config = model.generation_config
    return copy


def all_gather_tensors(own: Tensor, world_size: int) -> list[Tensor]:
    """All-gather one tensor per rank, all of the same shape. Every rank must call it."""
    if world_size == 1:
        return [own]
    gathered = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(gathered, own)
    return gathered
