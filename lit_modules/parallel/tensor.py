"""Tensor parallelism: each rank of a group has some heads of every attention and some columns of every SwiGLU.

A block's input and output are replicated over the group. Matrices into heads are split by rows, matrices out of heads
by columns. The results of the latter are all-reduced over the group, and in the backward pass the input gradients of
the former: two all-reduces per block and direction.

Embedding, final norm and head are replicated. Logits are the largest tensor, so each rank computes the loss of its
share of the tokens. The gradients after a backward pass, for a group of n ranks:

    blocks                        this rank's part of the gradient of the mean loss over the group's batch
    embedding, final norm, head   whole on every rank; their MEAN over the group is the gradient of the mean loss. The
                                  head's is n times that of this rank's tokens; the others' are equal on all ranks

Gradient averaging over groups that read different data (FSDP) must therefore also average the second line over the
ranks of a group, but not the first line.
"""

import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call

from common.settings import SettingError
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.networks.linear_cross_entropy import IGNORE_INDEX, linear_cross_entropy
from lit_modules.networks.mixers.attention import Attention
from lit_modules.parallel.gradients import local_shard


def split_tensors(model: PalimpsestForCausalLM, mesh: DeviceMesh) -> None:
    """Split the blocks of `model` and its loss, in place, over the ranks of the one-dimensional `mesh`.

    Split parameters become DTensors over `mesh` with the first rank's values (nothing is sent for a model on the meta
    device); the others stay plain tensors. Names do not change. Every rank of the group must call the forward pass with
    the same arguments; inputs and outputs are as before. Each rank gets the loss of all tokens and must run its
    backward pass.

    Raises:
        ValueError: if the model cannot be split so; the line names the key.
    """
    check_split(model.config, mesh.size())
    for block in model.model.layers:
        _split_attention(block.self_attn, mesh)
        if block.mlp is not None:
            parallelize_module(block.mlp, mesh, _INTO_THE_BLOCK)
            parallelize_module(block.mlp, mesh, _swiglu(Replicate()))
    model._loss = partial(_shared_loss, model, mesh)  # type: ignore[method-assign]  # of this model alone


def check_split(config: PalimpsestConfig, ranks: int) -> None:
    """Check that a model of `config` can be split over `ranks` ranks.

    Raises:
        ValueError: if it cannot; the line names the key.
    """
    others = sorted(set(config.layer_mixers) - {"attention"})
    if others and ranks > 1:
        problem = f"splits attention alone, and model.mixers has {', '.join(others)}"
        raise SettingError("strategy.tensor_parallel_size", ranks, "give 1", problem)
    heads, key_heads, value_heads = config.head_counts
    sizes = {
        "num_heads": heads,
        "num_key_heads": key_heads,
        "num_value_heads": value_heads,
        "augmented_query_dim": config.augmented_query_dim,
        "intermediate_size": config.intermediate_size,
    }
    for key, size in sizes.items():
        if size is not None and size % ranks:
            problem = f"does not divide model.{key}={size}"
            raise SettingError("strategy.tensor_parallel_size", ranks, "give a size that divides it", problem)


# A block's normalized input is marked replicated before it branches, so that one all-reduce sums the gradients of all
# branches.
_INTO_THE_BLOCK = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))
_INTO_THE_MIXER = PrepareModuleInput(
    input_layouts=(Replicate(), None, None), desired_input_layouts=(Replicate(), None, None)
)


def _swiglu(output: Replicate | Shard) -> dict[str, ParallelStyle]:
    return {
        "gate_proj": ColwiseParallel(),
        "up_proj": ColwiseParallel(),
        "down_proj": RowwiseParallel(output_layouts=output),
    }


class ByHeads(ParallelStyle):
    """Modules with parameters `[heads, ...]` that compute each head's result from that head's parameters only.

    The module runs on its local parameters: the same arithmetic on fewer heads. Its input is each rank's heads,
    `[B, T, H / n, D]`, or, as a DTensor, a mixer's replicated input.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        smaller: Any = copy.deepcopy(module).to("meta")  # its parameters are never used; it may have num_heads
        if hasattr(smaller, "num_heads"):
            smaller.num_heads //= device_mesh.size()
        for owner in module.modules():
            for key, parameter in owner.named_parameters(recurse=False):
                split = distribute_tensor(parameter, device_mesh, [Shard(0)])
                owner.register_parameter(key, nn.Parameter(split, requires_grad=parameter.requires_grad))

        def forward(x: Tensor | DTensor) -> Tensor:
            if isinstance(x, DTensor):
                x = x.to_local(grad_placements=[Partial()])  # every rank's heads add to its gradient
            return functional_call(smaller, {name: local_shard(p) for name, p in module.named_parameters()}, (x,))

        module.forward = forward
        return module


class OwnHeads(ParallelStyle):
    """A forget gate without parameters, hence without gradients: each rank slices its heads of `[B, T, H]`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward = module.forward

        def of_own_heads(hidden: DTensor) -> Tensor:
            return forward(hidden.to_local()).chunk(device_mesh.size(), dim=2)[device_mesh.get_local_rank()]

        module.forward = of_own_heads
        return module


def _split_attention(attention: Attention, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {
        "q_proj": ColwiseParallel(),
        "k_proj": ColwiseParallel(),
        "v_proj": ColwiseParallel(),
        "o_proj": RowwiseParallel(),
        "g_proj": ColwiseParallel(),
        "k_shift_proj": ColwiseParallel(),
        "v_shift_proj": ColwiseParallel(),
        "forget_gate": ByHeads(),
        "k_map_proj": ByHeads(),
        "q_norm": ByHeads(),
        "k_norm": ByHeads(),
        "o_norm": ByHeads(),
    }
    if attention.augmented_q is not None:
        # Every column reads all heads, so gather them; the result is split by heads.
        plan["q_proj"] = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        plan |= {f"augmented_q.{name}": style for name, style in _swiglu(Shard(-1)).items()}
    if attention.forget_gate is not None and attention.forget_gate.kind == "fixed":
        plan["forget_gate"] = OwnHeads()
    parallelize_module(attention, mesh, _INTO_THE_MIXER)
    parallelize_module(attention, mesh, {name: style for name, style in plan.items() if _has(attention, name)})
    of_all_heads = attention._logit_bound

    def of_own_heads() -> Tensor | None:
        bound = of_all_heads()
        return None if bound is None else local_shard(bound)

    attention._logit_bound = of_own_heads  # type: ignore[method-assign]  # of this layer alone


def _has(module: nn.Module, name: str) -> bool:
    return getattr(module, name.partition(".")[0]) is not None


def _shared_loss(
    model: PalimpsestForCausalLM,
    mesh: DeviceMesh,
    hidden: Tensor,
    targets: Tensor,
    reduction: str,
    num_items_in_batch: int | Tensor | None,
) -> Tensor:
    """Replace the model's `_loss`: each rank computes the loss of its share of the tokens.

    Returns:
        The loss of all tokens, on every rank. For its gradients see the module docstring.
    """
    group = mesh.get_group()
    flat_targets = targets.flatten()
    share = _Share(group, flat_targets.numel())
    own_hidden, own_targets = _OwnTokens.apply(hidden.flatten(0, -2), share), flat_targets[share.own]
    if reduction == "none" and num_items_in_batch is None:
        losses = linear_cross_entropy(own_hidden, model.lm_head.weight, own_targets, reduction="none")
        return share.gather(losses).view(targets.shape)
    total = linear_cross_entropy(own_hidden, model.lm_head.weight, own_targets, reduction="sum")
    total = _SumOverRanks.apply(total, group)
    if num_items_in_batch is not None:
        return total / num_items_in_batch
    return total / (targets != IGNORE_INDEX).sum().clamp(min=1) if reduction == "mean" else total


class _Share:
    """This rank's consecutive share of the tokens; the last shares may be smaller or empty."""

    def __init__(self, group: dist.ProcessGroup, tokens: int) -> None:
        self.group, self.ranks, self.tokens = group, group.size(), tokens
        self.size = -(-tokens // self.ranks)
        start = min(tokens, group.rank() * self.size)
        self.own = slice(start, min(tokens, start + self.size))

    def gather(self, own: Tensor) -> Tensor:
        """Gather all ranks' `own` `[own tokens, ...]` in rank order: `[tokens, ...]`."""
        padded = own.new_zeros(self.size, *own.shape[1:])
        padded[: own.shape[0]] = own
        parts = own.new_empty(self.ranks * self.size, *own.shape[1:])
        dist.all_gather(list(parts.split(self.size)), padded, group=self.group)
        return parts[: self.tokens]


class _OwnTokens(torch.autograd.Function):
    """This rank's share of `[tokens, D]`. Backward gathers the gradients of all shares, which are n times too large."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, share: _Share) -> Tensor:
        ctx.share = share
        return hidden[share.own]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.share.gather(grad) / ctx.share.ranks, None


class _SumOverRanks(torch.autograd.Function):
    """All-reduce sum. Backward multiplies the gradient by n: its average over n ranks is the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.ranks = group.size()
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None
