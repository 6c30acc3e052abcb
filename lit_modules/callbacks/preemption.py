"""Preemption: on a signal, a run writes a checkpoint within its grace time and can resume from it.

SIGUSR1 is SLURM's warning before the time limit (`--signal=USR1@120`): the run asks SLURM to requeue its job. SIGTERM
comes with preemption, scancel, scontrol requeue and a user's kill: its sender decides the job's fate. SIGINT is Ctrl-C:
the run ends; a second one ends it at once, without a checkpoint. Apart from that, handlers only set a flag. Ranks
receive signals at different steps, or only some ranks do, so they share the flags: in an all-reduce of
each optimizer step (`Training.reduce_flags`), and after each validation batch.

- At the end of an optimizer step: write a checkpoint and wait for it.
- Before or in a validation: the same; the resumed run repeats that validation.
- After the last step, while measuring all the held-out text: wait for the last checkpoint.
- In the export: finish it, and with it the run.

The process exits with status 75 (EX_TEMPFAIL of sysexits.h: try again later), after SIGINT with 130.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Iterator
from copy import deepcopy
from types import FrameType
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn

from lit_modules import checkpoints
from lit_modules.launching.process import this_process
from lit_modules.launching.restarts import requeue, slurm_job
from lit_modules.launching.run_folder import SilentExit
from lit_modules.trainer_parts import find_callback

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)  # in the order of Training's flags
STATUS, INTERRUPTED = 75, 130
SAME_INTERRUPT_SECONDS = 1.0  # seconds: the terminal and torchrun both forward one Ctrl-C


class Preempted(SilentExit):
    """End of a run by the signal `sent`; the run can be resumed, and rank 0 has reported it."""

    def __init__(self, sent: signal.Signals) -> None:
        here = this_process()
        status = INTERRUPTED if sent == signal.SIGINT else STATUS
        # Lightning's launcher kills rank 0 when a rank that it started exits with a status other than 0
        super().__init__(0 if here.launcher == "lightning" and here.rank > 0 else status)


class Preemption(Callback):
    """Callback that ends the run cleanly on a signal: checkpoint, requeue, loggers closed as preempted."""

    def __init__(self) -> None:
        self.noted: float | None = None  # time of this rank's first signal
        self.interrupted: float | None = None  # time of its first SIGINT
        self.validation_due = False  # saved in the checkpoint: its step's validation is still to be done
        self.before_validation: dict[str, Any] = {}  # Lightning's progress, as a validation in training starts

    def state_dict(self) -> dict[str, Any]:
        return {"validation_due": self.validation_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.validation_due = state["validation_due"]

    @contextlib.contextmanager
    def handle_signals(self, trainer: lightning.Trainer, module: Any) -> Iterator[None]:
        """Handle signals: the first sets `module.asked_to_end`, a second SIGINT raises KeyboardInterrupt."""

        def note(number: int, frame: FrameType | None) -> None:
            if self.noted is None:  # only the first counts: after a requeue SLURM also sends SIGTERM
                self.noted = time.monotonic()
                module.asked_to_end = tuple(number == each for each in SIGNALS)
            if number == signal.SIGINT:
                self.note_interrupt()

        disable_lightning_signals(trainer)
        before = {number: signal.signal(number, note) for number in SIGNALS}
        _handlers.append(note)
        try:
            yield
        finally:
            _handlers.remove(note)
            for number, handler in before.items():
                signal.signal(number, handler)

    def note_interrupt(self) -> None:
        """Announce the end of the run on the first SIGINT; end at once on the second.

        Raises:
            KeyboardInterrupt: this is the second SIGINT.
        """
        if self.interrupted is None:
            self.interrupted = time.monotonic()
            if this_process().rank == 0:
                write_to_terminal(
                    "interrupted: the run saves a checkpoint and ends; a second Ctrl-C ends it without one"
                )
        elif time.monotonic() - self.interrupted > SAME_INTERRUPT_SECONDS:
            raise KeyboardInterrupt

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        """Run the validation that the previous process's end cut short."""
        if not self.validation_due:
            return
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting = False
        self.validation_due = False  # set first: the checkpoint after this validation must not repeat it
        trainer.validating = True
        loop.run()
        trainer.training = True

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert trainer.val_check_batch is not None  # Lightning has set it before the first batch
        validates = (batch_idx + 1) % trainer.val_check_batch == 0  # then end there, so that the validation is kept
        if module.ends_step(batch_idx) and any(module.agreed_to_end) and not validates:
            self.end_between_steps(trainer, module)

    def on_validation_start(self, trainer: lightning.Trainer, module: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            loop = trainer.fit_loop.epoch_loop.val_loop
            self.before_validation = deepcopy(loop.batch_progress.state_dict())
        if any(module.agreed_to_end):
            self.end_in_validation(trainer, module)

    def on_validation_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        module.reduce_flags(True)
        if any(module.agreed_to_end):
            self.end_in_validation(trainer, module)

    def end_between_steps(self, trainer: lightning.Trainer, module: Any) -> None:
        """Save and end, unless training is complete: the end of training saves then.

        Raises:
            Preempted: always, unless training is complete.
        """
        if trainer.global_step < trainer.max_steps:
            self.save(trainer)
            self.end(trainer, module)

    def end_in_validation(self, trainer: lightning.Trainer, module: Any) -> None:
        """Save and end from within a validation; after the last step, finish training's own validation first."""
        if trainer.state.fn != TrainerFn.FITTING:
            self.end(trainer, module)
        if trainer.global_step < trainer.max_steps:
            # reset the validation: Lightning would resume in its middle, without the sums of the first part
            trainer.fit_loop.epoch_loop.val_loop.batch_progress.load_state_dict(self.before_validation)
            self.validation_due = True
            self.end_between_steps(trainer, module)

    def save(self, trainer: lightning.Trainer) -> None:
        """Write this step's checkpoint, unless it exists, and wait for it."""
        writer = find_callback(trainer, checkpoints.Checkpoints)
        if writer is not None:
            writer.save(trainer)
            writer.wait(trainer)

    def end(self, trainer: lightning.Trainer, module: Any) -> None:
        """Requeue the job, close the loggers, and exit with all ranks together.

        Raises:
            Preempted: always.
        """
        sent = SIGNALS[module.agreed_to_end.index(True)]
        ended = Preempted(sent)
        if trainer.is_global_zero:
            what_next = requeue_if_needed(sent)  # requeue first: a later failure must not prevent it
            word = "interrupted" if sent == signal.SIGINT else "preempted"
            log.warning(
                "%s (%s) after step %s: %s; %s",
                word,
                sent.name,
                trainer.global_step,
                describe_checkpoint(trainer),
                what_next,
            )
            for logger in trainer.loggers:
                if hasattr(logger, "close"):
                    logger.close(ended.status, preempted=sent != signal.SIGINT)
            trainer.loggers = []
        if self.noted is not None:
            log.info("%.1f s from the signal to the end", time.monotonic() - self.noted)
        trainer.strategy.barrier()  # the launcher kills the other ranks when one ends
        raise ended


def write_to_terminal(line: str) -> None:
    """Write a line to the terminal from a signal handler, which may have interrupted a print."""
    os.write(2, f"palimpsest: {line}\n".encode())


def handle_signals(trainer: lightning.Trainer, module: Any) -> contextlib.AbstractContextManager[None]:
    """Return `Preemption.handle_signals` of the trainer's callback; a null context without one."""
    found = find_callback(trainer, Preemption)
    return contextlib.nullcontext() if found is None else found.handle_signals(trainer, module)


def disable_lightning_signals(trainer: lightning.Trainer) -> None:
    """Disable Lightning's signal handling.

    Its SIGTERM handler waits for all ranks inside the handler, and its loop broadcasts from rank 0 before each
    micro-batch, which costs a synchronization each.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]  # no setting does it
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]  # the same


def describe_checkpoint(trainer: lightning.Trainer) -> str:
    """Describe the checkpoint that a resume would start from."""
    path = checkpoints.newest_checkpoint(checkpoints.checkpoints_folder(trainer))
    if path is None:
        return "there is no checkpoint (it starts from step 0 again)"
    late = "" if checkpoints.step_of(path) == trainer.global_step else " (that of the last step was not written)"
    return f"the checkpoint is {path}{late}"


def requeue_if_needed(sent: signal.Signals) -> str:
    """Requeue the SLURM job where we have to, and describe what happens next."""
    job = slurm_job()
    if sent == signal.SIGUSR1 and job is not None:
        return requeue(job)
    if job is not None and sent != signal.SIGINT:
        return f"where SLURM queues job {job} again it goes on from there, as resume=auto does"
    return "resume=auto goes on from there"


_handlers: list[Any] = []  # handlers installed in this process


def _detach_forked_process() -> None:
    """Detach data-loader workers from the run's signals.

    They end by their loader's SIGTERM, not by one sent to the whole process group while a step still needs their batch.
    """
    if _handlers:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number in (signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


os.register_at_fork(after_in_child=_detach_forked_process)
