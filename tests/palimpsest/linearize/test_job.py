"""`job=linearize` end to end: from a small pretrained model to a run with an adapter and an export."""

import csv
import io
import itertools
import json
import math
import shutil
from pathlib import Path
from unittest.mock import Mock

import hydra
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from lit_modules import checkpoints
from lit_modules.jobs import linearize as job
from lit_modules.launching import run_folder
from lit_modules.linearization import layer_setup
from lit_modules.networks.linearized import load_pretrained
from tests.data_pipeline.mixtures.conftest import write_corpus
from tests.palimpsest.linearize.conftest import alpaca


def column(folder: Path, name: str) -> dict[int, str]:
    with open(folder / "metrics.csv", newline="") as handle:
        return {int(row["step"]): row[name] for row in csv.DictReader(handle) if row.get(name)}


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def same(first: Path, second: Path) -> bool:
    one, other = tensors(first), tensors(second)
    return bool(one) and one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@torch.no_grad()
def stock_loss(base: Path, folder: Path) -> float:
    """Return nats per token of the stored base model, each document alone, on the held-out text of a run."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    data, total, tokens = hydra.utils.instantiate(OmegaConf.load(folder / run_folder.CONFIG).data), 0.0, 0
    for batch in data.val_dataloader():
        for first, last in itertools.pairwise(batch["cu_seqlens"].tolist()):
            ids, targets = (batch[key][:, first:last] for key in ("input_ids", "targets"))
            total += float(cross_entropy(model(ids).logits[0], targets[0], reduction="sum"))
            tokens += int((targets != -100).sum())
    return total / tokens


def test_liger_gla_leaves_an_adapter_an_export_and_numbers_that_hold(linearize, folder_of, run, base):
    finished = linearize("callbacks.samples.max_new_tokens=4", "callbacks.position_loss.window=9")
    assert finished.status == 0, finished.err
    folder, found = folder_of(), summary(folder_of())
    assert found["new_parameters"] == 0
    assert found["trained_parameters"] == sum(t.numel() for t in tensors(folder / "adapter").values())
    assert found["validation_loss"] < found["loss_before_training"]
    teacher = stock_loss(base, folder)
    assert found["teacher_loss"] == pytest.approx(teacher, rel=1e-4)
    unigram = found["unigram_bits_per_byte"] * math.log(2) * found["validation_bytes"] / found["validation_tokens"]
    assert found["recovery"] == pytest.approx((unigram - found["validation_loss"]) / (unigram - teacher), rel=1e-3)
    assert 0 < found["recovery"] < 1.1
    assert list((folder / "figures").glob("*.png"))
    kept = checkpoints.read_unsharded_weights(checkpoints.newest_checkpoint(folder / "checkpoints"))
    assert sum(t.numel() for name, t in kept.items() if name.startswith("model.")) == found["trained_parameters"]
    stock, exported = (AutoModelForCausalLM.from_pretrained(path) for path in (base, folder / "export"))
    assert exported.config.model_type == "linearized_llama"
    assert stock.num_parameters() == exported.num_parameters()
    texts = []
    for place in (folder, folder / "export", folder / "adapter"):
        written = run(
            "job=generate", f"checkpoint={place}", "prompt=the kernel", "max_new_tokens=12", "temperature=0", tiny=False
        )
        assert written.status == 0, written.err
        texts.append(written.out)
    assert len(texts[0]) > len("the kernel\n")
    assert len(set(texts)) == 1
    for change, said in (
        ({"base": "/nowhere/at/all"}, "was made for the base model /nowhere/at/all, which is not there"),
        ({"base_identity": {"vocab_size": 319}}, "vocab_size=319"),
        ({"linearization": {"gate": "lstm"}}, "linearization.gate=lstm"),
    ):
        written = run("job=generate", f"checkpoint={changed(folder / 'adapter', change)}", "prompt=a", tiny=False)
        assert written.status == 2
        assert said in written.err
        assert written.err.count("\n") == 1


def changed(adapter: Path, change: dict) -> Path:
    """Copy an adapter and change its record."""
    folder = adapter.with_name("changed")
    shutil.copytree(adapter, folder, dirs_exist_ok=True)
    record = json.loads((adapter / "linearization.json").read_text())
    for key, value in change.items():
        record[key] = record[key] | value if isinstance(value, dict) else value
    (folder / "linearization.json").write_text(json.dumps(record))
    return folder


KL = ("stages.finetuning.kl=1", "stages.finetuning.cross_entropy=0")

# LoLCATs in miniature: five steps of each stage, and a schedule that cuts at every validation without improvement.
TWO_STAGES = (
    "stages.alignment.tokens=2560",
    "stages.finetuning.lr=0.5",  # too high: the rate is cut, by what the schedule remembers
    "validate_every_tokens=1024",
    "schedule.patience=0",
    "schedule.factor=0.5",
    "data.micro_batch_size=2",
)


def test_lolcats_aligns_feature_maps_then_trains_lora_and_a_broken_run_ends_with_the_same_bits(
    linearize, command, stopping
):
    finished = linearize(*TWO_STAGES, experiment="lolcats/llm")
    assert finished.status == 0, finished.err
    (unbroken,) = command.runs("lolcats/llm")
    aligned = [float(value) for value in column(unbroken, "train/attention_transfer").values()]
    assert len(aligned) == 5
    assert aligned[-1] < aligned[0]
    assert min(column(unbroken, "train/cross_entropy")) == 6
    assert all(float(rate) > 0 for rate in column(unbroken, "train/learning_rate").values())
    held_out = column(unbroken, "validation/loss")
    assert float(held_out[8]) > float(held_out[6])
    for step in (3, 7):  # in the middle of each stage
        stopping(step)
        assert linearize(*TWO_STAGES, "resume=auto", experiment="lolcats/llm").status != 0
    stopping(0)
    finished = linearize(*TWO_STAGES, "resume=auto", experiment="lolcats/llm")
    assert finished.status == 0, finished.err
    assert "resumed from step_00000006" in finished.out
    _, broken = command.runs("lolcats/llm")
    assert same(unbroken / "adapter", broken / "adapter")
    for name in ("train/loss", "validation/loss", "train/gradient_norm"):
        assert column(unbroken, name) == column(broken, name)


def test_two_ranks_end_as_one_does_through_both_stages(linearize, command):
    settings = ("stages.alignment.tokens=1024", "max_tokens=2048", "data.micro_batch_size=2")
    assert linearize(*settings, experiment="lolcats/llm").status == 0
    finished = linearize(*settings, "trainer.devices=2", "strategy=ddp", experiment="lolcats/llm", alone=True)
    assert finished.status == 0, finished.err
    alone, together = command.runs("lolcats/llm")
    for name in ("train/loss", "train/attention_transfer", "train/cross_entropy"):
        one, two = column(alone, name), column(together, name)
        assert one.keys() == two.keys()
        assert all(float(two[step]) == pytest.approx(float(one[step]), rel=1e-3) for step in one)
    assert summary(together)["teacher_loss"] == pytest.approx(summary(alone)["teacher_loss"], rel=1e-5)
    assert summary(together)["validation_loss"] == pytest.approx(summary(alone)["validation_loss"], rel=1e-3)


def test_new_parameters_that_no_stage_trains_are_named_and_recovery_needs_a_teacher(
    linearize, folder_of, base, tmp_path
):
    folder = shutil.copytree(base, tmp_path / "worse")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 30  # it is sure of what is wrong
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    finished = linearize(f"base={folder}", "linearization.learned_weights=head", "max_tokens=512")
    assert finished.status == 0, finished.err
    assert "no stage trains them: add scalars to stages.finetuning.train" in finished.err + finished.out
    assert f"data.sequence_length=64 is more than base={folder} was trained for" in finished.err + finished.out
    assert "recovery: none to tell" in finished.out
    assert "recovery" not in summary(folder_of())


def test_supra_trains_every_weight_and_leaves_no_adapter(linearize, folder_of, base):
    few = "validation_tokens=256"  # while it trains: the teacher, gone at the end, is measured on all
    finished = linearize("schedule.warmup_tokens=512", "optimizer.lr=1e-3", few, experiment="supra/llm")
    assert finished.status == 0, finished.err
    folder = folder_of("supra/llm")
    assert not (folder / "adapter").exists()
    assert summary(folder)["validation_loss"] < summary(folder)["loss_before_training"]
    assert summary(folder)["teacher_loss"] == pytest.approx(stock_loss(base, folder), rel=1e-4)
    before, after = tensors(base), tensors(folder / "export")
    assert not any(before[name].equal(after[name]) for name in before)


def test_stored_tokens_of_the_teacher_train_as_the_teacher_itself_does(linearize, command, stopping, monkeypatch):
    """Store all tokens of the vocabulary: the whole distribution, in float16."""
    assert linearize(*KL).status == 0
    nearing = [float(value) for value in column(command.runs("liger/gla")[0], "train/kl").values()]
    assert sum(nearing[-3:]) < 0.9 * sum(nearing[:3])
    top_k = (*KL, "teacher_top_k=320")
    stopping(5)
    assert linearize(*top_k).status != 0
    (stored,) = (command.folder / "data").glob("teacher-*")
    written = {path: path.stat().st_mtime_ns for path in stored.iterdir()}
    stopping(0)
    finished = linearize(*top_k, "resume=auto", "data.micro_batch_size=2")
    assert finished.status == 0, finished.err
    assert {path: path.stat().st_mtime_ns for path in stored.iterdir()} == written, "asked once"
    asked, read = command.runs("liger/gla")
    expected, found = (column(folder, "train/kl") for folder in (asked, read))
    assert expected.keys() == found.keys()
    for step, value in expected.items():
        assert float(found[step]) == pytest.approx(float(value), rel=5e-3)
    shutil.rmtree(stored)


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.template=chat", "linearization=liger_gsa", "linearization.num_slots=8", "stages.finetuning.kl=0.5"),
        ("data.template=alpaca", "linearization=liger_hgrn2", "stages.finetuning.attention_transfer=1"),
    ],
    ids=["chat", "alpaca"],
)
def test_instructions_are_learned_and_measured_on_their_answers(linearize, folder_of, records, overrides, monkeypatch):
    read = []
    monkeypatch.setattr(job, "load_pretrained", lambda *args: read.append(args) or load_pretrained(*args))
    settings = (
        *overrides,
        "softmax_layers.most_sensitive=1",
        "trainer.precision=bf16-mixed",
        "base_dtype=bfloat16",
        "activation_checkpointing=full",
        "max_tokens=2048",
    )
    with monkeypatch.context() as killed:
        killed.setattr(run_folder, "lock_folder", lambda folder: io.StringIO())  # a killed process frees its run
        killed.setattr(layer_setup, "sensitivity", Mock(side_effect=KeyboardInterrupt))
        assert linearize(*settings, data=alpaca(records)).status == 130
    read.clear()
    finished = linearize(*settings, f"resume={folder_of()}", data=alpaca(records))
    assert finished.status == 0, finished.err
    assert len(read) == 1, "the base model is read once"
    folder, found = folder_of(), summary(folder_of())
    unigram = found["unigram_bits_per_byte"] * math.log(2) * found["validation_bytes"] / found["validation_tokens"]
    assert f"recovery: none to tell, token frequencies alone have {unigram:.4f}" in finished.out
    kept = json.loads((folder / "softmax_layers.json").read_text())
    config = json.loads((folder / "export" / "config.json").read_text())
    assert config["linearization"]["softmax_layers"] == kept["kept"]
    assert max(kept["sensitivity"]) == kept["sensitivity"][kept["kept"][0]]
    assert 0 < found["validation_bytes"] < 10 * len("assistant: 1 2 3 4 5 6 done")
    assert found["validation_loss"] < 10


def test_a_mixture_is_measured_by_component_with_the_teacher_stored_in_the_order_of_the_run(
    linearize, folder_of, tmp_path
):
    write_corpus(tmp_path / "corpus", {"debug": (60, 8), "design": (40, 5)})
    phases = "[{name: broad, share: 1, weights: {debug: 3, design: 1}}, {name: narrow, share: 1, weights: {design: 1}}]"
    text = ("data=mixture", "data.block_length=128", "data.validation_length=64", "data.processes=1")
    finished = linearize(
        *(*KL, "teacher_top_k=4", "max_tokens=2048", "validate_every_tokens=2048"),
        "stages.alignment={tokens: 512, train: [lora], cross_entropy: 1.0, kl: 1.0}",
        data=(*text, f"data.corpus={tmp_path}/corpus", f"data.phases={phases}", "data.max_epochs=null"),
    )
    assert finished.status == 0, finished.err
    assert {"debug", "design"} <= set(summary(folder_of())["validation_by_component"])
    for said in ("phase 1 of 3 begins: alignment, broad", "phase 2 of 3 begins: finetuning", "3 of 3 begins: narrow"):
        assert said in finished.out
