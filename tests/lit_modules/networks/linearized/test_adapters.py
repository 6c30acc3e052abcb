"""LoRA, and what is saved of a linearized model: adapters beside their base model, and merged exports."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lit_modules.generation import job
from lit_modules.launching import run_folder
from lit_modules.networks.linearized import adapters
from lit_modules.networks.linearized.conversion import load_adapted, load_pretrained
from lit_modules.networks.linearized.fingerprints import fingerprint
from lit_modules.networks.linearized.lora import merge, set_trainable, trainable
from lit_modules.networks.linearized.settings import Linearization
from tests.conftest import ROOT
from tests.lit_modules.networks.linearized.saved_bases import (
    LEARNED,
    LOLCATS,
    SETTINGS,
    TOKENS,
    adapted,
    logits,
    write_base,
)


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2", pad_token="w0")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "phi3"])
def test_lora_is_added_saved_loaded_and_merged_in_every_family(bases, tmp_path, family):
    plain = load_pretrained(str(bases[family]), SETTINGS, torch.float32).eval()
    model = adapted(bases[family])
    expected = logits(model)
    assert (expected - logits(plain)).abs().max() > 0.1
    adapters.save_adapter(model, tmp_path / "adapter", base=str(bases[family]))
    assert torch.equal(logits(load_adapted(tmp_path / "adapter").eval()), expected)
    assert torch.equal(logits(PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()), expected)
    plain = load_pretrained(str(bases[family]), SETTINGS, torch.float32).eval()
    plain.load_adapter(tmp_path / "adapter")
    assert torch.equal(logits(plain.eval()), expected)
    names = set(merge(model).state_dict())
    assert names == set(load_pretrained(str(bases[family]), SETTINGS, torch.float32).state_dict())
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_parameters_that_are_neither_lora_nor_the_base_models_come_back(bases, tmp_path):
    model = adapted(bases["llama"], LEARNED)
    with torch.no_grad():
        for parameter in model.new_parameters().values():
            parameter.add_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)))
    adapters.save_adapter(model, tmp_path / "adapter", base=str(bases["llama"]))
    assert torch.equal(logits(load_adapted(tmp_path / "adapter").eval()), logits(model))
    merged = load_adapted(tmp_path / "adapter", merge=True).eval()
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)
    assert not any(".lora_" in name for name, _ in merged.named_parameters())


def test_parameters_without_lora_are_an_adapter_too(bases, tmp_path):
    model = load_pretrained(str(bases["llama"]), LEARNED, torch.float32).eval()
    set_trainable(model, ["gates"])
    adapters.save_adapter(model, tmp_path / "adapter", base=str(bases["llama"]))
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [adapters.RECORD, adapters.PARAMETERS]
    assert torch.equal(logits(load_adapted(tmp_path / "adapter", merge=True).eval()), logits(model))


def test_full_fine_tuning_has_no_adapter(bases, tmp_path):
    model = load_pretrained(str(bases["llama"]), SETTINGS, torch.float32)
    set_trainable(model, ["all"])
    with pytest.raises(ValueError, match="of the base model is trained, and no adapter holds it"):
        adapters.save_adapter(model, tmp_path / "adapter", base=str(bases["llama"]))
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_logits_equal_those_with_lora_to_what_the_dtype_rounds(bases, tmp_path, tokenizer, dtype):
    model = adapted(bases["llama"], dtype=dtype)
    before = logits(model)
    adapters.export_merged(model, tokenizer, tmp_path / "export")
    assert torch.equal(logits(model), before)  # the model itself stays as it was
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert merged.dtype == dtype
    scale = before.float().abs().max()
    assert (logits(merged) - before).float().abs().max() < scale * (1e-5 if dtype == torch.float32 else 0.06)
    assert type(merged) is type(model)


def test_a_compiled_model_is_exported_after_a_pass_that_left_tensors_with_a_history(bases, tmp_path, tokenizer):
    model = adapted(bases["llama"])
    model.features(TOKENS, mode="transfer")
    assert model.transfer_losses().requires_grad
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
    assert (adapters.export_merged(model, tokenizer, tmp_path / "export") / "model.safetensors").is_file()


def test_an_adapter_goes_onto_its_base_model_in_another_dtype(bases, tmp_path):
    model = adapted(bases["llama"], dtype=torch.bfloat16)
    adapters.save_adapter(model, tmp_path / "adapter", base=str(bases["llama"]))
    assert torch.equal(logits(load_adapted(tmp_path / "adapter").eval()), logits(model))
    other = load_adapted(tmp_path / "adapter", dtype="auto").eval()
    assert other.dtype == torch.float32  # as the base model is stored
    assert not torch.equal(logits(other), logits(model).float())


def test_the_stock_model_stays_as_it_is_under_an_adapter_and_peft_warns(bases, tmp_path):
    adapters.save_adapter(adapted(bases["llama"]), tmp_path / "adapter", base=str(bases["llama"]))
    stock = AutoModelForCausalLM.from_pretrained(bases["llama"]).eval()
    expected = logits(stock)
    with pytest.warns(UserWarning, match="Found missing adapter keys while loading the checkpoint"):
        found = PeftModel.from_pretrained(stock, tmp_path / "adapter").eval()
    assert torch.equal(logits(found), expected)


def test_an_adapter_of_an_earlier_version_goes_onto_its_base_and_no_other(bases, tmp_path):
    model = adapted(bases["llama"])
    folder = adapters.save_adapter(model, tmp_path / "adapter", base=str(bases["llama"]))
    record = json.loads((folder / adapters.RECORD).read_text())
    record["base_identity"]["weights"] = fingerprint_of_an_earlier_version(bases["llama"])
    del record["base_dtype"]
    (folder / adapters.RECORD).write_text(json.dumps(record | {"format": 1}))
    weights = load_file(folder / adapters.LORA_WEIGHTS)
    earlier = {name.replace("trained_on_the_linearized_model.", ""): tensor for name, tensor in weights.items()}
    assert not earlier.keys() & weights.keys()
    save_file(earlier, folder / adapters.LORA_WEIGHTS)
    assert torch.equal(logits(load_adapted(folder).eval()), logits(model))
    assert "other weights" in refusal(folder, base=str(write_base(tmp_path / "alike", seed=7)))


def fingerprint_of_an_earlier_version(base):
    """Of four rows of each weight."""
    weights = [weight for _, weight in sorted(AutoModelForCausalLM.from_pretrained(base).state_dict().items())]
    rows = [weight if weight.ndim == 1 else weight[:: len(weight) // 4].flatten() for weight in weights]
    rounded = torch.cat(rows).bfloat16()
    rounded[rounded.abs() < torch.finfo(torch.float16).smallest_normal] = 0
    return hashlib.sha256(rounded.view(torch.int16).numpy().tobytes()).hexdigest()


def test_a_stock_model_takes_no_adapter(saved, bases):
    stock = AutoModelForCausalLM.from_pretrained(bases["llama"])
    with pytest.raises(ValueError, match="belongs on a linearized model, and this is a LlamaForCausalLM: give"):
        adapters.apply_adapter(stock, saved)


def test_an_export_generates_in_a_fresh_process_after_one_import(bases, tmp_path, tokenizer):
    model = adapted(bases["llama"], Linearization(window=4, softmax_layers=(1,)))
    folder = adapters.export_merged(model, tokenizer, tmp_path / "export")
    script = (
        "import sys, torch, lit_modules.networks\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model, tokenizer = (c.from_pretrained(sys.argv[1]) for c in (AutoModelForCausalLM, AutoTokenizer))\n"
        "inputs = tokenizer(['w5 w6 w7', 'w9'], return_tensors='pt', padding=True, padding_side='left')\n"
        "inputs.pop('token_type_ids', None)\n"
        "print(model.generate(**inputs, max_new_tokens=8, do_sample=False).tolist())"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == 0, found.stderr
    ids, mask = torch.tensor([[5, 6, 7], [0, 0, 9]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert json.loads(found.stdout.splitlines()[-1]) == expected.tolist()


def test_what_is_written_replaces_what_was_there_whole_or_not_at_all(bases, tmp_path, tokenizer, monkeypatch):
    model = adapted(bases["llama"])
    folder = adapters.save_adapter(model, tmp_path / "adapter", base=str(bases["llama"]))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setattr(adapters, "fingerprint", lambda model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        adapters.save_adapter(merge(model), folder, base=str(bases["llama"]))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["adapter"]


def test_a_folder_that_a_killed_process_had_moved_aside_is_not_lost(tmp_path):
    (tmp_path / ".export.replaced").mkdir()
    (tmp_path / ".export.replaced" / "model").write_text("precious")
    with pytest.raises(ZeroDivisionError), adapters.replace_atomically(tmp_path / "export"):
        _ = 1 / 0
    assert (tmp_path / "export" / "model").read_text() == "precious"


@pytest.fixture(scope="module")
def saved(bases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    return adapters.save_adapter(adapted(bases["llama"], LEARNED), folder, base=str(bases["llama"]))


def copied(saved, tmp_path, **record):
    """A copy of an adapter's folder with some of its record changed."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    found = json.loads((folder / adapters.RECORD).read_text())
    (folder / adapters.RECORD).write_text(json.dumps({**found, **record}))
    return folder


def refusal(folder, **options):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as found:
        load_adapted(folder, **options)
    assert str(folder) in str(found.value)
    return str(found.value)


def test_a_base_model_that_is_gone_is_named_and_may_be_elsewhere(saved, bases, tmp_path):
    folder = copied(saved, tmp_path, base="/nowhere/llama")
    said = refusal(folder)
    assert "/nowhere/llama" in said
    assert "base=FOLDER" in said
    there = load_adapted(folder, base=str(bases["llama"])).eval()
    assert torch.equal(logits(there), logits(load_adapted(saved).eval()))


def test_another_base_model_is_refused(saved, bases, tmp_path):
    wide = write_base(tmp_path / "wide", hidden_size=64)
    assert "hidden_size=32" in (said := refusal(saved, base=str(wide)))
    assert "hidden_size=64" in said
    assert "family=llama" in refusal(saved, base=str(bases["mistral"]))
    deep = write_base(tmp_path / "deep", num_hidden_layers=3)
    assert "num_hidden_layers=2" in refusal(saved, base=str(deep))
    alike = write_base(tmp_path / "alike", seed=7)
    assert "other weights" in refusal(saved, base=str(alike))


def test_an_adapter_for_other_settings_names_the_first_that_differs(saved, bases):
    model = load_pretrained(str(bases["llama"]), SETTINGS, torch.float32)
    with pytest.raises(ValueError, match=r"linearization\.gate_source=random, and the model has .*=keys"):
        adapters.apply_adapter(model, saved)
    assert not any(".lora_" in name for name, _ in model.named_parameters())


def test_an_adapter_is_not_put_onto_lora(saved, bases):
    with pytest.raises(ValueError, match="has LoRA: merge it before"):
        adapters.apply_adapter(adapted(bases["llama"], LEARNED), saved)


@pytest.mark.parametrize("name", [adapters.RECORD, adapters.PARAMETERS, adapters.LORA_CONFIG, adapters.LORA_WEIGHTS])
def test_a_missing_file_is_named(saved, tmp_path, name):
    folder = copied(saved, tmp_path)
    (folder / name).unlink()
    assert name in refusal(folder)


@pytest.mark.parametrize("name", [adapters.RECORD, adapters.PARAMETERS, adapters.LORA_CONFIG, adapters.LORA_WEIGHTS])
def test_a_truncated_file_is_named(saved, tmp_path, name):
    folder = copied(saved, tmp_path)
    os.truncate(folder / name, 100)
    assert name in refusal(folder)


def test_a_later_format_and_a_lost_tensor_are_named(saved, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copied(saved, tmp_path, format=3)
    assert "format is 3, and this version reads 1 to 2" in refusal(folder)
    (folder / adapters.RECORD).write_bytes((saved / adapters.RECORD).read_bytes())
    weights = load_file(folder / adapters.LORA_WEIGHTS)
    lost = min(weights)
    save_file({name: tensor for name, tensor in weights.items() if name != lost}, folder / adapters.LORA_WEIGHTS)
    assert f"{lost.removeprefix(adapters.PEFT_PREFIX + adapters.ADAPTER_PREFIX)} is missing" in refusal(folder)


def test_a_model_without_lora_has_nothing_to_merge(bases):
    with pytest.raises(ValueError, match="no LoRA to merge"):
        merge(load_pretrained(str(bases["llama"]), SETTINGS, torch.float32))


@pytest.fixture
def run_of_linearize(bases, tmp_path, tokenizer):
    """A folder as job=linearize leaves it."""
    folder = tmp_path / "run"
    model = adapted(bases["llama"])
    adapters.save_adapter(model, folder / "adapter", base=str(bases["llama"]))
    adapters.export_merged(model, tokenizer, folder / "export")
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / run_folder.CONFIG).write_text("experiment: liger/gla\n")
    return folder


def test_a_run_its_export_and_its_adapter_write_the_same_text(run, run_of_linearize, tmp_path):
    (tmp_path / "prompts.txt").write_text("w5 w6 w7 w8\nw9\n")
    found = []
    for part in ("", "export", "adapter"):
        checkpoint, prompts = run_of_linearize / part, f"prompts_file={tmp_path}/prompts.txt"
        arguments = (f"checkpoint={checkpoint}", prompts, "temperature=0", "max_new_tokens=6", "device=cpu")
        found.append(run("job=generate", *arguments, tiny=False))
    assert [f.status for f in found] == [0, 0, 0], found[-1].err
    assert found[0].out == found[1].out == found[2].out
    records = [json.loads(line) for line in found[0].out.splitlines()]
    assert [record["prompt"] for record in records] == ["w5 w6 w7 w8", "w9"]
    assert any(record["text"] for record in records)


def test_an_adapter_whose_base_model_is_gone_cannot_generate_and_says_so_in_one_line(run, run_of_linearize):
    path = run_of_linearize / "adapter" / adapters.RECORD
    path.write_text(json.dumps({**json.loads(path.read_text()), "base": "/nowhere/llama"}))
    found = run("job=generate", f"checkpoint={path.parent}", "prompt=w5", tiny=False)
    assert found.status == 2
    assert "/nowhere/llama" in found.err.splitlines()[-1]
    assert "Traceback" not in found.err


def test_a_model_that_is_not_whole_or_no_numbers_does_not_generate(run, run_of_linearize):
    path = run_of_linearize / "export" / "model.safetensors"
    weights = load_file(path)
    for name, tensor, said in (
        ("model.norm.weight", None, "lacks 1 of the model's weights, the first is model.norm.weight"),
        ("model.norm.weight", torch.full((3,), 1.0), "of shape [3], and its config.json means"),
        ("model.norm.weight", torch.full_like(weights["model.norm.weight"], torch.nan), "are not numbers"),
    ):
        changed = {key: value for key, value in weights.items() if key != name} | (
            {} if tensor is None else {name: tensor}
        )
        save_file(changed, path, metadata={"format": "pt"})
        found = run("job=generate", f"checkpoint={run_of_linearize}", "prompt=w5", "device=cpu", tiny=False)
        assert found.status == 2
        assert said in found.err
        assert found.err.count("\n") == 1


def test_no_prompt_at_all_is_written_on_from_the_token_that_begins_a_document(run, run_of_linearize):
    found = run(
        "job=generate", f"checkpoint={run_of_linearize}", "prompt=''", "max_new_tokens=3", "device=cpu", tiny=False
    )
    assert found.status == 0, found.err


def test_an_unfinished_run_says_that_it_has_nothing_to_load_yet(run_of_linearize, monkeypatch):
    config = {"model_type": "linearized_llama", "hidden_size": 32}
    monkeypatch.setattr(job.checkpoints, "read_trainer_state", lambda path: {"palimpsest": {"model_config": config}})
    with pytest.raises(ValueError, match="there to go on linearizing from"):
        job.load_training_checkpoint(run_of_linearize / "checkpoints" / "step_1")


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens",
        "lm_head",
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.gate_proj",
    ],
)
def test_a_base_of_which_any_part_has_other_weights_is_refused(saved, bases, tmp_path, name):
    stock = AutoModelForCausalLM.from_pretrained(bases["llama"])
    stock.get_submodule(name).weight.data *= 1.5
    stock.save_pretrained(tmp_path / "other")
    assert "other weights" in refusal(saved, base=str(tmp_path / "other"))


@pytest.mark.parametrize("row", [5, -1])
def test_a_changed_row_of_one_weight_is_another_base(bases, row):
    model = load_pretrained(str(bases["llama"]), SETTINGS, torch.float32)
    before = fingerprint(model)
    model.model.layers[1].mlp.up_proj.weight.data[row] *= 1.5
    assert fingerprint(model) != before


def test_a_fused_projection_is_part_of_what_tells_bases_apart(bases):
    model = load_pretrained(str(bases["phi3"]), SETTINGS, torch.float32)
    before = fingerprint(model)
    model.model.layers[1].self_attn.qkv_proj.weight.data *= 1.5
    assert fingerprint(model) != before


def test_a_base_with_other_rotations_is_refused_by_the_name_of_the_setting(saved, bases, tmp_path):
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(bases["llama"]).save_pretrained(other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5e5
    (other / "config.json").write_text(json.dumps(config))
    said = refusal(saved, base=str(other))
    assert "rope_parameters={" in said
    assert "500000.0" in said


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0}),
        ("mistral", {"rope_type": "dynamic", "factor": 2.0}),
        ("phi3", {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else value["rope_type"],
)
def test_an_adapter_goes_onto_its_base_whatever_its_rotations_are(tmp_path, family, rope):
    rope = {"rope_theta": 10000.0, "original_max_position_embeddings": 64, **rope}
    base = write_base(tmp_path / "base", family, rope_parameters=rope)
    model = adapted(base)
    expected = logits(model)
    adapters.save_adapter(model, tmp_path / "adapter", base=str(base))
    assert torch.equal(logits(load_adapted(tmp_path / "adapter").eval()), expected)


def test_a_fingerprint_is_of_the_base_alone(bases):
    """Not of LoRA, what is trained, the settings, or the dtype; in float16 if the weights are stored in 16 bits."""
    stored = load_pretrained(str(bases["llama"]), SETTINGS, torch.bfloat16)
    stored.lm_head.weight.data.mul_(1e-5)  # such as float16 has with fewer digits
    expected = fingerprint(stored)
    assert fingerprint(stored.half()) == expected
    of_float32 = fingerprint(load_pretrained(str(bases["llama"]), SETTINGS, torch.float32))
    for settings, dtype in ((LEARNED, torch.bfloat16), (LOLCATS, torch.float32), (SETTINGS, torch.bfloat16)):
        model = adapted(bases["llama"], settings, dtype=dtype)
        found = trainable(model, ["lora"])["lora"] + list(model.new_parameters())
        with torch.no_grad():
            for name in found:
                model.get_parameter(name).add_(1.0)
        assert fingerprint(model) == of_float32


def test_an_adapter_of_a_base_that_was_named_from_here_is_loaded_from_elsewhere(bases, tmp_path, monkeypatch):
    model = adapted(bases["llama"])
    monkeypatch.chdir(bases["llama"].parent)
    adapters.save_adapter(model, tmp_path / "adapter", base="llama")
    monkeypatch.chdir(tmp_path)
    assert torch.equal(logits(load_adapted(tmp_path / "adapter").eval()), logits(model))
