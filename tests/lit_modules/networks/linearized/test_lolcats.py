"""LoLCATs' attention against its definition over all pairs of tokens, in float64, and its decoding against itself."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from lit_modules.networks.linearized.lolcats import LolcatsAttention
from lit_modules.networks.linearized.settings import Linearization
from lit_modules.networks.positions import Positions, locate

WINDOW = 6
CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=8
)


def begin(feature_map: str = "learned", window: int = WINDOW) -> LolcatsAttention:
    """A layer whose maps are untrained."""
    torch.manual_seed(0)
    attention = LlamaAttention(CONFIG, 0)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.mul_(8)  # for scores that are far from equal
    settings = Linearization(mixer="lolcats", feature_map=feature_map, window=window)
    return LolcatsAttention(attention, CONFIG, settings).eval()


def build(feature_map: str = "learned", window: int = WINDOW) -> LolcatsAttention:
    """A layer in float64 with maps and weights that differ from head to head."""
    layer = begin(feature_map, window).double()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "feature_map" in name or "window_weight" in name:
                parameter.add_(torch.randn_like(parameter))
    return layer


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


def by_definition(layer: LolcatsAttention, hidden: Tensor, positions: Positions) -> Tensor:
    """The equation, one pair of tokens as good as another."""
    q, k, v = layer.project(hidden)
    q, k = layer.rotate(q, k, rotary(positions))
    mapped_q, mapped_k = layer.q_feature_map(q), layer.k_feature_map(k)
    k, v, mapped_k = (x.repeat_interleave(2, dim=2) for x in (k, v, mapped_k))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * layer.scale
    back = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    same = (back >= 0) & (back <= positions.index[:, :, None])
    near = (same & (back < layer.settings.window))[:, None]
    far = (same & (back >= layer.settings.window))[:, None]
    scores = scores.masked_fill(~near, -torch.inf)
    weight = torch.sigmoid(layer.window_weight.logit)[:, None, None]
    weights = weight * (scores - scores.amax(-1, keepdim=True)).exp()
    weights = weights + torch.einsum("bihf,bjhf->bhij", mapped_q, mapped_k) * far
    out = torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v)
    if positions.kv_start is not None:
        out = out * (torch.arange(q.shape[1]) >= positions.kv_start[:, None])[..., None, None]
    return out


@pytest.mark.parametrize("feature_map", ["learned", "softmax", "relu"])
@pytest.mark.parametrize(("layout", "length"), [("plain", 41), ("padded", 32), ("packed", 45), ("plain", 4)])
def test_it_is_the_window_and_what_came_before_over_one_denominator(layout: str, length: int, feature_map: str):
    layer = build(feature_map)
    batch = 1 if layout == "packed" else 2
    hidden, positions = hidden_states(batch, length).requires_grad_(), place(layout, batch, length)
    out, expected = attend(layer, hidden, positions), by_definition(layer, hidden, positions)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    learned = [hidden, layer.window_weight.logit, *layer.q_feature_map.parameters(), *layer.k_feature_map.parameters()]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = torch.autograd.grad((out * weight).sum(), learned, materialize_grads=True)
    references = torch.autograd.grad((expected * weight).sum(), learned, materialize_grads=True)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-9)


def test_the_window_begins_with_a_tenth_and_has_a_weight_for_each_head():
    torch.testing.assert_close(begin().window_weight(), torch.full((4,), 0.1))


def test_what_is_new_has_names_to_be_found_by():
    stock = dict(LlamaAttention(CONFIG, 0).named_parameters())
    new = {name: parameter for name, parameter in begin().named_parameters() if name not in stock}
    assert {name: list(parameter.shape) for name, parameter in new.items()} == {
        "q_feature_map.weight": [4, 8, 8],
        "k_feature_map.weight": [2, 8, 8],
        "window_weight.logit": [4],
    }


def test_no_map_at_all_is_refused():
    settings = Linearization(mixer="lolcats", feature_map="none")
    with pytest.raises(ValueError, match=r"^linearization\.feature_map=none [^\n]+$"):
        LolcatsAttention(LlamaAttention(CONFIG, 0), CONFIG, settings)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["plain", "padded"])
@pytest.mark.parametrize("pieces", [[1] * 25, [3, *[1] * 22], [14, *[1] * 11], [2, 3, 20], [9, 16]])
def test_decoding_in_any_pieces_is_the_parallel_pass(layout: str, pieces: list[int]):
    layer = build()
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
def test_rows_behind_padding_are_the_rows_alone():
    layer = build()
    hidden = hidden_states(2, 20)
    out = attend(layer, hidden, place("padded", 2, 20))
    alone = attend(layer, hidden[1:, 5:], place("plain", 1, 15))
    torch.testing.assert_close(out[1:, 5:], alone, rtol=1e-9, atol=1e-9)
    assert not out[1, :5].any()


class Watched(TorchDispatchMode):
    """The names of the operations, and the most elements of a result."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.names.append(function.name())
        self.largest = max(self.largest, out.numel() if isinstance(out, Tensor) else 0)
        return out


@torch.no_grad()
def test_a_step_waits_for_no_number_and_replays_with_the_counter_alone():
    layer, hidden = build(), hidden_states(2, 22)
    expected = attend(layer, hidden, place("padded", 2, 22))
    cache, step = layer.new_cache(), place("padded", 2, 1, 7)
    attend(layer, hidden[:, :7], place("padded", 2, 7), cache)
    for token in range(7, 22):
        tables = rotary(place("padded", 2, 1, token))
        inputs = layer.project(hidden[:, token : token + 1])
        with Watched() as watched:
            # The positions' numbers are those of the first step, as in a recording; so is the length in Python.
            cache.length = 7
            out = layer.student(hidden[:, :0], *inputs, step, tables, cache)
        torch.testing.assert_close(out[:, 0], expected[:, token], rtol=1e-9, atol=1e-9)
        assert "aten::_local_scalar_dense" not in watched.names


@torch.no_grad()
def test_no_tensor_grows_with_the_square_of_the_length():
    layer, length = build(window=16), 2048
    with Watched() as watched:
        attend(layer, hidden_states(1, length), place("plain", 1, length))
    assert watched.largest <= length * 4 * 2 * 16  # the scores of a window and of the block before it


def test_a_cache_is_constant_in_size():
    layer, sizes = build(), []
    for length in (2, 64):
        cache = layer.new_cache()
        with torch.no_grad():
            attend(layer, hidden_states(2, length), place("plain", 2, length), cache)
        held = (*cache.states, cache.ring_keys, cache.ring_values)
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
