"""What a model computes does not depend on how its tokens arrive: alone, padded, packed, cached, in chunks."""

import pytest
import torch
from torch.testing import assert_close

pytestmark = pytest.mark.core

EXACT = {"rtol": 0, "atol": 1e-9}


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_pad(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.cat((torch.full((longest - len(p),), 7), p)) for p in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - len(p) for p in prompts]).long()
    return ids, mask


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1] * 12, [5, 1, 4, 2]], ids=["one_by_one", "in_chunks"])
def test_cached_decoding_equals_the_parallel_pass(any_model, sizes):
    ids = tokens(2, 12)
    cache = any_model.new_cache()
    pieces = [any_model(piece, past_key_values=cache).logits for piece in ids.split(sizes, dim=1)]
    assert_close(torch.cat(pieces, dim=1), any_model(ids).logits, **EXACT)


@torch.no_grad()
def test_left_padded_rows_equal_each_row_alone_with_and_without_a_cache(any_model):
    prompts = [tokens(1, n, seed=n)[0] for n in (3, 9, 1)]
    new = tokens(3, 4, seed=99)
    ids, mask = left_pad(prompts)
    cache = any_model.new_cache()
    prefill = any_model(ids, attention_mask=mask, past_key_values=cache).logits
    steps = [prefill]
    for t in range(4):
        mask = torch.cat((mask, torch.ones(3, 1, dtype=mask.dtype)), dim=1)
        steps.append(any_model(new[:, t : t + 1], attention_mask=mask, past_key_values=cache).logits)
    cached = torch.cat(steps, dim=1)
    for row, prompt in enumerate(prompts):
        alone = any_model(torch.cat((prompt, new[row]))[None]).logits[0]
        assert_close(cached[row, -len(alone) :], alone, **EXACT)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(any_model):
    lengths = [1, 7, 2, 5]
    ids = tokens(1, sum(lengths))
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    packed = any_model(ids, cu_seqlens=cu_seqlens).logits
    alone = [any_model(document).logits for document in ids.split(lengths, dim=1)]
    assert_close(packed, torch.cat(alone, dim=1), **EXACT)


@torch.no_grad()
def test_the_future_changes_nothing(any_model):
    ids = tokens(1, 10)
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 61
    before, after = any_model(ids).logits, any_model(changed).logits
    assert_close(after[:, :6], before[:, :6], **EXACT)
    assert (after[:, 6:] - before[:, 6:]).abs().max() > 1e-3


@torch.no_grad()
def test_right_padding_leaves_the_real_tokens_alone(fox_pro):
    ids = tokens(2, 8)
    mask = torch.tensor([[1] * 5 + [0] * 3, [1] * 8])
    assert_close(fox_pro(ids, attention_mask=mask).logits[0, :5], fox_pro(ids[:1, :5]).logits[0], **EXACT)


@torch.no_grad()
def test_positions_given_by_the_user_turn_the_rotation(build):
    model = build(forget_gate="none", rope=True)
    ids = tokens(1, 6)
    moved = model(ids, position_ids=torch.arange(6)[None] + 100).logits
    assert_close(moved, model(ids).logits, rtol=0, atol=1e-4)  # only distances matter, up to float32 angles
    stretched = model(ids, position_ids=torch.arange(6)[None] * 5).logits
    assert (stretched - model(ids).logits).abs().max() > 1e-3


def test_generating_after_right_padding_is_refused(fox_pro):
    cache = fox_pro.new_cache()
    fox_pro(tokens(1, 4), attention_mask=torch.tensor([[1, 1, 0, 0]]), past_key_values=cache)
    with pytest.raises(ValueError, match="attention_mask has a hole in row 0: pad on the left"):
        fox_pro(tokens(1, 1), attention_mask=torch.tensor([[1, 1, 0, 0, 1]]), past_key_values=cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "attention_mask has a hole in row 0"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask is \[1, 3\], the tokens .* are \[1, 4\]"),
        ({"attention_mask": torch.ones(1, 4), "cu_seqlens": torch.tensor([0, 4]).int()}, "drop the mask"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens is \[2\] int64: give int32"),
        ({"cu_seqlens": torch.tensor([0, 4]).int(), "input_ids": tokens(2, 4)}, "cu_seqlens needs a batch of 1"),
        ({"input_ids": None}, "input_ids and inputs_embeds"),
        ({"output_attentions": True}, "output_attentions=true cannot be had"),
        ({"labels": tokens(1, 4), "shift_labels": tokens(1, 4)}, "labels and shift_labels are both given"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "position_ids start again at token 2 of row 0"),
    ],
)
def test_contradictions_are_named_in_one_line(fox_pro, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        fox_pro(**{"input_ids": tokens(1, 4)} | arguments)
    assert "\n" not in str(error.value)


def test_a_cache_of_another_kind_is_refused(fox_pro):
    from transformers import DynamicCache

    with pytest.raises(ValueError, match=r"past_key_values is a DynamicCache .*new_cache"):
        fox_pro(tokens(1, 4), past_key_values=DynamicCache())


@torch.no_grad()
def test_labels_and_shifted_labels_give_the_cross_entropy_of_the_logits(fox_pro):
    ids = tokens(2, 9)
    ids_with_gap = ids.clone()
    ids_with_gap[0, 3] = -100
    logits = fox_pro(ids).logits
    targets = torch.cat((ids_with_gap[:, 1:], torch.full((2, 1), -100)), dim=1)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    by_labels = fox_pro(ids, labels=ids_with_gap)
    by_targets = fox_pro(ids, shift_labels=targets)
    assert_close(by_labels.loss, expected, **EXACT)
    assert_close(by_labels.logits, logits, **EXACT)
    assert_close(by_targets.loss, expected, **EXACT)
    assert by_targets.logits is None
    assert by_targets.past_key_values is None
    per_token = fox_pro(ids, shift_labels=targets, reduction="none").loss
    assert per_token.shape == ids.shape
    assert (per_token == 0).sum() == 3
    assert_close(per_token.sum() / 15, expected, **EXACT)
    assert_close(fox_pro(ids, labels=ids_with_gap, num_items_in_batch=30).loss, expected / 2, **EXACT)


@torch.no_grad()
def test_hidden_states_and_the_last_logits_can_be_asked_for(fox_pro):
    ids = tokens(2, 6)
    everything = fox_pro(ids, output_hidden_states=True)
    assert len(everything.hidden_states) == 3
    assert_close(fox_pro.lm_head(everything.hidden_states[-1]), everything.logits)
    assert_close(fox_pro(ids, logits_to_keep=2).logits, everything.logits[:, -2:], **EXACT)
    assert_close(fox_pro(inputs_embeds=fox_pro.model.embed_tokens(ids)).logits, everything.logits, **EXACT)
