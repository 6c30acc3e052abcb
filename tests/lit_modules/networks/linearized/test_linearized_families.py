"""Every family's weights stay what they were: as a teacher, and in the layers that are kept, it is the stock model."""

import itertools

import pytest
import torch
from peft import LoraConfig
from torch.testing import assert_close

from lit_modules.networks import Linearization, linearize
from lit_modules.networks.linearized.families import FAMILIES
from lit_modules.networks.positions import locate

CLOSE = {"rtol": 1e-6, "atol": 1e-6}
FAMILY = pytest.mark.parametrize("family", FAMILIES)
KEPT = {"softmax_layers": (0, 1)}


def logits(model, ids, **arguments):
    return model.lm_head(model.features(ids, **arguments))


@FAMILY
@torch.no_grad()
def test_the_teacher_is_the_stock_model(family, stock, linearized, ids):
    model = linearized(family, window=4)
    expected = stock(family)(ids).logits
    assert_close(logits(model, ids, mode="teacher"), expected, **CLOSE)
    student = logits(model, ids)
    assert (student - expected).abs().max() > 0.1  # and the student is not
    assert_close(logits(model, ids), model(ids).logits)


@FAMILY
@torch.no_grad()
def test_layers_that_are_kept_are_the_stock_models(family, stock, linearized, ids):
    expected = stock(family)(ids).logits
    assert_close(linearized(family, **KEPT)(ids).logits, expected, **CLOSE)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "phi3"])
@torch.no_grad()
def test_kept_layers_decode_as_the_stock_model_from_either_cache(family, stock, linearized, ids):
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = stock(family)(ids, attention_mask=mask).logits
    model = linearized(family, **KEPT)
    for cache in (model.new_cache(), model.new_cache(capacity=20)):
        parts = [
            model(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits
            for a, b in ((0, 7), (7, 8), (8, 9), (9, 13))
        ]
        assert_close(torch.cat(parts, dim=1)[mask.bool()], expected[mask.bool()], **CLOSE)


@FAMILY
@torch.no_grad()
def test_packed_documents_have_the_teacher_to_themselves(family, stock, linearized, ids):
    model, bounds = linearized(family), [0, 4, 13]
    packed = logits(model, ids[:1], mode="teacher", cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for start, stop in itertools.pairwise(bounds):
        assert_close(packed[:, start:stop], stock(family)(ids[:1, start:stop]).logits, **CLOSE)


def test_linearizing_adds_no_parameter_and_copies_none(stock):
    for family in FAMILIES:
        source = stock(family, tie_word_embeddings=family == "qwen2")
        source.lm_head.weight.requires_grad_(family != "llama")
        model = linearize(source, Linearization())
        assert model.new_parameters() == {}
        ours, theirs = dict(model.named_parameters()), dict(source.named_parameters())
        assert {name: id(p) for name, p in ours.items()} == {name: id(p) for name, p in theirs.items()}
        assert set(model.state_dict()) == set(source.state_dict())
        assert source.lm_head.weight.requires_grad == (family != "llama")


def test_what_a_recipe_adds_is_named_and_is_float32(stock):
    settings = Linearization(
        gate_source="random",
        feature_map="learned",
        learned_weights="head",
        learned_gate_shift=True,
        output_norm=True,
        softmax_layers=(0,),
    )
    model = linearize(stock("qwen3").bfloat16(), settings)
    added = {name.removeprefix("model.layers.1.self_attn."): p for name, p in model.new_parameters().items()}
    assert set(added) == {
        "gate_proj.weight",
        "gate_shift.shift",
        "weights.state",
        "weights.window",
        "q_feature_map.weight",
        "k_feature_map.weight",
        "output_norm.weight",
    }
    assert {p.dtype for p in added.values()} == {torch.float32}
    assert added["gate_shift.shift"].abs().max() == 0
    assert 0.01 < added["gate_proj.weight"].std() < 0.03
    assert added["weights.window"].unique().tolist() == [0.5]
    assert model.lm_head.weight.dtype == torch.bfloat16
    undecayed = {name.rpartition("self_attn.")[2] for name in model.no_decay_parameters()}
    assert {"weights.state", "gate_shift.shift", "output_norm.weight", "k_norm.weight"} <= undecayed
    assert not {"gate_proj.weight", "q_proj.weight"} & undecayed


@torch.no_grad()
def test_transfer_goes_on_with_the_teacher_and_tells_how_far_the_student_is(linearized, ids):
    model = linearized("qwen2", window=4, softmax_layers=(1,))
    with pytest.raises(RuntimeError, match="no transfer losses"):
        model.transfer_losses()
    assert_close(model.features(ids, mode="transfer"), model.features(ids, mode="teacher"), rtol=0, atol=0)
    losses = model.transfer_losses()
    attention = model.model.layers[0].self_attn
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    rotary = model.model.rotary_emb(hidden, torch.arange(13)[None])
    positions = locate(2, 13, 0, hidden.device)
    ours = attention.student(hidden, *attention.project(hidden), positions, rotary, None)
    expected = (ours - attention.teacher(hidden, positions, rotary)).square().mean()
    assert_close(losses, expected[None].float())
    assert attention.mode == "student"


def test_transfer_trains_each_layer_by_itself(linearized, ids):
    model = linearized(feature_map="learned", window=4)
    model.features(ids, mode="transfer")
    model.transfer_losses()[1].backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()]
    assert any("layers.1.self_attn.q_feature_map" in name for name in trained)
    assert not any("layers.0" in name or "mlp" in name or "embed" in name for name in trained)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_computed_again_in_the_backward_pass_have_the_same_gradients(linearized, ids):
    model = linearized("qwen2", window=4, softmax_layers=(1,)).train()

    def gradients(objective):
        model.zero_grad()
        objective().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def transfer():
        model.features(ids, mode="transfer")
        return model.transfer_losses().sum()

    for objective in (lambda: model(ids, labels=ids).loss, transfer):
        model.gradient_checkpointing_disable()
        expected = gradients(objective)
        model.gradient_checkpointing_enable()
        assert_close(gradients(objective), expected)
        assert model.model.layers[0].gradient_checkpointing
    with pytest.raises(ValueError, match="would be filled twice"):
        model(ids, past_key_values=model.new_cache())
    assert not model.features(ids, mode="teacher").requires_grad


@FAMILY
@torch.no_grad()
def test_the_teacher_is_without_adapters_and_the_student_with_them(family, linearized, ids):
    model = linearized(family, window=4, softmax_layers=(0,))
    teacher, student = logits(model, ids, mode="teacher"), logits(model, ids)
    targets = ["qkv_proj", "o_proj"] if family == "phi3" else ["q_proj", "v_proj", "o_proj"]
    model.add_adapter(LoraConfig(target_modules=targets, init_lora_weights=False))
    assert_close(logits(model, ids, mode="teacher"), teacher, rtol=0, atol=0)
    assert (logits(model, ids) - student).abs().max() > 0.01
    assert model.new_parameters() == {}
