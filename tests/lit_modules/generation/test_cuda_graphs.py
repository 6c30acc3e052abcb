"""Captured generation, of which the CPU runs the same step: it equals `generate`, and nothing that it touches moves."""

import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lit_modules.generation.cuda_graphs import (
    DecodingStep,
    Output,
    can_be_captured,
    generate_captured,
    make_token_choice,
    with_own_attention,
)
from lit_modules.networks.caches import CacheSettings, CompressedCache
from lit_modules.networks.caches.settings import TensorSettings
from lit_modules.networks.linearized import Linearization, linearize
from lit_modules.networks.positions import locate

VOCABULARY = 48
SETTINGS = {
    "liger": Linearization(window=5),
    "sinks": Linearization(window=3, sinks=2),
    "every other layer softmax": Linearization(window=5, softmax_layers=(1,)),
    "all softmax": Linearization(softmax_layers=(0, 1, 2)),
    "softmax in a window": Linearization(window=5, softmax_layers=(0, 2)),
    "window alone": Linearization(window=4, sinks=2, state_weight=0.0, window_weight=1.0),
    "slots": Linearization(gate="slots", num_slots=8, window=4),
    "late states": Linearization(window=4, sinks=2, delayed=True, learned_weights="head", softmax_layers=(1,)),
}


@functools.cache
def make_model(name="liger"):
    torch.manual_seed(0)
    windowed = name == "softmax in a window"
    config = AutoConfig.for_model(
        "mistral" if windowed else "llama", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, **{"sliding_window": 6} if windowed else {},
    )  # fmt: skip
    return linearize(AutoModelForCausalLM.from_config(config).eval(), SETTINGS[name])


def prompts(batch=3, length=9, padding=(0, 4, 7)):
    """Return random prompts `[B, T]` and their mask."""
    ids = torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(length) >= torch.tensor(padding[:batch])[:, None]).long()
    return ids, mask


def by_generate(model, ids, mask, **options):
    return model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_tokens_equal_those_of_generate(name):
    ids, mask = prompts()
    right = by_generate(make_model(name), ids, mask, max_new_tokens=21)
    for fused in (True, False):
        assert torch.equal(generate_captured(make_model(name), ids, mask, max_new_tokens=21, fused=fused), right)
    assert len(right[:, 9:].unique()) > 4  # not one token over and over


@functools.cache
def stock_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("layers", [(1,), (0, 1, 2)])
@pytest.mark.parametrize("transform", ["none", "hadamard"])
@torch.no_grad()
def test_with_a_compressed_cache_tokens_equal_those_of_steps(layers, transform, monkeypatch):
    monkeypatch.setattr("lit_modules.generation.cuda_graphs.PROMPT_TOKENS", 3 * 16)
    model = linearize(stock_model(), Linearization(window=5, softmax_layers=layers))
    ids, mask = prompts(length=40, padding=(0, 4, 30))
    keys = TensorSettings(groups_along="tokens", group=16, transform=transform)
    settings = CacheSettings(keys, TensorSettings(group=16, transform=transform), window=4)
    growing = CompressedCache(model.config, settings)
    right = ids
    for start in range(0, 40, 16):
        logits = model(ids[:, start : start + 16], attention_mask=mask[:, : start + 16], past_key_values=growing).logits
    for _ in range(30):
        right = torch.cat((right, logits[:, -1].argmax(-1, keepdim=True)), 1)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        logits = model(right[:, -1:], attention_mask=mask, past_key_values=growing).logits
    for fused in (True, False):
        cache = CompressedCache(model.config, settings, capacity=70)
        out = generate_captured(model, ids, mask[:, :40], max_new_tokens=30, fused=fused, cache=cache)
        assert torch.equal(out, right)
    assert cache.memory()["packed"]


def test_a_stock_model_gets_this_projects_attention_on_its_own_weights():
    stock = stock_model()
    own = with_own_attention(stock)
    assert all(a is b for a, b in zip(own.parameters(), stock.parameters(), strict=True))
    ids, mask = prompts()
    right = by_generate(stock, ids, mask, max_new_tokens=12)
    cache = CompressedCache(own.config, CacheSettings(TensorSettings(bits=16), TensorSettings(bits=16)), capacity=21)
    assert torch.equal(generate_captured(own, ids, mask, max_new_tokens=12, cache=cache), right)
    assert with_own_attention(own) is own


def test_one_token_is_what_the_prompt_gives():
    ids, _ = prompts()
    out = generate_captured(make_model(), ids, max_new_tokens=1)
    assert torch.equal(out[:, -1], make_model()(ids).logits[:, -1].argmax(-1))


def test_rows_end_where_generate_ends_them():
    ids, mask = prompts()
    free = by_generate(make_model(), ids, mask, max_new_tokens=40)
    for ends in ([int(free[0, 12])], [int(free[0, 12]), int(free[1, 15]), int(free[2, 28])]):
        right = by_generate(make_model(), ids, mask, max_new_tokens=40, eos_token_id=ends)
        out = generate_captured(make_model(), ids, mask, max_new_tokens=40, eos_token_ids=ends)
        assert torch.equal(out, right)
    assert right.shape[1] < 49


@pytest.mark.parametrize("name", ["every other layer softmax", "late states", "softmax in a window", "window alone"])
def test_nothing_of_a_step_moves_and_no_count_of_the_host_decides(name):
    ids, mask = prompts()
    model = make_model(name)
    cache = model.new_cache(9 + 12)
    logits = model(ids, attention_mask=mask, past_key_values=cache).logits
    output = Output(3, 12, (), 0, ids.device)
    positions = locate(3, 9, 0, ids.device, mask)
    step = DecodingStep(model, cache, positions, make_token_choice(0, None, None, None), output)

    def places():
        own = (step.token, step.positions.index, *vars(output).values())
        held = [value for layer in cache.layers for value in vars(layer).values()]
        flat = [t for value in (*own, *held) for t in (value if isinstance(value, tuple) else (value,))]
        return [t.data_ptr() for t in flat if isinstance(t, torch.Tensor)]

    with torch.no_grad():
        step.take(logits[:, -1].argmax(-1))
        before = places()
        for _ in range(11):
            step()
    assert places() == before
    assert {layer.length for layer in cache.layers} == {9}  # 9 whatever was decoded, as in replays
    right = by_generate(model, ids, mask, max_new_tokens=12)
    assert torch.equal(output.tokens, right[:, 9:])


@torch.no_grad()
def test_counters_move_together_and_afterwards_each_with_its_layer():
    ids, _ = prompts()
    model = make_model("every other layer softmax")
    cache = model.new_cache(16)
    model(ids, past_key_values=cache)
    positions = locate(3, 9, 0, ids.device)
    step = DecodingStep(model, cache, positions, lambda logits: logits.argmax(-1), Output(3, 5, (), 0, ids.device))

    def counted() -> set[int]:
        names = [(layer, (*layer.counters_with_new, *layer.counters_before_new)) for layer in cache.layers]
        return {int(count) for layer, held in names for name in held for count in getattr(layer, name)}

    for made in range(1, 4):
        step()
        assert counted() == {9 + made}
    for layer in cache.layers:
        layer.length = 12
    model(ids[:, :2], past_key_values=cache)
    assert counted() == {14}


@pytest.mark.parametrize(
    ("name", "fused"),
    [("every other layer softmax", True), ("every other layer softmax", False), ("late states", True)],
    ids=["fused", "as they are", "late states"],
)
def test_all_layers_of_one_kind_are_compiled_once(monkeypatch, name, fused):
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter, fullgraph=True))
    torch.compiler.reset()
    ids, mask = prompts()
    model = make_model(name)
    out = generate_captured(model, ids, mask, max_new_tokens=8, fused=fused, compile=True)
    right = by_generate(make_model(name), ids, mask, max_new_tokens=8)
    assert torch.equal(out, right)
    assert counter.frame_count == 3  # linearized layers, softmax layers, the head


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}], ids=str)
def test_sampling_from_one_token_is_greedy(options):
    ids, mask = prompts()
    options = {"temperature": 1.0, **options}
    greedy = generate_captured(make_model(), ids, mask, max_new_tokens=6)
    assert torch.equal(generate_captured(make_model(), ids, mask, max_new_tokens=6, **options), greedy)


def test_samples_follow_the_probabilities_that_are_left():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).log_softmax(-1).expand(20000, 4)

    def draw(*settings):
        choose = make_token_choice(*settings, torch.Generator().manual_seed(0))
        return choose(logits).bincount(minlength=4) / 20000

    for settings, right in (
        ((1.0, None, None), logits[0].softmax(-1)),
        ((2.0, None, None), (logits[0] / 2).softmax(-1)),
        ((1.0, 2, None), torch.cat((logits[0, :2].softmax(-1), torch.zeros(2)))),
        ((1.0, None, 0.8), torch.cat((logits[0, :2].softmax(-1), torch.zeros(2)))),
    ):
        torch.testing.assert_close(draw(*settings), right, atol=0.015, rtol=0)


def test_one_seed_gives_one_text():
    ids, mask = prompts()
    sample = lambda seed: generate_captured(  # noqa: E731
        make_model(), ids, mask, max_new_tokens=9, temperature=1.0, generator=torch.Generator().manual_seed(seed)
    )
    assert torch.equal(sample(0), sample(0))
    assert not torch.equal(sample(0), sample(1))


class Listener:
    """A streamer that records its input."""

    def __init__(self):
        self.heard, self.ended = [], False

    def put(self, tokens):
        self.heard += tokens.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_hears_prompt_and_text_and_nothing_after_the_end():
    ids, _ = prompts(batch=1)
    free = generate_captured(make_model(), ids, max_new_tokens=40)
    for ends in ((), (int(free[0, 9 + 20]),)):
        listener = Listener()
        out = generate_captured(make_model(), ids, max_new_tokens=40, eos_token_ids=ends, streamer=listener)
        assert listener.heard == out[0].tolist()
        assert listener.ended


def test_prompts_that_are_padded_on_the_right_are_refused():
    ids, mask = prompts()
    with pytest.raises(ValueError, match="attention_mask ends in padding: pad prompts on the left"):
        generate_captured(make_model(), ids, mask.flip(1), max_new_tokens=2)


SHORT = {"factor": 2.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("rope", "captured"),
    [
        ({"rope_type": "default"}, True),
        ({"rope_type": "linear", "factor": 2.0}, True),
        ({"rope_type": "dynamic", **SHORT}, False),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, **SHORT}, False),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_rotary_tables_that_change_with_the_longest_position_are_not_captured(monkeypatch, rope, captured):
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )  # fmt: skip
    model = linearize(LlamaForCausalLM(config), Linearization())
    assert not can_be_captured(model)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert can_be_captured(model) == captured
