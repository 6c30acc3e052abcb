"""Parameter counts and FLOPs per token of a model."""

import copy
from typing import NamedTuple

import torch

from lit_modules.networks.causal_lm import PalimpsestForCausalLM
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.linearized.models import LinearizedForCausalLM

SIZES = ("hidden_size", "num_layers", "intermediate_size", "augmented_query_dim", "vocab_size")


class ParameterCount(NamedTuple):
    """Parameters of a model.

    Attributes:
        total: all parameters; a shared matrix counts once.
        embedding: the input embedding; 0 if the head shares it.
        blocks: the blocks and the final norm.
        head: the output matrix.
    """

    total: int
    embedding: int
    blocks: int
    head: int

    @property
    def active(self) -> int:
        """All but the input embedding: the paper's N, the parameters multiplied with each token."""
        return self.total - self.embedding


def count_parameters(model: PalimpsestForCausalLM | LinearizedForCausalLM) -> ParameterCount:
    """Count a model's parameters; it may be on the meta device."""
    total = sum(parameter.numel() for parameter in model.parameters())
    head = model.lm_head.weight.numel()
    shared = model.lm_head.weight is model.model.embed_tokens.weight
    embedding = 0 if shared else model.model.embed_tokens.weight.numel()
    return ParameterCount(total, embedding, total - embedding - head, head)


def planned_parameters(config: PalimpsestConfig) -> int:
    """Count the parameters without building the model: one block per kind of mixer is built on the meta device.

    Raises:
        ValueError: if a matrix is larger than torch can count.
    """
    counts = {}
    for mixer in dict.fromkeys(config.layer_mixers):
        one = copy.deepcopy(config)
        one.num_layers, one.mixers = 1, [mixer]
        try:
            with torch.device("meta"):
                model = PalimpsestForCausalLM(one)
        except RuntimeError as error:  # "Storage size calculation overflowed"
            raise ValueError(f"{sizes_of(config)}: one matrix takes 8 EiB or more: lower one of them") from error
        block = sum(parameter.numel() for parameter in model.model.layers.parameters())
        counts[mixer], others = block, count_parameters(model).total - block
    return others + sum(counts[mixer] for mixer in config.layer_mixers)


def sizes_of(config: PalimpsestConfig) -> str:
    """List the keys and values that determine a model's size."""
    return ", ".join(f"model.{key}={getattr(config, key)}" for key in SIZES if getattr(config, key) is not None)


def flops_per_token(config: PalimpsestConfig, length: int) -> int:
    """Count the floating point operations per training token, forward and backward, for sequences of `length` tokens.

    `3 (2 N + each layer's mixing)` (arXiv 2503.02130, table 6): the backward pass costs twice the forward one;
    recomputation in checkpointing and pruning are not counted. `mixing_flops` of each mixer counts what its parameters
    do not.
    """
    with torch.device("meta"):
        model = PalimpsestForCausalLM(config)
    mixing = sum(layer.self_attn.mixing_flops(length) for layer in model.model.layers)
    return 3 * (2 * count_parameters(model).active + mixing)
