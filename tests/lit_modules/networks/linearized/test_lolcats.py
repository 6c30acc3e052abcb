"""LoLCATs' attention against its definition over all pairs of tokens, in float64, and its decoding against itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from lit_modules.networks.linearized.lolcats import LolcatsAttention
from lit_modules.networks.linearized.settings import Linearization
from lit_modules.networks.linearized.windows import window_attention
from lit_modules.networks.positions import Positions, locate

WINDOW = 6
CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=8
)


PUBLISHED = {
    "mixer": "lolcats",
    "gate": "none",
    "feature_map": "learned",
    "state_weight": 1.0,
    "window_weight": 0.1,
    "rotate_state": True,
    "window": WINDOW,
}
FORMS = {
    "learned": {},
    "softmax": {"feature_map": "softmax"},
    "relu": {"feature_map": "relu", "learned_weights": "head"},
    "sinks": {"sinks": 3},
    "gla": {"gate": "gla", "temperature": 4.0, "learned_gate_shift": True, "sinks": 2},
    "hgrn2, not rotated": {"gate": "hgrn2", "feature_map": "softmax", "rotate_state": False},
    "mlstm of random gates": {"gate": "mlstm", "gate_source": "random", "sinks": 1},
    "fixed, not rotated": {"gate": "fixed", "rotate_state": False, "learned_weights": "layer"},
    "joint": {"mixer": "joint", "sinks": 2, "state_weight": 0.5},
    "joint, mamba2, clusters": {
        "mixer": "joint",
        "gate": "mamba2",
        "feature_map": "clusters",
        "num_slots": 5,
        "sinks": 2,
    },
}


def begin(form: str = "learned", **changes) -> LolcatsAttention:
    """A layer whose maps are untrained."""
    torch.manual_seed(0)
    attention = LlamaAttention(CONFIG, 0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.mul_(8)  # for scores that are far from equal
    layer = LolcatsAttention(attention, CONFIG, Linearization(**PUBLISHED | FORMS[form] | changes)).eval()
    with torch.no_grad():
        if layer.gate_proj is not None:  # a model draws it with all that no checkpoint has
            layer.gate_proj.weight.copy_(layer.gate_proj.initial_values()["weight"])
    return layer


def build(form: str = "learned", **changes) -> LolcatsAttention:
    """A layer in float64 with maps, gates and weights that differ from head to head."""
    layer = begin(form, **changes).double()
    with torch.no_grad():
        for parameter in new_parameters(layer).values():
            parameter.add_(torch.randn_like(parameter))
    return layer


def new_parameters(layer: LolcatsAttention) -> dict[str, torch.nn.Parameter]:
    stock = dict(LlamaAttention(CONFIG, 0).named_parameters())
    return {name: parameter for name, parameter in layer.named_parameters() if name not in stock}


def hidden_states(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def place(layout: str, batch: int, length: int, past: int = 0) -> Positions:
    """Whole rows; the second row with 5 tokens of padding; or three documents, one of them shorter than the window."""
    if layout == "packed":
        ends = torch.tensor([0, length // 2, length // 2 + 3, length], dtype=torch.int32)
        return locate(batch, length, past, CPU, cu_seqlens=ends)
    mask = None
    if layout == "padded":
        mask = torch.ones(batch, past + length)
        mask[1, :5] = 0
    return locate(batch, length, past, CPU, mask)


def rotary(positions: Positions) -> tuple[Tensor, Tensor]:
    return LlamaRotaryEmbedding(CONFIG)(torch.empty(0, dtype=torch.float64), positions.index)


def attend(layer: LolcatsAttention, hidden: Tensor, positions: Positions, cache=None) -> Tensor:
    """The layer's own attention, before its output projection."""
    return layer.student(hidden, *layer.project(hidden), positions, rotary(positions), cache)


def log_gates(layer: LolcatsAttention, hidden: Tensor, k: Tensor) -> Tensor:
    """`[B, T, 4, 1 or 8]`: the logarithms of the gates, written out."""
    s = layer.settings
    if s.gate in ("none", "fixed"):
        heads = torch.arange(2, dtype=k.dtype)
        decay = -(2 ** (-8 * (heads + 1) / 2)) if s.gate == "fixed" else 0 * heads
        logs = decay[:, None].expand(*k.shape[:2], 2, 1)
    else:
        wide = s.gate in ("gla", "hgrn2")
        logits = k if wide else k.mean(-1, keepdim=True)
        if s.gate_source == "random":
            logits = (hidden @ layer.gate_proj.weight.T).unflatten(-1, (2, -1))
        if s.learned_gate_shift:
            logits = logits + layer.gate_shift.shift[:, None]
        logs = -F.softplus(logits) if s.gate == "mamba2" else F.logsigmoid(logits)
    return (logs / s.gate_temperature).repeat_interleave(2, dim=2)


def by_definition(layer: LolcatsAttention, hidden: Tensor, positions: Positions) -> Tensor:
    """Evaluate the equation over all pairs of tokens."""
    s = layer.settings
    q, k, v = layer.project(hidden)
    logs = log_gates(layer, hidden, k)
    turned_q, turned_k = layer.rotate(q, k, rotary(positions))
    mapped_q, mapped_k = (turned_q, turned_k) if s.rotate_state else (q, k)
    mapped_q = layer.q_feature_map(mapped_q)
    mapped_k = 1 - logs[:, :, ::2].exp() if s.gate == "hgrn2" else layer.k_feature_map(mapped_k)
    turned_k, v, mapped_k = (x.repeat_interleave(2, dim=2) for x in (turned_k, v, mapped_k))
    scores = torch.einsum("bihd,bjhd->bhij", turned_q, turned_k) * layer.scale
    tokens = torch.arange(q.shape[1])
    back = tokens[:, None] - tokens
    same = (back >= 0) & (back <= positions.index[:, :, None])
    sink = (positions.index < s.sinks)[:, None]
    near = (same & ((back < s.window) | sink))[:, None]
    far = (same & (back >= s.window) & ~sink)[:, None]
    scores = scores.masked_fill(~near, -torch.inf)
    largest = scores.amax(-1, keepdim=True) if s.mixer == "lolcats" else 0
    weight = torch.sigmoid(layer.window_weight.logit)[:, None, None]
    log_state = layer.window_weight.log_state
    state = s.state_weight if log_state is None else log_state.exp().expand(4)[:, None, None]
    weights = weight * (scores - largest).exp()
    # Gates of the tokens after j, up to the one that enters the state with i.
    if logs.shape[-1] not in (1, mapped_q.shape[-1]):
        logs = logs.repeat(1, 1, 1, 2)
    passed = logs.cumsum(1)
    entered = F.pad(passed, (0, 0, 0, 0, s.window, 0))[:, : q.shape[1]]
    decay = (entered[:, :, None] - passed[:, None]).clamp(max=0).exp()
    weights = weights + state * far * (mapped_q[:, :, None] * mapped_k[:, None] * decay).sum(-1).permute(0, 3, 1, 2)
    out = torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v)
    if positions.kv_start is not None:
        out = out * (tokens >= positions.kv_start[:, None])[..., None, None]
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("layout", "length"), [("plain", 41), ("padded", 32), ("packed", 45), ("plain", 4)])
def test_it_is_the_window_and_what_came_before_over_one_denominator(layout: str, length: int, form: str):
    layer = build(form)
    batch = 1 if layout == "packed" else 2
    hidden, positions = hidden_states(batch, length).requires_grad_(), place(layout, batch, length)
    out, expected = attend(layer, hidden, positions), by_definition(layer, hidden, positions)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    learned = [hidden, *new_parameters(layer).values()]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = torch.autograd.grad((out * weight).sum(), learned, materialize_grads=True)
    references = torch.autograd.grad((expected * weight).sum(), learned, materialize_grads=True)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-9)


def test_the_window_begins_with_a_tenth_and_has_a_weight_for_each_head():
    window, state = begin().window_weight()
    torch.testing.assert_close(window, torch.full((4,), 0.1))
    assert state == 1.0


def test_learned_weights_begin_as_they_are_set():
    _, state = begin(learned_weights="head", state_weight=0.02).window_weight()
    torch.testing.assert_close(state, torch.full((4,), 0.02))


@torch.no_grad()
def test_a_joint_state_that_counts_little_leaves_the_window_with_its_sinks():
    layer = begin("joint", state_weight=1e-9)
    hidden, positions = hidden_states(2, 40).float(), place("plain", 2, 40)
    q, k, v = layer.project(hidden)
    tables = tuple(table.float() for table in rotary(positions))
    out = layer.student(hidden, q, k, v, positions, tables, None)
    q, k = layer.rotate(q, k, tables)
    expected = window_attention(q, k, v, window=WINDOW, sinks=2, positions=positions, scale=layer.scale)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_scores_however_large_leave_numbers(factor: float):
    layer = begin("joint, mamba2, clusters")
    layer.q_proj.weight.mul_(factor)
    layer.k_proj.weight.mul_(factor)
    positions = place("plain", 2, 40)
    hidden, tables = hidden_states(2, 40).float(), tuple(table.float() for table in rotary(positions))
    assert layer.student(hidden, *layer.project(hidden), positions, tables, None).isfinite().all()


def test_what_is_new_has_names_to_be_found_by():
    assert {name: list(parameter.shape) for name, parameter in new_parameters(begin()).items()} == {
        "q_feature_map.weight": [4, 8, 8],
        "k_feature_map.weight": [2, 8, 8],
        "window_weight.logit": [4],
    }


@pytest.mark.parametrize(
    "change",
    [
        {"window": 0},
        {"feature_map": "none"},
        {"gate": "slots"},
        {"output_norm": True},
        {"window_weight": 1.0},
        {"state_weight": 0.0},
        {"feature_map": "clusters"},
        {"feature_map": "clusters", "mixer": "joint", "gate": "gla"},
        {"gate_source": "random"},
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(change: dict):
    with pytest.raises(ValueError, match=rf"^linearization\.({'|'.join([*change, 'gate'])})=[^\n]+$"):
        Linearization(**PUBLISHED | change)


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["plain", "padded"])
@pytest.mark.parametrize("pieces", [[1] * 22, [14, 1, 1, 2], [2, 3, 20]])
def test_decoding_in_any_pieces_is_the_parallel_pass(layout: str, pieces: list[int], form: str):
    layer = build(form)
    hidden = hidden_states(2, sum(pieces))
    expected = attend(layer, hidden, place(layout, 2, hidden.shape[1]))
    cache, outs, past = layer.new_cache(), [], 0
    for tokens in pieces:
        positions = place(layout, 2, tokens, past)
        outs.append(attend(layer, hidden[:, past : past + tokens], positions, cache))
        past += tokens
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, rtol=1e-9, atol=1e-9)
    assert cache.get_seq_length() == past == int(cache.counter)


@torch.no_grad()
@pytest.mark.parametrize("form", ["learned", "gla", "joint"])
def test_rows_behind_padding_are_the_rows_alone(form: str):
    layer = build(form)
    hidden = hidden_states(2, 20)
    out = attend(layer, hidden, place("padded", 2, 20))
    alone = attend(layer, hidden[1:, 5:], place("plain", 1, 15))
    torch.testing.assert_close(out[1:, 5:], alone, rtol=1e-9, atol=1e-9)
    assert not out[1, :5].any()


class Watched(TorchDispatchMode):
    """Records the names of operations and the largest result, in elements."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.names.append(function.name())
        self.largest = max(self.largest, out.numel() if isinstance(out, Tensor) else 0)
        return out


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_a_step_waits_for_no_number_and_replays_with_the_counter_alone(form: str):
    layer, hidden = build(form), hidden_states(2, 22)
    expected = attend(layer, hidden, place("padded", 2, 22))
    cache, step = layer.new_cache(), place("padded", 2, 1, 7)
    attend(layer, hidden[:, :7], place("padded", 2, 7), cache)
    for token in range(7, 22):
        tables = rotary(place("padded", 2, 1, token))
        inputs = layer.project(hidden[:, token : token + 1])
        with Watched() as watched:
            # The positions' numbers are those of the first step, as in a recording; so is the length in Python.
            cache.length = 7
            out = layer.student(hidden[:, token : token + 1], *inputs, step, tables, cache)
        torch.testing.assert_close(out[:, 0], expected[:, token], rtol=1e-9, atol=1e-9)
        assert "aten::_local_scalar_dense" not in watched.names


@torch.no_grad()
@pytest.mark.parametrize("form", ["learned", "gla"])
def test_no_tensor_grows_with_the_square_of_the_length(form: str):
    layer, length = build(form, window=16), 2048
    with Watched() as watched:
        attend(layer, hidden_states(1, length), place("plain", 1, length))
    assert watched.largest <= length * 4 * 2 * 16  # the scores of a window and of the block before it


@pytest.mark.parametrize("form", ["learned", "gla"])
def test_a_cache_is_constant_in_size(form: str):
    layer, sizes = build(form), []
    for length in (2, 64):
        cache = layer.new_cache()
        with torch.no_grad():
            attend(layer, hidden_states(2, length), place("plain", 2, length), cache)
        held = (*cache.states, *cache.late, cache.ring_keys, cache.ring_values)
        sizes.append(sum(x.untyped_storage().nbytes() for x in held))
    assert sizes[0] == sizes[1]


def test_attention_transfer_trains_the_maps_alone_towards_the_teacher():
    layer = begin().requires_grad_(False)
    maps = [parameter for name, parameter in layer.named_parameters() if "feature_map" in name]
    optimizer = torch.optim.Adam([parameter.requires_grad_() for parameter in maps], lr=0.02)
    layer.mode = "transfer"
    hidden, positions = hidden_states(2, 48).float(), place("plain", 2, 48)
    tables = tuple(table.float() for table in rotary(positions))
    losses = []
    for _ in range(25):
        out, _ = layer(hidden, tables, positions=positions)
        losses.append(layer.transfer_loss.item())
        layer.transfer_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    layer.mode = "teacher"
    assert torch.equal(out, layer(hidden, tables, positions=positions)[0])  # what goes on is the teacher's
