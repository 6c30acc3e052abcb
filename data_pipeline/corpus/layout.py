"""Folder layout of a corpus."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """Paths in the folder of a corpus: `documents/<category>/`, the card, and the records of the build.

    `work` is scratch and removed at the end; `record`, `problems` and `logs` stay.
    """

    root: Path

    @property
    def documents(self) -> Path:
        """Files `<category>/<split>-<task>-<n>.parquet`; the folder exists only when it is complete."""
        return self.root / "documents"

    @property
    def work(self) -> Path:
        """Scratch folder."""
        return self.root / "work"

    @property
    def record(self) -> Path:
        """Reports of what each step removed: `<step>/<task>.json`, `merged.json`."""
        return self.root / "record"

    @property
    def problems(self) -> Path:
        """Reports of what could not be read: `<phase>-<task>.json`."""
        return self.root / "problems"

    @property
    def logs(self) -> Path:
        """datatrove's logs, one folder per phase."""
        return self.root / "logs"
