"""When a checkpoint is written, what training does meanwhile, and what happens on failure."""

import os
import resource
import signal
import threading

import pytest
import torch
from lightning.pytorch.loggers import Logger

from lit_modules import checkpoints
from lit_modules.checkpoints import folders, writing
from lit_modules.parallel.strategies import OneDevice
from tests.lit_modules.checkpoints import training


def names(folder) -> list[str]:
    return sorted(os.listdir(folder / "checkpoints"))


def test_training_goes_on_while_a_checkpoint_is_written_and_what_is_written_is_of_its_step(tmp_path, monkeypatch):
    at_step_4, kept = threading.Event(), {}
    real = writing.TensorFileWriter.write_data

    def slow(self, *args, **kwargs):
        assert at_step_4.wait(timeout=60), "training waits for the disk"
        return real(self, *args, **kwargs)

    def look(module):
        kept["names"] = names(tmp_path)
        at_step_4.set()

    monkeypatch.setattr(writing.TensorFileWriter, "write_data", slow)
    recorder = training.Recorder(step_2=lambda module: kept.update(training.weights(module)), step_4=look)
    _, module = training.train(tmp_path, OneDevice("cpu"), 5, every=2, recorder=recorder)
    assert kept.pop("names") == [".step_00000002.partial"]
    assert names(tmp_path) == ["step_00000002", "step_00000004", "step_00000005"]
    written = checkpoints.read_unsharded_weights(tmp_path / "checkpoints" / "step_00000002")
    assert all(torch.equal(written[name], weight) for name, weight in kept.items())
    assert not any(torch.equal(written[name], weight) for name, weight in training.weights(module).items())


def test_an_interrupted_training_ends_after_its_checkpoint_is_written(tmp_path, monkeypatch):
    real = writing.TensorFileWriter.write_data

    def slow(self, *args, **kwargs):
        threading.Event().wait(0.5)
        return real(self, *args, **kwargs)

    def stop(module):
        assert names(tmp_path) == [".step_00000002.partial"]
        raise RuntimeError("broken")

    monkeypatch.setattr(writing.TensorFileWriter, "write_data", slow)
    with pytest.raises(RuntimeError, match="broken"):
        training.train(tmp_path, OneDevice("cpu"), every=2, recorder=training.Recorder(step_3=stop))
    assert names(tmp_path) == ["step_00000002"]


def test_a_full_disk_leaves_the_checkpoint_that_was_there_says_so_and_training_goes_on(tmp_path, monkeypatch, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    real = writing.TensorFileWriter.write_data

    def on_a_small_disk(self, *args, **kwargs):
        small = 10_000 if "step_00000004" in str(self.path) else soft
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, hard))  # writing more than this fails, as on a full disk
        return real(self, *args, **kwargs)

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    monkeypatch.setattr(writing.TensorFileWriter, "write_data", on_a_small_disk)
    try:
        recorder, _ = training.train(tmp_path, OneDevice("cpu"), every=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list(recorder.losses) == [1, 2, 3, 4, 5, 6]
    assert names(tmp_path) == ["step_00000002", "step_00000006"]
    ours = [record for record in caplog.records if record.name.startswith("lit_modules")]
    path = tmp_path / "checkpoints" / "step_00000004"
    assert [record.message for record in ours] == [
        f"{path} could not be written (File too large); the checkpoints before it are intact"
    ]


def test_a_folder_that_cannot_be_made_is_named_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "checkpoints").write_text("a file")
    recorder, _ = training.train(tmp_path, OneDevice("cpu"), 3)
    assert list(recorder.losses) == [1, 2, 3]
    assert f"{tmp_path}/checkpoints/step_00000003 could not be written (Not a directory)" in caplog.text


def test_what_a_kill_has_left_is_no_checkpoint_and_is_cleared_at_the_next_start(tmp_path):
    training.train(tmp_path, OneDevice("cpu"), 3)
    folder = tmp_path / "checkpoints"
    (folder / ".step_00000006.partial").mkdir()
    (folder / ".step_00000006.partial" / "__0_0.distcp").write_bytes(b"half")
    (folder / ".best.partial").symlink_to("step_00000003")
    last = checkpoints.newest_intact(folder)
    assert last == folder / "step_00000003"
    recorder = training.Recorder(step_4=lambda module: seen.extend(names(tmp_path)))
    seen: list[str] = []
    training.train(tmp_path, OneDevice("cpu"), 4, resume=last, every=100, recorder=recorder)
    assert seen == ["step_00000003"]


def test_a_damaged_checkpoint_is_replaced_when_the_run_comes_to_its_step_again(tmp_path):
    training.train(tmp_path, OneDevice("cpu"), 6)
    last = tmp_path / "checkpoints" / "step_00000006"
    (last / "trainer.pt").unlink()
    training.train(tmp_path, OneDevice("cpu"), 6, resume=checkpoints.newest_intact(last.parent))
    assert checkpoints.find_damage(last) is None
    assert names(tmp_path) == ["step_00000003", "step_00000006"]


class Curve(Logger):
    """Records logged values."""

    name = version = ""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_hyperparams(self, *args, **kwargs) -> None: ...

    def log_metrics(self, metrics, step=None) -> None:
        self.rows.append({"step": step, **metrics})


def train_with_losses(folder, monkeypatch, losses, curve=False, **settings):
    """Train 6 steps with a validation each second one, which finds the losses given."""
    from lit_modules.language_modelling import Validation

    left = iter(losses)
    monkeypatch.setattr(Validation, "__post_init__", lambda self: self.__dict__.update(loss=next(left), tokens=1))
    return training.train(folder, OneDevice("cpu"), 6, validate_every=2, logger=curve, keep_last=1, **settings)


def test_the_best_is_spared_and_moves_only_to_a_better_one(tmp_path, monkeypatch):
    train_with_losses(tmp_path / "first", monkeypatch, [2.0, 3.0, 2.5])
    assert names(tmp_path / "first") == ["best", "step_00000002", "step_00000006"]
    assert folders.best_name(tmp_path / "first" / "checkpoints") == "step_00000002"
    train_with_losses(tmp_path / "last", monkeypatch, [3.0, 2.0, 1.0])
    assert names(tmp_path / "last") == ["best", "step_00000006"]
    state = checkpoints.read_trainer_state(tmp_path / "last" / "checkpoints" / "best")["callbacks"]["Checkpoints"]
    assert state == {"best_loss": 1.0, "best_step": 6}, "it knows of itself"


def test_one_that_could_not_be_written_is_not_the_best(tmp_path, monkeypatch):
    real = folders.publish

    def full(path, *args):
        if path.name == "step_00000004":
            raise OSError(28, "No space left on device")
        real(path, *args)

    monkeypatch.setattr(writing, "publish", full)
    train_with_losses(tmp_path, monkeypatch, [3.0, 1.0, 2.0])
    assert folders.best_name(tmp_path / "checkpoints") == "step_00000006"
    assert checkpoints.read_trainer_state(tmp_path / "checkpoints" / "best")["global_step"] == 6


def test_what_each_checkpoint_took_is_logged(tmp_path, monkeypatch):
    curve = Curve()
    train_with_losses(tmp_path, monkeypatch, [3.0, 3.0, 3.0], curve)
    rows = [row for row in curve.rows if "checkpoint/write_seconds" in row]
    assert len(rows) == 3, "the best at step 2, then steps 3 and 6"
    assert all(row["checkpoint/waited_seconds"] > 0 and 0 < row["checkpoint/write_seconds"] < 60 for row in rows)


@pytest.mark.parametrize("settings", [{"every_tokens": 0}, {"every_tokens": 10, "keep_last": 0}])
def test_settings_that_keep_nothing_are_refused(settings):
    with pytest.raises(ValueError, match="checkpoint"):
        checkpoints.Checkpoints(**settings)
