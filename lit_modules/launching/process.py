"""This process's identity within its run, from the environment of SLURM, torchrun or Lightning."""

import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ProcessInfo:
    """This process among those of its run.

    Attributes:
        rank, world_size: over all nodes.
        local_rank, local_size: on this node.
        node, nodes: the node's number and the number of nodes.
        launcher: "srun", "torchrun" or "lightning"; None for a single process.
        job: the name of this start, unchanged by a requeue; None if nothing restarts it.
        attempt: the number of restarts so far.
        even: every node runs the same number of processes.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    launcher: str | None = None
    job: str | None = None
    attempt: int = 0
    even: bool = True

    @property
    def from_outside(self) -> bool:
        """Whether srun or torchrun started the processes, so that they must find each other."""
        return self.launcher in ("srun", "torchrun")

    @property
    def alone(self) -> bool:
        """True for a single process that was started by hand."""
        return self.world_size == 1 and not self.from_outside

    @property
    def log(self) -> str:
        """The log of this process, relative to the run's folder."""
        return "palimpsest.log" if self.rank == 0 else f"logs/rank_{self.rank:05d}.log"


def this_process(environment: Mapping[str, str] = os.environ) -> ProcessInfo:
    """Read this process's identity from the environment; torchrun first, since srun may have started torchrun."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return _torchrun(environment)
    if in_slurm_step(environment):
        return _srun(environment)
    if {"LOCAL_RANK", "NODE_RANK"} <= set(environment):  # Lightning on one machine; it removes WORLD_SIZE again
        rank = int(environment["LOCAL_RANK"])
        size = int(environment.get("WORLD_SIZE", rank + 1))
        if size > 1:
            return ProcessInfo(rank, size, rank, size, launcher="lightning", **_slurm_job(environment))
    return ProcessInfo(**_slurm_job(environment))


def in_slurm_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether srun started this process as a task.

    False for a job's batch script and for an interactive shell of srun or salloc (the job names that Lightning checks).
    """
    if not {"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= set(environment):
        return False
    shell = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return not (shell and environment["SLURM_STEP_NUM_TASKS"] == "1")


def _torchrun(environment: Mapping[str, str]) -> ProcessInfo:
    size, local_size = int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"])
    name = environment["TORCHELASTIC_RUN_ID"]
    if name == "none":  # no --rdzv-id was given: use the agent's process, which outlives the restarts
        name = f"{socket.gethostname()}:{os.getppid()}"
    return ProcessInfo(
        rank=int(environment["RANK"]),
        world_size=size,
        local_rank=int(environment["LOCAL_RANK"]),
        local_size=local_size,
        node=int(environment["GROUP_RANK"]),
        nodes=size // local_size,
        launcher="torchrun",
        job=f"torchrun {name}",
        attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
        even=size % local_size == 0,
    )


def _srun(environment: Mapping[str, str]) -> ProcessInfo:
    size, nodes = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment["SLURM_STEP_NUM_NODES"])
    on_nodes = environment.get("SLURM_STEP_TASKS_PER_NODE", "")  # "2(x4)", or "2(x3),1" if uneven
    return ProcessInfo(
        rank=int(environment["SLURM_PROCID"]),
        world_size=size,
        local_rank=int(environment["SLURM_LOCALID"]),
        local_size=max(1, size // nodes),
        node=int(environment["SLURM_NODEID"]),
        nodes=nodes,
        launcher="srun",
        even="," not in on_nodes,
        **_slurm_job(environment),
    )


def _slurm_job(environment: Mapping[str, str]) -> dict[str, Any]:
    if "SLURM_JOB_ID" not in environment:
        return {}
    step = environment.get("SLURM_STEP_ID", "batch")
    attempt = int(environment.get("SLURM_RESTART_COUNT") or 0)
    return {"job": f"slurm {environment['SLURM_JOB_ID']}.{step}", "attempt": attempt}


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: gpu3 of "gpu[3-5,8],login1"."""
    match = re.match(r"([^,\[]*)(?:\[([^,\-\]]+)[^\]]*\])?([^,\[]*)", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes


def address(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of rank 0's node in this SLURM step.

    MASTER_ADDR first, as in torch; then the node's name, or SLURM's NodeAddr if the name does not resolve here.
    """
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    host = first_host(environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"])
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        found = subprocess.run(["scontrol", "show", "node", host], capture_output=True, text=True).stdout
        known = re.search(r"NodeAddr=(\S+)", found)
        return known[1] if known else host
    return host


def cluster_environment() -> Any:
    """Return Lightning's environment plugin; None if Lightning detects the right one.

    Lightning's requeueing is off, since our own callback requeues.
    """
    from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

    here = this_process()
    if here.launcher == "srun":
        # The sizes of the step, which may be a part of the job; srun omits these names without --ntasks-per-node.
        os.environ |= {
            "SLURM_NTASKS": str(here.world_size),
            "SLURM_NTASKS_PER_NODE": str(here.local_size),
            "SLURM_NNODES": str(here.nodes),
        }
        return SLURMEnvironment(auto_requeue=False)
    if here.launcher is None and "SLURM_NTASKS" in os.environ:  # a batch script: Lightning would wait for tasks
        return LightningEnvironment()
    return None
