"""Liger attention against its equations (arXiv 2503.01496, section 3 and table 1), written out token by token."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lit_modules.networks.linearized.gates import pool
from lit_modules.networks.positions import locate

GATES = ("gla", "hgrn2", "rwkv6", "slots", "mamba2", "mlstm", "gated_retention", "fixed")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
WINDOW = 4
OPTIONS = {
    "no_window": {"window": 0},
    "sinks": {"sinks": 2},
    "delayed": {"delayed": True},
    "delayed_with_sinks": {"delayed": True, "sinks": 2},
    "rotated": {"rotate_state": True},
    "normalized": {"output_norm": True},
    "learned_map": {"feature_map": "learned"},
    "learned_map_rotated": {"feature_map": "learned", "rotate_state": True},
    "relu_map": {"feature_map": "relu", "rotate_state": True},
    "no_map": {"feature_map": "none"},
    "weights": {"state_weight": 0.2, "window_weight": 1.5},
    "learned_weights": {"learned_weights": "head"},
    "a_learned_weight": {"learned_weights": "layer"},
    "shifted": {"learned_gate_shift": True},
    "random_gates": {"gate_source": "random"},
    "temperature": {"temperature": 3.0},
    "slots": {"gate": "slots", "num_slots": 32},
}


def reference(layer, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """`[T, Hq, D]` of one document: heads of keys and values repeated, one token after the other."""
    s, weight = layer.settings, layer.state_dict()
    tokens, dim = len(hidden), layer.heads.dim
    group = layer.heads.query // layer.heads.key
    q, k, v = (
        F.linear(hidden, weight[f"{name}.weight"], weight[f"{name}.bias"]).view(tokens, -1, dim)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    turn = lambda x: apply_rotary_pos_emb(x[None], x[None], *rotary, unsqueeze_dim=2)[0][0]  # noqa: E731
    width = {"gla": dim, "hgrn2": dim, "rwkv6": dim, "slots": s.num_slots}.get(s.gate, 1)
    pooled = F.adaptive_avg_pool1d(k.reshape(1, tokens, -1), layer.heads.key * width)[0].view(tokens, -1, width)
    if s.gate_source == "random":
        pooled = F.linear(hidden, weight["gate_proj.weight"]).view(tokens, -1, width)
    if s.learned_gate_shift:
        pooled = pooled + weight["gate_shift.shift"][:, None]
    p, k, v = (x.repeat_interleave(group, dim=1) for x in (pooled, k, v))
    turned = turn(q), turn(k)
    mapped_q, mapped_k = (feature_map(s, x, weight, name, group) for x, name in ((q, "q"), (k, "k")))
    p = p.repeat(1, 1, mapped_q.shape[-1] // p.shape[-1]) if s.gate in ("gla", "hgrn2", "rwkv6") else p
    gate = {
        "gla": p.sigmoid(),
        "hgrn2": p.sigmoid(),
        "rwkv6": torch.exp(-p.exp()),
        "slots": p.sigmoid(),
        "mamba2": torch.exp(-F.softplus(p)),
        "mlstm": p.sigmoid(),
        "gated_retention": p.sigmoid(),
        "fixed": torch.exp(-(2.0 ** (-8 * (torch.arange(layer.heads.query).double() // group + 1) / layer.heads.key)))
        .to(p)[None, :, None]
        .expand_as(p),
    }[s.gate]
    temperature = s.temperature or {"gla": 16, "slots": 16}.get(s.gate, 1)
    gate = gate ** (1 / temperature)
    if s.gate == "hgrn2":
        mapped_k = 1 - gate
    if s.rotate_state:
        mapped_q, mapped_k = (
            torch.cat([turn(part) for part in x.split(dim, dim=-1)], dim=-1) for x in (mapped_q, mapped_k)
        )
    alpha, beta = (torch.tensor(x, dtype=torch.float64) for x in (s.state_weight, s.window_weight))
    if s.learned_weights:
        alpha, beta = weight["weights.state"], weight["weights.window"]
    state = recurrence(s, mapped_q, mapped_k, v, gate)
    if s.output_norm:
        state = state * (state.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight["output_norm.weight"]
    out = alpha[..., None] * state
    return out + beta[..., None] * window(s, *turned, v) if s.window else out


def feature_map(s, x: Tensor, weight: dict[str, Tensor], name: str, group: int) -> Tensor:
    if s.gate == "slots" or s.feature_map == "none":
        return x
    if s.feature_map == "softmax":
        return x.softmax(-1)
    repeats = group if name == "k" else 1
    if s.gate == "hgrn2" and name == "k":
        return x
    matrix = weight[f"{name}_feature_map.weight"].repeat_interleave(repeats, dim=0)
    y = torch.einsum("hfd,thd->thf", matrix, x)
    if s.feature_map == "relu":
        return F.relu(y + weight[f"{name}_feature_map.bias"].repeat_interleave(repeats, dim=0))
    return torch.cat((y.softmax(-1), (-y).softmax(-1)), dim=-1)


def recurrence(s, q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    tokens, heads, dim = v.shape
    late = s.window if s.delayed else 0
    kept = s.sinks if s.delayed else 0  # what the window always sees is not in the state
    out = torch.zeros_like(v)
    for h in range(heads):
        state, values = v.new_zeros(k.shape[-1], dim), v.new_zeros(s.num_slots, dim)
        slots = v.new_zeros(s.num_slots, k.shape[-1])
        for t in range(tokens):
            if t >= late:
                i, g = t - late, gate[t - late, h]
                real = float(i >= kept)
                if s.gate == "slots":
                    slots = g[:, None] * slots + real * torch.outer(1 - g, k[i, h])
                    values = g[:, None] * values + real * torch.outer(1 - g, v[i, h])
                else:
                    state = g[:, None] * state + real * torch.outer(k[i, h], v[i, h])
            out[t, h] = (slots @ q[t, h]).softmax(-1) @ values if s.gate == "slots" else q[t, h] @ state
    return out


def window(s, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    back = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (back >= 0) & ((back < s.window) | (torch.arange(len(q)) < s.sinks))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def check_against_equations(linearized, **settings) -> None:
    model = linearized("llama", **{"window": WINDOW, "num_slots": 4} | settings)
    layer, hidden = model.model.layers[0].self_attn, torch.randn(2, 11, 32, dtype=torch.float64)
    rotary = model.model.rotary_emb(hidden, torch.arange(11)[None])
    out = layer.student(hidden, *layer.project(hidden), locate(2, 11, 0, hidden.device), rotary, None)
    expected = torch.stack([reference(layer, row, rotary) for row in hidden])
    assert_close(out, expected, **CLOSE)
    assert_close(
        layer(hidden, rotary, positions=locate(2, 11, 0, hidden.device))[0], layer.o_proj(expected.flatten(2)), **CLOSE
    )


@pytest.mark.parametrize("gate", GATES)
@torch.no_grad()
def test_each_form_of_the_gate_is_its_row_of_the_table(gate, linearized):
    check_against_equations(linearized, gate=gate)


@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_each_option_is_what_it_says(option, linearized):
    check_against_equations(linearized, **OPTIONS[option])


@pytest.mark.parametrize("gate", ["slots", "hgrn2", "mamba2"])
@torch.no_grad()
def test_options_do_not_depend_on_the_form(gate, linearized):
    mapped = {} if gate == "slots" else {"feature_map": "learned"}
    options = {"temperature": 2.0, "learned_gate_shift": True, "rotate_state": True, "sinks": 1, "delayed": True}
    check_against_equations(linearized, gate=gate, **options, **mapped)


@pytest.mark.parametrize("width", [1, 2, 8, 16, 12, 3])
def test_pooling_is_the_adaptive_average_of_all_heads_side_by_side(width):
    keys = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    expected = F.adaptive_avg_pool1d(keys.flatten(2), 3 * width).view(2, 5, 3, width)
    assert_close(pool(keys, width), expected)
    assert pool(keys.bfloat16(), width).dtype == torch.float32


@pytest.mark.parametrize("gate", GATES)
def test_packed_documents_and_padded_rows_are_as_alone_gradients_too(gate, linearized, ids):
    for options in ({}, {"sinks": 2}, {"delayed": True}):
        model, bounds = linearized(gate=gate, window=3, num_slots=4, softmax_layers=(1,), **options), [0, 1, 6, 13]
        targets = torch.randint(1, 61, (1, 13), generator=torch.Generator().manual_seed(5))

        def gradient(total, model=model):
            model.zero_grad()
            total.backward()
            return {name: p.grad.clone() for name, p in model.named_parameters()}

        packed = model(
            ids[:1], cu_seqlens=torch.tensor(bounds, dtype=torch.int32), shift_labels=targets, reduction="sum"
        ).loss
        spans = list(itertools.pairwise(bounds))
        alone = [model(ids[:1, a:b], shift_labels=targets[:, a:b], reduction="sum").loss for a, b in spans]
        assert_close(packed, sum(alone), rtol=1e-6, atol=0)
        expected = gradient(sum(alone))
        assert_close(gradient(packed), expected, rtol=1e-5, atol=1e-5)

        # The same documents as rows, padded on the left.
        mask = torch.tensor([[0] * (7 - b + a) + [1] * (b - a) for a, b in spans])
        rows, wanted = ids.new_zeros(mask.shape), ids.new_full(mask.shape, -100)
        for row, (a, b) in enumerate(spans):
            rows[row, 7 - b + a :], wanted[row, 7 - b + a :] = ids[0, a:b], targets[0, a:b]
        padded = model(rows, attention_mask=mask, shift_labels=wanted, reduction="sum").loss
        assert_close(padded, packed, rtol=1e-6, atol=0)
        assert_close(gradient(padded), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{"sinks": 1}, {"gate": "slots", "delayed": True}], ids=["sinks", "slots"])
def test_a_layer_compiles_whole_for_training(options, linearized, ids):
    model = linearized(overrides={"num_hidden_layers": 1}, window=4, num_slots=4, **options).train()
    batch = {"shift_labels": ids[:1], "cu_seqlens": torch.tensor([0, 5, 13], dtype=torch.int32)}
    expected = model(ids[:1], **batch).loss
    layer = model.model.layers[0]
    layer.forward = torch.compile(layer.forward, backend="eager", fullgraph=True)
    loss = model(ids[:1], **batch).loss
    assert_close(loss, expected)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_under_autocast_branches_are_bfloat16_and_gates_float32(linearized, ids):
    model = linearized("qwen3", window=4, output_norm=True, learned_weights="layer").float()
    expected = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
        logits = model(ids).logits
    loss.backward()
    assert_close(logits.float(), expected, rtol=0.1, atol=0.2)
    assert model.model.layers[0].self_attn.k_proj.weight.grad.any()


def test_the_stack_alone_says_what_to_call(linearized, ids):
    with pytest.raises(ValueError, match="call the language model"):
        linearized().model(ids)


@pytest.mark.parametrize("count", ["layer", "head"])
def test_without_a_window_no_weight_of_it_is_learned(count, linearized, ids):
    model = linearized(window=0, learned_weights=count, gate="fixed")
    model(ids, shift_labels=ids.roll(-1, 1)).loss.backward()
    assert {name.rpartition("self_attn.")[2] for name in model.new_parameters()} == {"weights.state"}
    assert all(parameter.grad is not None for parameter in model.new_parameters().values())
