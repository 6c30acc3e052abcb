"""Layers whose step is four products: the same numbers as their modules, in every family, and no second copy."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM

from lit_modules.generation import fused_layers as fused_module
from lit_modules.generation.cuda_graphs import DecodingStep, Output
from lit_modules.generation.fused_layers import fused_layers
from lit_modules.networks.linearized import Linearization, linearize
from lit_modules.networks.linearized.families import FAMILIES
from lit_modules.networks.positions import locate

VOCABULARY = 48
BATCH, LENGTH, STEPS = 3, 5, 4


def make_model(family="llama", **settings):
    """Return a small random model with nontrivial norms and biases; its second layer is softmax."""
    torch.manual_seed(0)
    config_class, model_class, _ = FAMILIES[family]
    config = config_class(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, use_cache=True,
    )  # fmt: skip
    model = linearize(model_class(config).eval(), Linearization(**{"window": 3, "softmax_layers": (1,), **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            assert not name.endswith(".bias") or parameter.abs().sum() > 0
    return model


@torch.no_grad()
def logits_of_steps(model, *, fused):
    """Return the logits `[steps, B, vocabulary]` after a short prompt."""
    found, cache = [], model.new_cache(LENGTH + STEPS + 1)
    prompt = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    output, positions = Output(BATCH, STEPS + 1, (), 0, prompt.device), locate(BATCH, LENGTH, 0, prompt.device)

    def choose(logits):
        found.append(logits)
        return (torch.arange(BATCH) + len(found)) % VOCABULARY

    model(prompt, past_key_values=cache)
    step = DecodingStep(model, cache, positions, choose, output, fused=fused)
    step.take(prompt[:, 0])
    for _ in range(STEPS):
        step()
    return torch.stack(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_logits_of_its_modules(family, monkeypatch):
    model, products = make_model(family), []
    right = logits_of_steps(model, fused=False)
    product = fused_module.small_batch_linear
    monkeypatch.setattr(fused_module, "small_batch_linear", lambda *a, **b: products.append(a) or product(*a, **b))
    torch.testing.assert_close(logits_of_steps(model, fused=True), right, atol=1e-5, rtol=1e-5)
    assert len(products) == (4 * 2 + 1) * STEPS


def test_matrices_that_are_read_together_lie_together_and_are_not_copied_again():
    model = make_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    layers = fused_layers(model)
    attention = model.model.layers[0].self_attn
    assert attention.k_proj.weight.untyped_storage().data_ptr() == layers[0].qkv.weight.untyped_storage().data_ptr()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    again = fused_layers(model)
    for first, second in zip(layers, again, strict=True):
        for name in ("qkv", "out", "gate_up", "down"):
            assert getattr(first, name).weight.data_ptr() == getattr(second, name).weight.data_ptr()
            assert torch.equal(getattr(first, name).weight, getattr(second, name).weight)
    with torch.no_grad():
        attention.k_proj.weight.fill_(7.0)  # what is trained on afterwards is what is decoded with
    assert (layers[0].qkv.weight == 7).sum() == attention.k_proj.weight.numel()


def test_a_model_is_saved_and_loaded_after_its_matrices_have_moved(tmp_path):
    model = make_model("qwen2")
    fused_layers(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def adapted(model):
    """LoRA on one projection of the first layer."""
    targets = r"model\.layers\.0\.self_attn\.v_proj"
    inject_adapter_in_model(LoraConfig(r=2, target_modules=targets, init_lora_weights=False), model)
    return model


def with_one_bias(model):
    """One for the values of the first layer, and none for queries and keys."""
    values = model.model.layers[0].self_attn.v_proj
    values.bias = torch.nn.Parameter(torch.ones(values.out_features))
    return model


CHANGES = {
    "LoRA that is not merged": (adapted, [False, True]),
    "gates of the hidden states": (lambda _: make_model(gate_source="random"), [False, True]),
    "a bias in one of the projections that are read together": (with_one_bias, [False, True]),
    "another activation": (lambda model: setattr(model.config, "hidden_act", "gelu") or model, [False, False]),
    "a float32 norm in a half precision layer": (
        lambda model: model.half().model.layers[1].input_layernorm.float() and model,
        [True, False],
    ),
}


@pytest.mark.parametrize(("change", "right"), CHANGES.values(), ids=CHANGES)
def test_layers_with_more_in_them_stay_as_they_are(change, right):
    model = change(make_model())
    assert [layer is not None for layer in fused_layers(model)] == right


def test_a_model_with_layers_of_both_kinds_gives_the_logits_of_its_modules():
    model = adapted(make_model())
    right = logits_of_steps(model, fused=False)
    torch.testing.assert_close(logits_of_steps(model, fused=True), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_many_rows_give_the_logits_of_the_modules_too(family, monkeypatch):
    model, products = make_model(family), []
    right = logits_of_steps(model, fused=False)
    product = fused_module.small_batch_linear
    monkeypatch.setattr(fused_module, "small_batch_linear", lambda *a, **b: products.append(a) or product(*a, **b))
    monkeypatch.setattr(fused_module, "FEW_ROWS", BATCH - 1)
    for largest, kernels in ((0, 0), (2**25, (4 * 2 + 1) * STEPS)):  # small matrices are for twice as many rows
        monkeypatch.setattr(fused_module, "SMALL_MATRIX", largest)
        torch.testing.assert_close(logits_of_steps(model, fused=True), right, atol=1e-5, rtol=1e-5)
        assert len(products) == kernels
