"""LoRA on a linearized model: what it is put on, what is trained, and what does not see it."""

import pytest
import torch

from lit_modules.networks.linearized.conversion import load_pretrained
from lit_modules.networks.linearized.lora import add_lora, set_trainable, trainable
from lit_modules.networks.linearized.settings import Linearization
from tests.lit_modules.networks.linearized.saved_bases import LEARNED, LOLCATS, SETTINGS, TOKENS, adapted, logits


def test_new_lora_changes_nothing_and_alone_is_trained(bases):
    model = load_pretrained(str(bases["llama"]), SETTINGS, torch.float32).eval()
    before = logits(model)
    assert torch.equal(logits(add_lora(model)), before)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(names) == 2 * 2 * 3
    assert all(".lora_" in name for name in names)


def test_lora_over_bfloat16_is_float32_and_learns_with_and_without_autocast(bases):
    model = adapted(bases["llama"], dtype=torch.bfloat16).train()
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(TOKENS, shift_labels=TOKENS.roll(-1, 1)).loss
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if ".lora_" in name}
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_the_teacher_inside_the_model_does_not_see_lora(bases):
    plain = load_pretrained(str(bases["llama"]), SETTINGS, torch.float32).eval()
    model = adapted(bases["llama"], targets=("q_proj", "k_proj", "v_proj", "o_proj"))
    assert torch.equal(model.features(TOKENS, mode="teacher"), plain.features(TOKENS, mode="teacher"))
    assert not torch.allclose(model.features(TOKENS), plain.features(TOKENS), atol=0.1)


def test_in_phi3_queries_keys_and_values_are_one_projection(bases):
    model = adapted(bases["phi3"], targets=("q_proj", "v_proj", "o_proj"))
    modules = {name.split(".")[4] for name, _ in model.named_parameters() if ".lora_" in name}
    assert modules == {"qkv_proj", "o_proj"}


def test_kept_layers_have_lora_unless_only_linearized_ones_are_asked_for(bases):
    hybrid = Linearization(window=4, softmax_layers=(1,))
    for where, expected in (("all", {"0", "1"}), ("linearized", {"0"})):
        model = adapted(bases["llama"], hybrid, where=where)
        assert {name.split(".")[2] for name, _ in model.named_parameters() if ".lora_" in name} == expected


def test_lora_on_linearized_layers_needs_one(bases):
    model = load_pretrained(str(bases["llama"]), Linearization(window=4, softmax_layers=(0, 1)), torch.float32)
    with pytest.raises(ValueError, match=r"lora\.where=linearized: all layers stay softmax attention"):
        add_lora(model, where="linearized")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"targets": ("gate_proj",)}, "lora.targets=gate_proj is not a projection of this model's attention: give"),
        ({"targets": ()}, "lora.targets=[]"),
        ({"rank": 0}, "lora.rank=0"),
        ({"alpha": 0}, "lora.alpha=0"),
        ({"dropout": 1.0}, "lora.dropout=1.0"),
        ({"where": "some"}, "lora.where=some"),
        ({"alpha": "much"}, "lora.alpha=much"),
    ],
)  # fmt: skip
def test_settings_of_lora_that_cannot_be_are_refused_in_one_line(bases, options, said):
    model = load_pretrained(str(bases["llama"]), SETTINGS, torch.float32)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as found:
        add_lora(model, **options)
    assert said in str(found.value)
    assert not any(".lora_" in name for name, _ in model.named_parameters())


def test_every_group_can_be_trained_by_its_name(bases):
    model = adapted(bases["llama"], LEARNED)
    groups = ("lora", "feature_maps", "scalars", "norms", "gates")
    found = set_trainable(model, groups)
    on = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert on == {name for names in found.values() for name in names}
    assert on == {name for name, _ in model.named_parameters() if ".lora_" in name} | set(model.new_parameters())
    assert sum(map(len, found.values())) == len(on)
    set_trainable(model, ["scalars"])
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == set(found["scalars"])
    assert len(set_trainable(model, ["all"])["all"]) == len(list(model.parameters()))


def test_no_parameter_of_lolcats_is_without_a_group(bases):
    model = load_pretrained(str(bases["llama"]), LOLCATS, torch.float32)
    found = trainable(model, ["feature_maps", "scalars"])
    assert {name for names in found.values() for name in names} == set(model.new_parameters())


def test_a_group_that_the_model_lacks_is_named_with_those_it_has(bases):
    model = load_pretrained(str(bases["llama"]), SETTINGS, torch.float32)
    with pytest.raises(ValueError, match="gates has no parameter in this model: give some of projections, all"):
        trainable(model, ["gates"])
    with pytest.raises(ValueError, match="everything is not known: give some of lora, feature_maps"):
        trainable(model, ["everything"])
