"""SLURM's commands, for the launcher of runs and the executor of data jobs.

Only squeue and scontrol are queried, not sacct, because many clusters keep no accounting.
"""

import subprocess
from collections.abc import Mapping

# Pending reasons that only a change of the cluster's configuration resolves.
NEVER = (
    "PartitionConfig",
    "PartitionTimeLimit",
    "PartitionNodeLimit",
    "PartitionDown",
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
    "AccountNotAllowed",
    "QOSNotAllowed",
)


def never_starts(reason: str) -> bool:
    """Return whether a job pending for this reason (squeue's %r) will never start."""
    return reason in NEVER or reason.endswith("PerJobLimit")


def ask(*command: str, key: str, instead: str = "") -> subprocess.CompletedProcess:
    """Run one of SLURM's commands; its exit status is not checked.

    Args:
        command: the program and its arguments.
        key: the setting that chose SLURM, for the error.
        instead: what else the user may give, for the error.

    Raises:
        ValueError: if the program is not installed.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        raise ValueError(
            f"{key}: there is no {command[0]} on this machine: start the command where jobs are submitted{instead}"
        ) from None


def refusal(words: str, keys: Mapping[str, str], otherwise: str) -> str:
    """Return a one-line error for sbatch's message when it refused a job.

    Args:
        words: sbatch's standard error.
        keys: maps a word of sbatch's message to the setting to change; the first match is named.
        otherwise: the setting to name without a match.
    """
    lines = [line.split("error: ")[-1].strip() for line in words.splitlines() if "error: " in line]
    said = "; ".join(lines) or " ".join(words.split())
    key = next((key for word, key in keys.items() if word in said.lower()), otherwise)
    return f"{key}: sbatch refuses the job: {said}"
