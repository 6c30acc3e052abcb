"""Each architecture against a loop over its paper's equations; the stabilizer of mLSTM and the groups of Mamba-2."""

import pytest
import torch
import torch.nn.functional as F

from kernels import gated_recurrence, gated_slot_attention
from kernels.gated_recurrence import forms

BATCH, HEADS, KEY, VALUE, SLOTS = 2, 4, 5, 3, 6
# What is added to the logits of a sigmoid: gates that forget nearly all, some, nearly nothing.
STRENGTHS = {"strong": -30.0, "middling": 0.0, "weak": 8.0}


def draw(*shape, seed, add=0.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + add).requires_grad_()


def tokens(length, *rest, seed, add=0.0):
    return draw(BATCH, length, *rest, seed=seed, add=add)


def results(function, inputs):
    """Return a function's result, and the gradients of a weighted sum of it."""
    out = function(**inputs)
    weights = draw(*out.shape, seed=99).detach()
    gradients = torch.autograd.grad((out * weights).sum(), list(inputs.values()), materialize_grads=True)
    return {"out": out, **dict(zip(inputs, gradients, strict=True))}


def outer(k, v):
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def read(q, state):
    return torch.einsum("bhk,bhkv->bhv", q, state)


def loop(length, state, step):
    outs = []
    for t in range(length):
        state, out = step(state, t)
        outs.append(out)
    return torch.stack(outs, 1)


def zeros(*shape):
    return torch.zeros(BATCH, HEADS, *shape, dtype=torch.float64)


def gla_inputs(length, strength):
    return {
        "q": tokens(length, HEADS, KEY, seed=1),
        "k": tokens(length, HEADS, KEY, seed=2),
        "v": tokens(length, HEADS, VALUE, seed=3),
        "gate": tokens(length, HEADS, KEY, seed=4, add=STRENGTHS[strength]),
    }


def gla_paper(q, k, v, gate):
    def step(state, t):
        alpha = torch.sigmoid(gate[:, t]) ** (1 / 16)
        state = alpha.unsqueeze(-1) * state + outer(k[:, t], v[:, t])
        return state, read(q[:, t], state)

    return loop(q.shape[1], zeros(KEY, VALUE), step)


def gla(**inputs):
    return gated_recurrence(*forms.gla(**inputs))[0]


def hgrn2_inputs(length, strength):
    inputs = gla_inputs(length, strength)
    bound = draw(HEADS, KEY, seed=5).detach().sigmoid().requires_grad_()
    return {"q": inputs["q"], "forget": inputs["gate"], "v": inputs["v"], "lower_bound": bound}


def hgrn2_paper(q, forget, v, lower_bound):
    def step(state, t):
        f = lower_bound + (1 - lower_bound) * torch.sigmoid(forget[:, t])
        state = f.unsqueeze(-1) * state + outer(1 - f, v[:, t])
        return state, read(q[:, t], state)

    return loop(q.shape[1], zeros(KEY, VALUE), step)


def hgrn2(**inputs):
    return gated_recurrence(*forms.hgrn2(**inputs))[0]


def rwkv6_inputs(length, strength):
    inputs = gla_inputs(length, strength)
    decay = tokens(length, HEADS, KEY, seed=4, add={"strong": 3.5, "middling": 0.0, "weak": -8.0}[strength])
    return {"r": inputs["q"], "k": inputs["k"], "v": inputs["v"], "d": decay, "u": draw(HEADS, KEY, seed=6)}


def rwkv6_paper(r, k, v, d, u):
    """Sum over all earlier tokens, each decayed by the gates strictly between."""
    w, outs = torch.exp(-torch.exp(d)), []
    for t in range(r.shape[1]):
        wkv = outer(u * k[:, t], v[:, t])
        for i in range(t):
            between = w[:, i + 1 : t].prod(1)
            wkv = wkv + outer(between * k[:, i], v[:, i])
        outs.append(read(r[:, t], wkv))
    return torch.stack(outs, 1)


def rwkv6(r, k, v, d, u):
    return gated_recurrence(*forms.rwkv6(r, k, v, d), bonus=u)[0]


def mamba2_inputs(length, strength):
    dt = F.softplus(tokens(length, HEADS, seed=2).detach()) * {"strong": 30.0, "middling": 1.0, "weak": 1e-3}[strength]
    return {
        "x": tokens(length, HEADS, VALUE, seed=1),
        "dt": dt.requires_grad_(),
        "A_log": draw(HEADS, seed=3),
        "B": tokens(length, 2, KEY, seed=4),
        "C": tokens(length, 2, KEY, seed=5),
        "D": draw(HEADS, seed=6),
    }


def mamba2_paper(x, dt, A_log, B, C, D):
    A = -torch.exp(A_log)

    def step(state, t):
        heads = []
        for h in range(HEADS):
            group = h // (HEADS // 2)
            write = outer(B[:, t, group], dt[:, t, h, None] * x[:, t, h])
            heads.append(torch.exp(dt[:, t, h] * A[h])[:, None, None] * state[:, h] + write)
        state = torch.stack(heads, 1)
        reads = C[:, t].repeat_interleave(HEADS // 2, dim=1)
        return state, read(reads, state) + D[:, None] * x[:, t]

    return loop(x.shape[1], zeros(KEY, VALUE), step)


def mamba2(x, dt, A_log, B, C, D):
    return forms.mamba2_output(gated_recurrence(*forms.mamba2(x, dt, A_log, B, C))[0], x, D)


def mlstm_inputs(length, strength, input_gate=0.0):
    inputs = gla_inputs(length, strength)
    return {
        **{name: inputs[name] for name in "qkv"},
        "input_gate": tokens(length, HEADS, seed=7, add=input_gate),
        "forget_gate": tokens(length, HEADS, seed=8, add=STRENGTHS[strength]),
    }


def mlstm_paper(q, k, v, input_gate, forget_gate):
    """Compute equations 19 to 26 without the stabilizer."""
    k = k / KEY**0.5

    def step(state, t):
        memory, normalizer = state
        i, f = torch.exp(input_gate[:, t])[..., None], torch.sigmoid(forget_gate[:, t])[..., None]
        memory = f[..., None] * memory + i[..., None] * outer(k[:, t], v[:, t])
        normalizer = f * normalizer + i * k[:, t]
        size = (q[:, t] * normalizer).sum(-1, keepdim=True).abs()
        return (memory, normalizer), read(q[:, t], memory) / torch.clamp(size, min=1.0)

    return loop(q.shape[1], (zeros(KEY, VALUE), zeros(KEY)), step)


def mlstm_stabilized_paper(q, k, v, input_gate, forget_gate):
    """Compute equations 19 to 26 with the gates of 15 to 17; autograd also differentiates the stabilizer."""
    k = k / KEY**0.5

    def step(state, t):
        memory, normalizer, before = state
        log_f = F.logsigmoid(forget_gate[:, t])
        m = torch.maximum(log_f + before, input_gate[:, t])
        i, f = torch.exp(input_gate[:, t] - m)[..., None], torch.exp(log_f + before - m)[..., None]
        memory = f[..., None] * memory + i[..., None] * outer(k[:, t], v[:, t])
        normalizer = f * normalizer + i * k[:, t]
        size = (q[:, t] * normalizer).sum(-1, keepdim=True).abs()
        return (memory, normalizer, m), read(q[:, t], memory) / torch.maximum(size, torch.exp(-m)[..., None])

    return loop(q.shape[1], (zeros(KEY, VALUE), zeros(KEY), zeros()), step)


def mlstm(**inputs):
    recurrence, m = forms.mlstm(**inputs)
    return forms.mlstm_output(gated_recurrence(*recurrence)[0], m)


def retention_inputs(length, strength):
    gate = tokens(length, HEADS, seed=4, add=STRENGTHS[strength])
    return {**gla_inputs(length, strength), "gate": gate}


def retention_paper(q, k, v, gate):
    """Compute the parallel form: (Q K^T . D) V with D_nm the product of gamma over m+1..n."""
    length = q.shape[1]
    gamma = torch.sigmoid(gate) ** (1 / 16)
    rows = []
    for n in range(length):
        decays = torch.stack([gamma[:, m + 1 : n + 1].prod(1) for m in range(n + 1)], -1)
        scores = torch.einsum("bhk,bmhk->bhm", q[:, n], k[:, : n + 1]) * decays
        rows.append(torch.einsum("bhm,bmhv->bhv", scores, v[:, : n + 1]))
    return torch.stack(rows, 1)


def retention(**inputs):
    return gated_recurrence(*forms.gated_retention(**inputs))[0]


def slot_inputs(length, strength):
    gate = tokens(length, HEADS, SLOTS, seed=4, add=STRENGTHS[strength])
    return {**gla_inputs(length, strength), "gate": gate}


def slot_paper(q, k, v, gate):
    def step(state, t):
        keys, values = state
        alpha = (torch.sigmoid(gate[:, t]) ** (1 / 8)).unsqueeze(-1)
        keys = alpha * keys + (1 - alpha) * k[:, t].unsqueeze(-2)
        values = alpha * values + (1 - alpha) * v[:, t].unsqueeze(-2)
        weights = torch.softmax(torch.einsum("bhmk,bhk->bhm", keys, q[:, t]), -1)
        return (keys, values), torch.einsum("bhm,bhmv->bhv", weights, values)

    return loop(q.shape[1], (zeros(SLOTS, KEY), zeros(SLOTS, VALUE)), step)


def slots(**inputs):
    return gated_slot_attention(*forms.slots(**inputs))[0]


ARCHITECTURES = {
    "gla": (gla, gla_paper, gla_inputs),
    "hgrn2": (hgrn2, hgrn2_paper, hgrn2_inputs),
    "rwkv6": (rwkv6, rwkv6_paper, rwkv6_inputs),
    "mamba2": (mamba2, mamba2_paper, mamba2_inputs),
    "mlstm": (mlstm, mlstm_paper, mlstm_inputs),
    "gated_retention": (retention, retention_paper, retention_inputs),
    "slots": (slots, slot_paper, slot_inputs),
}


@pytest.mark.parametrize("length", [1, 7, 67])
@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_and_gradients_are_those_of_the_papers_equations(assert_close, name, strength, length):
    form, paper, make_inputs = ARCHITECTURES[name]
    inputs = make_inputs(length, strength)
    assert_close(results(form, inputs), results(paper, inputs), 1e-9)


def float32(inputs):
    return {name: x.detach().float().requires_grad_() for name, x in inputs.items()}


@pytest.mark.parametrize("input_gate", [800.0, 80.0, -80.0])
def test_mlstm_input_gates_whose_exp_is_infinite_are_stabilized(assert_close, input_gate):
    inputs = mlstm_inputs(67, "middling", input_gate)
    expected = results(mlstm_stabilized_paper, inputs)
    assert_close(results(mlstm, inputs), expected, 1e-9)
    narrow = float32(inputs)
    wide = {name: x.detach().double().requires_grad_() for name, x in narrow.items()}
    assert_close(results(mlstm, narrow), results(mlstm_stabilized_paper, wide), 1e-5)


def test_a_rise_of_mlstm_input_gates_within_a_sequence_forgets_what_was_before(assert_close):
    inputs = mlstm_inputs(201, "weak", -350.0)
    inputs["input_gate"].data += torch.linspace(0, 700, 201)[:, None]
    assert_close(results(mlstm, inputs), results(mlstm_stabilized_paper, inputs), 1e-9)


def test_a_closed_mlstm_forget_gate_takes_no_digits_from_those_after_it(assert_close):
    inputs = mlstm_inputs(33, "middling")
    inputs["forget_gate"].data[:, 10] = -1e30
    assert_close(results(mlstm, inputs), results(mlstm_stabilized_paper, inputs), 1e-9)


def test_mlstm_continues_from_its_state_and_stabilizer(assert_close):
    inputs = mlstm_inputs(20, "weak", 100.0)
    whole = mlstm(**inputs)
    parts, state, stabilizer = [], None, None
    for part in (slice(0, 7), slice(7, 8), slice(8, 20)):
        recurrence, m = forms.mlstm(**{name: x[:, part] for name, x in inputs.items()}, stabilizer=stabilizer)
        out, state = gated_recurrence(*recurrence, initial_state=state)
        parts.append(forms.mlstm_output(out, m))
        stabilizer = m[:, -1]
    assert_close({"out": torch.cat(parts, 1)}, {"out": whole}, 1e-9)


def test_packed_mlstm_documents_do_not_share_a_stabilizer(assert_close):
    inputs = {name: x[:1] for name, x in mlstm_inputs(21, "weak").items()}
    bounds = [0, 6, 6, 7, 21, 21]
    heights = torch.tensor([900.0] * 6 + [-5.0] + [-600.0] * 14)
    inputs["input_gate"] = inputs["input_gate"] + heights[:, None]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    before = draw(5, HEADS, seed=9).detach()
    states = draw(5, HEADS, KEY, VALUE + 1, seed=10).detach()
    recurrence, m = forms.mlstm(**inputs, stabilizer=before, cu_seqlens=cu_seqlens)
    packed = forms.mlstm_output(gated_recurrence(*recurrence, initial_state=states, cu_seqlens=cu_seqlens)[0], m)
    alone = []
    for number in (0, 2, 3):
        document = slice(bounds[number], bounds[number + 1])
        one = {name: x[:, document] for name, x in inputs.items()}
        recurrence, m = forms.mlstm(**one, stabilizer=before[number : number + 1])
        out, _ = gated_recurrence(*recurrence, initial_state=states[number : number + 1])
        alone.append(forms.mlstm_output(out, m))
    assert_close({"out": packed}, {"out": torch.cat(alone, 1)}, 1e-9)
    stabilizers = forms.mlstm(**inputs, cu_seqlens=cu_seqlens)[1]
    expected = [forms.mlstm(**{name: x[:, a:b] for name, x in inputs.items()})[1] for a, b in ((0, 6), (6, 7), (7, 21))]
    assert_close({"m": stabilizers}, {"m": torch.cat(expected, 1)}, 1e-9)


def test_a_padded_mlstm_token_changes_nothing(assert_close):
    inputs = mlstm_inputs(9, "middling")
    padding = torch.zeros(9, 1, dtype=torch.bool)
    padding[:3] = padding[5] = True

    def padded(input_gate, forget_gate, **rest):
        return mlstm(
            input_gate=input_gate.masked_fill(padding, -torch.inf),
            forget_gate=forget_gate.masked_fill(padding, torch.inf),
            **rest,
        )[:, ~padding[:, 0]]

    def short(**inputs):
        return mlstm(**{name: x[:, ~padding[:, 0]] for name, x in inputs.items()})

    assert_close(results(padded, inputs), results(short, inputs), 1e-9)


def test_query_heads_share_the_mlstm_heads_of_their_group(assert_close):
    inputs = mlstm_inputs(9, "middling")
    shared = {name: inputs[name][:, :, :2] for name in ("k", "v", "input_gate", "forget_gate")}
    repeated = {name: x.repeat_interleave(2, dim=2) for name, x in shared.items()}
    assert_close({"out": mlstm(q=inputs["q"], **shared)}, {"out": mlstm(q=inputs["q"], **repeated)}, 1e-9)


def test_mlstm_is_compiled_as_one_graph(assert_close):
    inputs = {name: x[:1] for name, x in mlstm_inputs(9, "middling").items()}
    options = {"cu_seqlens": torch.tensor([0, 4, 9], dtype=torch.int32)}
    compiled = torch.compile(forms.mlstm, fullgraph=True, backend="eager")
    (actual, m), (expected, expected_m) = compiled(**inputs, **options), forms.mlstm(**inputs, **options)
    assert_close({**actual._asdict(), "m": m}, {**expected._asdict(), "m": expected_m}, 1e-9)


def test_one_group_of_mamba2_is_not_copied_for_each_head():
    x, dt, A_log, B, C, _ = mamba2_inputs(7, "middling").values()
    recurrence = forms.mamba2(x, dt, A_log, B[:, :, :1], C[:, :, 1:])
    assert recurrence.k.shape == recurrence.q.shape == (BATCH, 7, HEADS, KEY)
    assert recurrence.k.data_ptr() == B.data_ptr()
    assert recurrence.q.data_ptr() == C[:, :, 1:].data_ptr()


def test_mamba2_groups_must_divide_the_heads():
    x, dt, A_log, B, C, _ = mamba2_inputs(7, "middling").values()
    with pytest.raises(ValueError, match="B and C have 2 groups, which must divide the 3 heads of x"):
        forms.mamba2(x[:, :, :3], dt[:, :, :3], A_log[:3], B, C)
