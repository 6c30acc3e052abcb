"""Our own networks by the steps of replays: the tokens of `generate`, and folded queries within rounding."""

import copy
import functools

import pytest
import torch

from common.settings import SettingError
from lit_modules.generation import fused_blocks as fused_module
from lit_modules.generation.cuda_graphs import DecodingStep, Output, can_be_captured, generate_captured
from lit_modules.generation.fused_blocks import fold_queries, fused_attention, fused_blocks
from lit_modules.generation.job import continue_prompts
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.networks.caches import StaticAttentionCacheLayer
from lit_modules.networks.positions import locate

SIGMA = {"num_key_heads": 1, "num_value_heads": 2, "augmented_query_dim": 40, "rope": True}
SWITCHES = {
    "transformer": {"rope": True},
    "sigma": SIGMA,
    "tied": SIGMA | {"tie_word_embeddings": True},
    "without positions": {"num_key_heads": 2},
    "without an MLP": SIGMA | {"intermediate_size": None},
    "with more around attention": {"rope": True, "qk_norm": True, "output_norm": True, "output_gate": True},
}
FUSED = dict.fromkeys(SWITCHES, True) | {"with more around attention": False}


def new_model(name="sigma", **changes):
    """Return a small random model with nontrivial norms."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    config = PalimpsestConfig(
        **sizes | {"forget_gate": "none", "initializer_range": 0.3} | SWITCHES.get(name, {}) | changes
    )
    model = PalimpsestForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


make_model = functools.cache(new_model)


def prompts(padding=(0, 4, 7), length=9):
    """Return random prompts `[B, T]` and their mask."""
    ids = torch.randint(48, (len(padding), length), generator=torch.Generator().manual_seed(1))
    return ids, (torch.arange(length) >= torch.tensor(padding)[:, None]).long()


@pytest.mark.parametrize("name", SWITCHES)
def test_greedy_tokens_equal_those_of_generate(name):
    model = make_model(name)
    ids, mask = prompts()
    right = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, max_new_tokens=21)
    for fused in (True, False):
        assert torch.equal(generate_captured(model, ids, mask, max_new_tokens=21, fused=fused), right)
    assert [block is not None for block in fused_blocks(model)] == [FUSED[name]] * 2
    assert len(right[:, 9:].unique()) > 4  # not one token over and over


@pytest.mark.parametrize("fused", [True, False])
def test_all_blocks_are_compiled_once(monkeypatch, fused):
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter, fullgraph=True))
    torch.compiler.reset()
    ids, mask = prompts()
    right = make_model().generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, max_new_tokens=8)
    out = generate_captured(make_model(), ids, mask, max_new_tokens=8, fused=fused, compile=True)
    assert torch.equal(out, right)
    assert counter.frame_count == 2  # a block, and the head


@torch.no_grad()
def logits_of_steps(model, fold=True, steps=6):
    """Return the logits `[steps, B, vocabulary]` of decoding given tokens."""
    ids, mask = prompts()
    cache, found = model.new_cache(9 + steps + 1), []
    model(ids, attention_mask=mask, past_key_values=cache)

    def choose(logits):
        found.append(logits)
        return (torch.arange(3) + len(found)) % 48

    step = DecodingStep(
        model, cache, locate(3, 9, 0, ids.device, mask), choose, Output(3, steps + 1, (), 0, ids.device)
    )
    if not fold:
        step._blocks.fused = [
            block._replace(attention=fused_attention(layer.input_layernorm, layer.self_attn, model.dtype, fold=False))
            for block, layer in zip(step._blocks.fused, model.model.layers, strict=True)
        ]
    step.take(ids[:, 0])
    for _ in range(steps):
        step()
    return torch.stack(found).double()


def test_folded_queries_change_logits_no_more_than_rounding_does():
    half = new_model(initializer_range=0.12).to(torch.bfloat16)
    exact = copy.deepcopy(half).double()  # of the same rounded weights
    right = logits_of_steps(exact, fold=False)
    torch.testing.assert_close(logits_of_steps(exact), right, atol=1e-11, rtol=0)
    errors = [((logits_of_steps(half, fold=fold) - right).norm() / right.norm()).item() for fold in (False, True)]
    assert 1e-3 < errors[0] < 0.02
    assert errors[1] < 1.2 * errors[0]


def test_the_folded_matrix_is_the_product_rounded_once():
    after, queries = torch.randn(24, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    exact = (after.double() @ queries.double()).float()
    assert torch.equal(fold_queries(after, queries), exact.bfloat16())
    assert fold_queries(after.double(), queries.double()).dtype == torch.float64


@pytest.mark.parametrize(("fold", "products"), [(True, 2), (False, 3)])
def test_queries_alone_are_the_rows_that_the_layer_projects(fold, products, monkeypatch):
    model, rows, calls = make_model(), torch.randn(3, 32), []
    block = model.model.layers[0]
    fused = fused_attention(block.input_layernorm, block.self_attn, torch.float32, fold=fold)
    normed = block.input_layernorm(rows)
    right = block.self_attn.augmented_q(block.self_attn.q_proj(normed))
    product = fused_module.FusedProduct.__call__
    monkeypatch.setattr(
        fused_module.FusedProduct, "__call__", lambda self, *a, **b: calls.append(self) or product(self, *a, **b)
    )
    torch.testing.assert_close(fused.queries(rows), right, atol=1e-5, rtol=1e-5)
    assert len(calls) == products
    torch.testing.assert_close(fused.project(rows)[0].flatten(1), right, atol=1e-5, rtol=1e-5)
    plain = make_model("transformer").model.layers[0]
    own = fused_attention(plain.input_layernorm, plain.self_attn, torch.float32)
    right = plain.self_attn.q_proj(plain.input_layernorm(rows))
    torch.testing.assert_close(own.queries(rows), right, atol=1e-5, rtol=1e-5)


def test_folding_leaves_the_weights_and_what_is_read_together_lies_together():
    model = new_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    blocks = fused_blocks(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    attention = model.model.layers[0].self_attn
    projections = blocks[0].attention.projections.weight
    for part in (attention.k_proj, attention.v_proj):
        assert part.weight.untyped_storage().data_ptr() == projections.untyped_storage().data_ptr()
    with torch.no_grad():
        attention.q_proj.weight.zero_()  # folded anew by the next call: never stale
    assert not fused_blocks(model)[0].attention.augmented.gate_up.weight.any()


MORE_THAN_KEYS_AND_VALUES = [
    {"forget_gate": "data_dependent"}, {"kv_shift": True}, {"key_head_dim": 4}, {"mixers": ["attention", "gla"]},
]  # fmt: skip


@pytest.mark.parametrize("switches", MORE_THAN_KEYS_AND_VALUES, ids=str)
def test_models_that_cache_more_than_keys_and_values_have_no_cache_of_fixed_capacity(switches, monkeypatch):
    model = new_model(rope=True, **switches)
    with pytest.raises(SettingError, match="capacity=9 is for models whose layers cache keys and values"):
        model.new_cache(9)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert not can_be_captured(model)
    assert can_be_captured(make_model())


@torch.no_grad()
def test_prompts_in_pieces_fill_a_cache_of_fixed_capacity():
    model = make_model()
    ids, mask = prompts()
    cache, right = model.new_cache(12), model(ids, attention_mask=mask).logits[:, -3:]
    assert all(isinstance(layer, StaticAttentionCacheLayer) for layer in cache.layers)
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        out = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
    torch.testing.assert_close(out, right, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="13 tokens are more than the cache's capacity=12"):
        model(ids[:, :4], past_key_values=cache)


class Words:
    """A tokenizer of numbers."""

    pad_token_id, eos_token_id, bos_token_id = 0, None, 1

    def __call__(self, text):
        return {"input_ids": [int(word) for word in text.split()]}

    def batch_decode(self, rows, skip_special_tokens):
        return [" ".join(map(str, row)) for row in rows.tolist()]


def test_a_model_in_training_keeps_its_weights_where_they_are(monkeypatch):
    model, captured = make_model(), []
    monkeypatch.setattr("lit_modules.generation.cuda_graphs.can_be_captured", lambda model: True)
    monkeypatch.setattr(
        "lit_modules.generation.cuda_graphs.generate_captured",
        lambda *a, **b: captured.append(1) or generate_captured(*a, **b),
    )
    texts = [
        continue_prompts(model, Words(), ["3 7 11", "5"], 7, {"do_sample": False}, trains=trains)
        for trains in (True, False)
    ]
    assert texts[0] == texts[1]
    assert len(captured) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["transformer", "sigma", "with more around attention"])
@pytest.mark.parametrize("batch", [1, 3, 32])
def test_replays_on_a_gpu_give_the_tokens_of_generate(name, batch):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA: replays are of CUDA graphs")
    model = copy.deepcopy(make_model(name)).cuda()
    assert can_be_captured(model)
    ids, mask = (x.cuda() for x in prompts(padding=[row % 8 for row in range(batch)]))
    right = model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, max_new_tokens=30)
    for fused in (True, False):
        assert torch.equal(generate_captured(model, ids, mask, max_new_tokens=30, fused=fused), right)
