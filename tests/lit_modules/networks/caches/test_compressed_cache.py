"""Compressed caches in whole models: stock ones of transformers, and ours."""

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
)

from common.settings import SettingError
from lit_modules.networks import Linearization, linearize
from lit_modules.networks.caches import (
    CacheSettings,
    CompressedCache,
    CompressedCacheLayer,
    LogQuantCache,
    compressed,
    log_sparse_positions,
)
from lit_modules.networks.caches.calibration import fit_rotations
from lit_modules.networks.caches.rotations import LayerRotations, Rotations, Transform, model_identity, write_rotations

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": None,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
STOCK = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral_sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2_windows": (Qwen2ForCausalLM, Qwen2Config, WINDOWS | {"use_sliding_window": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {}),
    "gemma2_softcap": (Gemma2ForCausalLM, Gemma2Config, WINDOWS | {"attn_logit_softcapping": 3.0}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, WINDOWS),
}
OURS = ["fox_pro", "transformer_llama", "sigma", "pro_with_sigmas_heads", "small_keys", "hybrid", "hybrid_with_rope"]
FULL = CacheSettings(keys={"bits": 16}, values={"bits": 16})
PROMPT = torch.randint(1, 61, (2, 11), generator=torch.Generator().manual_seed(3))
TEXT = torch.randint(1, 61, (1, 320), generator=torch.Generator().manual_seed(4))
LEFT_PADDED = torch.ones(2, 11, dtype=torch.long)
LEFT_PADDED[0, :4] = 0


def stock(name: str, **changes):
    model, config, own = STOCK[name]
    torch.manual_seed(0)
    made = model(config(**SIZES | own | changes)).eval()
    # In float64, eager attention makes NaN of rows of padding.
    return made if made.config._attn_implementation == "eager" else made.double()


@pytest.fixture(params=[*STOCK, *OURS])
def model(request, build):
    if request.param in STOCK:
        return stock(request.param)
    from tests.lit_modules.networks.conftest import ABLATION, RECURRENT

    return build(**(ABLATION | RECURRENT)[request.param])


def generate(model, ids=PROMPT, **settings) -> torch.Tensor:
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | settings
    return model.generate(ids, **settings)


PADDED = {"attention_mask": LEFT_PADDED}
MODES = {
    "greedy": {},
    "padded": PADDED,
    "beam": PADDED | {"num_beams": 3},
    "chunks": PADDED | {"prefill_chunk_size": 4},
    "one_by_one": PADDED | {"prefill_chunk_size": 1},
}


@pytest.mark.parametrize("mode", MODES)
def test_with_16_bits_for_all_it_generates_what_the_full_cache_does(model, mode):
    expected = generate(model, **MODES[mode])
    assert generate(model, **MODES[mode], past_key_values=CompressedCache(model.config, FULL)).equal(expected)


def test_a_conversation_goes_on_from_its_cache(model):
    whole = generate(model, max_new_tokens=16, attention_mask=LEFT_PADDED)
    cache = CompressedCache(model.config, FULL)
    first = generate(model, max_new_tokens=4, attention_mask=LEFT_PADDED, past_key_values=cache)
    mask = torch.cat((LEFT_PADDED, torch.ones(2, 4, dtype=torch.long)), 1)
    assert generate(model, first, max_new_tokens=12, attention_mask=mask, past_key_values=cache).equal(whole)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_models_own_attention_stays_for_other_caches(name, implementation):
    model = stock(name, attn_implementation=implementation)
    expected = generate(model, attention_mask=LEFT_PADDED)
    cache = CompressedCache(model.config, FULL)
    assert generate(model, attention_mask=LEFT_PADDED, past_key_values=cache).equal(expected)
    assert generate(model, attention_mask=LEFT_PADDED).equal(expected)
    model.config._attn_implementation = "sdpa"


def test_positions_memory_and_bits_of_a_long_text():
    model = stock("llama").float()
    cache = LogQuantCache(model.config, window=32, group=16)
    ids = torch.randint(1, 61, (2, 1500))
    generate(model, ids, past_key_values=cache, prefill_chunk_size=200, max_new_tokens=100)
    length = cache.get_seq_length()
    assert length == 1599
    for layer in cache.layers:
        assert layer.positions() == [log_sparse_positions(length, 32)] * 2
    held = cache.memory()
    elements = 2 * 2 * length * 2 * 2 * 16  # layers, rows, tokens, keys and values, heads, width
    assert cache.bits_per_element == pytest.approx(8 * (held["packed"] + held["metadata"] + held["dense"]) / elements)
    codes, metadata = 2, 2  # a scale and a zero-point of 16 bits for 16 numbers
    dense = 32 * (3 * 32 + 16) / length
    assert codes + metadata < cache.bits_per_element < (codes + metadata) * 1.07 + dense


def test_generation_with_packed_tokens_reads_beams_and_padding():
    """Each beam of a padded row is what the row's own beams are without padding."""
    model, settings = stock("llama"), {"num_beams": 3, "max_new_tokens": 90}
    cache = LogQuantCache(model.config, window=5, group=16)
    out = generate(model, attention_mask=LEFT_PADDED, past_key_values=cache, **settings)
    assert cache.memory()["packed"] > 0
    alone = generate(model, PROMPT[:1, 4:], past_key_values=LogQuantCache(model.config, window=5, group=16), **settings)
    assert out[:1, 4:].equal(alone)


@pytest.mark.parametrize("name", ["llama", "fox_pro"])
def test_in_the_context_generate_begins_with_a_fresh_cache(name, build):
    from tests.lit_modules.networks.conftest import ABLATION

    model = stock("llama") if name == "llama" else build(**ABLATION[name])
    before, implementation = generate(model), model.config._attn_implementation
    group = 16 if name == "llama" else None
    settings = CacheSettings(keys={"bits": 0, "group": group}, values={"bits": 0, "group": group}, window=1)
    with compressed(model, settings) as same:
        assert same is model
        outs = [generate(model) for _ in range(2)]
        assert not outs[0].equal(before)
        assert outs[0].equal(outs[1])
        cache = DynamicCache(config=model.config) if name == "llama" else model.new_cache()
        assert generate(model, past_key_values=cache).equal(before)
    assert generate(model).equal(before)
    assert model.config._attn_implementation == implementation


def test_rows_can_be_repeated_selected_and_dropped():
    model = stock("llama")
    ids = torch.randint(1, 61, (3, 40))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    cache = LogQuantCache(model.config, window=4, group=16)
    model(ids, attention_mask=mask, past_key_values=cache, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    cache.batch_select_indices(torch.tensor([1, 2]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([0, 2, 3, 1]))
    new = torch.randint(1, 61, (4, 30))
    chosen = [1, 2, 2, 1]
    for t in range(30):
        seen = torch.cat((mask[chosen], torch.ones(4, t + 1, dtype=torch.long)), 1)
        place = seen.sum(1, keepdim=True) - 1
        out = model(new[:, t : t + 1], attention_mask=seen, past_key_values=cache, position_ids=place).logits
    alone = LogQuantCache(model.config, window=4, group=16)
    model(ids[1:2, 9:], past_key_values=alone)
    for t in range(30):
        expected = model(new[3:, t : t + 1], past_key_values=alone).logits
    torch.testing.assert_close(out[3:], expected)
    assert cache.layers[0].positions()[3] == alone.layers[0].positions()[0] == log_sparse_positions(61, 4)


def test_crop_takes_back_what_has_16_bits_and_says_where_it_cannot():
    model = stock("llama")
    ids = torch.randint(1, 61, (1, 60))
    cache, plain = (LogQuantCache(model.config, window=20, group=16) for _ in range(2))
    model(ids[:, :50], past_key_values=cache)
    model(ids[:, 50:58], past_key_values=cache)
    cache.crop(-8)
    assert cache.get_seq_length() == 50
    model(ids[:, :50], past_key_values=plain)
    for t in range(50, 60):
        out, expected = (model(ids[:, t : t + 1], past_key_values=each).logits for each in (cache, plain))
        torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match="60 tokens cannot be cut to 59, as a block was quantized since"):
        cache.crop(-1)
    assert cache.get_seq_length() == 60
    assert not cache.is_croppable
    cache.crop(-60)
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(
        model(ids, past_key_values=cache).logits, model(ids, past_key_values=DynamicCache(config=model.config)).logits
    )


@pytest.mark.parametrize("name", ["llama", "fox_pro"])
def test_prompt_lookup_takes_back_its_guesses(name, build):
    from tests.lit_modules.networks.conftest import ABLATION

    model = stock("llama") if name == "llama" else build(**ABLATION[name])
    repeating = PROMPT[:1].repeat(1, 3)
    expected = generate(model, repeating, max_new_tokens=24)
    cache = CompressedCache(model.config, FULL)
    found = generate(model, repeating, max_new_tokens=24, past_key_values=cache, prompt_lookup_num_tokens=5)
    assert found.equal(expected)


FIXED = {
    "log_sparse": CacheSettings(window=5, keys={"group": 16}, values={"group": 16}),
    "prompt_attention": CacheSettings(
        window=10,
        keys={"keep": "prompt_attention", "groups_along": "tokens", "group": 16, "debias": True},
        values={"keep": "prompt_attention", "group": 16},
    ),
    "full": FULL,
}


@pytest.mark.parametrize("settings", FIXED.values(), ids=FIXED)
def test_with_a_capacity_nothing_moves_and_nothing_else_changes(settings):
    model = stock("llama")
    ids = torch.randint(1, 61, (2, 130))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    growing, fixed = CompressedCache(model.config, settings), CompressedCache(model.config, settings, capacity=130)
    outs = {}
    for name, cache in (("growing", growing), ("fixed", fixed)):
        start, outs[name] = 0, []
        for tokens in (40, 20, *[1] * 70):
            stop = start + tokens
            if name == "fixed" and start > 100:
                cache.prepare_step()
            step = model(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                past_key_values=cache,
                position_ids=torch.arange(start, stop)[None],
            )
            outs[name].append(step.logits[1:, -1])
            if (name, start) == ("fixed", 40):
                places = addresses(cache)
            start = stop
    torch.testing.assert_close(torch.cat(outs["fixed"]), torch.cat(outs["growing"]))
    assert addresses(fixed) == places
    assert fixed.memory()["numbers"] == growing.memory()["numbers"]  # nothing for packed tokens, which need none
    assert fixed.layers[0].positions() == growing.layers[0].positions()
    with pytest.raises(ValueError, match=r"131 tokens are more than the cache's capacity=130"):
        fixed.prepare_step()


def addresses(cache: CompressedCache) -> list[int]:
    helds = [held for layer in cache.layers for held in (layer.key_states, layer.value_states)]
    found = [tensor.data_ptr() for held in helds for tensor in (held.dense, *held.packed)]
    return [*found, cache.books.keys.end.data_ptr(), cache.books.keys.blocks.data_ptr()]


def test_a_prepared_step_reads_nothing_of_the_host(monkeypatch):
    """The same calls with other numbers on the device: what a captured graph replays."""
    model = stock("llama")
    settings = CacheSettings(window=5, keys={"group": 16}, values={"group": 16})
    cache = CompressedCache(model.config, settings, capacity=120)
    model(torch.randint(1, 61, (1, 70)), past_key_values=cache)
    cache.prepare_step()
    first = cache.books.moves
    for token in range(1, 30):
        model(torch.full((1, 1), token), past_key_values=cache, position_ids=torch.full((1, 1), 69 + token))
        cache.prepare_step()
        # A step that was captured with the first move knows only its tensors.
        assert cache.books.moves[0].end is first[0].end
        assert cache.books.moves[0].blocks is first[0].blocks
        if cache.books.moves[0].roll is None:
            assert first[0].end.tolist() == cache.books.keys.counts()


def test_a_prepared_step_compiles_whole_and_seldom_again():
    model, graphs = stock("llama").float(), []
    ids = torch.randint(1, 61, (1, 120))
    settings = CacheSettings(window=5, keys={"group": 16, "transform": "hadamard"}, values={"group": 16})
    eager, traced = (CompressedCache(model.config, settings, capacity=120) for _ in range(2))

    def count(graph, example):
        graphs.append(graph)
        return graph

    def step(tokens, place, cache):
        return model(tokens, past_key_values=cache, position_ids=place).logits

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=count)
    with torch.no_grad():
        for cache in (eager, traced):
            model(ids[:, :20], past_key_values=cache)
        for t in range(20, 120):
            for cache in (eager, traced):
                cache.prepare_step()
            token, place = ids[:, t : t + 1], torch.tensor([[t]])
            torch.testing.assert_close(compiled(token, place, traced), step(token, place, eager))
    # Once more for the length, which is a number of the host there; it is not read.
    assert len(graphs) <= 2


@pytest.mark.parametrize("softmax_layers", [(0,), (0, 1)])
def test_a_linearized_models_softmax_layers_are_compressed(softmax_layers):
    source = stock("llama").float()
    model = linearize(source, Linearization(softmax_layers=softmax_layers, window=4)).double().eval()
    expected = generate(model, attention_mask=LEFT_PADDED)
    cache = CompressedCache(model.config, FULL)
    assert sum(isinstance(layer, CompressedCacheLayer) for layer in cache.layers) == len(softmax_layers)
    assert generate(model, attention_mask=LEFT_PADDED, past_key_values=cache).equal(expected)


def test_rotations_are_read_by_layer_and_those_of_another_model_are_refused(tmp_path):
    model = stock("llama")
    turns = [torch.linalg.qr(torch.randn(16, 16)).Q for _ in range(4)]
    maps = [Transform(turn.clone(), turn.clone()) for turn in turns]
    layers = {n: LayerRotations(*turns[2 * n : 2 * n + 2], *maps[2 * n : 2 * n + 2]) for n in range(2)}
    path = tmp_path / "rotations.safetensors"
    write_rotations(path, Rotations(layers, model_identity(model), 100))
    one = {"bits": 4, "group": 16, "transform": "rotation", "keep": "recent"}
    settings = CacheSettings(keys=one, values=one, window=100, rotations=str(path))
    cache, ids = CompressedCache(model.config, settings), torch.randint(1, 61, (1, 300))
    model(ids[:, :299], past_key_values=cache)
    assert model(ids[:, 299:], past_key_values=cache).logits.isfinite().all()
    held = [held for layer in cache.layers for held in (layer.key_states, layer.value_states)]
    assert all(each.rotation.equal(turn) for each, turn in zip(held, turns, strict=True))
    with pytest.raises(SettingError, match="belongs to another model"):
        CompressedCache(stock("llama", num_hidden_layers=3).config, settings)


@pytest.fixture(params=[*STOCK, "fox_pro", "sigma", "hybrid_with_rope", "half_width_keys"])
def calibrated(request, build, tmp_path):
    """A model, and settings of balanced maps that are fitted to it, with 4 bits beside so many new tokens."""
    from tests.lit_modules.networks.conftest import ABLATION, RECURRENT

    sizes = {
        "half_width_keys": {"hidden_size": 64, "num_key_heads": 2, "key_head_dim": 8, "rope": True, "qk_norm": True}
    }
    name = request.param
    model = stock(name) if name in STOCK else build(**(ABLATION | RECURRENT | sizes)[name])
    write_rotations(tmp_path / "maps.safetensors", fit_rotations(model, [TEXT[:, :160], TEXT[:, 160:]]))

    def settings(window: int) -> CacheSettings:
        return four_bits("balanced", window, rotations=str(tmp_path / "maps.safetensors"))

    return model, settings


def four_bits(transform: str, window: int, **others) -> CacheSettings:
    one = {"transform": transform, "group": None, "keep": "first_and_recent", "bits": 4}
    return CacheSettings(keys=one, values=one, first=2, window=window, **others)


def test_the_means_that_balanced_maps_take_away_are_given_back(calibrated):
    """All tokens keep 16 bits, without the means of their heads."""
    model, settings = calibrated
    expected = generate(model, attention_mask=LEFT_PADDED)
    cache = CompressedCache(model.config, settings(window=100))
    assert generate(model, attention_mask=LEFT_PADDED, past_key_values=cache).equal(expected)
    held = [layer.value_states for layer in cache.compressed_layers]
    assert all(each.mean is not None for each in held)


def test_tokens_packed_by_balanced_maps_are_read_as_they_were(calibrated):
    model, settings = calibrated
    logits, errors = model(TEXT).logits[:, -40:], []
    for each in (settings(window=8), four_bits("hadamard", 8)):
        cache = CompressedCache(model.config, each)
        model(TEXT[:, :-40], past_key_values=cache)
        found = [model(TEXT[:, [t]], past_key_values=cache).logits for t in range(TEXT.shape[1] - 40, TEXT.shape[1])]
        errors.append((torch.cat(found, 1) - logits).norm() / logits.norm())
    # Channels of untrained models are alike, so that no map is better.
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (MambaConfig(num_hidden_layers=2), "mamba has no layer of full attention: use its own cache"),
        (T5Config(), "t5 has an encoder: use its own cache"),
        (
            LlamaConfig(**SIZES, attn_implementation="flex_attention"),
            "attn_implementation=flex_attention has other masks",
        ),
        (LlamaConfig(**SIZES | {"head_dim": 20}), "cache.keys: head_dim=20 is not a multiple of 8"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_in_one_line(config, line):
    with pytest.raises(ValueError, match=line) as error:
        CompressedCache(config, FULL if "head_dim" not in line else None)
    assert "\n" not in str(error.value)


def test_our_recurrent_models_have_nothing_to_compress(build):
    with pytest.raises(ValueError, match="palimpsest has no layer of full attention"):
        CompressedCache(build(mixers="gla", gate_rank=3).config, FULL)


def test_a_cache_of_another_model_is_refused():
    one, other = stock("llama"), stock("llama", num_key_value_heads=4)
    cache = CompressedCache(one.config, FULL)
    one(PROMPT, past_key_values=cache)
    CompressedCache(other.config, FULL)
    with pytest.raises(ValueError, match="begin another model with a new cache"):
        other(PROMPT, past_key_values=cache)
    deeper = stock("llama", num_hidden_layers=3)
    CompressedCache(deeper.config, FULL)
    with pytest.raises(ValueError, match="made for llama of 2 layers of 64, and this model is llama of 3 layers of 64"):
        deeper(PROMPT, past_key_values=CompressedCache(one.config, FULL))


def test_a_batch_that_shrinks_without_a_word_is_refused():
    model = stock("llama")
    cache = CompressedCache(model.config, FULL)
    model(PROMPT, past_key_values=cache)
    with pytest.raises(ValueError, match=r"holds 2 rows, and the new tokens have 1: call its batch_select_indices"):
        model(PROMPT[:1], past_key_values=cache)


def test_a_mask_with_a_hole_is_refused():
    mask = torch.ones_like(PROMPT)
    mask[1, 5] = 0
    model = stock("llama")
    with pytest.raises(ValueError, match="attention_mask has a hole in row 1"):
        model(PROMPT, attention_mask=mask, past_key_values=CompressedCache(model.config, FULL))


def test_another_attention_after_the_cache_was_made_is_said():
    model = stock("llama")
    cache = CompressedCache(model.config, FULL)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"own config, after model.set_attn_implementation"):
        model(PROMPT, past_key_values=cache)


def test_one_token_prompts_and_windows_longer_than_the_text_pack_nothing():
    model = stock("llama")
    cache = LogQuantCache(model.config, window=128, group=16)
    out = generate(model, PROMPT[:, :1], past_key_values=cache)
    assert out.equal(generate(model, PROMPT[:, :1]))
    assert cache.memory()["packed"] == 0
