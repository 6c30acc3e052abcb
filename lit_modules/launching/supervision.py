"""Supervisor above each rank of srun or torchrun: it names a killed rank and requests a restart.

A rank that gets SIGKILL, as from the out-of-memory killer, cannot report anything; with `--kill-on-bad-exit` srun ends
the other ranks long before their watchdogs notice. srun or torchrun see only the supervisor: it forwards their signals
and exits as its rank does. For ranks that Lightning starts on one machine, rank 0 is the supervisor.
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
from lit_modules.launching.rank_logs import print_on_terminal
from lit_modules.launching.run_folder import RunFailed

# Signals that end a process without a request to end.
FATAL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
REPORT_SECONDS = 5.0  # seconds for rank 0 to report after another rank ended with an error
FORWARDED_SIGNALS = (*END_SIGNALS, signal.SIGUSR1)
KILL_SPREAD_SECONDS = 0.3  # seconds after which a kill of all processes of the job has reached this one too
PR_SET_PDEATHSIG = 1

_supervisor_pipe: int | None = None  # on a rank, a pipe to its supervisor


class RankKilled(RunFailed):
    """Error for a killed rank, which ends the run. `culprit`: the entries of failed.json about that rank."""

    def __init__(self, words: str, culprit: dict[str, object]) -> None:
        super().__init__(words)
        self.culprit = culprit | {"killed": True}


def fork_supervisor() -> None:
    """Fork: continue as the rank in the child and supervise it in the parent, if srun or torchrun started this process.

    Call this before any thread starts.
    """
    global _supervisor_pipe
    if not this_process().from_outside:
        return
    if os.environ.get("TORCHELASTIC_RUN_ID") == "none":  # no --rdzv-id: the agent outlives the restarts
        os.environ["TORCHELASTIC_RUN_ID"] = f"{socket.gethostname()}:{os.getppid()}"
    above = os.getpid()
    read, write = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)  # until the supervisor can forward them
    rank = os.fork()
    if rank == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(read)
        _supervisor_pipe = write
        end_with(above)
        return
    os.close(write)
    supervise_rank(rank, read)


def end_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends: torchrun and SLURM may kill the parent alone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def send_folder(folder: Path) -> None:
    """Send the run's folder to the supervisor of this rank."""
    if _supervisor_pipe is not None:
        os.write(_supervisor_pipe, f"{folder.absolute()}\n".encode())


def supervise_rank(rank: int, pipe: int) -> None:
    """Forward signals to the rank's process until it ends, report it if it was killed, and exit as it did."""
    asked_to_end = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked_to_end
        asked_to_end = asked_to_end or number in END_SIGNALS
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, number)

    for number in FORWARDED_SIGNALS:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    status = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    if -status in FATAL_SIGNALS and not asked_to_end:
        time.sleep(KILL_SPREAD_SECONDS)
        if not asked_to_end:
            report_killed_rank(receive_folder(pipe), signal.Signals(-status), this_process())
    os._exit(status if status >= 0 else 128 - status)


def receive_folder(pipe: int) -> Path | None:
    """Return the last folder that the rank sent; None if it sent none."""
    os.set_blocking(pipe, False)
    with contextlib.suppress(BlockingIOError), open(pipe, "rb", buffering=0) as opened:
        told = (opened.read() or b"").decode().splitlines()
        return Path(told[-1]) if told else None
    return None


def report_killed_rank(folder: Path | None, by: signal.Signals, killed: ProcessInfo) -> None:
    """Request a restart after a rank was killed, and name that rank, unless another rank failed earlier."""
    words = "was killed (out of memory?)" if by == signal.SIGKILL else f"was ended by {by.name}"
    if folder is None or not folder.is_dir():
        print_on_terminal(f"palimpsest: rank {killed.rank} of {killed.world_size} on {failures.host_name()} {words}")
        return
    if failures.first_failure(folder) is not None:
        return
    # only the first request of an attempt restarts; the marker remains until an attempt reaches training
    again = restarts.restart(folder, killed) if restarts.is_first_to_ask(folder) else restarts.RESUME_HINT
    culprit = {"rank": killed.rank, "world_size": killed.world_size, "log": str(folder / killed.log)}
    failures.record_failure(folder, RankKilled(f"{words}; {again}", culprit))


def watch_children(children: list[subprocess.Popen], folder: Path, over: Callable[[], bool]) -> None:
    """Watch the ranks that rank 0 started, in a thread: when one ends early, exit with status 1.

    If a signal ended that rank, name it first.

    Args:
        children: the processes of ranks 1, 2, ...
        folder: the run's folder.
        over: whether this process is ending them itself.
    """
    while True:
        statuses = [child.poll() for child in children]
        if over() or all(status == 0 for status in statuses):
            return
        rank, status = next(((rank, status) for rank, status in enumerate(statuses, 1) if status), (0, 0))
        if rank:
            break
        time.sleep(KILL_SPREAD_SECONDS)
    if status < 0:
        report_killed_rank(folder, signal.Signals(-status), ProcessInfo(rank=rank, world_size=len(children) + 1))
    else:
        time.sleep(REPORT_SECONDS)
    for child in children:
        child.kill()
    sys.stdout.flush()
    os._exit(1)
