"""Rotations fitted to the text that a model reads, and the errors that they leave."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.networks.attention_inputs import AttentionInputs, watched_attention
from lit_modules.networks.caches.balanced import balanced_transform
from lit_modules.networks.caches.calibration import (
    TREATMENTS,
    fit_rotations,
    key_metric,
    measure_rotations,
    measured_format,
)
from lit_modules.networks.caches.rotations import covariance_rotation, read_rotations, write_rotations

STOCK = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OURS = {"vocab_size": 60, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}

MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**STOCK)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**STOCK, head_dim=24)),
    "fox": lambda: PalimpsestForCausalLM(PalimpsestConfig(**OURS)),
    "unequal_heads": lambda: PalimpsestForCausalLM(PalimpsestConfig(**OURS, num_key_heads=1, num_value_heads=2)),
    "hybrid": lambda: PalimpsestForCausalLM(PalimpsestConfig(**OURS, mixers=["gla", "attention"])),
    "half_width_keys": lambda: PalimpsestForCausalLM(
        PalimpsestConfig(**OURS | {"hidden_size": 64}, num_key_heads=2, key_head_dim=8, rope=True, qk_norm=True)
    ),
}


def text(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(60, (1, length)) for length in lengths]


def collected(model, sequences) -> dict[int, list[AttentionInputs]]:
    found: dict[int, list[AttentionInputs]] = {}
    with torch.no_grad(), watched_attention(model, lambda layer, inputs: found.setdefault(layer, []).append(inputs)):
        for ids in sequences:
            model(input_ids=ids, use_cache=False)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_with_keys_and_values_gets_rotations_that_its_file_keeps(name, tmp_path):
    model = MODELS[name]().eval()
    rotations = fit_rotations(model, text(40, 33, 1))
    assert rotations.tokens == 74
    assert sorted(rotations.layers) == ([1] if name == "hybrid" else [0, 1])
    write_rotations(tmp_path / "r.safetensors", rotations)
    found = read_rotations(tmp_path / "r.safetensors", model)
    errors = measure_rotations(model, found, text(30))
    assert errors.keys() == rotations.layers.keys()
    for layer in errors.values():
        assert len(layer.scores) == len(layer.values) == len(TREATMENTS)
        assert all(0 < error < 1 for error in layer.scores + layer.values)


def test_rotations_are_those_of_oscars_covariances():
    model = MODELS["llama"]().double().eval()
    sequences = text(20, 13)
    fitted = fit_rotations(model, sequences)
    for layer, parts in collected(model, sequences).items():
        q, k, v = (torch.cat([getattr(p, n)[0] for p in parts], 1) for n in ("queries", "keys", "values"))
        of_keys, of_values = torch.zeros(2, 8, 8, dtype=torch.float64)
        for head in range(2):
            queries = q[2 * head : 2 * head + 2].flatten(0, 1)
            product = queries.mT @ queries / len(queries)
            weights = ((k[head] @ product) * k[head]).sum(1)
            weights = weights / weights.mean()
            of_keys += product / 2
            of_values += v[head].mT @ (weights[:, None] * v[head]) / len(weights) / 2
        assert torch.allclose(fitted.of_layer(layer).key, covariance_rotation(of_keys), atol=1e-3)
        assert torch.allclose(fitted.of_layer(layer).value, covariance_rotation(of_values), atol=1e-3)


def test_balanced_maps_know_the_heads_means_and_the_covariance_about_them():
    model = MODELS["llama"]().double().eval()
    for projection in (layer.self_attn.v_proj for layer in model.model.layers):
        projection.register_forward_hook(lambda module, inputs, out: out + 3)
    sequences = text(20, 13)
    fitted = fit_rotations(model, sequences)
    for layer, parts in collected(model, sequences).items():
        q, k, v = (torch.cat([getattr(p, n)[0] for p in parts], 1) for n in ("queries", "keys", "values"))
        metric = (q.mT @ q).mean(0) / q.shape[1]
        for found, data, of_errors in (
            (fitted.of_layer(layer).key_map, k, metric),
            (fitted.of_layer(layer).value_map, v, torch.eye(8)),
        ):
            covariance = torch.stack([head.T.cov(correction=0) for head in data]).mean(0)
            wanted = balanced_transform(of_errors, covariance, data.mean(1))
            torch.testing.assert_close(found.mean, wanted.mean)
            for x, y in zip(found[:2], wanted[:2], strict=True):  # eigenvectors may turn where eigenvalues are close
                torch.testing.assert_close(x @ x.mT, y @ y.mT, rtol=1e-3, atol=1e-3)


def test_capped_logits_do_not_lose_the_keys_mean():
    sizes = STOCK | {"head_dim": 8, "layer_types": ["full_attention"] * 2}
    layer = fit_rotations(Gemma2ForCausalLM(Gemma2Config(**sizes)).eval(), text(20)).of_layer(0)
    assert layer.key_map.mean is None
    assert layer.value_map.mean.shape == (2, 8)


def test_the_same_text_gives_the_same_rotations():
    model, sequences = MODELS["half_width_keys"]().eval(), text(40, 20)
    first, again = fit_rotations(model, sequences), fit_rotations(model, sequences)
    for layer, fitted in first.layers.items():
        other = again.of_layer(layer)
        assert torch.equal(fitted.key, other.key)
        assert torch.equal(fitted.value, other.value)
        for name in ("key", "value"):
            found = zip(fitted.transform(name, "balanced"), other.transform(name, "balanced"), strict=True)
            assert all(torch.equal(x, y) for x, y in found)


def test_the_metric_of_cached_keys_is_the_change_of_scores_through_what_follows_the_cache():
    torch.manual_seed(1)
    model = MODELS["half_width_keys"]().double().eval()
    (inputs,) = collected(model, text(2000))[0]
    error = 1e-4 * torch.randn(8, dtype=torch.float64)
    change = inputs.finish(inputs.cached_keys + error) - inputs.finish(inputs.cached_keys)
    queries = inputs.queries[0].unflatten(0, (2, 2))
    wanted = (queries[:, :, ::10] @ change[0][:, None].mT).square().mean((1, 2, 3))
    found = error @ key_metric(inputs) @ error
    assert torch.allclose(found, wanted, rtol=0.15)


def test_rotated_channels_lose_less_at_two_bits_than_plain_ones():
    sizes = STOCK | {"hidden_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                channel = torch.arange(len(projection.weight)) % 32
                projection.weight.mul_((0.2 + 9 * (channel == 5) + channel / 32)[:, None])
    rotations = fit_rotations(model, text(300, 300))
    for scores, values in measure_rotations(model, rotations, text(200)).values():
        for errors in (scores, values):
            plain, hadamard, rotated, clipped, balanced = errors
            assert rotated < 0.8 * plain
            assert hadamard < 0.8 * plain
            assert clipped < rotated
            assert balanced < 0.8 * plain


def test_balanced_maps_lose_least_where_many_channels_differ():
    """As in trained models: sizes fall gradually, and large keys are read by small queries."""
    sizes = STOCK | {"hidden_size": 128, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    size = torch.exp(torch.arange(16) / 3).repeat(2)  # the same for both channels of a pair that positions rotate
    with torch.no_grad():
        for attention in (layer.self_attn for layer in model.model.layers):
            for projection, factor in (
                (attention.k_proj, size),
                (attention.v_proj, size),
                (attention.q_proj, 1 / size),
            ):
                projection.weight.mul_(factor.repeat(len(projection.weight) // 32)[:, None])
    rotations = fit_rotations(model, text(300, 300))
    for scores, values in measure_rotations(model, rotations, text(200)).values():
        assert scores[-1] < 0.8 * min(scores[:-1])
        assert values[-1] < 0.95 * min(values[:-1])


def test_progress_counts_every_token_of_each_pass():
    model, counted = MODELS["llama"]().eval(), []
    fit_rotations(model, text(7, 5), counted.append)
    assert counted == [7, 5, 7, 5]


def test_a_model_without_keys_and_values_is_refused():
    model = PalimpsestForCausalLM(PalimpsestConfig(**OURS, mixers="gla")).eval()
    with pytest.raises(ValueError, match="no layer that caches keys and values"):
        fit_rotations(model, text(10))


def test_weights_that_are_not_numbers_are_told():
    model = MODELS["llama"]().eval()
    model.model.layers[0].self_attn.q_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        fit_rotations(model, text(10))


@pytest.mark.parametrize("head_dim", [8, 24, 64, 96, 128, 192, 256])
def test_a_token_of_a_head_is_one_group_or_groups_of_128(head_dim):
    assert measured_format(head_dim).group == (128 if head_dim in (128, 256) else head_dim)


def test_heads_that_no_word_holds_are_refused():
    with pytest.raises(ValueError, match="multiple of 8"):
        measured_format(20)
