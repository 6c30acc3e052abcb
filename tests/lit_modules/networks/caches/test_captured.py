"""Decoding steps with a compressed cache, captured in a CUDA graph or compiled."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_modules.networks.caches import CompressedCache, replayed_rolls
from lit_modules.networks.caches.settings import CacheSettings, TensorSettings

pytestmark = pytest.mark.gpu
PROMPT, STEPS, WINDOW = 300, 720, 64
"""The steps fill five blocks or more, each with a roll; rolls are replayed from the third on at the latest."""
SWITCH = 460
"""The step at which rows change places, after three rolls."""


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()


def settings(transform: str) -> CacheSettings:
    if transform == "selected values":
        return CacheSettings(TensorSettings(bits=16), TensorSettings(bits=16), top_values=50)
    if transform == "chosen by the prompt":
        keys = TensorSettings("prompt_attention", groups_along="tokens", high_channels=8, debias=True)
        return CacheSettings(keys, TensorSettings("prompt_attention", transform="hadamard"), window=WINDOW)
    keys = TensorSettings(groups_along="tokens", transform=transform)
    return CacheSettings(keys, TensorSettings(transform=transform), window=WINDOW)


def prefilled(llama: LlamaForCausalLM, transform: str) -> tuple[CompressedCache, torch.Tensor]:
    """Return a cache that holds a prompt, and the tokens that are to come."""
    tokens = torch.randint(0, 96, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(1)).to("cuda")
    cache = CompressedCache(llama.config, settings(transform), capacity=PROMPT + STEPS + 16)
    for chunk in tokens[:, :PROMPT].split(128, 1):
        llama(chunk, past_key_values=cache)
    return cache, tokens[:, PROMPT:]


@pytest.mark.parametrize("transform", ["none", "hadamard", "chosen by the prompt", "selected values"])
@torch.no_grad()
def test_replays_of_captured_steps_and_rolls_give_what_they_give_uncaptured(llama, transform, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(replayed_rolls, "kind_of", lambda *_: None)
        cache, tokens = prefilled(llama, transform)
        expected = [llama(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(STEPS)]
        kept = [layer.positions() for layer in cache.compressed_layers]

    cache, tokens = prefilled(llama, transform)
    token, position = tokens[:, :1].clone(), torch.full((2, 1), PROMPT, device="cuda")

    def step() -> torch.Tensor:
        return llama(token, position_ids=position, past_key_values=cache).logits

    found = []
    graph, out = None, None
    for i in range(STEPS):
        token.copy_(tokens[:, i : i + 1])
        position.fill_(PROMPT + i)
        cache.prepare_step()
        if i < 3:
            found.append(step())
        elif graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()
            graph.replay()
            found.append(out.clone())
        else:
            graph.replay()
            found.append(out.clone())
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"step {i}: {(one - other).abs().max()}"
    assert any(cache.books.rolls.captured.values()) == cache.settings.compresses
    assert [layer.positions() for layer in cache.compressed_layers] == kept


@torch.no_grad()
def test_rows_that_change_places_are_rolled_where_they_are(llama) -> None:
    tokens = torch.randint(0, 96, (2, PROMPT + STEPS), generator=torch.Generator().manual_seed(1)).to("cuda")
    logits = []
    for captures in (False, True):
        cache, _ = prefilled(llama, "chosen by the prompt")
        for i in range(STEPS):
            if not captures:
                cache.books.rolls.forget()  # so that no roll is the second of its kind
            if i == SWITCH:
                assert any(cache.books.rolls.captured.values()) == captures
                cache.batch_select_indices(torch.tensor([1, 0], device="cuda"))
                tokens = tokens.flip(0)
            last = llama(tokens[:, PROMPT + i : PROMPT + i + 1], past_key_values=cache).logits
        logits.append(last)
        assert copy.deepcopy(cache).get_seq_length() == PROMPT + STEPS
        tokens = tokens.flip(0)
    assert torch.equal(*logits)


@torch.no_grad()
def test_a_compiled_model_gives_what_it_gives_uncompiled(llama) -> None:
    cache, tokens = prefilled(llama, "none")
    expected = [llama(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(STEPS)]
    cache, tokens = prefilled(llama, "none")
    compiled = torch.compile(llama, fullgraph=True)
    for i in range(STEPS):
        cache.prepare_step()
        position = torch.full((2, 1), PROMPT + i, device="cuda")
        logits = compiled(tokens[:, i : i + 1], position_ids=position, past_key_values=cache).logits
        assert (logits - expected[i]).abs().max() < 0.05 * expected[i].abs().max()
