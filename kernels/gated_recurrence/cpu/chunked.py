"""The gated recurrence in plain PyTorch, chunk by chunk, for machines without CUDA.

With S the state before a chunk, b_i the sum of log_decay from the chunk's start to row i (all of it: b), gates on keys:

    A_ij = sum_d q_id k_jd exp(b_i - b_j)_d  (j <= i)     o_i = sum_j A_ij v_j + (q_i exp(b_i)) S
    S'   = exp(b) S + sum_j (k_j exp(b - b_j))^T v_j
    dA   = dO V^T                                         dV_j = sum_i A_ij dO_i + (k_j exp(b - b_j)) dS'
    dq_i = sum_j dA_ij k_j exp(b_i - b_j) + exp(b_i) S dO_i
    dk_j = sum_i dA_ij q_i exp(b_i - b_j) + exp(b - b_j) dS' v_j
    dS   = exp(b) dS' + sum_i (q_i exp(b_i))^T dO_i
    dlog_decay_t = sum over the pairs j < t <= i that decay at t, including pairs with the states

Gates on values exchange the roles: dO and v for q and k, q and k for dO and v, S transposed. Then the formula of dq
gives the output, dk gives dv, dv gives dk, and the output gives dq. Below, `rows` and `columns` are the gated tensors.
Query heads that share a state are rows of one matrix: k, v and the gates are not repeated.

Memory: the states at all chunks' starts in the backward pass, and tensors of a few chunks. `pairs.py` has the decay.
"""

import math

import torch
from torch import Tensor

from kernels.gated_recurrence.cpu.layout import Layout, Slab
from kernels.gated_recurrence.cpu.pairs import ChannelGates, HeadGates, plain_products, self_weights, sums_from
from kernels.gated_recurrence.validation import check_values
from kernels.operation import empty_gradients, register_operation


class _Problem:
    """Arguments as one row per token and head, their division into chunks, and the states.

    `turned`: gates are on values. `carry` [R, Hk, D gated, D plain] is one state per row, in the layout's order.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, cu_seqlens: Tensor | None, decay_axis: str):
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.heads, self.groups = k.shape[2], q.shape[2] // k.shape[2]
        self.turned = decay_axis == "value" and log_decay.ndim == 4
        self.gates = ChannelGates if log_decay.ndim == 4 else HeadGates
        self.q, self.k, self.v, self.log_decay = (self.rows(x) for x in (q, k, v, log_decay))
        self.layout = Layout.of(q.shape[0], q.shape[1], cu_seqlens, q.device)
        self.state_dims = k.shape[3], v.shape[3]
        self.slabs = self.layout.slabs(self.heads, max(self.groups * max(self.state_dims), 1))

    def rows(self, x: Tensor) -> Tensor:
        """Reshape [B, T, Hq or Hk, D] or [B, T, Hk] to [B * T * Hk, n]; copies only if necessary."""
        return x.reshape(x.shape[0] * x.shape[1] * self.heads, math.prod(x.shape[2:]) // self.heads)

    def carry(self, state: Tensor | None) -> Tensor:
        """Return a new carry from a state [R, Hk, Dk, Dv]; zeros for None."""
        if state is None:
            dims = reversed(self.state_dims) if self.turned else self.state_dims
            return self.q.new_zeros(len(self.layout.order), self.heads, *dims, dtype=self.dtype)
        state = state.to(self.dtype)[self.layout.order]
        return state.mT.contiguous() if self.turned else state

    def uncarry(self, carry: Tensor, dtype: torch.dtype) -> Tensor:
        state = torch.empty_like(carry)
        state[self.layout.order] = carry
        return (state.mT if self.turned else state).contiguous().to(dtype)

    def columns(self, slab: Slab) -> tuple[Tensor, Tensor]:
        """Return the gated tensor and the other one: k and v, or v and k."""
        k, v = slab.take(self.k, self.dtype), slab.take(self.v, self.dtype)
        return (v, k) if self.turned else (k, v)

    def queries(self, slab: Slab, rows: Tensor) -> Tensor:
        return slab.take(rows, self.dtype).unflatten(2, (self.groups, -1))

    def gates_of(self, slab: Slab) -> ChannelGates:
        return self.gates(slab.take(self.log_decay, self.dtype))

    def states(self, slab: Slab, gates: ChannelGates, columns: Tensor, others: Tensor, carry: Tensor) -> Tensor:
        """Return the state before each chunk of the slab, [N, D gated, D plain]; advance carry past the slab."""
        added = torch.bmm((columns * gates.to_end).mT, others).unflatten(0, (-1, self.heads))
        total = gates.total.unflatten(0, (-1, self.heads))[..., None]
        states = torch.empty_like(added)
        for rows, step in slab.steps:
            current = carry[rows]
            states[step] = current
            current.mul_(total[step]).add_(added[step])
        return states.flatten(0, 1)


# Autocast would round float32 inputs of every matrix product to bfloat16.
@torch.autocast("cpu", enabled=False)
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    decay_axis: str,
    scale: float,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run `gated_recurrence` without bonus and budget; wide: out in the dtype of the states."""
    check_values(log_decay, cu_seqlens)
    problem = _Problem(q, k, v, log_decay, cu_seqlens, decay_axis)
    out, _ = _empty_results(q, k, v, cu_seqlens, wide)
    out_rows = problem.rows(out)
    carry = problem.carry(initial_state)
    for slab in problem.slabs:
        gates, (columns, others) = problem.gates_of(slab), problem.columns(slab)
        states = problem.states(slab, gates, columns, others, carry)
        queries = problem.queries(slab, problem.q) * scale
        if problem.turned:
            weights = plain_products(queries, others)
            values = gates.spread(weights, columns)
            values.addcmul_(self_weights(weights, problem.groups), columns[:, :, None])
            before = torch.bmm(queries.flatten(1, 2), states.mT).view(values.shape)
            values.addcmul_(before, gates.from_start[:, :, None])
        else:
            values = _read(gates.products(queries, columns), others, queries, gates, states)
        slab.put(out_rows, values)
    return out, problem.uncarry(carry, problem.dtype)


def _read(products: Tensor, others: Tensor, rows: Tensor, gates: ChannelGates, states: Tensor) -> Tensor:
    """Return [N, C * G, D plain]: read from the chunk's own tokens and from the state before it."""
    decayed = (rows * gates.from_start[:, :, None]).flatten(1, 2)
    return torch.bmm(products, others).baddbmm_(decayed, states)


def _fake_forward(q, k, v, log_decay, initial_state, cu_seqlens, decay_axis, scale, wide=False):
    return _empty_results(q, k, v, cu_seqlens, wide)


def _empty_results(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, wide: bool) -> tuple[Tensor, Tensor]:
    batch, length, query_heads, _ = q.shape
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(batch, length, query_heads, v.shape[3], dtype=state_dtype if wide else v.dtype)
    return out, q.new_empty(rows, k.shape[2], k.shape[3], v.shape[3], dtype=state_dtype)


@torch.autocast("cpu", enabled=False)
def _backward(
    grad_out: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    decay_axis: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of q, k, v, log_decay and initial_state in their dtypes; the last is empty if it is None."""
    problem = _Problem(q, k, v, log_decay, cu_seqlens, decay_axis)
    grads = empty_gradients(q, k, v, log_decay, initial_state)
    grad_q, grad_k, grad_v, grad_gates = (problem.rows(x) for x in grads[:4])
    grad_columns, grad_others = (grad_v, grad_k) if problem.turned else (grad_k, grad_v)
    grad_out = problem.rows(grad_out)
    states, carry = [], problem.carry(initial_state)
    for slab in problem.slabs:
        states.append(problem.states(slab, problem.gates_of(slab), *problem.columns(slab), carry))
    carry = problem.carry(grad_final)
    for slab in reversed(problem.slabs):
        gates, (columns, others) = problem.gates_of(slab), problem.columns(slab)
        queries = problem.queries(slab, problem.q) * scale
        grad_values = problem.queries(slab, grad_out)
        rows, readers = (grad_values, queries) if problem.turned else (queries, grad_values)
        gradients = _SlabGradients(problem, slab, gates, rows, columns, readers, others, states.pop(), carry)
        slab.put(grad_q, gradients.of_queries() * scale)
        slab.put(grad_columns, gradients.columns)
        slab.put(grad_others, gradients.others)
        slab.put(grad_gates, gradients.of_gates())
    grad_gates.view(log_decay.shape).masked_fill_(log_decay == -torch.inf, 0.0)
    if initial_state is not None:
        grads[4].copy_(problem.uncarry(carry, initial_state.dtype))
    return grads


class _SlabGradients:
    """Gradients of one slab's gated `rows` and `columns` and of `others`; moves carry back to before the slab.

    readers: [N, C, G, D plain], multiplied with the values that `rows` read: the output's gradient, or q if turned.
    """

    def __init__(
        self,
        problem: _Problem,
        slab: Slab,
        gates: ChannelGates,
        rows: Tensor,
        columns: Tensor,
        readers: Tensor,
        others: Tensor,
        states: Tensor,
        carry: Tensor,
    ):
        self.problem, self.gates, self.inputs, self.states = problem, gates, (rows, columns, others), states
        from_start, readers_flat = gates.from_start[:, :, None], readers.flatten(1, 2)
        decayed_rows = (rows * from_start).flatten(1, 2)
        self.grad_states = self._states_backward(slab, torch.bmm(decayed_rows.mT, readers_flat), carry)
        weights = plain_products(readers, others)
        self.products, *in_pairs, self.gates_in_pairs = gates.products_and_gradients(rows, columns, weights)
        own = self_weights(weights, problem.groups)
        self.rows_by_state = torch.bmm(readers_flat, states.mT).view(rows.shape).mul_(from_start)
        self.columns_by_state = torch.bmm(others, self.grad_states.mT).mul_(gates.to_end)
        self.rows = in_pairs[0].add_(self.rows_by_state).addcmul_(own, columns[:, :, None])
        self.columns = in_pairs[1].add_(self.columns_by_state).add_((own * rows).sum(2))
        self.others = torch.bmm(self.products.mT, readers_flat).baddbmm_(columns * gates.to_end, self.grad_states)

    def _states_backward(self, slab: Slab, read: Tensor, carry: Tensor) -> Tensor:
        """Return gradients of the states after each chunk, [N, D gated, D plain]; read: part of the chunks' rows."""
        read = read.unflatten(0, (-1, self.problem.heads))
        total = self.gates.total.unflatten(0, (-1, self.problem.heads))[..., None]
        grads = torch.empty_like(read)
        for rows, step in reversed(slab.steps):
            current = carry[rows]
            grads[step] = current
            current.mul_(total[step]).add_(read[step])
        return grads.flatten(0, 1)

    def of_queries(self) -> Tensor:
        """Return the gradient of q, [N, C * G, Dk]."""
        if not self.problem.turned:
            return self.rows.flatten(1, 2)
        rows, _, others = self.inputs
        return _read(self.products, others, rows, self.gates, self.states)

    def of_gates(self) -> Tensor:
        """Return [N, C, D], or [N, C, 1] per head; gate t decays tokens before t that are read from t on."""
        rows, columns, _ = self.inputs
        reads = (rows * self.rows_by_state).sum(2)
        writes = columns * self.columns_by_state
        through = (self.states * self.grad_states).sum(2)
        if isinstance(self.gates, HeadGates):
            reads, writes, through = (x.sum(-1, keepdim=True) for x in (reads, writes, through))
        grads = self.gates_in_pairs.add_(sums_from(reads))
        grads[:, 1:] += writes[:, :-1].cumsum(1)
        return grads.add_((through * self.gates.total)[:, None])


def _fake_backward(grad_out, grad_final, q, k, v, log_decay, initial_state, cu_seqlens, decay_axis, scale):
    return empty_gradients(q, k, v, log_decay, initial_state)


def _save(ctx, inputs, output):
    *tensors, ctx.decay_axis, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx, grad_out, grad_final):
    q, k, v, log_decay, initial_state, cu_seqlens = ctx.saved_tensors
    *grads, grad_initial = chunked_backward(
        grad_out, grad_final, q, k, v, log_decay, initial_state, cu_seqlens, ctx.decay_axis, ctx.scale
    )
    return *grads, None if initial_state is None else grad_initial, None, None, None, None


chunked_recurrence = register_operation("gated_recurrence_chunked", _forward, _fake_forward)
chunked_backward = register_operation("gated_recurrence_chunked_backward", _backward, _fake_backward)
torch.library.register_autograd("palimpsest::gated_recurrence_chunked", _gradients, setup_context=_save)
