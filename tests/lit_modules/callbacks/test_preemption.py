"""Runs preempted at every kind of moment that resume: by signals to this process, and to one rank of two."""

import csv
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
from safetensors.torch import load_file

from lit_modules.callbacks import preemption
from lit_modules.callbacks.preemption import Preemption
from lit_modules.launching.restarts import requeue

# Ten steps of two micro-batches, validations at 5 and 10, reports at 1, 4, 8 and 10; one checkpoint is due, at the end.
SHORT = ("max_tokens=5120", "validate_every_tokens=2560", "checkpoint_every_tokens=5120", "log_every_tokens=2048")


class Send(lightning.Callback):
    """Sends this process a signal when a hook is called at a step; `again`: also when a checkpoint is written."""

    def __init__(self, number: int, hook: str, step: int, batch: int = 0, again: bool = True) -> None:
        self.number, self.again, self.sent = number, again, 0

        def send(trainer, module, *arguments) -> None:
            at = next((a for a in arguments if isinstance(a, int)), 0) % 2
            if trainer.global_step == step and at == batch % 2 and not self.sent:
                self.send()

        setattr(self, hook, send)

    def on_save_checkpoint(self, trainer, module, checkpoint) -> None:
        if self.sent and self.again:
            self.send()

    def send(self) -> None:
        self.sent += 1
        os.kill(os.getpid(), self.number)


@pytest.fixture
def with_callback(run, monkeypatch):
    """Run the command in this process with an additional callback."""

    def call(callback: lightning.Callback | None, *overrides: str):
        original = lightning.Trainer.__init__

        def init(self, *args, callbacks=(), **kwargs):
            original(self, *args, callbacks=[*callbacks, *([callback] if callback else [])], **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(lightning.Trainer, "__init__", init)
            return run(*SHORT, *overrides)

    return call


def losses(folder: Path) -> list[tuple[str, str, str]]:
    """Return the rows of metrics.csv with a loss: step, training loss, held-out loss."""
    with open(folder / "metrics.csv", newline="") as handle:
        rows = [(r["step"], r["train/loss"], r["validation/loss"]) for r in csv.DictReader(handle)]
    return [row for row in rows if row[1] or row[2]]


def test_a_run_told_to_end_again_and_again_ends_with_the_weights_and_losses_of_one_left_alone(
    with_callback, command
) -> None:
    before = [signal.getsignal(number) for number in preemption.SIGNALS]
    assert with_callback(None, "runs_dir=" + str(command.runs_dir / "alone")).status == 0
    (alone,) = (command.runs_dir / "alone" / "default").iterdir()
    steps = [
        # in the first of a step's two micro-batches; the step is finished
        (Send(signal.SIGTERM, "on_train_batch_start", step=2), "preempted (SIGTERM) after step 3"),
        # in a step after which a validation is due: that is left to the next start ...
        (Send(signal.SIGUSR1, "on_train_batch_start", step=4, batch=1), "preempted (SIGUSR1) after step 5"),
        # ... which is told to end in that validation
        (Send(signal.SIGTERM, "on_validation_batch_start", step=5), "preempted (SIGTERM) after step 5"),
        # by Ctrl-C, inside of what one report is the mean of
        (Send(signal.SIGINT, "on_train_batch_start", step=6, again=False), "interrupted (SIGINT) after step 7"),
        # in the validation of the last step: it is finished, and the measurement of all the text left out
        (Send(signal.SIGTERM, "on_validation_batch_start", step=10), "preempted (SIGTERM) after step 10"),
    ]
    for send, said in steps:
        found = with_callback(send, "resume=auto")
        assert found.status == (130 if send.number == signal.SIGINT else 75), found.err
        assert send.sent >= 1
        (folder,) = (f for f in command.runs() if f.name != "alone")
        step = int(said.rsplit(" ", 1)[1])
        assert f"{said}: the checkpoint is {folder}/checkpoints/step_{step:08d}; resume=auto goes on" in found.out
        assert "s from the signal to the end" in found.out
        assert not (folder / "summary.json").exists()
    assert with_callback(None, "resume=auto").status == 0
    assert losses(folder) == losses(alone)
    mine, theirs = (json.loads((f / "summary.json").read_text()) for f in (folder, alone))
    assert mine["validation_loss"] == theirs["validation_loss"]
    mine, theirs = (load_file(f / "export" / "model.safetensors") for f in (folder, alone))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert [signal.getsignal(number) for number in preemption.SIGNALS] == before


def test_a_signal_in_the_export_lets_the_run_finish(run, command, monkeypatch) -> None:
    from lit_modules.jobs import pretrain

    export = pretrain.export

    def told_to_end(*arguments) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        export(*arguments)

    monkeypatch.setattr(pretrain, "export", told_to_end)
    found = run("max_tokens=512", "schedule.warmup_tokens=0", "callbacks.samples.prompts=[]")
    assert found.status == 0, found.err
    assert (command.runs()[-1] / "summary.json").is_file()


def test_a_signal_to_one_rank_of_two_ends_both_with_a_checkpoint(command) -> None:
    process = command.start("trainer.devices=2", "strategy=ddp", "max_tokens=1024000", "validate_every_tokens=1024000")
    said = []
    for line in process.stdout:
        said.append(line)
        if "tokens/s" in line:
            (other,) = (Path("/proc") / str(process.pid) / "task" / str(process.pid) / "children").read_text().split()
            os.kill(int(other), signal.SIGTERM)
            break
    out, _ = process.communicate(timeout=120)
    out = "".join(said) + out
    assert process.returncode == 75, out
    assert out.count("preempted (SIGTERM)") == 1, out
    assert "Traceback" not in out
    (folder,) = command.runs()
    assert (folder / "checkpoints").is_dir()
    assert not (folder / "failed.json").exists(), "being told to end is no failure"


@pytest.fixture
def listening(monkeypatch):
    """The signals noted, as in a run: the module that they are noted in."""
    connector, loop = SimpleNamespace(), SimpleNamespace(epoch_loop=SimpleNamespace())
    trainer, module = SimpleNamespace(_signal_connector=connector, fit_loop=loop), SimpleNamespace()
    with Preemption().handle_signals(trainer, module):
        yield module


def test_the_first_signal_counts(listening) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert listening.asked_to_end == (True, False, False)


def test_a_second_ctrl_c_ends_the_run_at_once(listening, monkeypatch, capfd) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)  # the same one, that a terminal and a launcher both send
    assert listening.asked_to_end == (False, False, True)
    assert capfd.readouterr().err == (
        "palimpsest: interrupted: the run saves a checkpoint and ends; a second Ctrl-C ends it without one\n"
    )
    monkeypatch.setattr(preemption, "SAME_INTERRUPT_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_worker_dies_by_sigterm_and_is_spared_what_the_process_group_is_sent(listening, capfd) -> None:
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    worker.start()
    time.sleep(0.2)
    assert os.getpgid(worker.pid) == worker.pid
    os.kill(worker.pid, signal.SIGUSR1)
    os.kill(worker.pid, signal.SIGINT)
    time.sleep(0.2)
    assert worker.is_alive()
    assert capfd.readouterr().err == ""
    worker.terminate()
    worker.join(timeout=10)
    assert worker.exitcode == -signal.SIGTERM


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch) -> Path:
    """Return a stand-in for scontrol, and the file that records its requests; it refuses job 13."""
    asked, program = tmp_path / "asked", tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nif [ "$2" = 13 ]; then echo "Job is held" >&2; exit 1; fi\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    return asked


def test_the_warning_before_the_time_limit_has_the_job_queued_again(scontrol: Path) -> None:
    assert preemption.requeue_if_needed(signal.SIGUSR1).startswith("SLURM job 12 is queued again")
    assert scontrol.read_text() == "requeue 12\n"


def test_a_task_of_an_array_is_queued_again_by_itself(scontrol: Path, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    preemption.requeue_if_needed(signal.SIGUSR1)
    assert scontrol.read_text() == "requeue 7_3\n"


def test_sigterm_leaves_the_job_to_whoever_sent_it(scontrol: Path) -> None:
    assert "where SLURM queues job 12 again" in preemption.requeue_if_needed(signal.SIGTERM)
    assert not scontrol.exists()


def test_a_requeue_that_is_refused_is_said_with_slurms_words(scontrol: Path) -> None:
    assert requeue("13") == ("scontrol requeue 13 failed (Job is held): resume=auto goes on from the last checkpoint")


def test_outside_of_slurm_nobody_is_asked(scontrol: Path, monkeypatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    assert preemption.requeue_if_needed(signal.SIGUSR1) == "resume=auto goes on from there"
    assert not scontrol.exists()
