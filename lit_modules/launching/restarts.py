"""Automatic restarts of a run: the request to SLURM, and the limit on restarts without a new checkpoint.

Heavy imports are avoided: a rank's supervisor calls this when the rank ran out of memory.
"""

import contextlib
import json
import os
import subprocess
from pathlib import Path

from common.atomic_files import write_atomic
from lit_modules.launching.process import ProcessInfo

MAX_RESTARTS = 3  # restarts without a new checkpoint
COUNT_FILE = "restarts.json"  # {"checkpoint": the newest at the last restart, "restarts": the count since then}
RESUME_HINT = "resume=auto goes on from the last checkpoint"
MARKER_FILE = ".restarting"  # exists once a rank of this attempt has asked for a restart


def slurm_job() -> str | None:
    """Return the SLURM job of this process, as scontrol names it; None outside SLURM."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def requeue(job: str) -> str:
    """Ask SLURM to requeue a job; return the outcome as text."""
    try:
        asked = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
        refusal = " ".join(asked.stderr.split()) if asked.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        refusal = str(error)
    if refusal is None:
        return f"SLURM job {job} is queued again and goes on from the last checkpoint"
    return f"scontrol requeue {job} failed ({refusal}): {RESUME_HINT}"


def restart(folder: Path, here: ProcessInfo) -> str:
    """Restart the run after a failure where we can; return as text what happens next."""
    if restarts_so_far(folder) >= MAX_RESTARTS:
        return restart_limit_message()
    job = slurm_job()
    if job is not None:
        return requeue(job)
    if here.launcher == "torchrun":
        return "torchrun starts it again from the last checkpoint, if it has restarts left (--max-restarts)"
    return RESUME_HINT


def is_first_to_ask(folder: Path) -> bool:
    """Return whether this is the first rank of the attempt to call; always True if the disk refuses the marker file."""
    try:
        os.close(os.open(folder / MARKER_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def reset_count(folder: Path) -> None:
    """Reset the count of restarts, for a run that a person starts."""
    for name in (MARKER_FILE, COUNT_FILE):
        (folder / name).unlink(missing_ok=True)


def count_restart(folder: Path, here: ProcessInfo) -> int:
    """Count this restart, on rank 0 at the start of an attempt; return the restarts since the newest checkpoint.

    A start by a person (resume=...) resets the count.
    """
    if here.attempt == 0:
        reset_count(folder)
        return 0
    (folder / MARKER_FILE).unlink(missing_ok=True)
    restarts = restarts_so_far(folder) + 1
    with contextlib.suppress(OSError):  # a full disk must not stop the run
        counted = {"checkpoint": newest_checkpoint_name(folder), "restarts": restarts}
        write_atomic(folder / COUNT_FILE, json.dumps(counted) + "\n")
    return restarts


def restarts_so_far(folder: Path) -> int:
    """Return the number of automatic restarts since the newest checkpoint."""
    try:
        found = json.loads((folder / COUNT_FILE).read_text(encoding="utf-8"))
        return found["restarts"] if found["checkpoint"] == newest_checkpoint_name(folder) else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def newest_checkpoint_name(folder: Path) -> str | None:
    """Return the name of the newest checkpoint, complete or not."""
    return max((path.name for path in (folder / "checkpoints").glob("step_*")), default=None)


def restart_limit_message() -> str:
    """Return the message for a run that has used up its restarts."""
    return f"stopped after {MAX_RESTARTS} restarts without a new checkpoint; fix the cause, then give resume=auto"
