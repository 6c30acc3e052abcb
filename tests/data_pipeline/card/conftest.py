import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.documents import SCHEMA

CORPUS_SCHEMA = SCHEMA.append(pa.field("category", pa.string())).append(pa.field("quality", pa.float32()))


def document(number: int, **fields: object) -> dict:
    """Return a row of a corpus' Parquet files."""
    row = {"id": f"d/{number}", "text": "not read", "source": "man", "origin": f"/man/{number}", "length": 1000}
    return {**row, "split": "train", "licence": None, "date": None, "url": None, "category": "commands", **fields}


def step(name: str, given: tuple[int, int], left: tuple[int, int], reasons: dict, **fields: object) -> dict:
    """Return a step of merged.json: (documents, bytes) in and out, and {reason: {source: (documents, bytes)}}."""

    def amount(pair: Iterable[int]) -> dict:
        documents, length = pair
        return {"documents": documents, "bytes": length, "tokens": length // 4}

    return {
        "name": name,
        "position": 1,
        "in": amount(given),
        "out": amount(left),
        "sources": {},
        "reasons": {
            reason: {
                **amount(map(sum, zip(*sources.values(), strict=True))),
                "sources": {source: amount(pair) for source, pair in sources.items()},
            }
            for reason, sources in reasons.items()
        },
        "counts": {},
        "kept_samples": [],
        "dropped_samples": [],
        **fields,
    }


def sample(text: str, **fields: object) -> dict:
    entry = {"hash": "00", "id": "d/1", "source": "man", "category": "commands", "text": text, "length": len(text)}
    return {**entry, **fields}


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes documents and recorded steps as the folder of a corpus."""

    def write(rows: Iterable[dict], steps: Iterable[dict] = ()) -> Path:
        files: dict[tuple[str, str], list[dict]] = {}
        for row in rows:
            files.setdefault((row["category"], row["split"]), []).append(row)
        for number, ((_, split), mine) in enumerate(files.items()):
            path = tmp_path / "documents" / f"category{number}" / f"{split}-00000-00000.parquet"
            path.parent.mkdir(parents=True)
            pq.write_table(pa.Table.from_pylist(mine, schema=CORPUS_SCHEMA), path, row_group_size=7)
        (tmp_path / "record").mkdir()
        (tmp_path / "record" / "merged.json").write_text(json.dumps({"steps": list(steps)}))
        return tmp_path

    return write
