"""Caches of 16 bits that read the values of the highest scores alone, in stock models and in ours."""

import functools

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from lit_modules.generation.cuda_graphs import generate_captured, with_own_attention
from lit_modules.networks import PalimpsestForCausalLM
from lit_modules.networks.caches import CacheSettings, CompressedCache
from lit_modules.networks.mixers.attention import Attention
from tests.lit_modules.networks.caches.test_compressed_cache import (
    LEFT_PADDED,
    MODES,
    OURS,
    PROMPT,
    STOCK,
    generate,
    stock,
)
from tests.lit_modules.networks.conftest import ABLATION, RECURRENT

LENGTH = 23  # of prompt and new tokens
STEPS = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(5))


def selecting(number: int) -> CacheSettings:
    return CacheSettings(keys={"bits": 16}, values={"bits": 16}, top_values=number)


def fresh(model) -> Cache:
    """Return the model's own cache."""
    return model.new_cache() if isinstance(model, PalimpsestForCausalLM) else DynamicCache(config=model.config)


def named(name: str, build):
    return stock(name) if name in STOCK else build(**(ABLATION | RECURRENT)[name])


@pytest.fixture(params=[*STOCK, *OURS])
def model(request, build):
    return named(request.param, build)


@pytest.mark.parametrize("mode", MODES)
def test_with_as_many_values_as_tokens_it_generates_what_the_full_cache_does(model, mode):
    expected = generate(model, **MODES[mode])
    cache = CompressedCache(model.config, selecting(LENGTH))
    assert generate(model, **MODES[mode], past_key_values=cache).equal(expected)


def by_hand(scores: Tensor, values: Tensor, number: int) -> Tensor:
    """Attend by the `number` highest scores `[B, H, 1, S]` of the last token, -inf where hidden."""
    weights = scores.softmax(-1)
    least = weights.topk(min(number, weights.shape[-1]), -1).values[..., -1:]
    weights = weights.masked_fill(weights < least, 0.0)
    return (weights / weights.sum(-1, keepdim=True)) @ values


def logits_of_steps(model, cache, padded: bool) -> Tensor:
    """Return the logits of STEPS, one token at a time after PROMPT."""
    mask = LEFT_PADDED if padded else torch.ones_like(PROMPT)
    ids, found = torch.cat((PROMPT, STEPS), 1), []
    for start, stop in [(0, PROMPT.shape[1]), *((t, t + 1) for t in range(PROMPT.shape[1], ids.shape[1]))]:
        seen = torch.cat((mask, torch.ones(2, stop - PROMPT.shape[1], dtype=torch.long)), 1)
        places = (seen.cumsum(1) - 1).clamp(min=0)[:, start:stop]
        with torch.no_grad():
            out = model(
                ids[:, start:stop], attention_mask=seen if padded else None, past_key_values=cache, position_ids=places
            )
        found.append(out.logits[:, -1])
    return torch.stack(found, 1)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "qwen2_windows", "gemma2_softcap"])
def test_a_stock_models_steps_read_the_highest_weights_of_its_attention(name, padded):
    model = stock(name)
    own = model.config._attn_implementation
    found = logits_of_steps(model, CompressedCache(model.config, selecting(3)), padded)

    def attend(module, query, key, value, attention_mask, scaling, softcap=None, sliding_window=None, **kwargs):
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        scores = query @ key.mT * scaling
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, -torch.inf)
        elif query.shape[2] > 1:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        selects = query.shape[2] == 1 and sliding_window is None
        scores = scores.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
        out = by_hand(scores, value, 3) if selects else scores.softmax(-1) @ value
        return out.transpose(1, 2), None

    AttentionInterface.register("by_hand", attend)
    AttentionMaskInterface.register("by_hand", functools.partial(sdpa_mask, allow_is_causal_skip=False))
    model.config._attn_implementation = "by_hand"
    expected = logits_of_steps(model, fresh(model), padded)
    model.config._attn_implementation = own
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 if found.dtype == torch.float64 else 1e-5)
    assert (found - logits_of_steps(model, fresh(model), padded)).abs().max() > 1e-3


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_our_models_steps_read_the_highest_weights_of_their_attention(name, padded, build, monkeypatch):
    model = build(**(ABLATION | RECURRENT)[name])
    found = logits_of_steps(model, CompressedCache(model.config, selecting(3)), padded)
    whole = Attention.operation

    def operation(self, inputs, positions, **options):
        q, k, v, sums = inputs
        if q.shape[1] > 1:
            return whole(self, inputs, positions, **options)
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2).transpose(1, 2) for x in (k, v))
        scores = q.transpose(1, 2) @ k.mT / q.shape[-1] ** 0.5
        if sums is not None:
            scores = scores + (sums[:, -1:] - sums).mT[:, :, None]
        if positions.kv_start is not None:
            hidden = torch.arange(k.shape[2]) < positions.kv_start[:, None]
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        return by_hand(scores, v, 3).transpose(1, 2)

    monkeypatch.setattr(Attention, "operation", operation)
    torch.testing.assert_close(found, logits_of_steps(model, fresh(model), padded), rtol=0, atol=1e-9)
    monkeypatch.undo()
    assert (found - logits_of_steps(model, fresh(model), padded)).abs().max() > 1e-3


def test_a_prompt_reads_all_values(model):
    chunks = [(0, 6), (6, 11)]
    outs = []
    for cache in (fresh(model), CompressedCache(model.config, selecting(1))):
        with torch.no_grad():
            outs.append([model(PROMPT[:, a:b], past_key_values=cache).logits for a, b in chunks])
    torch.testing.assert_close(outs[1], outs[0])


def test_a_token_of_padding_reads_nothing():
    layer = CompressedCache(stock("llama").config, selecting(3)).compressed_layers[0]
    q, k, v = (torch.randn(2, heads, 1, 16) for heads in (4, 2, 2))
    out = layer.attend(q, k, v, padding=lambda: [1, 0])
    assert (out[0] == 0).all()
    torch.testing.assert_close(out[1], v[1].repeat_interleave(2, 0))


@pytest.mark.parametrize("name", ["llama", "fox_pro", "sigma", "small_keys"])
def test_tokens_that_were_taken_back_leave_no_trace(name, build):
    model = named(name, build)
    one, other = (CompressedCache(model.config, selecting(4)) for _ in range(2))
    with torch.no_grad():
        for cache in (one, other):
            model(PROMPT, past_key_values=cache)
        for t in range(5):
            model(STEPS[:, t : t + 1], past_key_values=one)
        assert one.is_croppable
        one.crop(-5)
        found, expected = (
            [model(STEPS[:, t : t + 1], past_key_values=cache).logits for t in range(4, 8)] for cache in (one, other)
        )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["llama", "fox_pro", "hybrid", "small_keys"])
def test_each_beam_of_a_padded_row_is_what_the_row_gives_alone(name, build):
    model, settings = named(name, build), {"num_beams": 3, "max_new_tokens": 12}
    caches = [CompressedCache(model.config, selecting(3)) for _ in range(2)]
    both = generate(model, attention_mask=LEFT_PADDED, past_key_values=caches[0], **settings)
    alone = generate(model, PROMPT[:1, 4:], past_key_values=caches[1], **settings)
    assert both[:1, 4:].equal(alone)
    assert not both.equal(generate(model, attention_mask=LEFT_PADDED, **settings))


@pytest.mark.parametrize("name", ["llama", "fox_pro", "pro_with_sigmas_heads", "hybrid"])
def test_a_conversation_goes_on_from_its_cache(name, build):
    model = named(name, build)
    whole = generate(model, max_new_tokens=16, past_key_values=CompressedCache(model.config, selecting(3)))
    cache = CompressedCache(model.config, selecting(3))
    first = generate(model, max_new_tokens=4, past_key_values=cache)
    assert generate(model, first, max_new_tokens=12, past_key_values=cache).equal(whole)


def test_a_captured_step_selects_as_an_uncaptured_one():
    """On a CPU the step that a GPU captures runs as it is, over storage at fixed addresses."""
    model = stock("llama").float()
    own = with_own_attention(model)
    expected = generate(
        own, attention_mask=LEFT_PADDED, past_key_values=CompressedCache(own.config, selecting(3)), max_new_tokens=12
    )
    cache = CompressedCache(own.config, selecting(3), capacity=LENGTH)
    assert generate_captured(own, PROMPT, LEFT_PADDED, max_new_tokens=12, cache=cache).equal(expected)
    assert not expected.equal(generate(model, attention_mask=LEFT_PADDED))
