"""Components of a mixture: the Parquet files of each, and a prepared folder that links them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from common.atomic_files import is_full_disk
from common.checksums import checksum, size_of
from common.settings import NO_VALUE, SettingError, check_number
from data_pipeline.documents import SPLITS, shards
from data_pipeline.fingerprint import MANIFEST, read_manifest
from data_pipeline.identity import SAMPLE, file_identity
from data_pipeline.progress import Stage

COMPONENT_KEYS = ("path", "categories", "upsample", "max_epochs")
NAME = re.compile(r"\w[\w.-]*")
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Component:
    """Text of one kind: Parquet files by split, an upsampling factor for use without weights, and an epoch cap.

    `written`: for files of a corpus or a rewriting, the sizes and checksums that their job recorded.
    """

    name: str
    files: dict[str, list[Path]]
    written: dict[Path, dict]
    upsample: float | None
    max_epochs: float | None

    def identity(self, by: str = SAMPLE) -> dict:
        """Return the component's files by split, identified as `by` says (`identity.file_identity`)."""
        return {split: file_identity(self.files[split], by) for split in SPLITS}


def check_components(corpus: str | None, given: Mapping | None, max_epochs: float | None) -> None:
    """Raise ValueError, naming the key, for settings that cannot work regardless of the files on disk."""
    if given is not None and not isinstance(given, Mapping):
        raise SettingError("data.components", given, "give {name: {path: folder}, ...}")
    if not given and corpus is None:
        fix = "give data.corpus=FOLDER (that job=corpus wrote), or 'data.components={name: {path: FOLDER}, ...}'"
        raise SettingError("data.components", NO_VALUE, fix, "names no text")
    check_number("data.max_epochs", max_epochs, above=0, null=True)
    for name, settings in (given or {}).items():
        key = f"data.components.{name}"
        if not NAME.fullmatch(str(name)):
            raise ValueError(f"{key}: give it a name of letters, digits, _, - and dots: metrics are named by it")
        if settings is None:
            if corpus is None:
                problem = "leaves out a category of data.corpus, which is not given"
                raise SettingError(key, None, "give its path", problem)
            continue
        if not isinstance(settings, Mapping):
            raise SettingError(key, settings, "give {path: folder}")
        for setting in settings:
            if setting not in COMPONENT_KEYS:
                fix = f"a component has {', '.join(COMPONENT_KEYS)}"
                raise SettingError(f"{key}.{setting}", NO_VALUE, fix, "is unknown")
        if settings.get("path") is None and corpus is None:
            raise SettingError(f"{key}.path", NO_VALUE, "give the folder of its text", "is missing")
        categories, upsample = settings.get("categories"), settings.get("upsample")
        if categories is not None and (isinstance(categories, str) or not categories):
            raise SettingError(f"{key}.categories", categories, "give a list of names, or null for all")
        check_number(f"{key}.upsample", upsample, above=0, null=True)
        check_number(f"{key}.max_epochs", settings.get("max_epochs"), above=0, null=True)


def find_components(corpus: str | None, given: Mapping | None, max_epochs: float | None) -> list[Component]:
    """Return the components of checked settings: the corpus's categories, then the given ones.

    A component without a path is the corpus's category of that name; null drops that category.

    Raises:
        ValueError: a folder is missing, unfinished, or without text.
    """
    given = dict(given or {})
    wanted: list[tuple[str, str, Mapping]] = []  # name, key, settings with a path
    if corpus is not None:
        found = categories_of(Path(corpus).expanduser(), "data.corpus")
        for category in found:
            settings = given.get(category, {})
            if settings is not None and settings.get("path") is None:
                if settings.get("categories") is not None:
                    fix = f"{category} is one category"
                    raise SettingError(f"data.components.{category}.categories", NO_VALUE, fix, "needs a path")
                wanted.append((category, "data.corpus", {**settings, "path": corpus, "categories": [category]}))
        for name, settings in given.items():
            if name not in found and (settings is None or settings.get("path") is None):
                problem = f"is not a category of data.corpus={corpus} (it has {', '.join(found)})"
                fix = f"give data.components.{name}.path, or one of these names"
                raise SettingError(f"data.components.{name}", NO_VALUE, fix, problem)
    wanted += [(n, f"data.components.{n}.path", s) for n, s in given.items() if s and s.get("path") is not None]
    if not wanted:
        problem = f"leaves out every category of data.corpus={corpus}"
        raise SettingError("data.components", NO_VALUE, "keep one", problem)
    return [
        Component(
            str(name),
            text_files(Path(settings["path"]).expanduser(), settings.get("categories"), key),
            written_files(Path(settings["path"]).expanduser()),
            settings.get("upsample"),
            max_epochs if settings.get("max_epochs") is None else settings["max_epochs"],
        )
        for name, key, settings in wanted
    ]


def categories_of(path: Path, key: str) -> list[str]:
    """Return the categories of a finished corpus; raise ValueError, naming the key, for any other folder."""
    if not (path / "documents").is_dir():
        found = "no such folder" if not path.exists() else "no documents/ in it"
        raise SettingError(key, path, f"{found}; give a folder that job=corpus wrote")
    _check_finished(path, key)
    folders = (path / "documents").iterdir()
    return sorted(folder.name for folder in folders if any(shards(folder, split) for split in SPLITS))


def text_files(path: Path, categories: Iterable[str] | None, key: str) -> dict[str, list[Path]]:
    """Return the Parquet files by split of a corpus, a rewriting, or any folder of train-*.parquet.

    Raises:
        ValueError: there are none, or the corpus or rewriting is unfinished; the line names the key.
    """
    if not path.is_dir():
        raise SettingError(key, path, "give one with a corpus, a rewriting or train-*.parquet", "is not a folder")
    folders = [path]
    if (path / "documents").is_dir():
        found = categories_of(path, key)
        missing = [category for category in categories or () if category not in found]
        if missing:
            raise SettingError(key, path, f"give some of {', '.join(found)}", f"has no category {missing[0]}")
        folders = [path / "documents" / category for category in categories or found]
    elif categories is not None:
        raise SettingError(key, path, "give a corpus, or leave categories out", "has no categories")
    elif (path / "shards").is_dir():
        _check_finished(path, key)
        folders = [path / "shards"]
    files = {split: [file.resolve() for folder in folders for file in shards(folder, split)] for split in SPLITS}
    _check_complete(path, folders, {file for split in SPLITS for file in files[split]}, key)
    if not files["train"]:
        where = folders[0] if len(folders) == 1 else path
        raise ValueError(f"{key}: no train-*.parquet in {where}; give a corpus, a rewriting or such files")
    return files


def _check_finished(path: Path, key: str) -> None:
    if not (path / MANIFEST).is_file():
        raise SettingError(key, path, "run the job that writes it to its end", f"has no {MANIFEST}")


def written_files(path: Path) -> dict[Path, dict]:
    """Return the size and checksum of each file of a corpus or a rewriting, as its job recorded them.

    Empty for earlier versions, which recorded none.
    """
    if not (path / MANIFEST).is_file():
        return {}
    manifest = read_manifest(path)
    listed = [entry for name in ("files", "shards") for entry in manifest.get(name, ()) if isinstance(entry, dict)]
    return {(path / entry["file"]).resolve(): entry["written"] for entry in listed if "written" in entry}


def _check_complete(path: Path, folders: list[Path], found: set[Path], key: str) -> None:
    """Raise ValueError, naming the file, if a file that the job wrote is missing or has another size."""
    chosen = {folder.resolve() for folder in folders}
    for file, written in written_files(path).items():
        size = size_of(file)
        if file.parent in chosen and (file not in found or size != written["bytes"]):
            what = "is missing" if size is None else f"is damaged ({size} bytes of {written['bytes']})"
            raise SettingError(key, path, f"{file} {what}: copy it again, or run the job that wrote it again")


def gather_files(files: dict[str, list[Path]], written: dict[Path, dict], folder: Path) -> dict:
    """Make `folder` a documents folder of links to these files; return the documents and bytes of each split.

    A row's `split` column overrides its file's name, so that a rewriting of a held-out document stays held out. Files
    with rows of another split are rewritten.

    Raises:
        ValueError: a file cannot be read, or does not match its checksum in `written`.
    """
    places = _Places(folder)
    with Stage("counting text", "B") as stage:
        for split in SPLITS:
            for path in files[split]:
                if path in written and checksum(path) != written[path]["sha256"]:
                    raise ValueError(f"{path} is damaged (it does not match its checksum): write it again")
                try:
                    counts = _count(path, split)
                    stage.advance(sum(size for _, size in counts.values()))
                    if set(counts) <= {split}:
                        places.next(split).symlink_to(path)
                    else:
                        _divide(path, split, places)
                except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                    if is_full_disk(error):
                        raise
                    reason = str(error).partition("\n")[0][:200]
                    raise ValueError(f"{path} cannot be read ({reason}): write it again, or leave it out") from error
                places.add(counts)
    return {**places.totals, "seconds": round(stage.seconds, 3)}


def join_folders(folders: list[Path], folder: Path) -> dict:
    """Make `folder` a documents folder of links into several; return the documents and bytes of each split."""
    places = _Places(folder)
    for joined in folders:
        for split in SPLITS:
            for path in shards(joined, split):
                places.next(split).symlink_to(path.resolve())
        counts = read_manifest(joined)
        places.add({split: (counts[split]["documents"], counts[split]["bytes"]) for split in SPLITS})
    return places.totals


class _Places:
    """Numbered file names of a documents folder, and the counts of its content."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.totals = {split: {"documents": 0, "bytes": 0} for split in SPLITS}
        self._files = dict.fromkeys(SPLITS, 0)

    def next(self, split: str) -> Path:
        self._files[split] += 1
        return self.folder / f"{split}-{self._files[split] - 1:06d}.parquet"

    def add(self, counts: dict[str, tuple[int, int]]) -> None:
        for split, (documents, size) in counts.items():
            self.totals[split]["documents"] += documents
            self.totals[split]["bytes"] += size


def _batches(path: Path, split: str) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
    """Yield a file's rows in batches, and for each row whether it is held out."""
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if "text" not in names:
            raise pa.ArrowInvalid(f"no column text; it has {', '.join(names)}")
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=[name for name in ("text", "split") if name in names]):
            own = batch.column("split") if "split" in names else pa.nulls(len(batch), pa.string())
            yield batch, pc.equal(pc.fill_null(own, split), "validation")


def _count(path: Path, split: str) -> dict[str, tuple[int, int]]:
    """Return (documents, UTF-8 bytes) of each split that the file has rows of."""
    counts: dict[str, tuple[int, int]] = {}
    for batch, held_out in _batches(path, split):
        if batch.column("text").null_count:
            raise pa.ArrowInvalid("a row without text")
        lengths = pc.binary_length(batch.column("text"))
        for name, mask in (("train", pc.invert(held_out)), ("validation", held_out)):
            chosen = lengths.filter(mask)
            if len(chosen):
                documents, size = counts.get(name, (0, 0))
                counts[name] = documents + len(chosen), size + pc.sum(chosen).as_py()
    return counts


def _divide(path: Path, split: str, places: _Places) -> None:
    """Write a file's rows to one file per split."""
    writers: dict[str, pq.ParquetWriter] = {}
    try:
        for batch, held_out in _batches(path, split):
            for name, mask in (("train", pc.invert(held_out)), ("validation", held_out)):
                rows = batch.filter(mask)
                if len(rows):
                    if name not in writers:
                        writers[name] = pq.ParquetWriter(places.next(name), rows.schema, compression="zstd")
                    writers[name].write_batch(rows)
    finally:
        for writer in writers.values():
            writer.close()
