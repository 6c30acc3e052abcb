"""Where things are in a corpus's folder."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """The folder of a corpus: `documents/<category>/`, the card, and what tells how they came about.

    `work` is scratch, removed at the end; `record`, `problems` and `logs` stay.
    """

    root: Path

    @property
    def documents(self) -> Path:
        """`<category>/<split>-<task>-<n>.parquet`; there only when all of it is."""
        return self.root / "documents"

    @property
    def work(self) -> Path:
        """Scratch."""
        return self.root / "work"

    @property
    def record(self) -> Path:
        """What each step removed: `<step>/<task>.json`, `merged.json`."""
        return self.root / "record"

    @property
    def problems(self) -> Path:
        """What could not be read: `<phase>-<task>.json`."""
        return self.root / "problems"

    @property
    def logs(self) -> Path:
        """datatrove's logs, a folder a phase."""
        return self.root / "logs"
