"""The meeting of the ranks of a run, before anything is written: one folder for all, and nothing that would fail later.

It is held in a torch.distributed.TCPStore: torchrun's own, or for srun one that rank 0 opens and that torch's process
group uses afterwards. Rank 0 asks, judges and answers; the others report. What it finds wrong is one line, said once.
"""

import functools
import json
import os
import secrets
import socket
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from lit_modules.launching import run_folder
from lit_modules.launching.failures import host
from lit_modules.launching.process import ProcessInfo, address, this_process

SECONDS = 300.0  # that a rank is waited for: on a busy file system, imports alone take minutes
FAREWELL = 10.0  # that rank 0 waits for the others to have read of a mistake, before it ends and the store with it
TOKEN = ".meeting"
FIRST_PORT, PORTS = 25000, 7000  # above those that Lightning derives from job numbers, below those that systems lend


class Meeting:
    """One rank's side of it. Each round of questions has a number, since a sweep has a round for each of its runs."""

    def __init__(self, here: ProcessInfo, store: Any) -> None:
        self.here, self.store = here, store
        self.rounds: dict[str, int] = {}
        self.of_torch: Any = None  # on rank 0, a store that is there as long as this is

    def round(self, name: str) -> str:
        """The name of this round's key: folder/1, folder/2, ..."""
        self.rounds[name] = self.rounds.get(name, 0) + 1
        return f"{name}/{self.rounds[name]}"

    def announce(self, name: str, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on every rank.

        Raises:
            ValueError, run_folder.RunFailed: on rank 0, what `make` raises.
            run_folder.SilentExit: on the others, since rank 0 says it.
        """
        key = self.round(name)
        if self.here.rank == 0:
            try:
                found = make()
            except (ValueError, run_folder.RunFailed) as error:
                self.store.set(key, json.dumps({"status": 2 if isinstance(error, ValueError) else 1}))
                self.wait_for([f"{key}/read/{rank}" for rank in range(1, self.here.world_size)], FAREWELL)
                raise
            self.store.set(key, json.dumps({"found": found}))
            return found
        if self.wait_for([key], SECONDS):
            raise run_folder.RunFailed(
                f"rank {self.here.rank} on {host()} waited {SECONDS:.0f} s in vain for rank 0 to begin the run"
            )
        answer = json.loads(self.store.get(key))
        self.store.set(f"{key}/read/{self.here.rank}", "")
        if "status" in answer:
            raise run_folder.SilentExit(answer["status"])
        return answer["found"]

    def report(self, name: str, value: Any) -> list[Any]:
        """Every rank's value, in their order, on rank 0; elsewhere an empty list.

        Raises:
            run_folder.RunFailed: on rank 0, where some did not come.
        """
        key = self.round(name)
        self.store.set(f"{key}/{self.here.rank}", json.dumps(value))
        if self.here.rank > 0:
            return []
        keys = [f"{key}/{rank}" for rank in range(self.here.world_size)]
        missing = [int(left.rpartition("/")[2]) for left in self.wait_for(keys, SECONDS)]
        if missing:
            raise run_folder.RunFailed(missing_ranks(missing, self.here))
        return [json.loads(self.store.get(key)) for key in keys]

    def wait_for(self, keys: list[str], seconds: float) -> list[str]:
        """Wait until the keys are there; those that are not after `seconds`."""
        deadline, pause = time.monotonic() + seconds, 0.01
        while keys:
            try:
                keys = [key for key in keys if not self.store.check([key])]
            except RuntimeError:  # the store has gone, and with it the rank or the agent that held it
                return keys
            if keys and time.monotonic() > deadline:
                return keys
            if keys:
                time.sleep(pause)
                pause = min(0.5, 1.5 * pause)
        return keys


def missing_ranks(missing: list[int], here: ProcessInfo) -> str:
    """One line for ranks that did not come."""
    names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    nodes = sorted({rank // here.local_size for rank in missing})
    return (
        f"rank {names} of {here.world_size} (on node {', '.join(map(str, nodes[:8]))} of this job, counted from 0) did "
        f"not come within {SECONDS:.0f} s: see what that node says, then start again"
    )


@functools.cache
def meeting() -> Meeting | None:
    """The meeting of this process's ranks; None where no others were started from outside.

    Raises:
        run_folder.RunFailed: there is no way to it.
    """
    here = this_process()
    if not here.from_outside or here.world_size == 1:
        return None
    from torch.distributed import PrefixStore, TCPStore

    master = here.launcher == "srun" and here.rank == 0
    if here.launcher == "srun":
        # Lightning and torch read these, and torch's process group shares the store that is there already.
        os.environ["MASTER_ADDR"] = address()
        os.environ.setdefault("MASTER_PORT", str(port(here)))
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        if not master:
            reach(place, SECONDS)
        store = TCPStore(
            *place,
            here.world_size,
            is_master=master,
            timeout=timedelta(seconds=SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError, OSError) as error:  # torch's errors of stores are RuntimeErrors
        words = str(error).splitlines()[0]
        raise run_folder.RunFailed(
            f"rank {here.rank} on {host()} found no way to rank 0 at {place[0]}:{place[1]} ({words}): start again, "
            "or give MASTER_ADDR and MASTER_PORT in the environment"
        ) from error
    met = Meeting(here, PrefixStore(f"palimpsest/{here.attempt}", store))
    if here.launcher == "torchrun" and here.attempt > 0:
        give_torch_a_new_store(met)
    return met


def reach(place: tuple[str, int], seconds: float) -> None:
    """Wait until something listens there; torch would print pages while it waits. Raises OSError if nothing does."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(place, timeout=5.0).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
        else:
            return


def give_torch_a_new_store(met: Meeting) -> None:
    """Have torch's process group use a store that rank 0 opens, as it does without torchrun. torchrun's is the one of
    the attempt before, in which the group would find the addresses of processes that have ended."""
    from torch.distributed import TCPStore

    # torchrun's own address need not be rank 0's node where there are several
    place = os.environ["MASTER_ADDR"] if met.here.nodes == 1 else socket.getfqdn()

    def open_store() -> list[Any]:
        met.of_torch = TCPStore(place, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return [place, met.of_torch.port]

    address, number = met.announce("store", open_store)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(number), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def port(here: ProcessInfo) -> int:
    """A port that all ranks of one start of a step know, and other steps on the same nodes hardly share."""
    return FIRST_PORT + zlib.crc32(f"{here.job}.{here.attempt}".encode()) % PORTS


def one_folder(choose: Callable[[], str]) -> str:
    """The folder that rank 0 chooses, on every rank.

    Raises:
        ValueError: it cannot be chosen.
        run_folder.SilentExit: the same, on the other ranks.
        run_folder.RunFailed: nobody came.
    """
    met = meeting()
    return choose() if met is None else met.announce("folder", lambda: str(Path(choose()).absolute()))


def write_token(folder: Path) -> str:
    """Write into the run's folder what only those who see this folder can read.

    Raises:
        ValueError: nothing can be written there.
    """
    token = secrets.token_hex(8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKEN).write_text(token)
    except OSError as error:
        raise ValueError(f"runs_dir: {folder} cannot be written ({error.strerror or error})") from error
    return token


def sees(folder: Path, token: str, seconds: float = 10.0) -> bool:
    """Whether this node sees the token; a network's file system may take its time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.listdir(folder)  # refreshes what such a file system remembers
            if (folder / TOKEN).read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
