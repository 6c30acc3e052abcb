"""A small process above each rank that srun or torchrun starts: it names a rank that was killed, and asks for a
restart.

A rank that SIGKILL ends, as the system's out-of-memory killer sends it, can say nothing; and with `--kill-on-bad-exit`
srun ends the other ranks long before their watchdogs notice. The process above is the one that srun or torchrun knows:
it passes their signals on, and ends as its rank does. Of the ranks that Lightning starts on one machine, rank 0 is the
process above the others.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from lit_modules.launching import failures, restarts
from lit_modules.launching.process import ProcessInfo, this_process
from lit_modules.launching.rank_logs import say_on_terminal
from lit_modules.launching.run_folder import RunFailed

# What ends a process that nobody asked to end.
FATAL = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
ASKS_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAST_WORDS = 5.0  # seconds for rank 0 to report, after another rank has ended with an error
PASSED_ON = (*ASKS_TO_END, signal.SIGUSR1)
MOMENT = 0.3  # seconds in which whoever kills all processes of a job has killed this one, too
PR_SET_PDEATHSIG = 1

_above: int | None = None  # on a rank, a pipe to the process above it


class RankKilled(RunFailed):
    """The end of a run of which a rank was killed. `culprit`: what failed.json is to say of it."""

    def __init__(self, words: str, culprit: dict[str, object]) -> None:
        super().__init__(words)
        self.culprit = culprit | {"killed": True}


def supervise() -> None:
    """Go on as a rank below a new process, where srun or torchrun started this one; elsewhere do nothing. To be called
    before anything starts a thread."""
    global _above
    if not this_process().from_outside:
        return
    if os.environ.get("TORCHELASTIC_RUN_ID") == "none":  # nobody gave one: the agent's process outlives the restarts
        os.environ["TORCHELASTIC_RUN_ID"] = f"{socket.gethostname()}:{os.getppid()}"
    above = os.getpid()
    read, write = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until the process above can pass them on
    rank = os.fork()
    if rank == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read)
        _above = write
        end_with(above)
        return
    os.close(write)
    stand_above(rank, read)


def end_with(parent: int) -> None:
    """Have the system kill this process when its parent ends: torchrun and SLURM may kill the parent alone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def tell_folder(folder: Path) -> None:
    """Tell the process above this rank the folder of its run."""
    if _above is not None:
        os.write(_above, f"{folder.absolute()}\n".encode())


def stand_above(rank: int, pipe: int) -> None:
    """Pass signals on to the rank's process until it ends, say so if it was killed, and end as it did."""
    asked_to_end = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked_to_end
        asked_to_end = asked_to_end or number in ASKS_TO_END
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    if -status in FATAL and not asked_to_end:
        time.sleep(MOMENT)
        if not asked_to_end:
            report(folder_told(pipe), signal.Signals(-status), this_process())
    os._exit(status if status >= 0 else 128 - status)


def folder_told(pipe: int) -> Path | None:
    """The folder of the run that the rank was in, which it told last; None where it came to none."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError), open(pipe, "rb", buffering=0) as opened:
        told = (opened.read() or b"").decode().splitlines()
        return Path(told[-1]) if told else None
    return None


def report(folder: Path | None, by: signal.Signals, killed: ProcessInfo) -> None:
    """Ask for the restart of a run of which a rank was killed, and name the rank, unless another failed before."""
    words = "was killed (out of memory?)" if by == signal.SIGKILL else f"was ended by {by.name}"
    if folder is None or not folder.is_dir():
        say_on_terminal(f"palimpsest: rank {killed.rank} of {killed.world_size} on {failures.host()} {words}")
        return
    if failures.first_failed(folder) is not None:
        return
    # the second time in an attempt, or where no attempt between came to train, none is asked for
    again = restarts.restart(folder, killed) if restarts.is_first(folder) else restarts.BY_HAND
    culprit = {"rank": killed.rank, "world_size": killed.world_size, "log": str(folder / killed.log)}
    failures.record(folder, RankKilled(f"{words}; {again}", culprit))


def watch(children: list[subprocess.Popen], folder: Path, over: Callable[[], bool]) -> None:
    """On rank 0, in a thread: when one of the ranks that it started ends before its time, end this process with status
    1; where a signal ended that rank, name it first.

    Args:
        children: the processes of ranks 1, 2, ...
        folder: the run's.
        over: whether this process ends them itself.
    """
    while True:
        statuses = [child.poll() for child in children]
        if over() or all(status == 0 for status in statuses):
            return
        rank, status = next(((rank, status) for rank, status in enumerate(statuses, 1) if status), (0, 0))
        if rank:
            break
        time.sleep(MOMENT)
    if status < 0:
        report(folder, signal.Signals(-status), ProcessInfo(rank=rank, world_size=len(children) + 1))
    else:
        time.sleep(LAST_WORDS)
    for child in children:
        child.kill()
    sys.stdout.flush()
    os._exit(1)
