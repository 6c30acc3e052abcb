import gzip
import json
import shutil

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.instructions.records import Record, Records

ROWS = [{"instruction": f"ask {n}", "input": "", "output": f"say é {n}"} for n in range(5)]
CHAT = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}]


def record(values, columns=None):
    return Record("data.path=x: record 1", values, columns or {})


def save(folder, form, rows):
    path = folder / f"rows.{form}"
    lines = "\n".join(map(json.dumps, rows)) + "\n\n"
    if form == "json":
        path.write_text(json.dumps(rows, indent=1))
    elif form == "bom.json":
        path.write_text("\ufeff" + json.dumps(rows), encoding="utf-8")
    elif form in ("jsonl", "lines.json"):
        path.write_text(lines)
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif form == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif form == "saved_splits":
        datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(path)
    return path


FORMS = ["json", "bom.json", "jsonl", "lines.json", "jsonl.gz", "parquet", "saved", "saved_splits"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_records(tmp_path, form):
    path = save(tmp_path, form, ROWS)
    records = list(Records(str(path)))
    assert [record.values for record in records] == ROWS
    assert [record.text("output") for record in records] == [row["output"] for row in ROWS]
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    (chat,) = Records(str(save(tmp_path, form, CHAT)))
    assert chat.messages() == CHAT[0]["messages"]


def test_a_folder_of_plain_files_is_read_as_a_data_set(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "clone"
    folder.mkdir()
    save(folder, "json", ROWS)
    (folder / "LICENSE").write_text("free")
    assert [record.values for record in Records(str(folder))] == ROWS


def test_columns_may_have_other_names():
    columns = {"instruction": "question", "output": "answer"}
    renamed = record({"question": "why?", "answer": "so"}, columns)
    assert renamed.text("instruction") == "why?"
    assert renamed.text("output") == "so"
    assert not renamed.has("input")
    assert renamed.canonical() == record({"instruction": "why?", "output": "so"}).canonical()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "[]", r"data\.path=.*a\.json: there is no record in it"),
        ("a.jsonl", "\n\n", r"there is no record in it"),
        ("a.json", '[{"a": 1}', r"data\.path=.*cannot be read as JSON: Expecting"),
        ("a.jsonl", '{"a": 1}\n{"a":\n', r"data\.path=.*line 2 that is not JSON"),
        ("a.json", '["text"]', r"record 1 is str, not an object"),
        ("a.parquet", "no parquet", r"data\.path=.*cannot be read as Parquet"),
        ("a.jsonl.gz", "no gzip", r"data\.path=.*cannot be read as JSON"),
        ("a.json", "[]".encode("utf-16"), r"data\.path=.*it is UTF-16"),
        ("a.csv", "a,b", r"data\.path=.*a\.csv: give a file that ends in \.json"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_in_one_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words) as error:
        list(Records(str(tmp_path / name)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["./nothing", "/no/such/folder", "nothing.json", "a/b/c"])
def test_a_missing_file_is_not_looked_for_on_the_hub(path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(ValueError, match=f"^data.path={path} does not exist: give a file or a folder$"):
        Records(path).identity()


def test_a_name_that_the_hub_does_not_give_is_told(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach it\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    records = Records("someone/alpaca")
    assert "files" not in records.identity()
    with pytest.raises(ValueError, match=r"^data\.path=someone/alpaca is not a file .* the Hub: Couldn't reach it$"):
        list(records)


def test_a_split_that_is_not_there_is_told_with_those_that_are(tmp_path):
    path = save(tmp_path, "saved_splits", ROWS)
    with pytest.raises(ValueError, match=r"^data\.split=test is not in data\.path=.*: give one of train$"):
        list(Records(str(path), split="test"))


def test_an_empty_folder_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"^data\.path=.* cannot be read: .*data files") as error:
        list(Records(str(tmp_path)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"prompt": "a", "output": "b"},
            r"record 1 has no field 'instruction' \(it has prompt, output\).*data\.columns",
        ),
        ({"instruction": 3}, r"record 1: the field 'instruction' is int, not text"),
        ({"instruction": None}, r"record 1: the field 'instruction' is null, not text"),
        ({"instruction": "\ud800"}, r"record 1: the field 'instruction' is not UTF-8"),
        ({"messages": []}, r"record 1 has no field 'instruction' \(it has messages\).*data\.template=chat"),
    ],
)
def test_a_record_without_its_fields_is_named(row, words):
    with pytest.raises(ValueError, match=words):
        record(row).text("instruction")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ({"role": ["user"], "content": ["a"]}, r"'messages' is dict, not a list of messages"),
        (["hi"], r"message 1: str, not an object with role and content"),
        ([{"from": "human", "value": "a"}], r"message 1 has no 'role' \(it has from, value\)"),
        ([{"role": "user", "content": None}], r"message 1: the content is null, not text"),
        ([{"role": "user", "content": "a"}], r"no message of the role 'assistant' \(it has user\)"),
        ([], r"no message of the role 'assistant' \(it has no message\)"),
    ],
)
def test_a_conversation_that_is_none_is_named(messages, words):
    with pytest.raises(ValueError, match=words):
        record({"messages": messages}).messages()


def test_what_follows_the_last_answer_is_left_out():
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert record({"messages": messages}).messages() == messages[:3]


def test_a_field_that_does_not_exist_cannot_be_named():
    with pytest.raises(ValueError, match=r"^data\.columns\.prompt is not a field"):
        Records("x", columns={"prompt": "question"})
