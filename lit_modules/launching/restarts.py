"""Restarts of a run by itself: who asks SLURM for one, and how many there may be without a new checkpoint.

Nothing heavy is imported here: the process above a rank calls it when the rank was killed for want of memory.
"""

import contextlib
import json
import os
import subprocess
from pathlib import Path

from common.atomic_files import write_atomic
from lit_modules.launching.process import ProcessInfo

MOST = 3  # without a new checkpoint between them
RECORD = "restarts.json"  # in the run's folder: {"checkpoint": the newest at the last restart, "restarts": since then}
BY_HAND = "resume=auto goes on from the last checkpoint"
ASKED = ".restarting"  # there once a rank of this attempt has asked for a restart


def slurm_job() -> str | None:
    """The SLURM job that this process runs in, as scontrol names it; None outside of SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def requeue(job: str) -> str:
    """Ask SLURM to queue a job again; what comes of it, in words."""
    try:
        asked = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
        refusal = " ".join(asked.stderr.split()) if asked.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        refusal = str(error)
    if refusal is None:
        return f"SLURM job {job} is queued again and goes on from the last checkpoint"
    return f"scontrol requeue {job} failed ({refusal}): {BY_HAND}"


def restart(folder: Path, here: ProcessInfo) -> str:
    """After a failure, have the run started again where that is ours to do; what comes next, in words."""
    if so_far(folder) >= MOST:
        return too_often()
    job = slurm_job()
    if job is not None:
        return requeue(job)
    if here.launcher == "torchrun":
        return "torchrun starts it again from the last checkpoint, if it has restarts left (--max-restarts)"
    return BY_HAND


def is_first(folder: Path) -> bool:
    """Whether no rank of this attempt has been here before; where the disk takes no file, every one is."""
    try:
        os.close(os.open(folder / ASKED, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def forget(folder: Path) -> None:
    """Forget the restarts of a run, which a person starts now."""
    for name in (ASKED, RECORD):
        (folder / name).unlink(missing_ok=True)


def count(folder: Path, here: ProcessInfo) -> int:
    """On rank 0 at the start of an attempt: how many restarts there were since the newest checkpoint, this one with
    them. A start by a person (resume=...) begins the count anew."""
    if here.attempt == 0:
        forget(folder)
        return 0
    (folder / ASKED).unlink(missing_ok=True)
    restarts = so_far(folder) + 1
    with contextlib.suppress(OSError):  # a full disk is no reason to stop
        write_atomic(folder / RECORD, json.dumps({"checkpoint": newest_name(folder), "restarts": restarts}) + "\n")
    return restarts


def so_far(folder: Path) -> int:
    """How often a run has restarted by itself since its newest checkpoint."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return found["restarts"] if found["checkpoint"] == newest_name(folder) else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def newest_name(folder: Path) -> str | None:
    """The name of the newest checkpoint of a run, whole or not."""
    return max((path.name for path in (folder / "checkpoints").glob("step_*")), default=None)


def too_often() -> str:
    """What is said of a run that restarts in vain."""
    return f"stopped after {MOST} restarts without a new checkpoint; resume=auto goes on once the cause is mended"
