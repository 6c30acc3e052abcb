import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.filters.base_filter import BaseFilter

from data_pipeline.cleaning.masks import Masks
from data_pipeline.cleaning.record import Recorded, merge_records


class Short(BaseFilter):
    """Drops texts shorter than ten characters."""

    name = "short"

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        return True if len(doc.text) >= 10 else (False, "too short")


def documents(rank: int = 0, world_size: int = 1) -> Iterator[Document]:
    for number in range(rank, 100, world_size):
        source = "man" if number % 4 else "web"
        text = f"é text number {number}" if number % 5 else "shorté"
        yield Document(text, f"d/{number}", metadata={"source": source, "category": "commands"})


class Numbers(PipelineStep):
    """Reads `documents`."""

    type, name = "READER", "numbers"

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        yield from documents(rank, world_size)


def run(step: Recorded, tasks: int) -> list[str]:
    ids = []
    for rank in range(tasks):
        ids += [doc.id for doc in pickle.loads(pickle.dumps(step)).run(documents(rank, tasks), rank, tasks)]
    return ids


def test_counts_by_source_and_reason_add_up(tmp_path: Path) -> None:
    assert len(run(Recorded(Short(), tmp_path, "short"), 3)) == 80
    [step] = merge_records(tmp_path, bytes_per_token=2)["steps"]
    assert step["in"]["documents"] == 100
    assert step["out"] == {"documents": 80, "bytes": step["out"]["bytes"], "tokens": step["out"]["bytes"] // 2}
    reason = step["reasons"]["too short"]
    assert (reason["documents"], reason["bytes"]) == (20, 20 * len("shorté".encode()))
    assert reason["sources"]["web"]["documents"] == 5
    assert step["in"]["bytes"] == step["out"]["bytes"] + reason["bytes"]
    assert step["sources"]["man"]["in"]["documents"] == 75


def test_samples_do_not_depend_on_the_number_of_tasks(tmp_path: Path) -> None:
    merged = []
    for tasks in (1, 4):
        folder = tmp_path / str(tasks)
        run(Recorded(Short(), folder, "short", samples=7), tasks)
        merged.append(merge_records(folder, samples=7)["steps"][0])
    for kind in ("kept_samples", "dropped_samples"):
        assert len(merged[0][kind]) == 7
        assert merged[0][kind] == merged[1][kind]
    assert {sample["reason"] for sample in merged[0]["dropped_samples"]} == {"too short"}


def test_samples_hold_no_credentials(tmp_path: Path) -> None:
    step = Recorded(Short(), tmp_path, "short")
    list(step.run([Document("mail a@corp.com\nDB_PASSWORD=hunter22\n" + "x" * 9000, "1")]))
    text = (tmp_path / "short" / "00000.json").read_text()
    assert "hunter22" not in text
    assert "a@corp.com" not in text
    assert len(text) < 4000


def test_the_exclusion_writer_of_a_step_is_still_written_to(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.ids: list[str] = []

        def __enter__(self) -> "Writer":
            return self

        def __exit__(self, *error: object) -> None:
            self.ids.append("closed")

        def write(self, document: Document, rank: int = 0) -> None:
            self.ids.append(document.id)

    writer = Writer()
    step = Short(exclusion_writer=writer)
    list(Recorded(step, tmp_path, "short").run(documents()))
    assert len(writer.ids) == 21
    assert step.exclusion_writer is writer


def test_a_filter_without_reasons_has_its_name_for_one(tmp_path: Path) -> None:
    list(Recorded(LambdaFilter(lambda doc: False), tmp_path, "none").run(documents()))
    assert merge_records(tmp_path)["steps"][0]["reasons"]["none"]["documents"] == 100


def test_what_a_step_counts_itself_is_kept_for_each_task_alone(tmp_path: Path) -> None:
    step = Recorded(Masks(), tmp_path, "masks")
    for rank in range(2):  # one object, as where a node runs several tasks in a row
        list(step.run([Document("mail a@corp.com", "1")], rank, 2))
    assert merge_records(tmp_path)["steps"][0]["counts"]["masked_email"] == 2


def test_a_task_that_fails_leaves_no_record_and_is_missed(tmp_path: Path) -> None:
    def breaks() -> Iterator[Document]:
        yield from documents()
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(Recorded(Short(), tmp_path, "short").run(breaks(), 1, 2))
    list(Recorded(Short(), tmp_path, "short").run(documents(), 0, 2))
    with pytest.raises(ValueError, match="no record of task 1 of 2"):
        merge_records(tmp_path)


def test_steps_are_merged_in_their_order_and_run_by_an_executor(tmp_path: Path) -> None:
    steps = [Recorded(Short(), tmp_path / "record", "zshort", 0), Recorded(Masks(), tmp_path / "record", "amasks", 1)]
    pipeline = [Numbers(), *steps]
    stats = LocalPipelineExecutor(pipeline, tasks=2, workers=1, logging_dir=str(tmp_path / "logs")).run()
    assert [step["name"] for step in merge_records(tmp_path / "record")["steps"]] == ["zshort", "amasks"]
    assert stats.stats[1]["dropped"].total == 20
    assert json.loads((tmp_path / "record" / "merged.json").read_text())["steps"][1]["in"]["documents"] == 80
