"""Rendezvous of a run's ranks before anything is written: agree on one folder and find mistakes early.

It uses a torch.distributed.TCPStore: torchrun's own or, under srun, one that rank 0 opens and that torch's process
group reuses. The ranks report, rank 0 checks and answers. It prints a mistake once, in one line.
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

from common.settings import SettingError
from lit_modules.launching import run_folder
from lit_modules.launching.failures import host_name
from lit_modules.launching.process import ProcessInfo, address, this_process

JOIN_SECONDS = 300.0  # join timeout per rank; imports alone can take minutes on a busy file system
ERROR_READ_SECONDS = 10.0  # seconds rank 0 keeps the store open after an error, so that other ranks can read it
TOKEN_FILE = ".meeting"
FIRST_PORT, PORTS = 25000, 7000  # above Lightning's ports for jobs, below the systems' ephemeral ports


class Rendezvous:
    """One rank's side of the rendezvous. Rounds are numbered, since a sweep has one per run."""

    def __init__(self, here: ProcessInfo, store: Any) -> None:
        self.here, self.store = here, store
        self.rounds: dict[str, int] = {}
        self.torch_store: Any = None  # on rank 0, a reference that keeps torch's new store open

    def next_key(self, name: str) -> str:
        """Return the key of the next round: folder/1, folder/2, ..."""
        self.rounds[name] = self.rounds.get(name, 0) + 1
        return f"{name}/{self.rounds[name]}"

    def broadcast(self, name: str, make: Callable[[], Any]) -> Any:
        """Broadcast the result of `make` on rank 0 to every rank.

        Raises:
            ValueError, run_folder.RunFailed: on rank 0, as `make` raises.
            run_folder.SilentExit: on the others, since rank 0 reports the error.
        """
        key = self.next_key(name)
        if self.here.rank == 0:
            try:
                found = make()
            except (ValueError, run_folder.RunFailed) as error:
                self.store.set(key, json.dumps({"status": 2 if isinstance(error, ValueError) else 1}))
                self.wait_for([f"{key}/read/{rank}" for rank in range(1, self.here.world_size)], ERROR_READ_SECONDS)
                raise
            self.store.set(key, json.dumps({"found": found}))
            return found
        if self.wait_for([key], JOIN_SECONDS):
            raise run_folder.RunFailed(
                f"rank {self.here.rank} on {host_name()} waited {JOIN_SECONDS:.0f} s for rank 0 to start the run"
            )
        answer = json.loads(self.store.get(key))
        self.store.set(f"{key}/read/{self.here.rank}", "")
        if "status" in answer:
            raise run_folder.SilentExit(answer["status"])
        return answer["found"]

    def gather(self, name: str, value: Any) -> list[Any]:
        """Gather every rank's value on rank 0, in rank order; elsewhere return an empty list.

        Raises:
            run_folder.RunFailed: on rank 0, if ranks are missing after the timeout.
        """
        key = self.next_key(name)
        self.store.set(f"{key}/{self.here.rank}", json.dumps(value))
        if self.here.rank > 0:
            return []
        keys = [f"{key}/{rank}" for rank in range(self.here.world_size)]
        missing = [int(left.rpartition("/")[2]) for left in self.wait_for(keys, JOIN_SECONDS)]
        if missing:
            raise run_folder.RunFailed(missing_ranks(missing, self.here))
        return [json.loads(self.store.get(key)) for key in keys]

    def wait_for(self, keys: list[str], seconds: float) -> list[str]:
        """Wait until the keys are set; return those still missing after `seconds`."""
        deadline, pause = time.monotonic() + seconds, 0.01
        while keys:
            try:
                keys = [key for key in keys if not self.store.check([key])]
            except RuntimeError:  # the store is closed: the rank or agent that held it has ended
                return keys
            if keys and time.monotonic() > deadline:
                return keys
            if keys:
                time.sleep(pause)
                pause = min(0.5, 1.5 * pause)
        return keys


def missing_ranks(missing: list[int], here: ProcessInfo) -> str:
    """Return the error message for ranks that did not join."""
    names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    nodes = sorted({rank // here.local_size for rank in missing})
    return (
        f"rank {names} of {here.world_size} (on node {', '.join(map(str, nodes[:8]))} of this job, counted from 0) did "
        f"not come within {JOIN_SECONDS:.0f} s: see what that node says, then start again"
    )


@functools.cache
def current_rendezvous() -> Rendezvous | None:
    """Return the rendezvous of this process's ranks; None without other ranks from srun or torchrun.

    Raises:
        run_folder.RunFailed: rank 0 cannot be reached.
    """
    here = this_process()
    if not here.from_outside or here.world_size == 1:
        return None
    from torch.distributed import PrefixStore, TCPStore

    master = here.launcher == "srun" and here.rank == 0
    if here.launcher == "srun":
        # Lightning and torch read these; torch's process group then shares the open store.
        os.environ["MASTER_ADDR"] = address()
        os.environ.setdefault("MASTER_PORT", str(derive_port(here)))
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        if not master:
            wait_until_reachable(place, JOIN_SECONDS)
        store = TCPStore(
            *place,
            here.world_size,
            is_master=master,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError, OSError) as error:  # torch's store errors are RuntimeErrors
        words = str(error).splitlines()[0]
        raise run_folder.RunFailed(
            f"rank {here.rank} on {host_name()} cannot reach rank 0 at {place[0]}:{place[1]} ({words}): start again, "
            "or give MASTER_ADDR and MASTER_PORT in the environment"
        ) from error
    met = Rendezvous(here, PrefixStore(f"palimpsest/{here.attempt}", store))
    if here.launcher == "torchrun" and here.attempt > 0:
        open_new_torch_store(met)
    return met


def wait_until_reachable(place: tuple[str, int], seconds: float) -> None:
    """Wait until an address accepts connections, since torch itself would log at length while it waits.

    Raises:
        OSError: nothing accepts within `seconds`.
    """
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


def open_new_torch_store(met: Rendezvous) -> None:
    """Have torch's process group use a store that rank 0 opens, as it does without torchrun.

    torchrun's store still holds the previous attempt's addresses, of processes that have ended.
    """
    from torch.distributed import TCPStore

    # with several nodes, torchrun's address need not be rank 0's node
    place = os.environ["MASTER_ADDR"] if met.here.nodes == 1 else socket.getfqdn()

    def open_store() -> list[Any]:
        met.torch_store = TCPStore(place, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return [place, met.torch_store.port]

    address, number = met.broadcast("store", open_store)
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(number), "TORCHELASTIC_USE_AGENT_STORE": "False"}


def derive_port(here: ProcessInfo) -> int:
    """Return a port that all ranks of this attempt derive, and that other steps on the nodes rarely share."""
    return FIRST_PORT + zlib.crc32(f"{here.job}.{here.attempt}".encode()) % PORTS


def agree_on_folder(choose: Callable[[], str]) -> str:
    """Return the folder that rank 0 chooses, on every rank.

    Raises:
        ValueError: it cannot be chosen.
        run_folder.SilentExit: the same, on the other ranks.
        run_folder.RunFailed: rank 0 did not answer or cannot be reached.
    """
    met = current_rendezvous()
    return choose() if met is None else met.broadcast("folder", lambda: str(Path(choose()).absolute()))


def write_token(folder: Path) -> str:
    """Write a random token into the run's folder, to find nodes that do not share it.

    Raises:
        ValueError: the folder cannot be written.
    """
    token = secrets.token_hex(8)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKEN_FILE).write_text(token)
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise SettingError("runs_dir", folder, "give another folder", problem) from error
    return token


def is_token_visible(folder: Path, token: str, seconds: float = 10.0) -> bool:
    """Return whether this node sees the token within `seconds`; network file systems can be slow."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.listdir(folder)  # refreshes the file system's cached listing
            if (folder / TOKEN_FILE).read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
