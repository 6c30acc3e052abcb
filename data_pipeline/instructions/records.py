"""Records of instructions: from JSON, Parquet, a folder of `datasets`, or the Hub."""

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.exceptions import DatasetsError

from common.hub import is_path, use_cache_where_unreachable
from common.settings import NO_VALUE, SettingError
from data_pipeline.identity import EARLIER, SAMPLE, file_identity
from data_pipeline.sources.json_lines import COMPRESSED, open_bytes

FIELDS = ("instruction", "input", "output", "messages")
JSON_ENDINGS = tuple(kind + end for kind in (".json", ".jsonl") for end in ("", *COMPRESSED))
ENDINGS = (*JSON_ENDINGS, ".parquet")
SAVED = ("state.json", "dataset_dict.json")  # files that `save_to_disk` writes into a folder
RECORDS_AT_ONCE = 1024
REASON_LENGTH = 200


@dataclass(frozen=True)
class Record:
    """One record, its location for error messages, and `columns`, the column names of fields that differ."""

    where: str
    values: dict[str, Any]
    columns: Mapping[str, str]

    def has(self, name: str) -> bool:
        """Return whether the record has a value for a field."""
        return self.values.get(self.columns.get(name, name)) is not None

    def text(self, name: str) -> str:
        """Return the text of a field; raise ValueError if the record has none."""
        column = self.columns.get(name, name)
        if column not in self.values:
            chat = ", or use data.template=chat" if self.has("messages") else ""
            raise ValueError(
                f"{self.where} has no field {column!r} (it has {', '.join(self.values) or 'none'}): "
                f"name the one that is meant with data.columns.{name}{chat}"
            )
        return _text(self.values[column], f"{self.where}: the field {column!r}")

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation up to its last answer; raise ValueError if there is none."""
        column = self.columns.get("messages", "messages")
        found = self.values[column]
        if not isinstance(found, list):
            raise ValueError(f"{self.where}: {column!r} is {type(found).__name__}, not a list of messages")
        messages = [self._message(number, message) for number, message in enumerate(found, 1)]
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages)) or "no message"
            raise ValueError(f"{self.where}: {column!r} has no message of the role 'assistant' (it has {roles})")
        return messages[: answers[-1] + 1]

    def _message(self, number: int, message: Any) -> dict[str, str]:
        place = f"{self.where}, message {number}"
        if not isinstance(message, dict):
            raise ValueError(f"{place}: {type(message).__name__}, not an object with role and content")
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(f"{place} has no {key!r} (it has {', '.join(message) or 'nothing'})")
        return {key: _text(message[key], f"{place}: the {key}") for key in ("role", "content")}

    def canonical(self) -> bytes:
        """Return the bytes to hash a record by: its fields under their standard names."""
        fields = {name: self.values.get(self.columns.get(name, name)) for name in FIELDS}
        return json.dumps(fields, sort_keys=True, default=str).encode()


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place} is {'null' if value is None else type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{place} is not UTF-8 (it has a lone surrogate)") from None
    return value


@dataclass(frozen=True)
class Records:
    """Records of a file (JSON list, JSON lines, or Parquet), a `datasets` folder, or a data set on the Hub.

    `split` and `revision` apply to the Hub's data sets, `split` also to folders with several. `columns` maps
    instruction, input, output and messages to column names. Records are counted from 1.
    """

    path: str
    split: str = "train"
    revision: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [name for name in self.columns if name not in FIELDS]
        if unknown:
            fix = f"give names for {', '.join(FIELDS)}"
            raise SettingError(f"data.columns.{unknown[0]}", NO_VALUE, fix, "is not a field")

    def identity(self, by: str = SAMPLE) -> dict:
        """Return the settings and the content of local files.

        Args:
            by: how files are identified, see `data_pipeline.identity.file_identity`.

        Raises:
            ValueError: the path is missing or has an unknown ending.
        """
        settings = {"path": self.path, "split": self.split, "revision": self.revision, "columns": dict(self.columns)}
        local = self._local()
        if local is None:
            return settings
        files = [local] if local.is_file() else sorted(path for path in local.rglob("*") if path.is_file())
        if by != EARLIER:
            del settings["path"]  # the files may be moved
        return {**settings, "files": file_identity(files, by)}

    def __iter__(self) -> Iterator[Record]:
        """Yield the records in order; raise ValueError, naming `data.path`, if they cannot be read."""
        place, number = f"data.path={self.path}", 0
        for number, values in enumerate(self._values(), 1):
            where = f"{place}: record {number}"
            if not isinstance(values, dict):
                raise ValueError(f"{where} is {type(values).__name__}, not an object with fields")
            yield Record(where, values, self.columns)
        if number == 0:
            raise ValueError(f"{place}: there is no record in it")

    def _local(self) -> Path | None:
        """Return the file or folder, or None for a name on the Hub."""
        path = Path(self.path).expanduser()
        named = is_path(self.path) or path.name.endswith(ENDINGS)
        if not path.exists():
            if named:
                raise SettingError("data.path", self.path, "give a file or a folder", "does not exist")
            return None
        if path.is_file() and not path.name.lower().endswith(ENDINGS):
            fix = f"give a file that ends in {', '.join(ENDINGS)}, a folder of datasets, or a name on the Hub"
            raise SettingError("data.path", self.path, fix)
        return path

    def _values(self) -> Iterator[Any]:
        path = self._local()
        if path is None or path.is_dir():
            return iter(self._data_set(path))
        return self._parquet(path) if path.name.lower().endswith(".parquet") else self._json(path)

    def _json(self, path: Path) -> Iterator[Any]:
        """Yield the items of a JSON list, or of JSON lines."""
        try:
            with open_bytes(path) as stream:
                content = stream.read().removeprefix(codecs.BOM_UTF8)
            if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise ValueError("it is UTF-16, write it as UTF-8")
            if content.lstrip().startswith(b"["):
                yield from json.loads(content)
                return
        except (OSError, ValueError, RecursionError) as error:
            raise SettingError("data.path", self.path, _reason(error), "cannot be read as JSON") from error
        for number, line in enumerate(content.splitlines(), 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    problem = f"has a line {number} that is not JSON"
                    raise SettingError("data.path", self.path, _reason(error), problem) from error

    def _parquet(self, path: Path) -> Iterator[dict]:
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(RECORDS_AT_ONCE):
                    yield from batch.to_pylist()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise SettingError("data.path", self.path, _reason(error), "cannot be read as Parquet") from error

    def _data_set(self, folder: Path | None) -> datasets.Dataset:
        saved = folder is not None and any((folder / name).exists() for name in SAVED)
        try:
            if saved:
                found = datasets.load_from_disk(folder)
            else:
                use_cache_where_unreachable()
                found = datasets.load_dataset(str(folder or self.path), split=self.split, revision=self.revision)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, DatasetsError, pa.ArrowException) as error:
            what = "cannot be read" if folder else "is not a file or folder here, nor could it come from the Hub"
            raise SettingError("data.path", self.path, _reason(error.__cause__ or error), what) from error
        if isinstance(found, datasets.DatasetDict):
            if self.split not in found:
                raise SettingError(
                    "data.split", self.split, f"give one of {', '.join(found)}", f"is not in data.path={self.path}"
                )
            return found[self.split]
        return found


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:REASON_LENGTH]
