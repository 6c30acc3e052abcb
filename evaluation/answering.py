"""Greedy answers to prompts, with the prompts read through a cache chunk by chunk."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache


def answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    cache: Cache,
    *,
    max_new_tokens: int,
    chunk: int,
    ends: Collection[int],
    min_new_tokens: int = 0,
) -> list[str]:
    """Return the likeliest continuation of each prompt, token by token, without special tokens.

    Penalties in the model's generation settings are left aside: they would change what a benchmark asks for.

    Args:
        prompts: token ids, of any lengths; they make one left-padded batch.
        cache: an empty one.
        max_new_tokens, min_new_tokens: of each answer.
        chunk: tokens of the prompts that pass through the model at a time.
        ends: tokens that end an answer.
    """
    longest = max(map(len, prompts))
    pad = next((token for token in (tokenizer.pad_token_id, *sorted(ends)) if token is not None), 0)
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=model.device)
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            prefill_chunk_size=chunk,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            eos_token_id=sorted(ends) or None,
            pad_token_id=pad,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
        )
    return tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
