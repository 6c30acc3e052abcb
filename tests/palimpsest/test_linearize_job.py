"""`job=linearize` as a user meets it: a small pretrained model in, a run with an adapter and an export out."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import lightning
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lit_modules import checkpoints
from lit_modules import linearize as job
from lit_modules.networks.linearized import load_pretrained
from tests.conftest import ROOT, Finished
from tests.data_pipeline.mixtures.conftest import write_corpus

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
# In place of the sizes of conftest.TINY, which are of a model that is pretrained.
SMALL = (
    "trainer=cpu",
    "base_dtype=float32",
    "data.sequence_length=64",
    "data.validation_length=64",
    "data.batch_tokens=512",
    "data.micro_batch_size=4",
    "max_tokens=5120",  # 10 steps
    "log_every_tokens=512",
    "validate_every_tokens=2560",
    "checkpoint_every_tokens=1024",
    "linearization.window=8",
    "callbacks.samples=null",
    "callbacks.position_loss=null",
)
TEXT = ("data=text_files", "data.block_length=128", "data.validation_fraction=0.1", "data.processes=1")


@pytest.fixture(scope="session")
def base(workplace: Path) -> Path:
    """The folder of a Llama that has learned a little of the text; its tokenizer has no pad token."""
    texts = [path.read_text() for path in sorted((workplace / "text").glob("*.txt"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=1))
    ids = torch.tensor(fast("".join(texts))["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        starts = torch.randint(len(ids) - 65, (8,)).tolist()
        batch = torch.stack([ids[start : start + 65] for start in starts])
        optimizer.zero_grad()
        logits = model(batch[:, :-1]).logits
        cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
    folder = workplace / "base"
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def records(workplace: Path) -> Path:
    path = workplace / "alpaca.json"
    found = [
        {"instruction": f"Count to {n % 7}.", "input": "", "output": " ".join(map(str, range(1, n % 7 + 1))) + " done"}
        for n in range(80)
    ]
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def linearize(run, command, base):
    """Run an experiment on the small text, or with `data=...` on other data, perhaps in processes of its own; gives how
    it ended."""

    def call(*overrides: str, experiment: str = "liger/gla", data: tuple[str, ...] = TEXT, alone: bool = False):
        given = {override.split("=")[0].lstrip("+") for override in overrides}
        places = (f"base={base}", f"data_dir={command.folder}/data", f"runs_dir={command.runs_dir}")
        if data is TEXT:
            places += (f"data.source.path={command.folder}/text/*.txt",)
        given |= {".".join(name.split(".")[:2]) for name in given if name.startswith("callbacks.")}
        settings = [o for o in (*data, *SMALL, *places) if o.split("=")[0] not in given]
        arguments = (f"experiment={experiment}", *settings, *overrides)
        return start(command.folder, arguments) if alone else run(*arguments, tiny=False)

    return call


def start(folder: Path, arguments: tuple[str, ...]) -> Finished:
    done = subprocess.run(
        [sys.executable, str(ROOT / "palimpsest.py"), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def folder_of(command):
    """The folder of the one run of an experiment."""

    def found(experiment: str = "liger/gla") -> Path:
        (folder,) = command.runs(experiment)
        return folder

    return found


@pytest.fixture
def stopping(monkeypatch):
    """Have the runs that follow stop after an optimizer step, as by a kill; 0: no longer."""
    at = [0]

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == at[0] and module.ends_step(batch_idx):
                raise KeyboardInterrupt

    original = lightning.Trainer.__init__

    def init(self, *args, callbacks=(), **kwargs):
        original(self, *args, callbacks=[*callbacks, Stop()] if at[0] else callbacks, **kwargs)

    monkeypatch.setattr(lightning.Trainer, "__init__", init)
    return lambda step: at.__setitem__(0, step)


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


def test_liger_gla_leaves_an_adapter_an_export_and_numbers_that_hold(linearize, folder_of, run, base):
    finished = linearize("callbacks.samples.max_new_tokens=4", "callbacks.position_loss.window=9")
    assert finished.status == 0, finished.err
    folder, found = folder_of(), summary(folder_of())
    assert found["new_parameters"] == 0
    assert found["trained_parameters"] == sum(t.numel() for t in tensors(folder / "adapter").values())
    assert found["validation_loss"] < found["loss_before_training"]
    assert 0 < found["recovery"] < 1.1
    assert list((folder / "figures").glob("*.png"))
    kept = checkpoints.consolidated(checkpoints.newest(folder / "checkpoints"))
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
    """A copy of an adapter whose record says something else."""
    folder = adapter.with_name("changed")
    shutil.copytree(adapter, folder, dirs_exist_ok=True)
    record = json.loads((adapter / "linearization.json").read_text())
    for key, value in change.items():
        record[key] = record[key] | value if isinstance(value, dict) else value
    (folder / "linearization.json").write_text(json.dumps(record))
    return folder


KL = ("stages.finetuning.kl=1", "stages.finetuning.cross_entropy=0")

# LoLCATs in miniature: five steps of each stage, and a schedule that cuts at every validation that is no better.
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
    held_out = column(unbroken, "validation/loss")
    assert float(held_out[8]) > float(held_out[6])
    for step in (3, 7):  # in the middle of each stage
        stopping(step)
        assert linearize(*TWO_STAGES, "+tags=[broken]", "resume=auto", experiment="lolcats/llm").status != 0
    stopping(0)
    finished = linearize(*TWO_STAGES, "+tags=[broken]", "resume=auto", experiment="lolcats/llm")
    assert finished.status == 0, finished.err
    assert "resumed from step_00000006" in finished.out
    _, broken = command.runs("lolcats/llm")
    assert same(unbroken / "adapter", broken / "adapter")
    for name in ("train/loss", "validation/loss", "train/gradient_norm"):
        assert column(unbroken, name) == column(broken, name)


def test_two_ranks_end_as_one_does_through_both_stages(linearize, command):
    settings = ("stages.alignment.tokens=1024", "max_tokens=2048", "data.micro_batch_size=2")
    assert linearize(*settings, experiment="lolcats/llm").status == 0
    finished = linearize(*settings, "trainer.devices=2", experiment="lolcats/llm", alone=True)
    assert finished.status == 0, finished.err
    alone, together = command.runs("lolcats/llm")
    for name in ("train/loss", "train/attention_transfer", "train/cross_entropy"):
        one, two = column(alone, name), column(together, name)
        assert one.keys() == two.keys()
        assert all(float(two[step]) == pytest.approx(float(one[step]), rel=1e-3) for step in one)
    assert summary(together)["teacher_loss"] == pytest.approx(summary(alone)["teacher_loss"], rel=1e-5)
    assert summary(together)["validation_loss"] == pytest.approx(summary(alone)["validation_loss"], rel=1e-3)


def test_supra_trains_every_weight_and_leaves_no_adapter(linearize, folder_of, base):
    finished = linearize("schedule.warmup_tokens=512", "optimizer.lr=1e-3", experiment="supra/llm")
    assert finished.status == 0, finished.err
    folder = folder_of("supra/llm")
    assert not (folder / "adapter").exists()
    assert summary(folder)["validation_loss"] < summary(folder)["loss_before_training"]
    before, after = tensors(base), tensors(folder / "export")
    assert not any(before[name].equal(after[name]) for name in before)


def test_stored_tokens_of_the_teacher_train_as_the_teacher_itself_does(linearize, command, stopping, monkeypatch):
    """All tokens of the vocabulary: what is stored is then the whole distribution, in float16."""
    assert linearize(*KL).status == 0
    nearing = [float(value) for value in column(command.runs("liger/gla")[0], "train/kl").values()]
    assert sum(nearing[-3:]) < 0.9 * sum(nearing[:3])
    top_k = (*KL, "teacher_top_k=320", "+tags=[stored]")
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


def alpaca(path: Path) -> tuple[str, ...]:
    return ("data=alpaca", f"data.path={path}", "data.validation_records=10")


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
    finished = linearize(
        *overrides,
        "softmax_layers={most_sensitive: 1}",
        "trainer.precision=bf16-mixed",
        "base_dtype=bfloat16",
        "activation_checkpointing=full",
        "max_tokens=2048",
        data=alpaca(records),
    )
    assert finished.status == 0, finished.err
    assert len(read) == 1, "the base model is read once"
    folder, found = folder_of(), summary(folder_of())
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


@pytest.fixture
def changed_base(base: Path, tmp_path: Path):
    """A copy of the base model's folder with other values in config.json, or without its weights."""

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
        ({"vocab_size": 310}, "of shape [320, 32], and its config.json means [310, 32]"),
        ({"model_type": 7}, LISTED),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "no model can be built from its config.json"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_base_model_that_cannot_be_linearized_is_refused_in_one_line(linearize, command, changed_base, change, said):
    refused(linearize(changed_base(**change)), command, said)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["base=???"], "base"),
        (["base=/nowhere/at/all"], "base=/nowhere/at/all is no folder"),
        (["base=null"], "base=null"),
        (["base=nobody/nothing"], "base=nobody/nothing"),
        (["stages.finetuning=3"], "stages.finetuning=3"),
        (["+stages.finetuning.kll=1"], "stages.finetuning.kll"),
        (["stages.finetuning.train=[feature_maps]"], "the model has no feature_maps"),
        (["stages.finetuning.tokens=1024"], "max_tokens=5120"),
        (["lora.targets=[gate_proj]"], "lora.targets: gate_proj"),
        (["lora.targets=q_proj"], "lora.targets=q_proj is not a list"),
        (["lora.rank=0"], "lora.rank=0"),
        (["optimizer.lr=0"], "optimizer.lr=0"),
        (["tokenizer=bpe"], "tokenizer=bpe"),
        (["stages=null"], "stages is empty"),
        (["+lora.ranks=3"], "lora.ranks is not known"),
        (["lora=null"], "the model has no lora"),
        (["linearization.softmax_layers=[3]"], "linearization.softmax_layers"),
        (["linearization.softmax_layers=[0,1,2]"], "linearization.softmax_layers=[0, 1, 2] are all"),
        (["linearization.gate=lstm"], "linearization.gate=lstm"),
        (["softmax_layers=[1]"], "softmax_layers=[1] is not known"),
        (["softmax_layers={every: 8}"], "softmax_layers.every=8"),
        (["softmax_layers={most_sensitive: 4}"], "softmax_layers.most_sensitive=4"),
        (["teacher_top_k=8"], "teacher_top_k=8"),
        (["teacher_top_k=1000", "stages.finetuning.kl=1"], "teacher_top_k=1000"),
        (["activation_checkpointing=selective"], "activation_checkpointing=selective"),
        (["strategy=fsdp"], "strategy"),
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


def test_a_base_model_whose_weights_are_no_numbers_ends_before_it_is_trained(linearize, base, tmp_path):
    folder = shutil.copytree(base, tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    finished = linearize(f"base={folder}")
    assert finished.status == 1
    assert "the base model itself has a held-out loss of nan" in finished.err
    assert finished.err.count("\n") == 1


@pytest.mark.parametrize(
    ("written", "said"), [([], "data."), ([{"question": "?"}], "instruction"), ([{"instruction": "?"}], "output")]
)
def test_records_that_teach_nothing_are_refused_in_one_line(linearize, command, tmp_path, written, said):
    path = tmp_path / "records.json"
    path.write_text(json.dumps(written))
    refused(linearize(data=alpaca(path)), command, said)


def refused(finished, command, said: str) -> None:
    """One line that says it, status 2, and no run that resume=auto would take up."""
    assert finished.status == 2, finished.err
    assert said in finished.err
    assert finished.err.count("\n") == 1, finished.err
    assert command.runs("liger/gla") == []
