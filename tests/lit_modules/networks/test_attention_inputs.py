"""What attention layers read, seen from outside."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lit_modules.networks import Linearization, PalimpsestConfig, PalimpsestForCausalLM, linearize
from lit_modules.networks.attention_inputs import watched_attention

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 6}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 16}),
}


def palimpsest(**switches) -> PalimpsestForCausalLM:
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    return PalimpsestForCausalLM(PalimpsestConfig(**sizes | switches)).eval()


def seen(model, ids):
    found = {}
    with torch.no_grad(), watched_attention(model, lambda layer, inputs: found.update({layer: inputs})):
        logits = model(input_ids=ids, use_cache=False).logits
    return found, logits


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, kind) for name in FAMILIES for kind in ("sdpa", "eager") if (name, kind) != ("gemma2", "sdpa")],
)
def test_keys_and_values_are_those_that_a_stock_models_cache_holds(name, implementation):
    model_class, config_class, sizes = FAMILIES[name]
    model = model_class(config_class(**SIZES | sizes)).eval()
    model.set_attn_implementation(implementation)
    ids = torch.randint(1, 60, (2, 5))
    plain = model(input_ids=ids, use_cache=True)
    found, logits = seen(model, ids)
    assert torch.equal(logits, plain.logits)
    assert model.config._attn_implementation == implementation
    assert list(found) == [0, 1]
    for layer, inputs in found.items():
        assert torch.equal(inputs.cached_keys, plain.past_key_values.layers[layer].keys)
        assert torch.equal(inputs.values, plain.past_key_values.layers[layer].values)
        assert inputs.keys is inputs.cached_keys
        assert inputs.queries.shape[:3] == (2, 4, 5)


@pytest.mark.parametrize(
    "switches",
    [
        {"num_key_heads": 1, "num_value_heads": 2},
        {"num_key_heads": 2, "key_head_dim": 4, "rope": True, "qk_norm": True},
        {"mixers": ["attention", "gla"], "kv_shift": True},
    ],
)
def test_keys_and_values_are_those_that_our_own_models_cache_holds(switches):
    model = palimpsest(**switches)
    ids = torch.randint(1, 60, (2, 5))
    with torch.no_grad():
        plain = model(input_ids=ids, use_cache=True)
    found, logits = seen(model, ids)
    assert torch.equal(logits, plain.logits)
    assert list(found) == [n for n, mixer in enumerate(model.config.layer_mixers) if mixer == "attention"]
    for layer, inputs in found.items():
        held = plain.past_key_values.layers[layer]
        assert torch.equal(inputs.cached_keys, held.keys[:, :5].transpose(1, 2))
        assert torch.equal(inputs.values, held.values[:, :5].transpose(1, 2))
        if inputs.finish is not None:
            assert torch.equal(inputs.finish(inputs.cached_keys), inputs.keys)
    assert not any("operation" in layer.self_attn.__dict__ for layer in model.model.layers)


def test_of_a_linearized_model_the_softmax_layers_are_seen():
    stock = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    model = linearize(stock, Linearization(softmax_layers=[1])).eval()
    found, _ = seen(model, torch.randint(1, 60, (2, 5)))
    assert list(found) == [1]
    assert found[1].cached_keys.shape == (2, 2, 5, 8)


def test_an_error_leaves_a_model_as_it_was():
    models = [LlamaForCausalLM(LlamaConfig(**SIZES)), palimpsest(num_layers=1)]

    def fail(layer, inputs):
        raise KeyError("seen")

    for model in models:
        ids = torch.randint(1, 60, (1, 3))
        before = model(input_ids=ids, use_cache=False).logits
        with pytest.raises(KeyError, match="seen"), watched_attention(model, fail):
            model(input_ids=ids, use_cache=False)
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
