"""A SLURM cluster on this machine: a controller and two nodes, each a daemon on a separate loopback port."""

import os
import pwd
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
SYSTEM = "/usr/sbin:/sbin"  # of daemons; not on the PATH of every user
NODES = ("node1", "node2")
SECONDS = 60  # that anything is waited for; a busy machine is slow

SETTINGS = """
ClusterName=palimpsest
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=8
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=10
SlurmdTimeout=30
MaxArraySize={max_array_size}
{nodes}
PartitionName=cpu Nodes={names} Default=YES MaxTime=60 State=UP
"""


def missing() -> str:
    """Return the programs of a cluster that are not installed here."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM}"
    return ", ".join(name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=path) is None)


@contextmanager
def cluster(folder: Path, cpus: int = 2, max_array_size: int = 1001) -> Iterator["Cluster"]:
    """A running cluster, whose files are in `folder` (a short path: it holds a socket); gone afterwards."""
    running = Cluster(folder, cpus, max_array_size)
    try:
        running.start()
        yield running
    finally:
        running.end()


class Cluster:
    """`environment`: what a command needs to speak to it."""

    def __init__(self, folder: Path, cpus: int, max_array_size: int) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PATH": f"{os.environ['PATH']}:{SYSTEM}",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self.daemons: dict[str, subprocess.Popen] = {}
        controller, *ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=8192"
            for name, port in zip(NODES, ports, strict=True)
        )
        settings = SETTINGS.format(
            host=socket.gethostname().partition(".")[0],
            user=pwd.getpwuid(os.getuid()).pw_name,
            folder=folder,
            controller=controller,
            first_job=random.SystemRandom().randrange(1, 60000),  # ports follow from it: not those of another cluster
            max_array_size=max_array_size,
            nodes=nodes,
            names=",".join(NODES),
        )
        (folder / "slurm.conf").write_text(settings)
        (folder / "state").mkdir()

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"key-file": key, **{f"{kind}-file": self.folder / f"munge.{kind}" for kind in ("log", "pid", "seed")}}
        options = [f"--{name}={path}" for name, path in files.items()]
        self._start("munged", "--foreground", "--force", f"--socket={self.folder / 'munge.socket'}", *options)
        until(lambda: (self.folder / "munge.socket").exists(), self._words)
        self._start("slurmctld", "-D", "-i")
        for node in NODES:
            self.start_node(node)
        until(lambda: self.ask("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES), self._words)

    def start_node(self, node: str) -> None:
        """Start a node's daemon, for the first time or again."""
        self._start("slurmd", "-D", "-N", node, called=node)

    def ask(self, *command: str) -> str:
        """Return the output of a SLURM command; empty if it fails."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True).stdout

    def states(self, job: str) -> list[str]:
        """Return the states of a job, one for each task of an array: COMPLETED, FAILED, CANCELLED, PENDING ..."""
        words = self.ask("scontrol", "show", "job", job).split()
        return [word.removeprefix("JobState=") for word in words if word.startswith("JobState=")]

    def wait(self, *jobs: str) -> None:
        """Wait until none of the jobs is queued or running."""
        until(
            lambda: not self.ask("squeue", "-h", f"--jobs={','.join(jobs)}").strip(),
            lambda: self.ask("squeue") + self._words(),
        )

    def end(self) -> None:
        """Cancel all jobs and end the daemons."""
        if "slurmctld" in self.daemons:
            self.ask("scancel", "--state=PENDING", "--state=RUNNING", "--user", pwd.getpwuid(os.getuid()).pw_name)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in reversed(self.daemons.values()):
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, program: str, *options: object, called: str | None = None) -> None:
        with open(self.folder / f"{called or program}.out", "ab") as out:
            command = [program, *map(str, options)]
            self.daemons[called or program] = subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)

    def _words(self) -> str:
        """Return the daemons' last log lines, for the report of a failed test."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"{file.name}: {file.read_text(errors='replace')[-800:]}" for file in files)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def until(condition, words=lambda: "waited in vain", seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(words())
        time.sleep(0.1)
