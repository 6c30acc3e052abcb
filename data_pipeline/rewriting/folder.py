"""Folder of a rewriting: lock, settings, journals, shards, and manifest.

`settings.json` holds the run's settings. `journals/` holds the paid answers of unfinished chunks. A finished chunk is
one file in `shards/` with its counts in the file's metadata, so that both appear at once; `left_out/` names its dropped
documents, and the reasons. `manifest.json`, written last, marks the rewriting as complete.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from common.atomic_files import write_atomic
from data_pipeline.documents import SCHEMA
from data_pipeline.job_folder import JobFolder
from data_pipeline.rewriting.journal import Journal

COUNTS_KEY = b"palimpsest.rewriting"
PROVENANCE = (
    ("category", pa.string()),
    ("rewritten_from", pa.string()),  # the source document's id
    ("style", pa.string()),
    ("parts", pa.string()),  # numbers of the parts in the text, from 0: "0,1,3"
    ("source_parts", pa.int64()),  # number of parts of the source
    ("prompt_hash", pa.string()),
    ("model", pa.string()),
    ("sampling", pa.string()),  # JSON: temperature, top_p, max_tokens_ratio, and each part's seed
    ("pairs", pa.string()),  # JSON, for styles whose answers are pairs
)
ROWS = pa.schema([*SCHEMA, *(pa.field(name, kind) for name, kind in PROVENANCE if name not in SCHEMA.names)])
ROW_GROUP = 256


class OutputFolder(JobFolder):
    """The folder `path`; every file is either complete or absent."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path, "rewrite")
        self.shards = self.path / "shards"
        self.left_out = self.path / "left_out"
        self.journals = self.path / "journals"

    def begin(self, settings: dict, earlier: dict | None = None) -> None:
        """Create or check the folder as `JobFolder.begin` does, and create the subfolders."""
        super().begin(settings, earlier)
        for folder in (self.shards, self.left_out, self.journals):
            folder.mkdir(exist_ok=True)

    def shard(self, task: int, chunk: int) -> Path:
        """Return the path of a chunk's shard."""
        return self.shards / f"train-{task:05d}-{chunk:06d}.parquet"

    def journal(self, task: int, chunk: int) -> Journal:
        """Return the journal of a chunk."""
        return Journal(self.journals / f"{task:05d}-{chunk:06d}.jsonl")

    def open_journals(self, task: int) -> Iterator[Journal]:
        """Yield a task's journals; remove those of chunks that were finished just before a kill."""
        for path in sorted(self.journals.glob(f"{task:05d}-*.jsonl")):
            if self.shard(task, int(path.stem.partition("-")[2])).exists():
                path.unlink()
            else:
                yield Journal(path)

    def write_shard(self, task: int, chunk: int, rows: list[dict], left_out: list[dict], counts: dict) -> None:
        """Write the results of a chunk; the chunk counts as finished once the shard exists."""
        target = self.shard(task, chunk)
        if left_out:
            lines = "".join(json.dumps(entry, ensure_ascii=True) + "\n" for entry in left_out)
            write_atomic(self.left_out / f"{task:05d}-{chunk:06d}.jsonl", lines)
        beside = target.with_name(f".{target.name}.partial")
        table = pa.Table.from_pylist(rows, schema=ROWS.with_metadata({COUNTS_KEY: json.dumps(counts).encode()}))
        try:
            pq.write_table(table, beside, compression="zstd", row_group_size=ROW_GROUP)
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise

    def counts(self) -> Iterator[tuple[Path, int, dict]]:
        """Yield each shard, its number of rows, and the counts in it."""
        for path in sorted(self.shards.glob("train-*.parquet")):
            file = pq.read_metadata(path)
            yield path, file.num_rows, json.loads(file.metadata[COUNTS_KEY])

    def end_task(self, task: int, totals: dict) -> None:
        """Record that all chunks of a task are finished."""
        write_atomic(self.path / "tasks" / f"{task:05d}.json", json.dumps(totals) + "\n")

    def ended_tasks(self) -> dict[int, dict]:
        """Return the totals of the finished tasks."""
        found = sorted((self.path / "tasks").glob("*.json"))
        return {int(path.stem): json.loads(path.read_text(encoding="utf-8")) for path in found}

    def clean(self) -> None:
        """Remove files that only an unfinished run needs."""
        shutil.rmtree(self.journals, ignore_errors=True)
        for partial in self.shards.glob(".*.partial"):
            partial.unlink()
