"""From a folder, from a model in memory, and back: the same weights, and one line for what cannot be."""

import dataclasses
import json

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, LlamaModel

from lit_modules.networks import Linearization, linearize, load_pretrained
from lit_modules.networks.linearized.conversion import with_softmax_layers
from lit_modules.networks.linearized.families import FAMILIES
from lit_modules.networks.loading import load_whole

LEARNED = Linearization(
    gate_source="random", feature_map="relu", learned_weights="head", output_norm=True, softmax_layers=(1,), window=4
)


@pytest.fixture(scope="session")
def folders(stock, tmp_path_factory):
    """Pretrained models as they lie on a disk."""
    root = tmp_path_factory.mktemp("pretrained")
    for family in FAMILIES:
        stock(family, tie_word_embeddings=family == "qwen3").save_pretrained(root / family)
    return root


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_folder_is_read_straight_into_the_linearized_form(family, folders, stock, ids):
    settings = Linearization(window=4)
    model = load_pretrained(str(folders / family), settings)
    in_memory = linearize(stock(family, tie_word_embeddings=family == "qwen3"), settings)
    assert_close(model(ids).logits, in_memory(ids).logits)
    assert model.linearization == settings
    assert model.dtype == torch.float64
    assert model.config.name_or_path == str(folders / family)


@pytest.mark.parametrize(("family", "settings"), [("qwen3", LEARNED), ("phi3", Linearization(window=4, sinks=1))])
@torch.no_grad()
def test_what_is_saved_is_loaded_as_any_model_is(family, settings, folders, linearized, ids, tmp_path):
    model = linearize(AutoModelForCausalLM.from_pretrained(folders / family), settings)
    for parameter in model.new_parameters().values():
        parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert again.linearization == settings
    assert_close(again(ids).logits, model(ids).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert {p.dtype for p in half.new_parameters().values()} <= {torch.float32}
    assert all(torch.isfinite(p).all() for p in half.parameters())


@torch.no_grad()
def test_what_a_recipe_adds_begins_the_same_from_a_folder_and_in_memory(folders, stock):
    from_folder = load_pretrained(str(folders / "llama"), LEARNED, torch.bfloat16).new_parameters()
    in_memory = linearize(stock("llama"), LEARNED).new_parameters()
    assert set(from_folder) == set(in_memory)
    for name, parameter in from_folder.items():
        assert parameter.dtype == torch.float32
        if "gate_proj" in name:
            assert 0.01 < parameter.std() < 0.03
        else:
            assert_close(parameter, in_memory[name], rtol=0, atol=0)


@torch.no_grad()
def test_layers_go_back_to_softmax_on_the_same_parameters(stock, ids):
    settings = dataclasses.replace(LEARNED, softmax_layers=())
    model = linearize(stock("llama"), settings)
    for parameter in model.new_parameters().values():
        parameter += 0.3 * torch.randn_like(parameter)
    hybrid = with_softmax_layers(model, (1,))
    assert hybrid.linearization == dataclasses.replace(settings, softmax_layers=(1,))
    own, before = dict(hybrid.named_parameters()), dict(model.named_parameters())
    assert own.keys() == {name for name in before if name not in model.new_parameters() or ".layers.0." in name}
    assert all(parameter is before[name] for name, parameter in own.items())
    model.attentions()[1].mode = "teacher"
    assert_close(hybrid(ids).logits, model(ids, use_cache=False).logits)


def test_a_model_without_weights_keeps_having_none(stock):
    config = stock("llama").config
    with torch.device("meta"):
        source = AutoModelForCausalLM.from_config(config)
    model = linearize(source, LEARNED)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.model.embed_tokens.weight is source.model.embed_tokens.weight


def test_training_frozen_weights_and_the_mode_are_the_sources(stock):
    source = stock("qwen2").train()
    source.model.requires_grad_(False)
    model = linearize(source, Linearization(learned_weights="head"))
    assert model.training
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lm_head.weight", *model.new_parameters()}


def refused(folder, settings: Linearization | None = None) -> str:
    with pytest.raises(ValueError, match=r".+") as error:
        load_pretrained(str(folder), settings or Linearization())
    (line,) = str(error.value).splitlines()
    return line


def changed(folder, tmp_path, **values):
    """A folder with another `config.json`."""
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
    return tmp_path


def test_what_cannot_be_linearized_is_said_in_one_line(folders, stock, tmp_path):
    llama = folders / "llama"
    assert "model_type=gpt2 cannot be linearized: give one of llama, mistral, qwen2, qwen3, phi3" in refused(
        changed(llama, tmp_path, model_type="gpt2")
    )
    assert "linearized already" in refused(changed(llama, tmp_path, model_type="linearized_llama"))
    assert "has no weights that can be read" in refused(changed(llama, tmp_path))
    assert "num_key_value_heads=3 does not divide" in refused(changed(llama, tmp_path, num_key_value_heads=3))
    assert "num_attention_heads=10 does not divide hidden_size=32" in refused(
        changed(llama, tmp_path, num_attention_heads=10, head_dim=None)
    )
    assert "config.json of this llama is refused" in refused(changed(llama, tmp_path, hidden_size="large"))
    assert "attention_dropout=0.1 cannot be had" in refused(changed(llama, tmp_path, attention_dropout=0.1))
    assert "resid_pdrop=0.1 cannot be had" in refused(changed(folders / "phi3", tmp_path, resid_pdrop=0.1))
    assert "softmax_layers=2 is not a layer of a model of 2: give some of 0 to 1" in refused(
        llama, Linearization(softmax_layers=(2,))
    )
    assert "softmax_layers=-1 is not a layer of a model of 2" in refused(llama, Linearization(softmax_layers=(-1,)))
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in refused(tmp_path)
    assert "is not a folder" in refused(tmp_path / "nowhere" / "at" / "all")
    (tmp_path / "config.json").write_text("{")
    assert "has no config.json that can be read" in refused(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    assert 'model_type="" cannot be linearized' in refused(tmp_path)
    with pytest.raises(ValueError, match="LlamaModel is not a causal language model"):
        linearize(LlamaModel(stock("llama").config), Linearization())
    with pytest.raises(ValueError, match="linearized already"):
        linearize(linearize(stock("llama"), Linearization()), Linearization())


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "fp8"])
def test_quantized_weights_are_refused_by_their_method(method, folders, tmp_path):
    quantized = changed(folders / "llama", tmp_path, quantization_config={"quant_method": method, "bits": 4})
    line = refused(quantized)
    assert f"a quantization_config ({method}): give the model in bfloat16, float16 or float32" in line


def test_no_quantization_may_be_written_down(folders, tmp_path):
    assert "has no weights" in refused(changed(folders / "llama", tmp_path, quantization_config=None))


def test_weights_that_need_a_package_that_is_not_there_are_said_in_one_line(folders, tmp_path):
    source = changed(folders / "llama", tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"has no weights that can be read: .*optimum") as error:
        load_whole(AutoModelForCausalLM, str(source))
    assert "\n" not in str(error.value)


def test_weights_that_are_broken_or_incomplete_are_said_in_one_line(stock, tmp_path):
    model = stock("llama")
    short = {name: p for name, p in model.state_dict().items() if "layers.1.self_attn.k_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=short)
    assert "lacks 2 of the model's weights, the first is model.layers.1.self_attn.k_proj.bias" in refused(tmp_path)
    model.save_pretrained(tmp_path)
    assert "and its config.json means [32, 50]" in refused(changed(tmp_path, tmp_path, intermediate_size=50))
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    assert "has no weights that can be read" in refused(tmp_path)


def test_settings_that_are_not_known_are_said_in_one_line(folders, tmp_path):
    folder = changed(folders / "llama", tmp_path, model_type="linearized_llama", linearization={"windows": 3})
    with pytest.raises(ValueError, match=r"linearization has a key that is not known: .*'windows'"):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"delayed": True, "window": 0}, "linearization.delayed=true with linearization.window=0"),
        ({"gate": "fixed", "gate_source": "random"}, "linearization.gate=fixed has no logits"),
        ({"gate": "fixed", "learned_gate_shift": True}, "linearization.gate=fixed has no logits"),
        ({"state_weight": 0, "window_weight": 0}, "nothing would be attended to"),
        ({"state_weight": 0.0, "window": 0}, "linearization.state_weight=0 with linearization.window=0"),
        ({"state_weight": 0, "gate_source": "random"}, "linearization.gate_source=random belongs to a state"),
        ({"state_weight": 0, "feature_map": "relu"}, "linearization.feature_map=relu belongs to a state"),
        ({"state_weight": float("nan")}, "linearization.state_weight=nan: give a number"),
        ({"temperature": "warm"}, "linearization.temperature=warm"),
        ({"delayed": "maybe"}, "linearization.delayed=maybe"),
        ({"softmax_layers": 1}, "linearization.softmax_layers=1: give a list"),
        ({"softmax_layers": [1.0]}, "linearization.softmax_layers="),
    ],
)
def test_settings_that_contradict_each_other_name_their_keys(settings, line):
    with pytest.raises(ValueError, match=line):
        Linearization(**settings)
