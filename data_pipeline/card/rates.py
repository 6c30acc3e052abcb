"""Times of the phases and steps of a corpus.

Seconds are CPU time, which other work on the machine hardly affects. A phase's seconds sum over its whole tasks; a
step's are measured by `data_pipeline.executors.timed_step`.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.executors.timed_step import PROCESSOR_SECONDS


@dataclass
class StepRate:
    """Seconds summed over tasks, and bytes of the step's input, or of the corpus when it ran."""

    name: str
    bytes: int
    seconds: float


@dataclass
class PhaseRate:
    """`seconds` summed over tasks, and `peak_memory` in bytes of the largest task; None if not recorded."""

    name: str
    tasks: int
    bytes: int
    seconds: float | None
    peak_memory: int | None
    steps: list[StepRate] = field(default_factory=list)


def read_rates(logs: Path, recorded: list[dict], corpus_bytes: int) -> list[PhaseRate]:
    """Return the finished phases, in order. `recorded`: the steps of merged.json."""
    records = {title(step["name"]): step for step in recorded}
    current = recorded[0]["in"]["bytes"] if recorded else corpus_bytes
    phases = []
    for folder in sorted(path for path in logs.iterdir() if path.is_dir()) if logs.is_dir() else ():
        tasks = sorted((folder / "stats").glob("*.json"))
        if not tasks:
            continue
        phase = PhaseRate(title(folder.name), len(tasks), current, *_resources(folder, len(tasks)))
        for name, seconds in _steps(tasks).items():
            record = records.get(name)
            phase.steps.append(StepRate(name, record["in"]["bytes"] if record else current, seconds))
            current = record["out"]["bytes"] if record else current
        phases.append(phase)
    return phases


def title(name: str) -> str:
    """Return the name of a phase's folder without its leading number."""
    return re.sub(r"^\d+-(?=.)", "", name)


def _resources(folder: Path, tasks: int) -> tuple[float | None, int | None]:
    """Return the seconds summed over tasks (None unless all recorded them), and the largest task's memory."""
    paths = sorted((folder / "resources").glob("*.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    seconds = sum(task["processor_seconds"] for task in found) if len(found) == tasks else None
    return seconds, max((task["peak_rss_bytes"] for task in found), default=None)


def _steps(tasks: list[Path]) -> dict[str, float]:
    """Return the seconds of a phase's steps, summed over tasks, in pipeline order."""
    seconds: dict[str, float] = {}
    for path in tasks:
        for step in json.loads(path.read_text(encoding="utf-8")):
            name = _step_name(step["name"])
            seconds[name] = seconds.get(name, 0.0) + _number(step["stats"].get(PROCESSOR_SECONDS, 0))
    return seconds


def _step_name(name: str) -> str:
    """Return "quality" for datatrove's "🔻 - FILTER: quality", "Jsonl reader" for "📖 - READER: 🐿 Jsonl"."""
    kind, _, rest = name.partition(": ")
    own = title(re.sub(r"^\W+", "", rest) or name)
    readers_and_writers = re.search(r" - (READER|WRITER)$", kind)
    return f"{own} {readers_and_writers[1].lower()}" if readers_and_writers else own


def _number(stat: dict | float) -> float:
    """Return the total of a datatrove statistic, which may be stored as a plain number."""
    return stat["total"] if isinstance(stat, dict) else stat
