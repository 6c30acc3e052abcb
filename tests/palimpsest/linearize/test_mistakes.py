"""User errors in `job=linearize` give one line, and leave no files behind."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.palimpsest.linearize.conftest import alpaca


@pytest.fixture
def changed_base(base: Path, tmp_path: Path):
    """Copy the base model's folder with other values in config.json, or without its weights."""

    def change(weights: bool = True, **values) -> str:
        folder = tmp_path / "changed"
        shutil.copytree(base, folder)
        config = json.loads((folder / "config.json").read_text())
        config = {k: v for k, v in (config | values).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(config))
        if not weights:
            (folder / "model.safetensors").unlink()
        return f"base={folder}"

    return change


LISTED = "llama, mistral, qwen2, qwen3, phi3"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, LISTED),
        ({"model_type": "of_the_future"}, LISTED),
        ({"weights": False}, "has no weights that can be read"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": None}, "num_attention_heads=3"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2, "head_dim": 8}, "num_key_value_heads=2"),
        ({"num_hidden_layers": 4}, "lacks 9 of the model's weights"),
        ({"num_hidden_layers": 2}, "has 9 tensors that a LinearizedLlamaForCausalLM of its config.json does not use"),
        ({"vocab_size": 310}, "of shape [320, 32], and its config.json means [310, 32]"),
        ({"model_type": 7}, LISTED),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its config.json has a quantization_config (fp8): give"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "no model can be built from its config.json"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_base_model_that_cannot_be_linearized_is_refused_in_one_line(linearize, command, changed_base, change, said):
    finished = linearize(changed_base(**change))
    refused(finished, command, said)
    assert finished.out == "", "text was read first"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["base=???"], "base"),
        (["base=/nowhere/at/all"], "base=/nowhere/at/all is not a folder"),
        (["base=null"], "base=null"),
        (["base=nobody/nothing"], "base=nobody/nothing"),
        (["stages.finetuning=3"], "stages.finetuning=3"),
        (["+stages.finetuning.kll=1"], "stages.finetuning.kll"),
        (["stages.finetuning.train=[feature_maps]"], "train=feature_maps has no parameter in this model"),
        (["stages.finetuning.tokens=1024"], "max_tokens=5120"),
        (["lora.targets=[gate_proj]"], "lora.targets=gate_proj"),
        (["lora.targets=q_proj"], "lora.targets=q_proj is not a list"),
        (["lora.rank=0"], "lora.rank=0"),
        (["optimizer.lr=0"], "optimizer.lr=0"),
        (["tokenizer=bpe"], "tokenizer=bpe"),
        (["stages=null"], "stages is empty"),
        (["+lora.ranks=3"], "lora.ranks is not known"),
        (["lora=null"], "train=lora has no parameter in this model"),
        (["linearization.softmax_layers=[3]"], "linearization.softmax_layers"),
        (["linearization.softmax_layers=[0,1,2]"], "linearization.softmax_layers=[0, 1, 2] are all"),
        (["linearization.gate=lstm"], "linearization.gate=lstm"),
        (["+linearization.alpha=1"], "linearization.alpha is not known"),
        (["softmax_layers=[1]"], "softmax_layers=[1] is not known: it has keys"),
        (["softmax_layers=1"], "softmax_layers=1 is not known: it has keys, such as softmax_layers.every"),
        (["softmax_layers={every: 2, most_sensitive: 1}"], "as softmax_layers.every=null"),
        (["softmax_layers.every=8"], "softmax_layers.every=8: give a whole number, from 2 to 3"),
        (["softmax_layers={most_sensitive: 4}"], "softmax_layers.most_sensitive=4"),
        (["teacher_top_k=8"], "teacher_top_k=8"),
        (["teacher_top_k=1000", "stages.finetuning.kl=1"], "teacher_top_k=1000"),
        (["activation_checkpointing=selective"], "activation_checkpointing=selective"),
        (["trainer.precision=bf16-true"], "trainer.precision=bf16-true"),
        (["strategy=fsdp"], "runs on one device or with strategy=ddp"),
        (["strategy=ddp", "strategy.context_parallel_size=2"], "strategy.context_parallel_size=2"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_setting_that_cannot_work_is_refused_in_one_line(linearize, command, overrides, said, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    finished = linearize(*overrides)
    refused(finished, command, said)
    assert finished.out == "", "something was read first"


def test_a_run_and_a_list_are_no_base_model(linearize, command, base, tmp_path):
    shutil.copytree(base, tmp_path / "run" / "export")
    refused(linearize(f"base={tmp_path}/run"), command, "give its export/")
    (tmp_path / "run" / "config.json").write_text("[1]")
    refused(linearize(f"base={tmp_path}/run"), command, "a config.json that is list")


@pytest.mark.parametrize(
    ("value", "status", "said"),
    [
        (torch.nan, 2, "layers.0.mlp.gate_proj.weight holds values that are not finite"),
        (1e30, 1, "the base model itself has a held-out loss of"),
    ],
    ids=["no number", "too large"],
)
def test_a_damaged_base_model_ends_before_it_is_trained(linearize, base, tmp_path, value, status, said):
    folder = shutil.copytree(base, tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.0.mlp.{name}.weight"][0] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    finished = linearize(f"base={folder}")
    assert finished.status == status
    assert said in finished.err
    assert finished.err.count("\n") == 1
    assert (finished.out == "") == (value is torch.nan), "what is no number is found before text is read"


def test_a_tokenizer_larger_than_the_embedding_is_refused_before_text_is_read(linearize, command, base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "larger")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<{number}>" for number in range(21)])
    tokenizer.save_pretrained(folder)
    finished = linearize(f"tokenizer.path={folder}")
    refused(finished, command, f"tokenizer.path={folder} has 321 tokens, and base={base} has embeddings for 320: give")
    assert finished.out == ""


@pytest.mark.parametrize(
    ("written", "said"), [([], "data."), ([{"question": "?"}], "instruction"), ([{"instruction": "?"}], "output")]
)
def test_records_that_teach_nothing_are_refused_in_one_line(linearize, command, tmp_path, written, said):
    path = tmp_path / "records.json"
    path.write_text(json.dumps(written))
    refused(linearize(data=alpaca(path)), command, said)


def refused(finished, command, said: str) -> None:
    """Check for one error line, exit status 2, and no run that resume=auto would resume."""
    assert finished.status == 2, finished.err
    assert said in finished.err
    assert finished.err.count("\n") == 1, finished.err
    assert command.runs("liger/gla") == []
