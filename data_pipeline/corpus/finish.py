"""Last step of a corpus: merge the record, write the card, publish the documents, write the manifest."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from common import checksums
from common.atomic_files import write_atomic
from data_pipeline.card import write_card
from data_pipeline.cleaning.record import merge_records
from data_pipeline.corpus.layout import Layout
from data_pipeline.corpus.reading import check_problems
from data_pipeline.corpus.recipe import Recipe
from data_pipeline.documents import SPLITS
from data_pipeline.fingerprint import MANIFEST
from data_pipeline.job_folder import SETTINGS


class Finish(PipelineStep):
    """Last step of a corpus, in one task. Work that a killed run left half done is repeated."""

    type = "WRITER"
    name = "finish"

    def __init__(self, recipe: Recipe, layout: Layout) -> None:
        super().__init__()
        self.samples, self.bytes_per_token, self.recorded = recipe.samples, recipe.bytes_per_token, len(recipe.cleaning)
        self.layout, self.most_skipped = layout, recipe.most_skipped

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> None:
        """Write card and manifest; yield no documents.

        Raises:
            ValueError: too many records of a source were skipped, or no document is left.
        """
        layout = self.layout
        check_problems(layout.problems, self.most_skipped)
        written = layout.work / "corpus"
        if written.exists():
            shutil.rmtree(layout.documents, ignore_errors=True)
            os.replace(written, layout.documents)
        if not layout.documents.exists():
            raise ValueError(_nothing_left(layout))
        if self.recorded:
            merge_records(layout.record, self.samples, self.bytes_per_token)
        manifest = {
            "identity": json.loads((layout.root / SETTINGS).read_text(encoding="utf-8")),
            "bytes_per_token": self.bytes_per_token,
            **contents(layout.documents),
        }
        report = layout.work / "labels" / "report"
        if report.exists():
            shutil.copytree(report, layout.root / "labels" / "report", dirs_exist_ok=True)
        write_card(layout.root, layout.root.name, self.bytes_per_token)
        write_atomic(layout.root / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        shutil.rmtree(layout.work, ignore_errors=True)


def contents(documents: Path) -> dict:
    """Return {"categories": {name: {split: counts, "sources": {source: counts}}}, "files": [counts of each]}.

    Each file also has its size and checksum. Counts are {"documents", "bytes"}; bytes are UTF-8 bytes of text.
    """
    categories, files = {}, []
    for folder in sorted(path for path in documents.iterdir() if path.is_dir()):
        splits = {split: _none() for split in SPLITS}
        sources: dict[str, dict[str, int]] = {}
        for path in sorted(folder.glob("*.parquet")):
            split, counts = path.name.partition("-")[0], _none()
            for source, rows, size in _counted(path):
                for total in (counts, splits[split], sources.setdefault(source, _none())):
                    total["documents"] += rows
                    total["bytes"] += size
            name = f"{folder.name}/{path.name}"
            files.append(
                {"file": f"documents/{name}", **counts, "written": checksums.manifest_entries(documents, [name])[name]}
            )
        categories[folder.name] = {**splits, "sources": dict(sorted(sources.items()))}
    return {"categories": categories, "files": files}


def _counted(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (source, documents, bytes) of each source, row group by row group."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=["source", "length"]):
            grouped = batch.column("source").value_counts()
            for source, rows in zip(
                grouped.field("values").to_pylist(), grouped.field("counts").to_pylist(), strict=True
            ):
                chosen = pc.equal(batch.column("source"), source)
                yield source, rows, pc.sum(batch.column("length").filter(chosen)).as_py()


def _none() -> dict[str, int]:
    return {"documents": 0, "bytes": 0}


def _nothing_left(layout: Layout) -> str:
    merged = merge_records(layout.record)["steps"] if layout.record.exists() else []
    emptied = next((step["name"] for step in merged if step["in"]["documents"] and not step["out"]["documents"]), None)
    if emptied is None:
        return "corpus.sources give no document: see problems/ in corpus.output, and point them at readable text"
    return f"corpus.cleaning.{emptied} removed every document: loosen it, or set corpus.cleaning.{emptied}=null"
