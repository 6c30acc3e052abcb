"""`job=pretrain` from text to an export, killed and resumed, and related settings."""

import csv
import itertools
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file

from lit_modules import checkpoints
from lit_modules.jobs import starts
from lit_modules.jobs.training_job import describe_start
from lit_modules.launching import run_folder
from tests.conftest import PICTURES, Command

pytestmark = pytest.mark.long

FIGURES = ("loss.png", "position_loss.png", "forget_gates.png")


def newest(command, experiment="default") -> Path:
    return command.runs(experiment)[-1]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def metrics(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as handle:
        return list(csv.DictReader(handle))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, workplace) -> Path:
    """Run from start to end in a separate process."""
    command = Command(workplace, tmp_path_factory.mktemp("unbroken"))
    process = command.start(*PICTURES)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    folder = newest(command)
    (folder / "terminal.txt").write_text(out)
    return folder


def test_a_run_leaves_what_the_readme_says(unbroken):
    summary = json.loads((unbroken / "summary.json").read_text())
    assert summary["tokens"] == 10240
    assert summary["skipped_steps"] == 0
    assert 0 < summary["bits_per_byte"] < 8
    assert 0 < summary["xz_after_training_bits_per_byte"] < summary["xz_bits_per_byte"] < 8
    assert 0 < summary["unigram_bits_per_byte"] < 8
    for name in FIGURES:
        with Image.open(unbroken / "figures" / name) as image:
            assert min(image.size) > 200
    table = (unbroken / "figures" / "position_loss.csv").read_text().splitlines()
    assert table[0] == "context_tokens,loss,tokens"
    assert table[1].startswith("1,")
    assert [p.name for p in sorted((unbroken / "checkpoints").iterdir())] == [
        "best",
        "step_00000016",
        "step_00000020",
    ]
    assert os.readlink(unbroken / "checkpoints" / "best") == "step_00000020"
    assert len(list((unbroken / "samples").iterdir())) == 2
    assert OmegaConf.load(unbroken / ".hydra" / "config.yaml").seed == 0
    rows = metrics(unbroken)
    assert [int(row["tokens"]) for row in rows if row["train/loss"]] == [512, *range(1024, 10241, 1024)]
    losses = [float(row["validation/loss"]) for row in rows if row["validation/loss"]]
    assert losses[-1] < losses[0]
    assert any(row["forget_gate/layer_01_memory_longest"] for row in rows)


def test_the_terminal_shows_progress_and_ends_with_what_came_out(unbroken):
    out = (unbroken / "terminal.txt").read_text()
    yardsticks = ("xz -9 after training text", "xz -9 of this text alone", "token unigram")
    for said in ("tokens/s", " left", "bits per byte", *yardsticks, "a sample of its writing", "figures/"):
        assert said in out
    assert "Traceback" not in out
    assert "torch.distributed" not in out


def test_bits_per_byte_and_the_held_out_loss_are_the_same_number(unbroken, workplace):
    """Counted again here from the text itself: the export's loss over the held-out documents, by hand."""
    import math

    from transformers import AutoModelForCausalLM, AutoTokenizer

    import lit_modules.networks  # noqa: F401 (registers the architecture)

    summary = json.loads((unbroken / "summary.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(unbroken / "export")
    tokenizer = AutoTokenizer.from_pretrained(unbroken / "export")
    held_out = held_out_documents(workplace)
    assert sum(len(text.encode()) for text in held_out) == summary["validation_bytes"]
    # rows of 128 tokens; every document restarts the state, as in the run's validation
    stream = [t for text in held_out for t in tokenizer(text)["input_ids"]]
    total, count = 0.0, 0
    for start in range(0, len(stream) - 1, 128):
        row = stream[start : start + 129]
        edges = sorted({0, len(row) - 1, *(i for i, t in enumerate(row[:-1]) if t == tokenizer.bos_token_id)})
        for first, last in itertools.pairwise(edges):
            inputs = torch.tensor([row[first:last]])
            with torch.no_grad():
                logits = model(inputs).logits[0].double()
            targets = torch.tensor(row[first + 1 : last + 1])
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            count += len(targets)
    assert count == summary["validation_tokens"]
    assert total / count == pytest.approx(summary["validation_loss"], rel=1e-5)
    assert total / math.log(2) / summary["validation_bytes"] == pytest.approx(summary["bits_per_byte"], rel=1e-5)


def held_out_documents(workplace: Path) -> list[str]:
    import pyarrow.parquet as pq

    files = sorted((workplace / "data").glob("documents-*/validation-*.parquet"))
    return [text for file in files for text in pq.read_table(file)["text"].to_pylist()]


def kill_at(process, folder_of, moment) -> None:
    """SIGKILL the process group once `moment(folder)` is true."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        folder = folder_of()
        if folder is not None and moment(folder):
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    process.wait()


def test_a_run_killed_at_arbitrary_moments_ends_with_the_same_weights_bit_for_bit(command, unbroken):
    draw = random.Random(time.time_ns())
    killed = []

    def mine():
        return next(iter(command.runs()), None)

    for low in (1, 8, 14):
        step, delay = draw.randint(low, low + 4), draw.uniform(0, 0.05)
        process = command.start("resume=auto", start_new_session=True)

        def moment(folder, step=step, delay=delay):
            path = folder / "metrics.csv"
            reached = path.is_file() and any(
                int(r["step"] or 0) >= step for r in metrics(folder) if r["step"].isdigit()
            )
            if reached:
                time.sleep(delay)
            return reached

        kill_at(process, mine, moment)
        killed.append((step, delay, process.returncode))
    process = command.start("resume=auto", start_new_session=True)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert sum(status == -signal.SIGKILL for _, _, status in killed) >= 2, killed
    assert len(command.runs()) == 1, "resume=auto goes on in the same folder"
    assert same(weights(mine()), weights(unbroken)), killed
    for column in ("train/loss", "validation/loss"):
        rows = {r["step"]: r[column] for r in metrics(mine()) if r[column]}
        assert rows == {r["step"]: r[column] for r in metrics(unbroken) if r[column]}, "and with the same curve"


def stop_early(run, command, *overrides, at: int = 9) -> Path:
    """Return the folder of a run that stopped at a step, as if killed."""
    import lightning

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_step == at:
                raise KeyboardInterrupt

    original = lightning.Trainer.__init__

    def init(self, *args, callbacks=(), **kwargs):
        original(self, *args, callbacks=[*callbacks, Stop()], **kwargs)

    lightning.Trainer.__init__, kept = init, original
    try:
        found = run(*overrides)
    finally:
        lightning.Trainer.__init__ = kept
    assert found.status != 0, found.out
    return newest(command, "default")


def test_resume_after_the_model_was_changed_is_refused_by_name_and_changes_nothing(run, command):
    folder = stop_early(run, command, "seed=7")
    said = (folder / "palimpsest.log", folder / run_folder.LOCK)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file() and p not in said}
    found = run("seed=7", "resume=auto", "model.hidden_size=64")
    assert found.status == 2
    assert "model.hidden_size=64 differs" in found.err
    assert "model.hidden_size=32" in found.err
    after = {p: p.stat().st_mtime_ns for p in before}
    assert after == before, "Hydra's record of the second command stands beside the first's"


def test_a_truncated_checkpoint_is_said_and_the_previous_one_taken_and_the_end_is_the_same(run, command, unbroken):
    folder = stop_early(run, command)
    last = checkpoints.newest_checkpoint(folder / "checkpoints")
    shard = last / "__0_0.distcp"
    os.truncate(shard, shard.stat().st_size // 2)
    found = run("resume=auto")
    assert found.status == 0, found.err
    assert f"{last.name}/{shard.name} is truncated" in found.out
    assert "resumed from step_00000004\n" in found.out
    assert same(weights(folder), weights(unbroken))


def test_a_resumed_run_may_have_another_micro_batch(run, command, unbroken):
    folder = stop_early(run, command)
    found = run("resume=auto", "data.micro_batch_size=2")
    assert found.status == 0, found.err
    mine, theirs = (json.loads((f / "summary.json").read_text()) for f in (folder, unbroken))
    assert mine["steps"] == theirs["steps"]
    assert mine["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-4)
    first, second = map(json.loads, (folder / starts.FILE).read_text(encoding="utf-8").splitlines())
    assert (first["from"], second["from"] is None) == (None, False)
    assert first["torch"] == torch.__version__
    assert second["settings"] == first["settings"] | {"data.micro_batch_size": 2}
    assert "since the last start: data.micro_batch_size" in found.out


def test_resume_after_the_text_was_changed_is_refused(run, command):
    stop_early(run, command, "seed=8")
    extra = command.folder / "text" / "zzz.txt"
    extra.write_text("a file that was not there when the run began\n" * 3)
    try:
        found = run("seed=8", "resume=auto")
    finally:
        extra.unlink()
    assert found.status == 2
    assert "the text is not what this run began with" in found.err


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(run, command):
    found = run("model.vocab_size=100")
    assert found.status == 2
    assert command.runs() == [], "nothing is left that resume=auto would take up"
    assert "model.vocab_size=100 is smaller" in found.err


def test_two_processes_train_on_the_same_global_batches_as_one(command, unbroken):
    process = command.start("trainer.devices=2", "strategy=ddp", "data.micro_batch_size=4")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    (folder,) = command.runs()  # one run, one folder
    mine, theirs = (json.loads((f / "summary.json").read_text()) for f in (folder, unbroken))
    assert mine["validation_tokens"] == theirs["validation_tokens"]
    assert mine["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-4)
    assert out.count("held-out text: loss") == 1


def test_wandb_offline_has_config_metrics_figures_and_goes_on_after_a_resume(command, run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = ("seed=9", "logger=wandb", *PICTURES)
    folder = stop_early(run, command, *settings)
    import wandb

    wandb.finish()
    found = run(*settings, "resume=auto")
    assert found.status == 0, found.err
    wandb.teardown()  # as the end of the command's process does: until then not all need be written
    offline = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(offline) == 2
    assert len({p.name.split("-", 3)[3] for p in offline}) == 1, "the same run's id"
    content = b"".join(p.read_bytes() for p in offline[-1].glob("run-*.wandb"))
    for said in (b"train/loss", b"forget_gate/layer_00_mean", b"figures/loss", b"samples", b"hidden_size", b"commit"):
        assert said in content
    media = {p.name.split("_")[0] for p in offline[-1].rglob("*.png")}
    assert media >= {"loss", "position", "forget"}


def test_a_sweep_has_a_folder_and_in_it_a_run_for_each_value_and_is_resumed_as_a_whole(run, command):
    settings = ("max_tokens=1024", "schedule.warmup_tokens=0", "callbacks.samples.prompts=[]")
    found = run("-m", "model.forget_gate=data_dependent,none", *settings)
    assert found.status == 0, found.err
    (sweep,) = command.runs()
    assert sorted(p.name for p in sweep.iterdir() if p.is_dir()) == ["0", "1"]
    for number, gate in enumerate(("data_dependent", "none")):
        assert OmegaConf.load(sweep / str(number) / "config.yaml").model.forget_gate == gate
        assert (sweep / str(number) / "summary.json").is_file()
    (sweep / "1" / "summary.json").unlink()  # as if that run had been cancelled
    found = run("-m", "model.forget_gate=data_dependent,none", "resume=auto", *settings)
    assert found.status == 0, found.err
    assert f"run: {sweep}/0 has finished; nothing is left to do" in found.out
    assert f"run: {sweep}/1, resumed from step_00000002" in found.out
    assert (sweep / "1" / "summary.json").is_file()
    assert command.runs() == [sweep]


def test_the_best_checkpoint_stays_the_best_after_a_resume(run, command, monkeypatch):
    """Validations at steps 10 and 20; the first is made to look better, and the run stops between them."""
    from lit_modules.language_modelling import Validation

    monkeypatch.setattr(Validation, "__post_init__", lambda self: self.__dict__.update(loss=3.0, tokens=1))
    folder = stop_early(run, command, "checkpoint_every_tokens=5120", at=11)
    best = folder / "checkpoints" / "best"
    assert checkpoints.read_trainer_state(best)["global_step"] == 10
    monkeypatch.setattr(Validation, "__post_init__", lambda self: self.__dict__.update(loss=3.5, tokens=1))
    found = run("checkpoint_every_tokens=5120", "resume=auto")
    assert found.status == 0, found.err
    assert checkpoints.read_trainer_state(best)["global_step"] == 10
    assert checkpoints.step_folders(best.parent)[0] == (10, best.resolve()), "and is spared when older ones go"


def test_ctrl_c_saves_a_checkpoint_and_one_line_says_how_to_resume(command):
    process = command.start("max_tokens=1024000", "validate_every_tokens=1024000")
    for line in process.stdout:
        if " · lr " in line:  # of training; what prepares the text has a rate of its own
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    (folder,) = command.runs()
    last = checkpoints.newest_intact(folder / "checkpoints")
    said = f"after step {checkpoints.step_of(last)}: the checkpoint is {last}; resume=auto goes on from there"
    assert [line for line in out.splitlines() if "resume=auto" in line] == [f"interrupted (SIGINT) {said}"]
    assert "Traceback" not in out


def test_a_disk_that_fills_up_costs_checkpoints_and_pictures_but_not_the_run(run, command, monkeypatch):
    from lit_modules.loggers import figures

    def full(*_):
        raise OSError(28, "No space left on device")

    real = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: full() if "step_00000008" in str(b) else real(a, b))
    monkeypatch.setattr(figures, "write_figure", full)
    found = run(*PICTURES)
    assert found.status == 0, found.err
    assert "step_00000008 could not be written (No space left on device)" in found.out
    assert found.out.count("training goes on") >= 2
    names = sorted(p.name for p in (newest(command) / "checkpoints").iterdir())
    assert names == ["best", "step_00000016", "step_00000020"]


def test_validation_tokens_name_the_same_text_whatever_the_micro_batch(run, command):
    settings = ("max_tokens=1024", "validate_every_tokens=512", "validation_tokens=512", "schedule.warmup_tokens=0")
    losses = []
    for micro_batch in (2, 8):
        found = run(*settings, f"data.micro_batch_size={micro_batch}")
        assert found.status == 0, found.err
        assert "over 512 tokens" in found.out
        rows = [row["validation/loss"] for row in metrics(newest(command)) if row["validation/loss"]]
        losses.append(float(rows[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_summary_is_of_all_the_held_out_text_when_the_last_validation_read_one_batch(run, command, unbroken):
    found = run("max_tokens=512", "validate_every_tokens=512", "validation_tokens=256", "schedule.warmup_tokens=0")
    assert found.status == 0, found.err
    assert "over 256 tokens" in found.out
    summary, other = (json.loads((folder / "summary.json").read_text()) for folder in (newest(command), unbroken))
    assert summary["validation_tokens"] == other["validation_tokens"] > 256


def test_a_run_whose_checkpoints_are_gone_says_that_it_starts_from_step_0(tmp_path):
    assert describe_start(tmp_path, None) == "", "a new run"
    (tmp_path / run_folder.CONFIG).touch()
    assert describe_start(tmp_path, tmp_path / "checkpoints" / "step_00000020") == ", resumed from step_00000020"
    assert (
        describe_start(tmp_path, None) == f", which has no checkpoint in {tmp_path}/checkpoints: it starts from step 0"
    )
