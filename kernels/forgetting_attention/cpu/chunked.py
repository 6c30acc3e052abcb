"""Forgetting attention in plain PyTorch, chunk by chunk: the form for machines without CUDA.

c_i is constant along row i and cancels in its softmax, so with a reference r for each block of queries

    s_ij = scale q_i . k_j + (r - c_j)                      P_ij = exp(s_ij - lse_i)
    dP   = dO V^T        dS = P * (dP - delta)              delta_i = dO_i . O_i - dlse_i
    dQ   = scale dS K    dK = scale dS^T Q    dV = P^T dO   dc_i = sum_j dS_ij - sum_k dS_ki

Each block of queries reads its keys in chunks, from the diagonal backwards (so that every row has a finite maximum from
the first chunk on), with an online softmax. Masks touch only the columns that need one. Query heads that share a key
head are stacked as rows of one matrix: K and V are never repeated, and the matrix product sums their gradients over the
sharing heads. Memory: O(T) for the results, and a chunk of scores for each head.
"""

from functools import partial

import torch
from torch import Tensor

from kernels.forgetting_attention.cpu.blocks import Block, segments
from kernels.forgetting_attention.cpu.scores import KEY_CHUNK, LN_2, QUERY_CHUNK, SegmentScores, stack
from kernels.forgetting_attention.validation import check_values
from kernels.operation import empty_gradients


@torch.library.custom_op("palimpsest::forgetting_attention_chunked", mutates_args=())
def chunked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    cu_seqlens: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    prune_threshold: Tensor | None,
    scale: float,
    window: int | None,
    cumulative: bool,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, sums for the backward pass, and lse as `forgetting_attention` defines it.

    Returns:
        out [B, T, Hq, Dv] in q's dtype. sums [B, Hq, T], log2 of the sum of exp2 of each row of `SegmentScores.logits`.
        lse [B, T, Hq], empty without return_lse. sums and lse are float32 or float64, and -inf without a key.
    """
    check_values(q, k, log_forget, cu_seqlens, kv_start, kv_end, cumulative)
    out, sums, lse = _empty_results(q, v, return_lse)
    out.zero_()
    sums.fill_(-torch.inf)
    lse.fill_(-torch.inf)
    for segment in segments(q, k, cu_seqlens, kv_start, kv_end, QUERY_CHUNK * KEY_CHUNK):
        scores = SegmentScores(segment, q, k, v, log_forget, scale, window, cumulative)
        for block in scores.blocks(prune_threshold):
            # Autocast would round the products, and the backward pass needs exact sums.
            with torch.autocast(q.device.type, enabled=False):
                block_out, block_sums = _attend(scores, block)
            out[segment.rows, scores.rows(block)] = scores.heads_last(block_out).to(out.dtype)
            sums[segment.rows, :, scores.rows(block)] = block_sums.unflatten(0, (-1, q.shape[2]))
            if return_lse:
                natural = scores.natural(block_sums, block).unflatten(0, (-1, q.shape[2]))
                lse[segment.rows, scores.rows(block)] = natural.mT
    return out, sums, lse


def _attend(scores: SegmentScores, block: Block) -> tuple[Tensor, Tensor]:
    """Attend with one block of queries to all its keys. Return out [H, n, Dv] and the log2 of its sums [H, n]."""
    queries = scores.queries(block)
    row_max = row_sum = out = None
    for keys in scores.key_chunks(block):
        chunk = scores.logits(queries, block, keys)
        chunk_max = chunk.amax(-1, keepdim=True)
        previous_max, row_max = row_max, chunk_max if row_max is None else torch.maximum(row_max, chunk_max)
        weights = chunk.sub_(row_max).exp2_()
        chunk_sum, chunk_out = weights.sum(-1, keepdim=True), scores.weighted_values(weights, keys)
        if out is None:
            row_sum, out = chunk_sum, chunk_out
        else:
            shrink = previous_max.sub_(row_max).exp2_()
            row_sum = row_sum.mul_(shrink).add_(chunk_sum)
            out = out.mul_(shrink).add_(chunk_out)
    return out.div_(row_sum), (row_max + row_sum.log2()).squeeze(-1)


@chunked_forward.register_fake
def _(q, k, v, log_forget, cu_seqlens, kv_start, kv_end, prune_threshold, scale, window, cumulative, return_lse=False):
    return _empty_results(q, v, return_lse)


def _empty_results(q: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, num_queries, num_heads, _ = q.shape
    out = q.new_empty(batch, num_queries, num_heads, v.shape[3])
    new = partial(q.new_empty, dtype=torch.promote_types(q.dtype, torch.float32))
    lse_shape = (batch, num_queries, num_heads) if return_lse else (0,)
    return out, new((batch, num_heads, num_queries)), new(lse_shape)


@torch.library.custom_op("palimpsest::forgetting_attention_chunked_backward", mutates_args=())
def chunked_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_forget: Tensor | None,
    out: Tensor,
    sums: Tensor,
    cu_seqlens: Tensor | None,
    kv_start: Tensor | None,
    kv_end: Tensor | None,
    prune_threshold: Tensor | None,
    scale: float,
    window: int | None,
    cumulative: bool,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and log_forget in their dtypes; the last is empty without log_forget."""
    grads = [grad.zero_() for grad in empty_gradients(q, k, v, log_forget)]
    for segment in segments(q, k, cu_seqlens, kv_start, kv_end, QUERY_CHUNK * KEY_CHUNK):
        scores = SegmentScores(segment, q, k, v, log_forget, scale, window, cumulative)
        gathered = SegmentGradients(scores)
        for block in scores.blocks(prune_threshold):
            grad_q = gathered.add_block(block, grad_out, out, sums, grad_lse)
            grads[0][segment.rows, scores.rows(block)] = scores.heads_last(grad_q).to(q.dtype)
        seen = segment.rows, slice(segment.key_from, segment.key_to)
        grads[1][seen] = scores.heads_last(gathered.k.mul_(LN_2)).to(k.dtype)
        grads[2][seen] = scores.heads_last(gathered.v).to(v.dtype)
        if log_forget is not None:
            of_gates = gathered.of_gates(cumulative).unflatten(0, (-1, q.shape[2]))
            grads[3][seen] = of_gates.mT.to(log_forget.dtype)
    return tuple(grads)


class SegmentGradients:
    """Gradient sums over the blocks of one segment: `k` [Hk, n, Dk] (times log2 e), `v` [Hv, n, Dv], `decay` [H, n]."""

    def __init__(self, scores: SegmentScores):
        self.scores = scores
        num_keys, new_zeros = scores.segment.num_keys, partial(scores.q.new_zeros, dtype=scores.dtype)
        self.k = new_zeros(scores.key_heads, num_keys, scores.k.shape[-1])
        self.v = new_zeros(scores.value_heads, num_keys, scores.v.shape[-1])
        self.decay = new_zeros(scores.num_heads, num_keys)

    def add_block(self, block: Block, grad_out: Tensor, out: Tensor, sums: Tensor, grad_lse: Tensor | None) -> Tensor:
        """Add a block's gradients to k, v and decay, and return its gradient of q, [H, n, Dk]."""
        scores, rows = self.scores, (self.scores.segment.rows, self.scores.rows(block))
        queries = scores.queries(block)
        grad_rows = scores.heads_first(grad_out[rows]).contiguous()
        out_rows = scores.heads_first(out[rows])
        delta = (grad_rows * out_rows).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta -= grad_lse[rows].mT.reshape(delta.shape)
        sums_rows = sums[rows[0], :, rows[1]].flatten(0, 1)[..., None]
        grad_q = torch.zeros_like(queries)
        for keys in scores.key_chunks(block):
            weights = scores.logits(queries, block, keys).sub_(sums_rows).exp2_()
            self.v[:, keys] += stack(weights, scores.value_heads).mT @ stack(grad_rows, scores.value_heads)
            grad_logits = scores.grad_weights(grad_rows, keys).sub_(delta).mul_(weights)
            if scores.decay is not None:
                # Keep the row sums: they are 0 (or dlse) only in exact arithmetic, and errors would add up over time.
                self.decay[:, block.first : block.last] += grad_logits.sum(-1)
                self.decay[:, keys] -= grad_logits.sum(-2)
            stacked = stack(grad_logits, scores.key_heads)
            grad_q.baddbmm_(stacked, scores.keys(keys))
            self.k[:, keys] += stacked.mT @ queries
        return grad_q.mul_(scores.scale).view(scores.num_heads, block.last - block.first, -1)

    def of_gates(self, cumulative: bool) -> Tensor:
        """Return the gradient of the segment's log_forget, [H, n]."""
        return self.decay if cumulative else self.scores.decay.gradient_of_gates(self.decay)


@chunked_backward.register_fake
def _(
    grad_out, q, k, v, log_forget, out, sums, cu_seqlens, kv_start, kv_end, prune_threshold, scale, window, cumulative,
    grad_lse=None,
):  # fmt: skip
    return empty_gradients(q, k, v, log_forget)


def _save(ctx, inputs, output):
    q, k, v, log_forget, cu_seqlens, kv_start, kv_end, prune_threshold, *ctx.settings, return_lse = inputs
    out, sums, lse = output
    ctx.mark_non_differentiable(*((sums,) if return_lse else (sums, lse)))
    # Otherwise autograd materializes zero gradients for unused outputs.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, log_forget, out, sums, cu_seqlens, kv_start, kv_end, prune_threshold)


def _gradients(ctx, grad_out, _, grad_lse):
    saved = ctx.saved_tensors
    grad_out = torch.zeros_like(saved[4]) if grad_out is None else grad_out
    grads = chunked_backward(grad_out, *saved, *ctx.settings, grad_lse)
    grad_log_forget = grads[3] if ctx.needs_input_grad[3] else None
    return *grads[:3], grad_log_forget, *(None,) * 8


chunked_forward.register_autograd(_gradients, setup_context=_save)
