"""Steps that store documents: as JSON lines between phases, and finally as Parquet by category."""

from pathlib import Path

import pyarrow as pa
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

from data_pipeline.documents import SCHEMA, SPLITS, ShardWriter
from data_pipeline.documents import Document as Text

ROWS = pa.schema([*SCHEMA, pa.field("category", pa.string()), pa.field("quality", pa.float32())])


class StoreDocuments(JsonlWriter):
    """datatrove's writer of JSON lines, with one file per task even if a task has no documents.

    The same number of tasks therefore reads the same documents back.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder, "${rank}.jsonl", compression="zstd")

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Write the documents, and yield them."""
        with self:
            self.output_mg.get_file(f"{rank:05d}.jsonl.zst")
            yield from super().run(data, rank, world_size)


class StoredDocuments(JsonlReader):
    """datatrove's reader for the files of `StoreDocuments`."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, glob_pattern="*.jsonl.zst", compression="zstd", add_file_path=False)

    def read_file(self, filepath: str) -> DocumentsPipeline:
        """Yield a file's documents; none for an empty file, which is not a valid compressed stream."""
        if self.data_folder.size(filepath):
            yield from super().read_file(filepath)


class WriteCorpus(PipelineStep):
    """Step that writes documents as `folder/<category>/<split>-<task>-<n>.parquet`, in the columns of `ROWS`."""

    type = "WRITER"
    name = "write"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Write all documents of a task, replacing an earlier attempt's files; yield none."""
        for split in SPLITS:
            for stale in Path(self.folder).glob(f"*/{split}-{rank:05d}-*.parquet"):
                stale.unlink()
        writers: dict[tuple[str, str], ShardWriter] = {}
        for document in data:
            category, split = place = document.metadata["category"], document.metadata["split"]
            if place not in writers:
                folder = Path(self.folder, category)
                folder.mkdir(parents=True, exist_ok=True)
                writers[place] = ShardWriter(folder, split, f"{split}-{rank:05d}", ROWS)
            text = Text(document.text, document.id, document.metadata)
            writers[place].write(text, len(document.text.encode()))
            self.stat_update("documents")
        for writer in writers.values():
            writer.close()
        return
        yield
