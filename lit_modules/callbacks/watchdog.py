"""Watchdog: name a rank that hangs or is gone, and end the run so that it can resume from its checkpoint.

A rank that waits in a collective can neither raise nor respond. So each rank runs two threads in addition to training.
One publishes the rank's progress to a store on rank 0: a count of the actions that Lightning's profiler hooks see start
(waiting for a batch, forward, backward, ...), and a heartbeat. The other judges:

- If this rank started nothing new for `seconds`, it names the ranks that are furthest behind and their current action:
  the others wait for them. When one rank stops, all do, so each rank notices by itself; no clocks are compared.
- If this rank started nothing new for a while and another's heartbeat has stopped, it names that rank: its process or
  node is gone or stopped. If the store itself is gone, that is rank 0.

The first rank to judge publishes the verdict. Every rank writes its threads' stacks to its log and ends its process,
since a thread that waits in CUDA or NCCL cannot be interrupted. One rank asks SLURM to requeue the job; under torchrun,
exit status 1 causes the restart; elsewhere the line names resume=auto. After three restarts without a new checkpoint,
no further one is requested.

Slow but normal work is tolerated. Judging is limited to fit and validate (data are gathered before, the export comes
after). Work between steps (reports, checkpoints, waiting for a checkpoint) and the first occurrence of each kind of
work (the first step compiles) get `LONG_ACTION_FACTOR` times the limit.
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
from lightning.pytorch.profilers import Profiler

from common.settings import check_number
from lit_modules.callbacks.rank_progress import (
    LONG_ACTIONS,
    ActionProfiler,
    RankProgress,
    describe_silent_ranks,
    furthest_behind,
)
from lit_modules.launching import failures, restarts
from lit_modules.launching.process import ProcessInfo, this_process
from lit_modules.launching.rank_logs import print_on_terminal
from lit_modules.launching.run_folder import RunFailed, SilentExit
from lit_modules.trainer_parts import find_callback

LONG_ACTION_FACTOR = 3  # factor on the limit for work that may take long

BROKEN_COLLECTIVE = re.compile(r"gloo|nccl|socket|connection|peer|process ?group", re.IGNORECASE)


class RankLost(RunFailed):
    """Error for an end that another rank caused. `culprit`: the entries of failed.json about that rank."""

    def __init__(self, words: str, place: RankProgress, folder: Path) -> None:
        super().__init__(words)
        self.culprit = {"rank": place.rank, "host": place.host, "log": str(folder / ProcessInfo(rank=place.rank).log)}


class Watchdog(Callback):
    """Callback that names a rank that hangs or is gone, and ends the run to restart from its last checkpoint.

    Args:
        seconds: time without a new action after which a rank counts as hanging; null disables the watchdog.

    Raises:
        ValueError: `seconds` is not a positive number.
    """

    def __init__(self, seconds: float | None = 600) -> None:
        check_number("callbacks.watchdog.seconds", seconds, above=0, null=True)
        self.seconds = seconds or 0.0  # 0: no watch
        self.gone_after = min(20.0, self.seconds / 2)  # seconds without a heartbeat
        self.interval = self.gone_after / 4
        self.store: dist.TCPStore | None = None
        self.watching = False
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        self.lost: RankLost | None = None

    def setup(self, trainer: lightning.Trainer, module: Any, stage: str) -> None:
        """Start watching in fit and validate, once the ranks have joined.

        Raises:
            RunFailed: too many restarts without a new checkpoint, or rank 0's store cannot be reached.
        """
        if not self.seconds:
            return
        self.folder, self.here = Path(trainer.default_root_dir), this_process()
        self.trainer, self.world_size = trainer, trainer.world_size
        if stage == "fit":
            restarted = restarts.count_restart(self.folder, self.here) if trainer.is_global_zero else 0
            if trainer.strategy.broadcast(restarted) > restarts.MAX_RESTARTS:
                raise RunFailed(f"{self.folder}: {restarts.restart_limit_message()}")
        gpu = trainer.local_rank if trainer.strategy.root_device.type == "cuda" else None
        self.progress = RankProgress(trainer.global_rank, failures.host_name(), gpu, step=trainer.global_step)
        self.since = time.monotonic()
        self.seen: set[str] = set()  # earlier actions of this rank
        self.others: dict[int, RankProgress] = {}
        self.beaten: dict[int, float] = {}  # when a rank's heartbeat last grew, by this rank's clock
        self.verdict: str | None = None
        self.over = threading.Event()
        work = [self.watch_ranks]
        if self.world_size > 1:
            self.store = self.connect(trainer)
            self.publish_progress(self.store)
            trainer.strategy.barrier()
            self.read_progress(self.store)
            work.append(self.publish_repeatedly)
        self.answered = time.monotonic()
        self.inner: Profiler = trainer.profiler  # type: ignore[attr-defined]  # Lightning sets it, undeclared
        trainer.profiler = ActionProfiler(self.inner, self.mark)  # type: ignore[attr-defined]  # the same
        self.watching = True
        self.threads = [threading.Thread(target=each, name=f"watchdog-{each.__name__}", daemon=True) for each in work]
        for thread in self.threads:
            thread.start()

    def teardown(self, trainer: lightning.Trainer, module: Any, stage: str) -> None:
        self.end_watch()

    def on_exception(self, trainer: lightning.Trainer, module: Any, exception: BaseException) -> None:
        """Stop judging, since the process ends by itself; if another rank is the cause, report that first."""
        self.watching = False
        if self.threads and isinstance(exception, Exception) and not isinstance(exception, SilentExit):
            self.lost = self.find_culprit(exception)
            if self.lost is not None:
                self.write_report(self.lost)

    def end_watch(self) -> None:
        """Stop the threads. Rank 0's store stays open, since others may still use it."""
        self.watching = False
        if not self.threads:
            return
        self.over.set()
        self.trainer.profiler = self.inner  # type: ignore[attr-defined]  # as in setup
        for thread in self.threads:
            thread.join(timeout=self.gone_after)
        self.threads = []

    def mark(self, doing: str) -> None:
        """Record that the training thread starts an action."""
        place = self.progress
        self.seen.add(place.doing)
        place.count, place.step, place.doing = place.count + 1, self.trainer.global_step, doing
        self.since = time.monotonic()

    def connect(self, trainer: lightning.Trainer) -> dist.TCPStore:
        """Connect to a separate store on rank 0, not the one that collectives use.

        Raises:
            RunFailed: rank 0 cannot be reached.
        """
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        timeout = timedelta(seconds=max(30.0, self.gone_after))
        store = None
        if trainer.is_global_zero:
            store = dist.TCPStore(address, 0, is_master=True, timeout=timeout, wait_for_workers=False)
            store.set("verdict", "")
        port = trainer.strategy.broadcast(store.port if store is not None else 0)
        if store is not None:
            return store
        try:
            return dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise RunFailed(
                f"rank {self.progress.rank} on {self.progress.host} does not reach rank 0's watchdog at "
                f"{address}:{port} ({error}): open that node's ports to the others, "
                "or give callbacks.watchdog.seconds=null"
            ) from error

    def seconds_stalled(self) -> float:
        """Return the seconds since the training thread last started an action."""
        return time.monotonic() - self.since

    def limit(self) -> float:
        """Return the seconds that the training thread's current action may take."""
        doing = self.progress.doing
        return self.seconds * (LONG_ACTION_FACTOR if doing in LONG_ACTIONS or doing not in self.seen else 1)

    def publish_repeatedly(self) -> None:
        """Publish this rank's progress in a thread, which itself hangs if rank 0 is stopped."""
        store = self.store
        assert store is not None  # setup connects before it starts this thread
        try:
            while not self.over.wait(self.interval):
                self.progress.beat += 1
                self.publish_progress(store)
                if self.progress.rank == 0 or self.seconds_stalled() > self.gone_after or not self.watching:
                    self.read_progress(store)
                else:
                    self.beaten.clear()  # progress that is not read is unknown
                verdict = store.get("verdict").decode()
                self.answered = time.monotonic()
                if verdict:
                    self.verdict = verdict
                    return
        except RuntimeError:  # torch's store: connection lost or timeout
            self.answered = float("-inf")

    def publish_progress(self, store: dist.TCPStore) -> None:
        """Publish this rank's progress."""
        store.set(f"rank/{self.progress.rank}", json.dumps(asdict(self.progress)))

    def read_progress(self, store: dist.TCPStore) -> None:
        """Read the progress of the other ranks."""
        others = [rank for rank in range(self.world_size) if rank != self.progress.rank]
        for rank, written in zip(others, store.multi_get([f"rank/{rank}" for rank in others]), strict=True):
            known, found = self.others.get(rank), RankProgress(**json.loads(written))
            if known is None or known.beat != found.beat or rank not in self.beaten:
                self.beaten[rank] = time.monotonic()
            self.others[rank] = found

    def reachable_store(self) -> dist.TCPStore | None:
        """Return the store if it has answered recently; otherwise do not query it, since it may never answer."""
        return self.store if time.monotonic() - self.answered < self.gone_after else None

    def silent_ranks(self) -> list[RankProgress]:
        """Return the ranks whose heartbeat has stopped; rank 0 if its store does not answer."""
        if self.store is None:
            return []
        if self.progress.rank != 0 and self.reachable_store() is None:
            return [self.others[0]]
        now = time.monotonic()
        return [self.others[rank] for rank, at in list(self.beaten.items()) if now - at > self.gone_after]

    def failed_ranks(self) -> list[tuple[RankProgress, str]]:
        """Return other ranks that failed by themselves, for which this one may wait in vain, and their errors."""
        return [(p, p.error) for p in self.others.values() if p.error and not BROKEN_COLLECTIVE.search(p.error)]

    def watch_ranks(self) -> None:
        """Judge in a thread, and end the process on a verdict."""
        began = time.monotonic()
        while not self.over.wait(self.interval):
            late, began = time.monotonic() - began > 2 * self.interval, time.monotonic()
            if self.verdict is not None:
                return self.end_process(self.verdict)
            if late or not self.watching:  # late: this process was stopped; its view is outdated
                continue
            stalled = self.seconds_stalled() > self.gone_after
            failed, silent = (self.failed_ranks(), self.silent_ranks()) if stalled else ([], [])
            if failed:
                return self.end_run(*failed[0])
            if silent:
                return self.end_run(silent[0], describe_silent_ranks(silent))
            if self.seconds_stalled() > self.limit():
                return self.end_run(*furthest_behind([self.progress, *self.others.values()], self.seconds_stalled()))
        return None

    def end_run(self, culprit: RankProgress, words: str) -> None:
        """Publish a verdict, unless another rank was first, and end the process."""
        verdict = json.dumps([asdict(culprit), words])
        with contextlib.suppress(RuntimeError):
            if (store := self.reachable_store()) is not None:
                verdict = store.compare_set("verdict", "", verdict).decode()
        self.end_process(verdict)

    def end_process(self, verdict: str) -> None:
        """End this rank; the first rank to get here requests the restart and informs the user."""
        culprit, words = json.loads(verdict)
        with contextlib.suppress(OSError), open(self.folder / self.here.log, "a", encoding="utf-8") as file:
            file.write(f"rank {culprit['rank']} {words}\n")
            file.write(f"this rank: {self.progress.doing} since step {self.progress.step}; its threads:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        first = restarts.is_first_to_ask(self.folder)
        if first:
            self.write_report(self.build_error(words, RankProgress(**culprit)))
        self.wait_for_report(first)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def write_report(self, lost: RankLost) -> None:
        """Write failed.json and print the error on the terminal."""
        if self.here.alone:
            print_on_terminal(f"palimpsest: {lost}")
        else:
            failures.record_failure(self.folder, lost)

    def wait_for_report(self, first: bool) -> None:
        """Wait until the first rank has requested the restart: the launcher kills the others when one ends."""
        with contextlib.suppress(RuntimeError):
            store = self.reachable_store()
            if store is not None and first:
                store.set("told", "")
            elif store is not None:
                store.wait(["told"], timedelta(seconds=60))
            elif not first:
                time.sleep(self.gone_after)
        if self.store is not None and self.progress.rank == 0:
            time.sleep(self.interval * 2)  # the others read "told" from the store in this process
        for process in getattr(self.trainer.strategy.launcher, "procs", []):  # Lightning's ranks; one may be stopped
            process.kill()
        if self.here.launcher == "lightning" and self.progress.rank > 0:
            time.sleep(self.gone_after)  # this one's end makes Lightning kill rank 0, which still has to report

    def build_error(self, words: str, culprit: RankProgress) -> RankLost:
        """Build the error that ends this rank, and request a restart.

        There is no restart if the culprit raised an error, which may recur.
        """
        if culprit.error is None:
            words = f"{words}; {restarts.restart(self.folder, self.here)}"
        return RankLost(words, culprit, self.folder)

    def find_culprit(self, error: Exception) -> RankLost | None:
        """Return the rank behind an error of training if a collective broke; else None."""
        if self.store is None:
            return None
        self.progress.error = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if not BROKEN_COLLECTIVE.search(self.progress.error):
            with contextlib.suppress(RuntimeError):
                if (store := self.reachable_store()) is not None:
                    self.publish_progress(store)
            return None
        deadline = time.monotonic() + 2 * self.gone_after
        while time.monotonic() < deadline and failures.first_failure(self.folder) is None:
            failed, silent = self.failed_ranks(), self.silent_ranks()
            if failed:
                culprit, words = failed[0]
                return RankLost(words, culprit, self.folder)
            if silent and restarts.is_first_to_ask(self.folder):
                return self.build_error(describe_silent_ranks(silent), silent[0])
            if silent:
                return RankLost(describe_silent_ranks(silent), silent[0], self.folder)
            time.sleep(self.interval / 2)
        return None


@contextlib.contextmanager
def report_culprit(trainer: lightning.Trainer) -> Iterator[None]:
    """Wrap fit and validate: stop the watch, and exit silently if the watchdog has named another rank as the cause.

    Raises:
        SilentExit: another rank is the cause of the error.
    """
    found = find_callback(trainer, Watchdog)
    try:
        yield
    except Exception as error:
        if found is not None and found.lost is not None:
            raise SilentExit(1) from error
        raise
    finally:
        if found is not None:
            found.end_watch()
