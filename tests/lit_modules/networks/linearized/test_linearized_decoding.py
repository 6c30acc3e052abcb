"""Decoding one token after the other, in constant memory, equals the parallel pass."""

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache

from lit_modules.networks.linearized import liger
from lit_modules.networks.positions import Positions

GATES = ("gla", "hgrn2", "rwkv6", "slots", "mamba2", "mlstm", "gated_retention", "fixed", "none")
WINDOW = 5
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
OPTIONS = {
    "window": {},
    "no_window": {"window": 0},
    "window_of_one": {"window": 1},
    "sinks": {"sinks": 2},
    "delayed": {"delayed": True},
    "delayed_with_sinks": {"delayed": True, "sinks": 3, "window": 2},
    "delayed_with_scalars": {"delayed": True, "sinks": 1, "learned_gate_shift": True, "learned_weights": "head"},
    "delayed_in_parts": {"delayed": True, "feature_map": "learned", "output_norm": True, "sinks": 1},
    "delayed_random_gates": {"delayed": True, "gate_source": "random", "sinks": 1},
    "delayed_rotated": {"delayed": True, "rotate_state": True, "sinks": 1},
    "window_alone": {"state_weight": 0.0, "window_weight": 1.0},
    "window_alone_with_sinks": {"state_weight": 0.0, "window_weight": 0.7, "sinks": 2},
    "hybrid": {"softmax_layers": (0,), "sinks": 1},
    "temperature": {"temperature": 3.0},
    "shifted": {"learned_gate_shift": True, "temperature": 2.0},
    "no_map": {"feature_map": "none"},
    "random_gates": {"gate_source": "random"},
    "rotated": {"rotate_state": True},
    "normalized": {"output_norm": True, "learned_weights": "layer"},
    "learned": {"feature_map": "learned", "learned_weights": "head", "state_weight": 0.2},
}
OF_ALL_GATES = ("window", "no_window", "sinks", "delayed", "hybrid")
OF_SOME_GATES = {
    "hgrn2": ("temperature", "shifted", "no_map", "delayed_with_scalars"),
    "mamba2": ("temperature", "shifted"),
}
LENGTH = 13
PADDING = torch.ones(2, LENGTH, dtype=torch.long)
PADDING[0, :6] = 0


def build(linearized, **settings):
    return linearized("qwen3", **{"window": WINDOW, "num_slots": 4} | settings)


def decoded(model, ids, mask, bounds, cache=None) -> torch.Tensor:
    """Logits of tokens read in pieces that end at `bounds`."""
    cache = model.new_cache() if cache is None else cache
    parts = [
        model(ids[:, a:b], attention_mask=None if mask is None else mask[:, :b], past_key_values=cache).logits
        for a, b in zip([0, *bounds], bounds, strict=False)
    ]
    assert cache.get_seq_length() == bounds[-1]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize(
    ("gate", "option"),
    [
        (gate, option)
        for gate in GATES
        for option in OPTIONS
        if option in (*OF_ALL_GATES, *OF_SOME_GATES.get(gate, ())) or gate == "gla"
    ],
)
@torch.no_grad()
def test_decoding_equals_the_parallel_pass(gate, option, linearized, ids):
    model = build(linearized, gate=gate, **OPTIONS[option])
    one_by_one, pieces = list(range(1, LENGTH + 1)), [WINDOW + 1, WINDOW + 2, LENGTH - 2, LENGTH]
    for mask, bounds in ((PADDING, one_by_one), (None, pieces)):
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        expected = model(ids, attention_mask=mask, use_cache=False).logits[real]
        assert_close(decoded(model, ids, mask, bounds)[real], expected, **CLOSE)


PROMPTED = {
    "window": {},
    "window alone": {"state_weight": 0.0, "window_weight": 1.0, "sinks": 2},
    "sinks": {"sinks": 2},
    "delayed": {"delayed": True},
    "delayed with sinks": {"delayed": True, "sinks": 2, "gate": "hgrn2"},
}


@pytest.mark.parametrize("first", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1])
@pytest.mark.parametrize("options", PROMPTED.values(), ids=PROMPTED)
@torch.no_grad()
def test_a_prompt_of_any_length_is_gone_on_from(first, options, linearized, ids):
    model = build(linearized, **options)
    for mask in (None, PADDING):
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        expected = model(ids, attention_mask=mask, use_cache=False).logits[real]
        bounds = [first, *range(first + 1, LENGTH + 1)]
        assert_close(decoded(model, ids, mask, bounds)[real], expected, **CLOSE)


@torch.no_grad()
def test_a_long_piece_after_a_cache_sees_its_window_block_by_block(linearized, ids):
    long = ids.repeat(1, 3)
    model = build(linearized, sinks=2)
    expected = model(long, use_cache=False).logits
    assert_close(decoded(model, long, None, [2, 39]), expected, **CLOSE)


@pytest.mark.parametrize("window", [2, 5, 16], ids=lambda window: f"window_of_{window}")
@torch.no_grad()
def test_a_late_state_goes_on_through_pieces_and_single_tokens(window, linearized, ids):
    """Pieces shorter, as long and longer than the window, single tokens before, between and after them."""
    long = ids.repeat(1, 3)
    model = build(linearized, window=window, sinks=1, delayed=True, learned_weights="head")
    mask = torch.ones_like(long)
    mask[0, :4] = 0
    bounds = [1, 2, 3, 2 + window, 3 + window, 4 + 2 * window, *range(5 + 2 * window, 40)]
    bounds = [bound for bound in bounds if bound <= 39]
    expected = model(long, attention_mask=mask, use_cache=False).logits[mask.bool()]
    assert_close(decoded(model, long, mask, bounds)[mask.bool()], expected, **CLOSE)


@pytest.mark.parametrize("options", [{}, {"delayed": True, "window": 2}], ids=["window", "delayed"])
def test_pieces_with_gradients_equal_those_without(options, linearized, ids):
    model = build(linearized, **options)
    logits = decoded(model, ids, None, [3, 4, 5, 8])
    with torch.no_grad():
        expected = decoded(model, ids, None, [3, 4, 5, 8])
    assert_close(logits, expected, **CLOSE)
    logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.any()


@pytest.mark.parametrize(
    "options",
    [{"sinks": 2}, {"delayed": True}, {"gate": "slots", "delayed": True}],
    ids=["sinks", "delayed", "slots"],
)
@torch.no_grad()
def test_the_cache_does_not_grow(options, linearized, ids):
    model, sizes = build(linearized, **options), []
    cache = model.new_cache()
    for start in (0, 1, 7, 12):
        model(ids[:, start:], past_key_values=cache)
        layer = cache.layers[1]
        sizes.append([x.nbytes for x in (*layer.states, layer.ring_keys, layer.ring_values, *layer.late)])
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]
    assert {state.dtype for state in layer.states} == {torch.float64}  # of a float64 model


@torch.no_grad()
def test_a_window_alone_computes_and_caches_no_state(linearized, ids, monkeypatch):
    model = build(linearized, state_weight=0.0, window_weight=1.0, sinks=2, delayed=True)
    for operation in ("gated", "gated_recurrence", "gated_recurrence_step", "liger_step", "windowed_step"):
        monkeypatch.delattr(liger, operation)
    cache = model.new_cache()
    for piece in (ids[:, :7], ids[:, 7:8], ids[:, 8:]):
        model(piece, past_key_values=cache)
    assert [layer.states for layer in cache.layers] == [(), ()]
    assert [layer.late for layer in cache.layers] == [(), ()]


@pytest.mark.parametrize("capacity", [None, LENGTH], ids=["growing", "static"])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])  # of Qwen2 the second layer alone has a window
@torch.no_grad()
def test_a_softmax_layer_caches_no_more_than_its_window(family, capacity, linearized, ids):
    model = linearized(family, window=4, softmax_layers=(0, 1))
    window = model.attentions()[1].sliding_window
    pieces = [1, 2, window + 1, window + 2, LENGTH]
    for mask, bounds in ((PADDING, range(1, LENGTH + 1)), (PADDING, pieces), (None, pieces)):
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        expected = model(ids, attention_mask=mask, use_cache=False).logits[real]
        cache = model.new_cache(capacity)
        assert_close(decoded(model, ids, mask, list(bounds), cache)[real], expected, **CLOSE)
        layer = cache.layers[1]
        held, most = (layer.keys, window - 1) if capacity is None else (layer.ring_keys, window)
        assert held.shape[1] == most
        assert held.untyped_storage().nbytes() <= 2 * window * held[:, :1].nbytes


@torch.no_grad()
def test_a_cache_of_a_window_gives_back_what_it_still_knows(linearized, ids):
    model = linearized("mistral", window=4, softmax_layers=(0, 1))
    cache = model(ids[:, :5]).past_key_values
    cache.crop(3)
    expected = model(ids, use_cache=False).logits[:, 3:]
    assert_close(model(ids[:, 3:], past_key_values=cache).logits, expected, **CLOSE)
    with pytest.raises(ValueError, match=r"crop\(-2\) takes back 2 of 13 tokens, and a window of 6 no longer has"):
        cache.crop(-2)
    cache.reset()
    assert_close(model(ids[:, :1], past_key_values=cache).logits, model(ids[:, :1]).logits, **CLOSE)
    cache.crop(-1)
    assert cache.get_seq_length() == 0


@torch.no_grad()
def test_the_state_is_float32_in_a_bfloat16_model(linearized, ids):
    model = build(linearized).bfloat16()
    cache = model(ids).past_key_values
    expected = model(torch.cat((ids, ids[:, :1]), dim=1), use_cache=False).logits[:, -1:]
    out = model(ids[:, :1], past_key_values=cache).logits
    assert {state.dtype for layer in cache.layers for state in layer.states} == {torch.float32}
    assert cache.layers[0].ring_keys.dtype == torch.bfloat16
    assert_close(out, expected, rtol=0.05, atol=0.5)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": 1},
        {"delayed": True, "sinks": 1},
        {"delayed": True, "gate": "slots"},
        {"state_weight": 0.0, "window_weight": 1.0, "sinks": 1},
    ],
    ids=["fused", "delayed", "in_parts", "window_alone"],
)
@torch.no_grad()
def test_a_step_reads_its_place_from_the_device_alone(options, linearized, ids):
    """Freeze host values at one step, as a recorded CUDA graph does."""
    model = build(linearized, **options)
    cache = model.new_cache()
    model(ids[:, :4], past_key_values=cache)
    expected = model(ids, use_cache=False).logits
    for token in range(4, LENGTH):
        positions = Positions(cache.layers[0].counter.long().expand(2, 1))
        for layer in cache.layers:
            layer.length = 4
        logits = model(ids[:, token : token + 1], past_key_values=cache, positions=positions).logits
        assert_close(logits[:, 0], expected[:, token], **CLOSE)


WHOLE = {
    "a model without new parameters": ({"sinks": 2}, "liger_step"),
    "learned weights and shift": ({"learned_gate_shift": True, "learned_weights": "head"}, "liger_step"),
    "a map that is learned": ({"feature_map": "learned"}, "windowed_step"),
    "gates of the hidden states": ({"gate_source": "random"}, "windowed_step"),
    "rotation in the state": ({"rotate_state": True}, "windowed_step"),
    "slots": ({"gate": "slots"}, None),
    "an output norm": ({"output_norm": True}, None),
    "a late state": ({"delayed": True, "sinks": 1, "learned_weights": "head"}, "liger_step"),
    "a late state of a learned map": ({"delayed": True, "feature_map": "learned"}, None),
    "no window": ({"window": 0}, None),
}


@pytest.mark.parametrize(("options", "taken"), WHOLE.values(), ids=WHOLE)
def test_one_operation_takes_what_it_can_of_a_token(options, taken, linearized, ids, monkeypatch):
    model, calls = build(linearized, **options), []
    for name in ("liger_step", "windowed_step"):
        step = getattr(liger, name)
        record = lambda *given, name=name, step=step, **more: calls.append(name) or step(*given, **more)  # noqa: E731
        monkeypatch.setattr(liger, name, record)
    with torch.no_grad():
        cache = model(ids[:, :4]).past_key_values
        model(ids[:, 4:7], past_key_values=cache)
        assert not calls  # several tokens are none
        model(ids[:, 7:8], past_key_values=cache)
    assert calls == [taken] * 2 * (taken is not None)


@pytest.mark.parametrize("trained", ["q_proj.weight", "gate_shift.shift"])
def test_a_token_with_gradients_is_taken_apart(trained, linearized, ids):
    model = build(linearized, learned_gate_shift=True).requires_grad_(False)
    cache = model(ids[:, :4]).past_key_values
    parameter = model.model.layers[1].self_attn.get_parameter(trained).requires_grad_()
    model(ids[:, 4:5], past_key_values=cache).logits.sum().backward()
    assert parameter.grad.any()


def generate(model, ids, **settings) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(ids, **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | settings)


@pytest.mark.parametrize("mask", [None, PADDING], ids=["unpadded", "left_padded"])
@pytest.mark.parametrize(
    "mode",
    [{}, {"do_sample": True, "top_k": 5, "temperature": 3.0}, {"num_beams": 3}, {"prefill_chunk_size": 4}],
    ids=["greedy", "sampling", "beam", "chunked"],
)
@pytest.mark.parametrize("options", [{"softmax_layers": (1,)}, {"gate": "slots", "sinks": 2, "delayed": True}])
def test_generating_with_a_cache_equals_generating_without(options, mode, mask, linearized, ids):
    model = build(linearized, **options)
    settings = mode if mask is None else mode | {"attention_mask": mask}
    without = {key: value for key, value in settings.items() if key != "prefill_chunk_size"}
    assert generate(model, ids, **settings).equal(generate(model, ids, **without, use_cache=False))


def test_greedy_generation_takes_the_most_likely_token_of_the_parallel_pass(linearized, ids):
    model = build(linearized)
    out = generate(model, ids)
    assert out[:, LENGTH:].equal(model(out, use_cache=False).logits.argmax(-1)[:, LENGTH - 1 : -1])
    assert model(out, logits_to_keep=1).logits.shape == (2, 1, 61)


def test_rows_of_unequal_length_are_written_as_each_alone(linearized, ids):
    model = build(linearized, sinks=1)
    both = generate(model, ids, attention_mask=PADDING)[:, LENGTH:]
    assert both[:1].equal(generate(model, ids[:1, 6:])[:, LENGTH - 6 :])
    assert both[1:].equal(generate(model, ids[1:])[:, LENGTH:])


@pytest.mark.parametrize("gate", ["gla", "slots"])
@torch.no_grad()
def test_a_cache_is_reset_repeated_selected_and_offloaded(gate, linearized, ids):
    model = build(linearized, gate=gate, delayed=True, sinks=1)
    cache = model(ids).past_key_values
    expected = model(ids[:, :1], past_key_values=model(ids).past_key_values).logits
    for layer in cache.layers:
        layer.batch_repeat_interleave(2)
        layer.batch_select_indices(torch.tensor([2, 0, 1]))
        layer.reorder_cache(torch.tensor([1, 0, 0]))
        layer.offload()
        layer.prefetch()
    rows = torch.tensor([0, 1, 1])
    assert_close(model(ids[rows, :1], past_key_values=cache).logits, expected[rows], **CLOSE)
    cache.reset()
    assert_close(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits, **CLOSE)


def test_what_does_not_fit_is_refused_in_one_line(linearized, ids):
    model, packed = build(linearized), torch.tensor([0, 13], dtype=torch.int32)
    with pytest.raises(ValueError, match="DynamicCache of other layers than this model's"):
        model(ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="DynamicCache of other layers than this model's"):
        build(linearized, softmax_layers=(0, 1))(ids, past_key_values=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="input_ids and inputs_embeds: give one of the two"):
        model()
    with pytest.raises(ValueError, match="cu_seqlens with a cache"):
        model(ids[:1], cu_seqlens=packed, use_cache=True)
    with pytest.raises(ValueError, match="positions says all"):
        model(ids, positions=Positions(torch.arange(13)[None]), attention_mask=PADDING)
    with pytest.raises(ValueError, match="labels and shift_labels are both given"):
        model(ids, labels=ids, shift_labels=ids)
    with pytest.raises(ValueError, match="output_attentions=true cannot be had"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="mode=guess is not known"):
        model.features(ids, mode="guess")
    with pytest.raises(ValueError, match="hole in row 0"):
        model(ids, attention_mask=(torch.arange(13) != 5).expand(2, 13))
    with pytest.raises(ValueError, match="cache_implementation=static does not fit"):
        generate(model, ids, cache_implementation="static")


@pytest.mark.parametrize("options", [{}, {"delayed": True}, {"feature_map": "learned"}], ids=str)
def test_learned_weights_have_their_gradient_from_a_cached_token_too(options, linearized, ids):
    model = build(linearized, learned_weights="head", **options).requires_grad_(False)
    cache = model.new_cache()
    model(ids[:, :8], past_key_values=cache)
    weights = list(model.attentions()[-1].weights.requires_grad_().parameters())
    found = model(ids[:, 8:9], past_key_values=cache).logits
    expected = model(ids[:, :9], use_cache=False).logits[:, 8:]
    assert_close(found, expected, **CLOSE)
    gradients = (torch.autograd.grad(logits.square().sum(), weights) for logits in (found, expected))
    assert_close(*gradients, **CLOSE)
