"""The recipe of corpus_building.py written with datatrove alone; arguments: text, out, tasks, workers."""

import sys
from pathlib import Path

import yaml
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter
from hydra.utils import instantiate

CONF = Path(__file__).resolve().parents[2] / "conf" / "cleaning"


def settings(name: str) -> dict:
    """Return the recipe's settings of a step."""
    return yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))


def text_alone(_writer: ParquetWriter, document: Document) -> dict[str, str]:
    """Return a row without metadata: its keys differ between documents, but Parquet columns must not."""
    return {"id": document.id, "text": document.text}


def main() -> None:
    """Build the corpus."""
    text, out = map(Path, sys.argv[1:3])
    tasks, workers = map(int, sys.argv[3:5])
    pipelines, stored = [], 0
    flowing = [JsonlReader(str(text)), *(instantiate(settings(name)) for name in ("language", "quality", "masks"))]
    for name in ("exact_documents", "near_duplicates", "exact_spans"):
        for stage in instantiate(settings(name))(folder=str(out / "work" / name), tasks=tasks):
            folder = str(out / "work" / f"documents-{stored}")
            if not stage.reads:
                pipelines.append((stage.steps, stage.tasks))
            elif stage.gives:
                flowing = [JsonlReader(folder, glob_pattern="*.jsonl.zst"), *stage.steps]
            else:
                stored += 1
                folder = str(out / "work" / f"documents-{stored}")
                pipelines.append(([*flowing, JsonlWriter(folder, compression="zstd"), *stage.steps], tasks))
    pipelines.append(([*flowing, ParquetWriter(str(out / "documents"), compression="zstd", adapter=text_alone)], tasks))
    for number, (steps, count) in enumerate(pipelines):
        logs = str(out / "logs" / f"{number:02d}")
        LocalPipelineExecutor(steps, tasks=count, workers=min(workers, count), logging_dir=logs).run()


if __name__ == "__main__":
    main()
