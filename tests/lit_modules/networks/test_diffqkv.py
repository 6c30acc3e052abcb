"""Heads and sizes of their own for queries, keys and values (DiffQKV, arXiv 2501.13629) against their definitions."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers import LlamaForCausalLM

from lit_modules.networks import (
    PalimpsestConfig,
    PalimpsestForCausalLM,
    count_parameters,
    export_pretrained,
    flops_per_token,
)
from lit_modules.networks.positions import locate
from lit_modules.networks.rotary import rotary_tables, rotate

IDS = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))
SMALL_KEYS = {"num_key_heads": 2, "num_value_heads": 1, "key_head_dim": 4}


@torch.no_grad()
@pytest.mark.parametrize(("key_heads", "value_heads"), [(1, 2), (2, 1), (4, 1), (2, 4)])
def test_each_query_head_reads_the_mapped_key_head_and_the_value_head_of_its_group(build, key_heads, value_heads):
    model = build(
        forget_gate="none",
        rope=True,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=4,
        augmented_query_dim=24,
    )
    mixer = model.model.layers[0].self_attn
    hidden = torch.randn(1, 7, 32, dtype=torch.float64)
    positions = locate(1, 7, 0, hidden.device)
    tables = rotary_tables(positions.index, 8, model.config.rope_base)

    projected = hidden @ mixer.q_proj.weight.T
    augmented = mixer.augmented_q
    inner = F.silu(projected @ augmented.gate_proj.weight.T) * (projected @ augmented.up_proj.weight.T)
    queries = rotate((inner @ augmented.down_proj.weight.T).view(1, 7, 4, 8), tables)
    keys, values = hidden @ mixer.k_proj.weight.T, hidden @ mixer.v_proj.weight.T
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    heads = []
    for head in range(4):
        key_head, value_head = head * key_heads // 4, head * value_heads // 4
        key = keys[..., 4 * key_head : 4 * key_head + 4] @ mixer.k_map_proj.weight[key_head].T
        key = rotate(key[:, :, None], tables)[0, :, 0]
        scores = (queries[0, :, head] @ key.T / 8**0.5).masked_fill(future, -torch.inf)
        heads.append(scores.softmax(-1) @ values[0, :, 8 * value_head : 8 * value_head + 8])
    expected = torch.cat(heads, dim=-1) @ mixer.o_proj.weight.T
    assert_close(mixer(hidden, positions._replace(rotary_index=positions.index, rotary=tables))[0], expected)


def cached_elements(**heads) -> int:
    """Elements of keys and values that a layer's cache holds for each token, in a model with Sigma's 32 query heads."""
    sizes = {"vocab_size": 61, "hidden_size": 256, "num_layers": 1, "num_heads": 32, "intermediate_size": 48}
    model = PalimpsestForCausalLM(PalimpsestConfig(**sizes, forget_gate="none", rope=True, **heads)).eval()
    cache = model.new_cache()
    for piece in IDS.split([8, 1, 3], dim=1):
        model(piece, past_key_values=cache)
    layer = cache.layers[0]
    assert layer.keys.shape[1] == layer.values.shape[1]
    return (layer.keys.numel() + layer.values.numel()) // (2 * layer.keys.shape[1])


def test_the_cache_keeps_the_few_key_heads_few_and_small():
    sigma = cached_elements(num_key_heads=4, num_value_heads=16, augmented_query_dim=384)
    gqa_16 = cached_elements(num_key_heads=16, num_value_heads=16)
    assert sigma == 4 * 8 + 16 * 8
    assert sigma / gqa_16 == 20 / 32
    assert cached_elements(num_key_heads=4, num_value_heads=16, key_head_dim=4) == 4 * 4 + 16 * 8
    assert cached_elements(num_key_heads=16, num_value_heads=16, key_head_dim=4) / gqa_16 == 3 / 4


@torch.no_grad()
def test_small_keys_are_cached_before_their_map_their_norm_and_their_rotation(build):
    model = build(forget_gate="none", rope=True, qk_norm=True, **SMALL_KEYS)
    block, cache = model.model.layers[0], model.new_cache()
    for piece in IDS.split([5, 7], dim=1):
        model(piece, past_key_values=cache)
    projected = block.self_attn.k_proj(block.input_layernorm(model.model.embed_tokens(IDS)))
    assert_close(cache.layers[0].keys[:, :12], projected.unflatten(-1, (2, 4)))
    assert cache.layers[0].positions[:, :12].tolist() == [list(range(12))] * 2


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1] * 12, [5, 3, 4]], ids=["one_by_one", "in_chunks"])
def test_small_keys_keep_the_positions_that_the_user_gave_them(build, sizes):
    model = build(forget_gate="none", rope=True, **SMALL_KEYS)
    stretched = torch.stack((torch.arange(12) * 5, torch.arange(12) * 2 + 40))
    cache, pieces = model.new_cache(), zip(IDS.split(sizes, dim=1), stretched.split(sizes, dim=1), strict=True)
    steps = [model(ids, position_ids=index, past_key_values=cache).logits for ids, index in pieces]
    whole = model(IDS, position_ids=stretched).logits
    assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-9)
    assert (whole - model(IDS).logits).abs().max() > 1e-3


@torch.no_grad()
def test_small_keys_that_were_taken_back_leave_no_position_behind(build):
    model = build(forget_gate="none", rope=True, **SMALL_KEYS)
    cache = model.new_cache()
    model(IDS[:, :4], past_key_values=cache)
    model(IDS[:, :5], position_ids=torch.arange(90, 95).expand(2, 5), past_key_values=cache)
    cache.crop(-5)
    assert_close(model(IDS[:, 4:], past_key_values=cache).logits, model(IDS).logits[:, 4:], rtol=0, atol=1e-9)


@torch.no_grad()
def test_the_logit_bound_of_a_query_head_is_that_of_the_key_head_it_reads(build):
    mixer = build(qk_norm=True, **SMALL_KEYS).model.layers[0].self_attn
    mixer.q_norm.weight.fill_(1.0)
    mixer.k_norm.weight.copy_(torch.tensor([[0.5], [3.0]], dtype=torch.float64).expand(2, 8))
    assert_close(mixer._logit_bound(), 1.04 * 8**0.5 * torch.tensor([0.5, 0.5, 3.0, 3.0]))
    q, k, *_ = mixer.project(torch.randn(1, 64, 32, dtype=torch.float64), locate(1, 64, 0, torch.device("cpu")))
    logits = torch.einsum("bihd,bjhd->hij", q, k.repeat_interleave(2, dim=2)) / 8**0.5
    assert (logits.abs().amax((1, 2)) <= mixer._logit_bound()).all()


@torch.no_grad()
def test_grouped_queries_are_a_stock_llamas(build, tmp_path):
    model = build(forget_gate="none", rope=True, num_key_heads=2, num_value_heads=2, key_head_dim=8)
    llama = LlamaForCausalLM.from_pretrained(export_pretrained(model, tmp_path / "export"), dtype=torch.float64)
    assert llama.config.num_key_value_heads == 2
    assert_close(llama(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)  # it normalizes in float32


def test_flops_change_with_the_parameters_alone(build):
    plain, sigma = (build(forget_gate="none", rope=True, **heads) for heads in ({}, SMALL_KEYS))
    scores = 3 * 2 * 2 * 32 * 100
    for model in (plain, sigma):
        assert flops_per_token(model.config, 100) - scores == 6 * count_parameters(model).active
    # k_proj from 32 x 32 to 32 x 2 x 4, a map of 4 x 8 for each key head, v_proj from 32 x 32 to 32 x 8
    saved = 2 * (32 * 32 - 32 * 2 * 4 - 2 * 4 * 8 + 32 * 32 - 32 * 8)
    assert count_parameters(plain).total - count_parameters(sigma).total == saved
