"""Invalid values of known settings give one line that names the key, before any reading or writing.

A configuration is composed once, and a job's own checks run in this process for each value.
"""

from pathlib import Path

import hydra
import pytest
import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

import palimpsest
from common.setting_types import check_type
from lit_modules.jobs import pretrain
from lit_modules.jobs.training_job import check_settings
from lit_modules.launching import consistency, run_folder, start
from lit_modules.launching.process import ProcessInfo
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM, count_parameters
from lit_modules.networks.counting import planned_parameters
from lit_modules.parallel import choosing
from tests.conftest import ROOT, TINY


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    """The tiny configuration of a pretraining, with the settings of a picture and of a logger that others leave out."""
    start.register_resolvers()
    left_out = ("callbacks.forget_gates=null", "callbacks.position_loss=null")
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        overrides = [*(o for o in TINY if o not in left_out), "data.source.path=/given", "logger=wandb"]
        cfg = hydra.compose("config", overrides, return_hydra_config=True)
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = "."
    return cfg


@pytest.fixture
def refused(composed: DictConfig, monkeypatch: pytest.MonkeyPatch):
    """Return the error line of a pretraining with these settings, started without a run folder."""

    def give(tmp_path: Path, *overrides: str) -> str:
        cfg = composed.copy()
        monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": cfg.hydra}))
        for override in overrides:
            key, _, value = override.partition("=")
            OmegaConf.update(cfg, key, yaml.safe_load(value), merge=False)
        with pytest.raises(Exception) as error:  # noqa: PT011 (that it is a user's mistake is what is tested)
            check(cfg, tmp_path)
        line = palimpsest.mistake(error.value)
        assert line is not None, repr(error.value)
        return line

    return give


def check(cfg: DictConfig, folder: Path) -> None:
    """What a run does before it reads anything."""
    start.check_switches(cfg)
    consistency.apply_launcher_sizes(cfg.trainer, ProcessInfo())
    check_settings(cfg)
    pretrain.build(cfg, folder)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        # of another type
        ("debug=abc", "debug=abc: give true or false"),
        ("dry_run=1", "dry_run=1: give true or false"),
        ("compile=maybe", "compile=maybe: give true or false"),
        ("data_dir=5", "data_dir=5: give text"),
        ("data.strict=abc", "data.strict=abc: give true or false"),
        ("data.source.path=5", "data.source.path=5: give text or a list of text, as [a, b]"),
        ("data.processes=abc", "data.processes=abc: give a whole number or null"),
        ("data.num_workers=1.5", "data.num_workers=1.5: give a whole number"),
        ("data.num_workers=[]", "data.num_workers=[]: give a whole number"),
        ("data.validation_fraction=abc", "data.validation_fraction=abc: give a number"),
        ("tokenizer.vocab_size=1024.5", "tokenizer.vocab_size=1024.5: give a whole number"),
        ("tokenizer.train_bytes=.nan", "tokenizer.train_bytes=nan: give a whole number"),
        ("model.max_position_embeddings=abc", "model.max_position_embeddings=abc: give a whole number or null"),
        ("model.mixers=5", "model.mixers=5: give a list of text, as [a, b], text or null"),
        ("model.prune=abc", "model.prune=abc: give a number or null"),
        ("optimizer.lr=abc", "optimizer.lr=abc: give a number"),
        ("optimizer.lr=null", "optimizer.lr=null: give a number"),
        ("optimizer.betas=5", "optimizer.betas=5: give a list of 2 values"),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: give a list of 2 values"),
        ("optimizer.betas=[0.9,x]", 'optimizer.betas=[0.9, "x"]: give a list of 2 values, each a number'),
        ("optimizer.weight_decay=abc", "optimizer.weight_decay=abc: give a number"),
        ("schedule.final=true", "schedule.final=true: give a number"),
        ("callbacks.progress.every_tokens=abc", "callbacks.progress.every_tokens=abc: give a whole number"),
        ("callbacks.checkpoints.keep_last=abc", "callbacks.checkpoints.keep_last=abc: give a whole number"),
        ("callbacks.samples.prompts=abc", "callbacks.samples.prompts=abc: give a list of text, as [a, b]"),
        ("callbacks.samples.prompts=[5]", "callbacks.samples.prompts=[5]: give a list of text, as [a, b]"),
        ("callbacks.samples.temperature=.nan", "callbacks.samples.temperature=nan: give a number"),
        ("callbacks.watchdog.seconds=abc", "callbacks.watchdog.seconds=abc: give a number or null"),
        ("trainer.gradient_clip_val=true", "trainer.gradient_clip_val=true: give a whole number, a number or null"),
        ("log_every_tokens=abc", "log_every_tokens=abc: give a whole number, 1 or more"),
        # of the right type, and out of range
        ("data.sequence_length=1", "data.sequence_length=1: give a whole number, 2 or more"),
        ("data.sequence_length=0", "data.sequence_length=0: give a whole number, 2 or more"),
        ("data.batch_tokens=1000000", "data.batch_tokens=1000000 is more than the run's max_tokens=10240"),
        ("data.seed=-1", "data.seed=-1: give a whole number, 0 or more"),
        ("data.processes=1000000", "data.processes=1000000: give a whole number, from 1 to"),
        ("data.num_workers=1000000", "data.num_workers=1000000: give a whole number, from 0 to"),
        ("data.validation_fraction=1.5", "data.validation_fraction=1.5: give a number above 0 and below 1"),
        ("tokenizer.vocab_size=0", "tokenizer.vocab_size=0: give a whole number, 257 or more"),
        ("model.max_position_embeddings=0", "model.max_position_embeddings=0: give a whole number"),
        ("model.gate_time_min=-1", "model.gate_time_min=-1: give a number above 0"),
        ("model.num_layers=1000000000000", "model.num_layers=1000000000000: give a whole number, from 1 to"),
        ("model.num_heads=1000000000000", "model.num_heads=1000000000000 does not divide hidden_size=32"),
        ("activation_checkpointing=99", "activation_checkpointing=99 recomputes none of model.num_layers=2 blocks"),
        ("optimizer.lr=-1", "optimizer.lr=-1: give a number above 0"),
        ("optimizer.betas=[0.9, 1.5]", "optimizer.betas=[0.9, 1.5]: give numbers of 0 or more, below 1"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1: give a number at least 0"),
        ("callbacks.checkpoints.keep_last=0", "callbacks.checkpoints.keep_last=0: give a whole number, 1 or more"),
        ("callbacks.machines.every_tokens=0", "callbacks.machines.every_tokens=0: give a whole number, 1 or more"),
        ("trainer.accelerator=tpu", "trainer.accelerator=tpu: give one of auto, cpu, gpu, cuda"),
        ("trainer.precision=fp16", "trainer.precision=fp16: give one of 32-true, "),
        ("trainer.devices=abc", "trainer.devices=abc: give a whole number from 1 to"),
        ("trainer.devices=[0,1]", "trainer.devices=[0, 1]: give a whole number from 1 to"),
        ("trainer.devices=1000000000000", "trainer.devices=1000000000000: give a whole number from 1 to"),
        ("trainer.num_nodes=0", "trainer.num_nodes=0: give a whole number, 1 or more"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_its_key(refused, tmp_path, override, said):
    assert refused(tmp_path, override).startswith((said, f"data.tokenizer: {said}"))


@pytest.mark.parametrize("devices", ["auto", "1", "-1", "[0,1]"])
@pytest.mark.parametrize("target", ["null", "lit_modules.parallel.strategies.DataParallel"])
def test_gpus_that_there_are_not_are_refused_by_their_key(refused, tmp_path, monkeypatch, devices, target):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = refused(tmp_path, "trainer.accelerator=gpu", f"trainer.devices={devices}", f"strategy._target_={target}")
    assert said.startswith("trainer.accelerator=gpu, trainer.devices=")
    assert said.endswith(": this machine has no GPU: give trainer=cpu")


@pytest.mark.parametrize("strategy", ["DataParallel", "Sharded"])
def test_a_context_parallel_size_is_refused_by_its_own_key(refused, tmp_path, strategy):
    target = f"lit_modules.parallel.strategies.{strategy}"
    said = refused(tmp_path, f"strategy={{_target_: {target}, context_parallel_size: 0}}")
    assert said == "strategy.context_parallel_size=0: give a whole number, 1 or more"


def test_a_value_that_another_key_gives_is_refused_by_that_key(refused, tmp_path):
    said = refused(tmp_path, "data.sequence_length=${log_every_tokens}", "log_every_tokens=abc")
    assert said.startswith("log_every_tokens=abc")
    said = refused(tmp_path, "model.vocab_size=${tokenizer.train_bytes}", "tokenizer.train_bytes=abc")
    assert said == "tokenizer.train_bytes=abc: give a whole number"


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (10**9, "GiB for weights, gradients and the optimizer alone, and this machine has "),
        (10**12, ": one matrix takes 8 EiB or more: lower one of them"),
    ],
)
def test_a_model_beyond_this_machines_memory_is_refused_before_memory_is_asked_for(
    refused, tmp_path, monkeypatch, size, words
):
    monkeypatch.setattr(pretrain, "Pretraining", None)  # would ask for it
    said = refused(tmp_path, f"model.hidden_size={size}")
    assert said.startswith(f"model.hidden_size={size}, model.num_layers=2, model.intermediate_size=64")
    assert words in said


def test_sharding_lets_each_gpu_hold_its_part_of_a_model(composed, monkeypatch):
    config, cfg = PalimpsestConfig(vocab_size=100, hidden_size=64, num_layers=2, num_heads=2), composed.copy()
    with torch.device("meta"):
        whole = 16 * count_parameters(PalimpsestForCausalLM(config)).total
    monkeypatch.setattr(choosing, "count_devices", lambda *_: 8)
    monkeypatch.setattr(choosing, "device_memory", lambda _: whole / 4)
    choosing.check_memory(config, cfg, choosing.Sharded())
    with pytest.raises(ValueError, match="and a GPU here has 0 GiB"):
        choosing.check_memory(config, cfg, choosing.DataParallel())


def test_parameters_are_counted_without_making_the_model():
    mixers = ["attention", "gla", "attention", "mamba2"]
    for tied in (False, True):
        config = PalimpsestConfig(
            vocab_size=100, hidden_size=64, num_layers=4, num_heads=2, mixers=mixers, tie_word_embeddings=tied
        )
        with torch.device("meta"):
            made = count_parameters(PalimpsestForCausalLM(config)).total
        assert planned_parameters(config) == made
        assert config.num_layers == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("abc", "runs"), "job.makes_a_run=abc"), ((True, 5), "runs_dir=5"), ((True, "runs", None, 5), "resume=5")],
)
def test_a_runs_folder_is_not_made_for_values_that_cannot_be_meant(arguments, said):
    with pytest.raises(ValueError, match=f"^{said}: give "):
        start.run_folder(*arguments, *[None] * (4 - len(arguments)))


@pytest.mark.parametrize("override", ["job.makes_a_run=abc", "job.makes_a_run=false", "debug=abc"])
def test_what_decides_on_the_runs_folder_is_checked_before_there_is_one(run, command, override):
    ended = run("experiment=demo", f"runs_dir={command.runs_dir}", override, tiny=False)
    assert ended.status == 2
    assert ended.err.startswith(f"palimpsest: {override}: ")
    assert not [path for path in command.runs_dir.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("hint", "values", "others"),
    [
        (int | None, [3, None], [True, 1.0, "3"]),
        (float, [3, 0.5], [True, float("nan"), float("inf"), "x", None]),
        (list[str], [["a"], []], ["a", [5], None]),
        (tuple[int, ...], [[1], [1, 2]], [["a"], 1]),
        (tuple[float | torch.Tensor, float], [[1, 2]], [[1], [1, "a"], "ab"]),
        (dict[str, str | None], [{"a": "b"}, {"a": None}], [{"a": 5}, ["a"]]),
        (str | Path, ["a"], [5]),
        (object, [5, "a"], []),
        (torch.nn.Module, [], [5, "a"]),
    ],
)
def test_a_value_is_held_to_its_type_hint(hint, values, others):
    for value in values:
        check_type("key", value, hint)
    for value in others:
        with pytest.raises(ValueError, match=r"^key=.*: give "):
            check_type("key", value, hint)


def test_a_held_out_loss_that_is_not_a_number_ends_a_run_without_an_export(run, command, monkeypatch):
    losses = pretrain.Pretraining.token_losses
    monkeypatch.setattr(pretrain.Pretraining, "token_losses", lambda *given: losses(*given) * float("nan"))
    ended = run("max_tokens=1024", "schedule.warmup_tokens=0", "callbacks.samples=null")
    folder = command.runs()[-1]
    assert ended.status == 1
    assert ended.err.count("\n") == 1
    assert f"{folder}: the held-out loss at the end is nan, so nothing is exported" in ended.err
    assert not (folder / "export").exists()
    assert not (folder / run_folder.SUMMARY).exists()
    kept = [path.name for path in (folder / "checkpoints").iterdir()]
    assert [name for name in kept if name.startswith("step")]
    assert "best" not in kept
