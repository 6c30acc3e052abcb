import functools
import json
import random

import pytest

from common.settings import shown
from data_pipeline.documents import Document, Problems, shards, texts
from data_pipeline.identity import EARLIER
from data_pipeline.sources.text_files import TextFiles
from data_pipeline.tokens import gathering, repeats
from data_pipeline.tokens.gathering import gather

SPAN = 50  # bytes


class Given:
    """A source of given texts."""

    def __init__(self, given):
        self.given = given

    def documents(self, problems, processes):
        for number, text in enumerate(self.given):
            yield Document(text, f"doc{number}", {"source": "given", "origin": "here", "date": "2020-01-02"})


def words(seed: int, count: int = 120) -> list[str]:
    draw = random.Random(seed)
    return [f"{draw.choice('bcdfghklmnprst')}{draw.choice('aeiou')}{draw.randrange(9999)}" for _ in range(count)]


def near(text: list[str], seed: int) -> str:
    """Return a copy with three words changed."""
    changed = list(text)
    for place in random.Random(seed).sample(range(len(text)), 3):
        changed[place] = "another"
    return " ".join(changed)


def families(number: int, size: int) -> list[str]:
    """Return texts with `size` near copies each, and as many unique texts."""
    copies = [near(words(family), copy) for family in range(number) for copy in range(size)]
    return [*copies, *(" ".join(words(1000 + alone)) for alone in range(number * size))]


def shared_with_training(folder) -> float:
    """Return the fraction of held-out bytes in spans of SPAN bytes that also occur in the training text."""
    known = set()
    for text in texts(folder, "train"):
        known.update(text[place : place + SPAN] for place in range(len(text) - SPAN + 1))
    total = inside = 0
    for text in texts(folder, "validation"):
        covered = set()
        for place in range(len(text) - SPAN + 1):
            if text[place : place + SPAN] in known:
                covered.update(range(place, place + SPAN))
        total, inside = total + len(text), inside + len(covered)
    return inside / total


@pytest.mark.parametrize("index_windows", [repeats.INDEX_WINDOWS, 1000])
def test_near_copies_of_a_text_are_on_one_side(tmp_path, monkeypatch, index_windows):
    monkeypatch.setattr(repeats, "INDEX_WINDOWS", index_windows)
    given = families(30, 4)
    counts = gather(Given(given), tmp_path, 0.3, 1, Problems(), 0.5)
    assert shared_with_training(tmp_path) < 0.02
    assert counts["validation"]["documents"] > 20
    assert counts["repeated"] > 20
    assert sorted([*texts(tmp_path, "train"), *texts(tmp_path, "validation")]) == sorted(given)
    assert counts["train"]["documents"] + counts["validation"]["documents"] == len(given)
    assert not shards(tmp_path, gathering.DRAWN)
    assert not list(tmp_path.glob(".*"))


def test_the_split_depends_on_neither_order_nor_processes_and_loses_no_column(tmp_path, monkeypatch):
    given = families(10, 3)
    held_out = []
    for number, order in enumerate((given, given[::-1])):
        (tmp_path / str(number)).mkdir()
        gather(Given(order), tmp_path / str(number), 0.3, 1 + number, Problems(), 0.5)
        held_out.append(set(texts(tmp_path / str(number), "validation")))
    assert held_out[0] == held_out[1]
    rows = [row for path in shards(tmp_path / "0", "validation") for row in gathering_rows(path)]
    assert {row["date"] for row in rows} == {"2020-01-02"}
    assert {row["split"] for row in rows} == {"validation"}


def gathering_rows(path) -> list[dict]:
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def test_where_every_text_is_repeated_the_least_repeated_one_is_held_out_with_a_warning(tmp_path, caplog):
    given = [near(words(family), copy) for family in range(8) for copy in range(4)]
    counts = gather(Given(given), tmp_path, 0.5, 1, Problems(), 0.5)
    assert counts["validation"]["documents"] >= 1
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("data.validation_fraction: each document that was drawn repeats others")


def records(path, with_text: int, without: int) -> None:
    lines = [{"text": f"text {n} " * 9} for n in range(with_text)]
    lines += [{"body": f"text {n}", "lang": "en"} for n in range(without)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_most_records_without_the_text_key_stop_the_run(make_data, tmp_path):
    records(tmp_path / "a.jsonl", 13, 87)
    make = functools.partial(make_data, source=TextFiles(str(tmp_path / "a.jsonl")), data_dir=tmp_path / "data")
    with pytest.raises(ValueError, match=r"data\.source\.text_key=text") as error:
        make().prepare()
    assert str(error.value) == (
        "data.source.text_key=text (a record has body, lang): 87.0% of 100 records were skipped "
        "(87 x no column 'text'); fix that, or set data.most_skipped=0.87 to read the rest"
    )
    other = TextFiles(str(tmp_path / "a.jsonl"), text_key="content")
    with pytest.raises(ValueError, match=r"\(100 x no column 'content'\); fix that$"):  # there is no rest
        make(source=other).prepare()
    data = make(most_skipped=0.87)
    data.prepare()
    assert data.manifest["train"]["documents"] + data.manifest["validation"]["documents"] == 13
    records(tmp_path / "a.jsonl", 60, 40)
    make().prepare()


def test_a_parquet_file_without_the_column_counts_its_rows(make_data, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"content": ["x"] * 90, "url": ["y"] * 90}), tmp_path / "a.parquet")
    records(tmp_path / "b.jsonl", 30, 0)
    with pytest.raises(ValueError, match=r"text_key=text \(a record has content, url\): 75\.0% of 120 records"):
        make_data(source=TextFiles(str(tmp_path)), data_dir=tmp_path / "data").prepare()


@pytest.mark.parametrize("value", [0, 1.5, "most", True])
def test_most_skipped_is_a_share(make_data, value):
    with pytest.raises(ValueError, match=rf"data\.most_skipped={shown(value)}: give a number above 0 and at most 1"):
        make_data(most_skipped=value)


def test_a_run_of_an_earlier_version_goes_on_with_its_own_split(make_data, corpus, tmp_path, monkeypatch):
    """Earlier versions drew by hash alone, and told files apart by path and time."""
    make = functools.partial(make_data, data_dir=tmp_path / "data")
    monkeypatch.setattr("data_pipeline.tokens.datamodule.FORMATS", {"documents": 1, "blocks": 1})
    earlier = make()
    earlier.identified_by = EARLIER
    earlier.prepare()
    monkeypatch.undo()
    resumed = make()
    resumed.resumed = earlier.fingerprint
    resumed.prepare()
    assert resumed.fingerprint == earlier.fingerprint
    new = make()
    new.prepare()
    assert new.fingerprint != earlier.fingerprint
    again = make()
    again.resumed = new.fingerprint
    again.prepare()
    assert again.fingerprint == new.fingerprint
    before = sorted(path.name for path in (tmp_path / "data").iterdir())
    other = make(validation_fraction=0.3)
    other.resumed = new.fingerprint
    with pytest.raises(ValueError, match=rf"the text is not what this run began with \(blocks {new.fingerprint}"):
        other.prepare()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == before, "refused before it is prepared"
