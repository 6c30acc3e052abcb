"""`generate` returns the same with and without a cache, in every mode of Hugging Face."""

import pytest
import torch

PROMPT = torch.randint(1, 61, (2, 11), generator=torch.Generator().manual_seed(3))
LEFT_PADDED = torch.ones(2, 11, dtype=torch.long)
LEFT_PADDED[0, :4] = 0


def generate(model, ids=PROMPT, **settings) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(ids, **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | settings)


@pytest.mark.parametrize("mask", [None, LEFT_PADDED], ids=["unpadded", "left_padded"])
@pytest.mark.parametrize(
    "mode",
    [{}, {"do_sample": True, "top_k": 5, "temperature": 3.0}, {"num_beams": 3}],
    ids=["greedy", "sampling", "beam"],
)
def test_generating_with_a_cache_equals_generating_without(generating_model, mode, mask):
    settings = mode if mask is None else mode | {"attention_mask": mask}
    assert generate(generating_model, **settings).equal(generate(generating_model, **settings, use_cache=False))


def test_greedy_generation_takes_the_most_likely_token_of_the_parallel_pass(generating_model):
    out = generate(generating_model)
    assert out[:, 11:].equal(generating_model(out).logits.argmax(-1)[:, 10:-1])


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_a_prompt_read_in_chunks_generates_the_same(generating_model, chunk):
    for mask in (None, LEFT_PADDED):
        expected = generate(generating_model, attention_mask=mask)
        assert generate(generating_model, attention_mask=mask, prefill_chunk_size=chunk).equal(expected)


def test_prompt_lookup_generates_what_greedy_search_generates(attending_model):
    repeating = PROMPT[:1].repeat(1, 3)
    expected = generate(attending_model, repeating, max_new_tokens=24)
    assert generate(attending_model, repeating, max_new_tokens=24, prompt_lookup_num_tokens=5).equal(expected)


def test_assisted_generation_rolls_back_what_the_assistant_guessed_wrong(build, fox_pro):
    assistant = build(forget_gate="data_dependent", kv_shift=True, num_layers=1)
    expected = generate(fox_pro, PROMPT[:1], max_new_tokens=24)
    assert generate(fox_pro, PROMPT[:1], max_new_tokens=24, assistant_model=assistant).equal(expected)


def test_a_conversation_goes_on_from_its_cache(fox_pro):
    whole = generate(fox_pro, max_new_tokens=12)
    cache = fox_pro.new_cache()
    first = generate(fox_pro, max_new_tokens=4, past_key_values=cache)
    assert generate(fox_pro, first, max_new_tokens=8, past_key_values=cache).equal(whole)


def test_a_static_cache_is_refused_by_name(fox_pro):
    with pytest.raises(ValueError, match="cache_implementation=static does not fit"):
        generate(fox_pro, cache_implementation="static")
