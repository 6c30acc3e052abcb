"""What the backward pass computes again instead of keeping: activation checkpointing by policy.

The forward pass of a block keeps what its backward pass needs; recomputation keeps less and runs (parts of) the block
again. Memory falls in the order of the policies, and arithmetic grows in it:

    none       keep everything
    <n>        run every n-th block again, whole
    selective  keep the results of matrix products, attention and recurrences, and make the cheap rest again
    full       run every block again, whole
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lit_modules.networks import PalimpsestForCausalLM
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
"""The operations whose results "selective" keeps."""


def check_policy(policy: str | int, layers: int | None = None) -> None:
    """Raise ValueError, naming the key, unless `policy` is one of POLICIES or a whole number of at least 2.

    Args:
        layers: blocks of the model, where they are known: of fewer than n blocks, n recomputes none.
    """
    if policy in POLICIES:
        return
    if isinstance(policy, int) and policy >= 2:  # True is 1
        if layers is not None and policy > layers:
            raise ValueError(
                f"activation_checkpointing={policy} recomputes none of model.num_layers={layers} blocks: give none, or "
                f"at most {layers}"
            )
        return
    raise ValueError(
        f"activation_checkpointing={policy} is not a policy: give {', '.join(POLICIES)}, or n, 2 or more, for every "
        "n-th block"
    )


def recompute(model: PalimpsestForCausalLM, policy: str | int) -> None:
    """Let the blocks of `model` compute again in the backward pass what `policy` says; gradients stay as they are.

    Wraps `block.forward`, inside of the block's hooks: FSDP gathers a block's weights once for both computations. A
    compilation of `block.forward` is to come after this, and then plans the recomputation itself. With a cache, or
    without gradients, nothing is computed again.

    Args:
        policy: "none", "full", "selective", or n >= 2: the n-th block, the 2n-th and so on, whole.

    Raises:
        ValueError: for another policy.
    """
    check_policy(policy)
    if policy == "none":
        return
    every = policy if isinstance(policy, int) else 1
    # A block draws no random numbers, so that none have to be drawn again.
    run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if policy == "selective":
        run_again = partial(run_again, context_fn=partial(create_selective_checkpoint_contexts, EXPENSIVE))
    for block in model.model.layers[every - 1 :: every]:
        block.forward = _recomputed(block, run_again)


def _recomputed(block: nn.Module, run_again: Callable) -> Callable:
    forward = block.forward

    def call(hidden: Tensor, positions: Positions, cache: None = None, **shared: Tensor) -> Tensor:
        if cache is not None or not torch.is_grad_enabled():
            return forward(hidden, positions, cache, **shared)
        return run_again(forward, hidden, positions, **shared)

    return call
