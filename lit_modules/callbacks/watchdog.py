"""The watchdog: a rank that hangs, or is gone, is named, and the run ends so that it can go on from its checkpoint.

A rank that waits for another in a collective can neither raise nor be asked. So each rank has threads beside the one
that trains. One publishes in a store on rank 0 how far the rank has come (a count of what Lightning's profiler hooks
see begin: waiting for a batch, forward, backward, ...) and a beat that says it is alive. The other judges:

- Where this rank has begun nothing new for `seconds`, the ranks that are furthest behind are named, with what they were
  doing: the others wait for them. All ranks stop when one does, so each sees this of itself; no clocks are compared.
- Where this rank has begun nothing new for a while and another's beat has stopped, that rank is named: its process or
  its node is gone, or stopped. When the store itself is gone, that is rank 0.

The first that judges publishes the line; every rank writes the stacks of its threads into its log and ends the process,
since a thread that waits in CUDA or NCCL cannot be interrupted. One of them has SLURM queue the job again; under
torchrun the status 1 does that; elsewhere the line says resume=auto. After three restarts without a new checkpoint none
is asked for.

What takes long and is no hang: nothing is judged outside of fit and validate (data are gathered before, the export
comes after), and `PATIENCE` times as long is given to what comes between steps (reports, checkpoints and the wait for
one) and to each kind of work the first time (that of the first step compiles).
"""

import contextlib
import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from common.settings import is_number
from lit_modules.callbacks.rank_progress import LONG, Marks, RankProgress, furthest_behind, no_answer
from lit_modules.launching import failures, restarts
from lit_modules.launching.process import ProcessInfo, this_process
from lit_modules.launching.rank_logs import say_on_terminal
from lit_modules.launching.run_folder import RunFailed, SilentExit

PATIENCE = 3  # times the limit, for what may well take long

BROKEN_COLLECTIVE = re.compile(r"gloo|nccl|socket|connection|peer|process ?group", re.IGNORECASE)


class RankLost(RunFailed):
    """The end of this rank, of which another is the cause. `culprit`: what failed.json is to say of that one."""

    def __init__(self, words: str, place: RankProgress, folder: Path) -> None:
        super().__init__(words)
        self.culprit = {"rank": place.rank, "host": place.host, "log": str(folder / ProcessInfo(rank=place.rank).log)}


class Watchdog(Callback):
    """Name the rank that hangs or is gone, and end the run so that it restarts from its last checkpoint.

    Args:
        seconds: without anything new after which a rank hangs; null for no watchdog.

    Raises:
        ValueError: `seconds` is no positive number.
    """

    def __init__(self, seconds: float | None = 600) -> None:
        if seconds is not None and not (is_number(seconds) and seconds > 0):
            raise ValueError(f"callbacks.watchdog.seconds={seconds} is no time: give seconds, or null for no watchdog")
        self.seconds = seconds
        self.gone_after = min(20.0, (seconds or 0.0) / 2)  # seconds without a beat
        self.interval = self.gone_after / 4
        self.store: dist.TCPStore | None = None
        self.watching = False
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        self.lost: RankLost | None = None

    def setup(self, trainer: lightning.Trainer, module: Any, stage: str) -> None:
        """Begin to watch: in fit and validate, once the ranks have found each other.

        Raises:
            RunFailed: the run has restarted too often without a new checkpoint, or rank 0's store is out of reach.
        """
        if self.seconds is None:
            return
        self.folder, self.here = Path(trainer.default_root_dir), this_process()
        self.trainer, self.world_size = trainer, trainer.world_size
        if stage == "fit":
            restarted = restarts.count(self.folder, self.here) if trainer.is_global_zero else 0
            if trainer.strategy.broadcast(restarted) > restarts.MOST:
                raise RunFailed(f"{self.folder}: {restarts.too_often()}")
        gpu = trainer.local_rank if trainer.strategy.root_device.type == "cuda" else None
        self.place = RankProgress(trainer.global_rank, failures.host(), gpu, step=trainer.global_step)
        self.since, self.seen = time.monotonic(), set()
        self.others: dict[int, RankProgress] = {}
        self.beaten: dict[int, float] = {}  # when a rank's beat last grew, by this rank's clock
        self.verdict: str | None = None
        self.over = threading.Event()
        work = [self.judge]
        if self.world_size > 1:
            self.store = self.meet(trainer)
            self.tell_place()
            trainer.strategy.barrier()
            self.look()
            work.append(self.publish)
        self.answered = time.monotonic()
        self.inner, trainer.profiler = trainer.profiler, Marks(trainer.profiler, self.mark)
        self.watching = True
        self.threads = [threading.Thread(target=each, name=f"watchdog-{each.__name__}", daemon=True) for each in work]
        for thread in self.threads:
            thread.start()

    def teardown(self, trainer: lightning.Trainer, module: Any, stage: str) -> None:
        self.end_watch()

    def on_exception(self, trainer: lightning.Trainer, module: Any, exception: BaseException) -> None:
        """Judge no longer: the process ends by itself. Where another rank is the cause, say so before all others do."""
        self.watching = False
        if self.threads and isinstance(exception, Exception) and not isinstance(exception, SilentExit):
            self.lost = self.cause(exception)
            if self.lost is not None:
                self.tell(self.lost)

    def end_watch(self) -> None:
        """End the threads. Rank 0's store stays, for others may still speak to it."""
        self.watching = False
        if not self.threads:
            return
        self.over.set()
        self.trainer.profiler = self.inner
        for thread in self.threads:
            thread.join(timeout=self.gone_after)
        self.threads = []

    def mark(self, doing: str) -> None:
        """The training thread begins something."""
        place = self.place
        self.seen.add(place.doing)
        place.count, place.step, place.doing = place.count + 1, self.trainer.global_step, doing
        self.since = time.monotonic()

    def meet(self, trainer: lightning.Trainer) -> dist.TCPStore:
        """A store of our own on rank 0, apart from the one that collectives use. Raises RunFailed if out of reach."""
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        timeout = timedelta(seconds=max(30.0, self.gone_after))
        store = None
        if trainer.is_global_zero:
            store = dist.TCPStore(address, 0, is_master=True, timeout=timeout, wait_for_workers=False)
            store.set("verdict", "")
        port = trainer.strategy.broadcast(store.port if store is not None else None)
        if store is not None:
            return store
        try:
            return dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise RunFailed(
                f"rank {self.place.rank} on {self.place.host} does not reach rank 0's watchdog at {address}:{port} "
                f"({error}): open that node's ports to the others, or give callbacks.watchdog.seconds=null"
            ) from error

    def stalled(self) -> float:
        """Seconds since the training thread has begun something new."""
        return time.monotonic() - self.since

    def limit(self) -> float:
        """Seconds that what the training thread is doing may take."""
        doing = self.place.doing
        return self.seconds * (PATIENCE if doing in LONG or doing not in self.seen else 1)

    def publish(self) -> None:
        """The thread that speaks to the store. It may itself be stuck, where rank 0 has stopped."""
        try:
            while not self.over.wait(self.interval):
                self.place.beat += 1
                self.tell_place()
                if self.place.rank == 0 or self.stalled() > self.gone_after or not self.watching:
                    self.look()
                else:
                    self.beaten.clear()  # of what is not looked at nothing is known
                verdict = self.store.get("verdict").decode()
                self.answered = time.monotonic()
                if verdict:
                    self.verdict = verdict
                    return
        except RuntimeError:  # of torch's store: connection lost, or no answer in time
            self.answered = float("-inf")

    def tell_place(self) -> None:
        """Write where this rank is."""
        self.store.set(f"rank/{self.place.rank}", json.dumps(asdict(self.place)))

    def look(self) -> None:
        """Read where the others are."""
        this_process = [rank for rank in range(self.world_size) if rank != self.place.rank]
        for rank, written in zip(
            this_process, self.store.multi_get([f"rank/{rank}" for rank in this_process]), strict=True
        ):
            known, found = self.others.get(rank), RankProgress(**json.loads(written))
            if known is None or known.beat != found.beat or rank not in self.beaten:
                self.beaten[rank] = time.monotonic()
            self.others[rank] = found

    def reachable(self) -> bool:
        """Whether the store has answered of late: else nothing is to be asked of it, for it may never answer."""
        return self.store is not None and time.monotonic() - self.answered < self.gone_after

    def silent(self) -> list[RankProgress]:
        """Ranks whose beat has stopped; where rank 0's store does not answer, that one."""
        if self.store is None:
            return []
        if self.place.rank != 0 and not self.reachable():
            return [self.others[0]]
        now = time.monotonic()
        return [self.others[rank] for rank, at in list(self.beaten.items()) if now - at > self.gone_after]

    def failed(self) -> list[RankProgress]:
        """Other ranks that have failed by themselves, and whose end this one may wait for in vain."""
        return [p for p in self.others.values() if p.error and not BROKEN_COLLECTIVE.search(p.error)]

    def judge(self) -> None:
        """The thread that judges, and ends the process."""
        began = time.monotonic()
        while not self.over.wait(self.interval):
            late, began = time.monotonic() - began > 2 * self.interval, time.monotonic()
            if self.verdict is not None:
                return self.end_process(self.verdict)
            if late or not self.watching:  # late: this process itself was stopped, and has not heard of the others yet
                continue
            failed, silent = (self.failed(), self.silent()) if self.stalled() > self.gone_after else ([], [])
            if failed:
                return self.condemn(failed[0], failed[0].error)
            if silent:
                return self.condemn(silent[0], no_answer(silent))
            if self.stalled() > self.limit():
                return self.condemn(*furthest_behind([self.place, *self.others.values()], self.stalled()))
        return None

    def condemn(self, culprit: RankProgress, words: str) -> None:
        """Publish a verdict, unless another was first, and end."""
        verdict = json.dumps([asdict(culprit), words])
        with contextlib.suppress(RuntimeError):
            if self.reachable():
                verdict = self.store.compare_set("verdict", "", verdict).decode()
        self.end_process(verdict)

    def end_process(self, verdict: str) -> None:
        """End this rank; the first to come here asks for the restart, and tells the user."""
        culprit, words = json.loads(verdict)
        with contextlib.suppress(OSError), open(self.folder / self.here.log, "a", encoding="utf-8") as file:
            file.write(f"rank {culprit['rank']} {words}\n")
            file.write(f"this rank: {self.place.doing} since step {self.place.step}; its threads:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        first = restarts.is_first(self.folder)
        if first:
            self.tell(self.loss(words, RankProgress(**culprit)))
        self.leave_together(first)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def tell(self, lost: RankLost) -> None:
        """Write failed.json, and say it on the terminal."""
        if self.here.alone:
            say_on_terminal(f"palimpsest: {lost}")
        else:
            failures.record(self.folder, lost)

    def leave_together(self, first: bool) -> None:
        """Wait until the first has asked for the restart: the end of one rank has the launcher kill the others."""
        with contextlib.suppress(RuntimeError):
            if self.reachable() and first:
                self.store.set("told", "")
            elif self.reachable():
                self.store.wait(["told"], timedelta(seconds=60))
            elif not first:
                time.sleep(self.gone_after)
        if self.store is not None and self.place.rank == 0:
            time.sleep(self.interval * 2)  # the others read that from the store here
        for process in getattr(self.trainer.strategy.launcher, "procs", []):  # of Lightning's; one may be stopped
            process.kill()
        if self.here.launcher == "lightning" and self.place.rank > 0:
            time.sleep(self.gone_after)  # else Lightning kills rank 0, which has more to say, for the end of this one

    def loss(self, words: str, culprit: RankProgress) -> RankLost:
        """The end of this rank for another's sake. Asks for the restart, unless that one has failed by an error of its
        own, which may well come again."""
        if culprit.error is None:
            words = f"{words}; {restarts.restart(self.folder, self.here)}"
        return RankLost(words, culprit, self.folder)

    def cause(self, error: Exception) -> RankLost | None:
        """After an error of the training: the rank behind it, where it is a collective that broke; else None."""
        if self.store is None:
            return None
        self.place.error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if not BROKEN_COLLECTIVE.search(self.place.error):
            with contextlib.suppress(RuntimeError):
                if self.reachable():
                    self.tell_place()
            return None
        deadline = time.monotonic() + 2 * self.gone_after
        while time.monotonic() < deadline and failures.first_failed(self.folder) is None:
            failed, silent = self.failed(), self.silent()
            if failed:
                return RankLost(failed[0].error, failed[0], self.folder)
            if silent and restarts.is_first(self.folder):
                return self.loss(no_answer(silent), silent[0])
            if silent:
                return RankLost(no_answer(silent), silent[0], self.folder)
            time.sleep(self.interval / 2)
        return None


@contextlib.contextmanager
def naming_the_cause(trainer: lightning.Trainer) -> Iterator[None]:
    """Around fit and validate: ends the watch, and this process without a further word where the watchdog has said that
    another rank is the cause of an error.

    Raises:
        SilentExit: so it is.
    """
    found = next((callback for callback in trainer.callbacks if isinstance(callback, Watchdog)), None)
    try:
        yield
    except Exception as error:
        if found is not None and found.lost is not None:
            raise SilentExit(1) from error
        raise
    finally:
        if found is not None:
            found.end_watch()
