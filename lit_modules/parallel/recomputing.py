"""Activation checkpointing by policy: what the backward pass recomputes instead of keeping.

The forward pass of a block keeps the activations of its backward pass; recomputation keeps fewer and runs (parts of)
the block again. In the order of the policies memory falls and arithmetic grows:

    none       keep everything
    <n>        recompute every n-th block entirely
    selective  keep the results of matrix products, attention and recurrences; recompute the cheap rest
    full       recompute every block entirely
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common.settings import SettingError
from lit_modules.networks.positions import Positions

POLICIES = ("none", "full", "selective")

EXPENSIVE = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.palimpsest.forgetting_attention_chunked.default,
    torch.ops.palimpsest.forgetting_attention_triton.default,
    torch.ops.palimpsest.gated_recurrence_chunked.default,
    torch.ops.palimpsest.gated_recurrence_triton.default,
]
"""Operations whose results "selective" keeps."""


def check_policy(policy: str | int, layers: int | None = None) -> None:
    """Check that `policy` is one of POLICIES or a whole number of at least 2.

    Args:
        layers: number of blocks, if known; a larger n recomputes none.

    Raises:
        ValueError: if it is not; the line names the key.
    """
    if policy in POLICIES:
        return
    if isinstance(policy, int) and policy >= 2:  # True is 1
        if layers is not None and policy > layers:
            problem = f"recomputes none of model.num_layers={layers} blocks"
            raise SettingError("activation_checkpointing", policy, f"give none, or at most {layers}", problem)
        return
    fix = f"give {', '.join(POLICIES)}, or n, 2 or more, for every n-th block"
    raise SettingError("activation_checkpointing", policy, fix, "is not a policy")


def apply_recomputation(blocks: Sequence[nn.Module], policy: str | int) -> None:
    """Let the blocks of a model recompute activations in the backward pass by `policy`; gradients do not change.

    This wraps `block.forward`, inside the block's hooks, so that FSDP gathers a block's weights once for both
    computations. Compile `block.forward` after this; the compiler then plans the recomputation. With a cache or without
    gradients nothing is recomputed.

    Args:
        policy: "none", "full", "selective", or n >= 2: blocks n, 2n and so on, entirely.

    Raises:
        ValueError: if the policy is unknown.
    """
    check_policy(policy)
    if policy == "none":
        return
    every = policy if isinstance(policy, int) else 1
    # Blocks draw no random numbers, so the RNG state need not be restored.
    run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if policy == "selective":
        run_again = partial(run_again, context_fn=partial(create_selective_checkpoint_contexts, EXPENSIVE))
    for block in blocks[every - 1 :: every]:
        block.forward = _recomputed(block, run_again)


def _recomputed(block: nn.Module, run_again: Callable) -> Callable:
    forward = block.forward

    def call(hidden: Tensor, positions: Positions, cache: None = None, **shared: Tensor) -> Tensor:
        if cache is not None or not torch.is_grad_enabled():
            return forward(hidden, positions, cache, **shared)
        return run_again(forward, hidden, positions, **shared)

    return call
