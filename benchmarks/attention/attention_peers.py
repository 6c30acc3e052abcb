"""Implementations of causal attention that forgetting_attention.py compares, behind one interface.

Each takes a `Problem` and returns a `Call`: a forward pass without arguments, the leaves to differentiate, and the
output's gradient. Inputs that a model would already have are prepared untimed: each peer's preferred layout, the bound
on the logits, block masks. A peer that is not installed raises ImportError; one that does not support the problem
raises its own exception.
"""

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.measuring.timing import Call
from kernels import forgetting_attention

PRUNE = -10.0  # natural log of the attention mass that pruning may lose, as in the papers


@dataclass
class Problem:
    """Inputs of one attention call.

    q, k, v: [B, T, H, D], heads of k and v may be fewer. log_forget: [B, T, Hq] float32. d_out: [B, T, Hq, Dv].
    logit_bound: [Hq] float32, largest |q.k| / sqrt(D). window, cu_seqlens: as in `forgetting_attention`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_forget: Tensor
    d_out: Tensor
    logit_bound: Tensor
    window: int | None = None
    cu_seqlens: Tensor | None = None


def largest_logits(q: Tensor, k: Tensor) -> Tensor:
    """Return the bound on |q.k| / sqrt(D) from the largest norms of q and k `[B, T, H, D]`, [Hq] float32."""
    norms = [torch.linalg.vector_norm(x.float(), dim=-1).amax((0, 1)) for x in (q, k)]
    return q.shape[3] ** -0.5 * norms[0] * norms[1].repeat_interleave(q.shape[2] // k.shape[2])


def _leaf(x: Tensor) -> Tensor:
    return x.detach().contiguous().requires_grad_()


def _heads_first(x: Tensor) -> Tensor:
    return _leaf(x.transpose(1, 2))


def ours(problem: Problem, gated: bool = True, pruned: bool = False) -> Call:
    """Call `kernels.forgetting_attention`."""
    tensors = (problem.q, problem.k, problem.v) + ((problem.log_forget,) if gated else ())
    leaves = tuple(_leaf(x) for x in tensors)
    options = {"prune": PRUNE, "logit_bound": problem.logit_bound} if pruned else {}
    options |= {"window": problem.window, "cu_seqlens": problem.cu_seqlens}
    return Call(lambda: forgetting_attention(*leaves, **options), leaves, problem.d_out)


def official(problem: Problem, pruned: bool = False) -> Call:
    """Call the Triton kernel of the Forgetting Transformer's authors; it needs equal heads and equal lengths.

    pruned: with adaptive computation pruning, at our threshold.
    """
    kernel = importlib.import_module("forgetting_transformer").forgetting_attention
    _refuse(problem, window=True, cu_seqlens=True)
    q, k, v = (_heads_first(x) for x in (problem.q, problem.k, problem.v))
    log_forget = _leaf(problem.log_forget.mT)
    threshold = None
    if pruned:
        bound = problem.logit_bound.expand(q.shape[0], -1)
        threshold = PRUNE - 2 * bound - math.log(q.shape[2])
    leaves = (q, k, v, log_forget)
    return Call(
        lambda: kernel(*leaves, head_first=True, adaptive_threshold=threshold),
        leaves,
        problem.d_out.transpose(1, 2).contiguous(),
        heads_first=True,
    )


def fla(problem: Problem) -> Call:
    """Call flash-linear-attention's parallel forgetting attention."""
    kernel = importlib.import_module("fla.ops.forgetting_attn").parallel_forgetting_attn
    cu_seqlens = None if problem.cu_seqlens is None else problem.cu_seqlens.long()
    leaves = tuple(_leaf(x) for x in (problem.q, problem.k, problem.v, problem.log_forget))
    return Call(lambda: kernel(*leaves, window_size=problem.window, cu_seqlens=cu_seqlens), leaves, problem.d_out)


def sdpa(problem: Problem, backend: SDPBackend) -> Call:
    """Call PyTorch's attention with one of its backends, no gate."""
    _refuse(problem, window=True, cu_seqlens=True)
    leaves = tuple(_heads_first(x) for x in (problem.q, problem.k, problem.v))
    grouped = leaves[0].shape[1] != leaves[1].shape[1]

    def forward() -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=grouped)

    return Call(forward, leaves, problem.d_out.transpose(1, 2).contiguous(), heads_first=True)


def sdpa_flash(problem: Problem) -> Call:
    """Call PyTorch's FlashAttention-2, no gate; for packed documents its variable-length form."""
    if problem.cu_seqlens is None:
        return sdpa(problem, SDPBackend.FLASH_ATTENTION)
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # The argument for the causal mask was renamed between PyTorch versions.
    has_flag = "is_causal" in inspect.signature(varlen_attn).parameters
    causal = {"is_causal": True} if has_flag else {"window_size": (-1, 0)}
    leaves = tuple(_leaf(x[0]) for x in (problem.q, problem.k, problem.v))
    bounds, longest = problem.cu_seqlens, int(problem.cu_seqlens.diff().max())
    return Call(
        lambda: varlen_attn(*leaves, bounds, bounds, longest, longest, **causal), leaves, problem.d_out[0].contiguous()
    )


def flash_attention(problem: Problem, module: str) -> Call:
    """Call a FlashAttention newer than PyTorch's, no gate."""
    kernel = importlib.import_module(module).flash_attn_func
    _refuse(problem, cu_seqlens=True)
    leaves = tuple(_leaf(x) for x in (problem.q, problem.k, problem.v))
    window = {} if problem.window is None else {"window_size": (problem.window - 1, 0)}

    def forward() -> Tensor:
        out = kernel(*leaves, causal=True, **window)
        return out[0] if isinstance(out, tuple) else out

    return Call(forward, leaves, problem.d_out)


def flex(problem: Problem) -> Call:
    """Call PyTorch's flex_attention, compiled, with `-c_j` added to the scores: c_i cancels in the softmax."""
    _refuse(problem, window=True, cu_seqlens=True)
    module = importlib.import_module("torch.nn.attention.flex_attention")
    q, k, v = (_heads_first(x) for x in (problem.q, problem.k, problem.v))
    log_forget = _leaf(problem.log_forget.mT)
    length = q.shape[2]
    causal = module.create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=q.device)

    @torch.compile(dynamic=False)
    def attend(q: Tensor, k: Tensor, v: Tensor, log_forget: Tensor) -> Tensor:
        decay = log_forget.cumsum(-1)
        return module.flex_attention(q, k, v, lambda score, b, h, i, j: score - decay[b, h, j], block_mask=causal)

    leaves = (q, k, v, log_forget)
    return Call(lambda: attend(*leaves), leaves, problem.d_out.transpose(1, 2).contiguous(), heads_first=True)


def _refuse(problem: Problem, window: bool = False, cu_seqlens: bool = False) -> None:
    if window and problem.window is not None:
        raise NotImplementedError("no window")
    if cu_seqlens and problem.cu_seqlens is not None:
        raise NotImplementedError("no packed documents")


# In the order of the table columns.
IMPLEMENTATIONS: dict[str, Callable[[Problem], Call]] = {
    "ours, plain": partial(ours, gated=False),
    "ours, gated": ours,
    "ours, pruned": partial(ours, pruned=True),
    "FoX official": official,
    "FoX official, pruned": partial(official, pruned=True),
    "fla": fla,
    "FA2": sdpa_flash,
    "cuDNN": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "FA3": partial(flash_attention, module="flash_attn_interface"),  # CUDA C++
    "FA4": partial(flash_attention, module="flash_attn.cute"),  # CuTe DSL; on Hopper it follows FlashAttention-3
    "flex": flex,
}
