"""Data sets from a folder of copies, and the error if neither it nor the Hub has one.

The copy of configuration `name` of the data set `path` (a task's `dataset_name` and `dataset_path`) is in
`FOLDER/path/name`. Without a name it is in `FOLDER/path`, or in its subfolder `data` or the one with the name of the
data set, the usual layouts of Hub repositories, so that a downloaded repository is a copy. It is the output of
`Dataset.save_to_disk`, or files `SPLIT.parquet`, `SPLIT-00000-of-00002.parquet`, ..., or the same in .jsonl, or
`SPLIT/0000.parquet` as in the Hub's branch refs/convert/parquet. A metric that a task loads from the Hub, such as
`code_eval`, is in `FOLDER/evaluate-metric/code_eval`.
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import evaluate
import pyarrow
from pyarrow import parquet

from common.hub import use_cache_where_unreachable

SUFFIXES = (".parquet", ".jsonl")
SPLITS = ("train", "validation", "test", "dev")  # names of folders that hold one


class DataNotFound(Exception):
    """A data set that is not available.

    Attributes:
        dataset: its name.
        looked: folders searched for a copy.
        reason: why the download failed.
    """

    def __init__(self, dataset: str, looked: list[Path], reason: str) -> None:
        super().__init__(reason)
        self.dataset, self.looked, self.reason = dataset, looked, reason


class DataCopies:
    """Answers `datasets.load_dataset` and `evaluate.load` from a folder first.

    After one failed connection the Hub is not tried again.

    Args:
        folder: the folder of copies, or None.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.silent: str | None = None
        self.download, self.download_metric = datasets.load_dataset, evaluate.load

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace `datasets.load_dataset` by `load`, and `evaluate.load` by `load_metric`, within the block."""
        datasets.load_dataset, evaluate.load = self.load, self.load_metric
        try:
            yield
        finally:
            datasets.load_dataset, evaluate.load = self.download, self.download_metric

    def load(self, path: str, name: str | None = None, **settings: Any) -> Any:
        """Load the data set from its copy, or with `datasets.load_dataset`.

        Raises:
            DataNotFound: if there is no copy and no download.
            ValueError: if the copy cannot be read.
        """
        folders = [] if "data_files" in settings else self.folders(path, name or settings.get("data_dir"))
        for folder in folders:
            if holds_data(folder):
                found = read(folder)
                return found[settings["split"]] if settings.get("split") else found
        title = f"{path} ({name})" if name else path
        with self.asking_the_hub(title, folders):
            return self.download(path, name, **settings)

    def load_metric(self, path: str, *arguments: Any, **settings: Any) -> Any:
        """Load the metric from its copy, or with `evaluate.load`.

        Raises:
            DataNotFound: if there is no copy and no download.
        """
        folder = self.folder / "evaluate-metric" / path if self.folder is not None else None
        if folder is not None and (folder / f"{path}.py").is_file():
            return self.download_metric(str(folder), *arguments, **settings)
        with self.asking_the_hub(f"the metric {path}", [] if folder is None else [folder]):
            return self.download_metric(path, *arguments, **settings)

    @contextlib.contextmanager
    def asking_the_hub(self, title: str, looked: list[Path]) -> Iterator[None]:
        """Raise DataNotFound for what a download within the block raises, or at once after a failed connection."""
        if self.silent is not None:
            raise DataNotFound(title, looked, self.silent)
        use_cache_where_unreachable()
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, ConnectionError):
                self.silent = reason
            raise DataNotFound(title, looked, reason) from error

    def folders(self, path: str, name: str | None) -> list[Path]:
        """List the folders in which a copy may be."""
        if self.folder is None:
            return []
        place = self.folder / path
        return [place / name] if name else [place, place / "data", place / place.name]


def holds_data(folder: Path) -> bool:
    """Return whether the folder itself holds a data set."""
    return (folder / "dataset_dict.json").is_file() or bool(split_files(folder))


def split_files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each split, in order."""
    found = defaultdict(list)
    for file in sorted(folder.glob("*")):
        if file.suffix in SUFFIXES and file.is_file():
            found[file.stem.split("-")[0]].append(file)
    for split in SPLITS:
        found[split] += sorted((folder / split).glob("[0-9]*.parquet"))
    return {split: files for split, files in found.items() if files}


def read(folder: Path) -> datasets.DatasetDict:
    """Read the splits of a copy into memory, because tasks would otherwise write their caches next to it.

    Raises:
        ValueError: if a file cannot be read.
    """
    if (folder / "dataset_dict.json").is_file():
        try:
            return datasets.load_from_disk(str(folder), keep_in_memory=True)
        except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
            raise ValueError(f"{folder} cannot be read as a saved data set: {first_line(error)}") from error
    splits = split_files(folder).items()
    return datasets.DatasetDict(
        {split: datasets.concatenate_datasets([read_file(file) for file in files]) for split, files in splits}
    )


def read_file(path: Path) -> datasets.Dataset:
    try:
        if path.suffix == ".parquet":
            return datasets.Dataset(parquet.read_table(path))
        lines = path.read_text(encoding="utf-8").splitlines()
        return datasets.Dataset.from_list([json.loads(line) for line in lines if line.strip()])
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
