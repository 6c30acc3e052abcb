"""The result folder of a measurement, and the identity of the measured weights."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from common.settings import NO_VALUE, SettingError
from data_pipeline.identity import WHOLE, file_identity
from lit_modules import checkpoints
from lit_modules.launching import run_folder


@dataclass(frozen=True)
class ResultFolder:
    """Where results of a checkpoint go.

    Attributes:
        folder: folder for the results; `make` creates it.
        run: folder of the checkpoint's run, or None.
    """

    folder: Path
    run: Path | None

    def make(self) -> None:
        """Create the folder.

        Raises:
            ValueError: if it cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot be written ({error.strerror or error})"
            raise SettingError("output", self.folder, "give another folder", problem) from error


def result_folder_of(cfg: DictConfig) -> ResultFolder:
    """Return `result_folder` for `cfg.checkpoint` and `cfg.output`."""
    return result_folder(str(cfg.checkpoint), None if cfg.output is None else str(cfg.output))


def result_folder(checkpoint: str, output: str | None) -> ResultFolder:
    """Return `evaluation/` in `output`, or else in the folder of the checkpoint's run.

    Raises:
        ValueError: if there is neither.
    """
    run = run_of_checkpoint(checkpoint)
    if output is not None:
        if Path(output).is_file():
            raise SettingError("output", output, "give a folder", "is a file")
        return ResultFolder(Path(output) / "evaluation", run)
    if run is None:
        fix = f"checkpoint={checkpoint} is not of a run, in whose folder results would go; give output=FOLDER"
        raise SettingError("output", NO_VALUE, fix, "is missing")
    return ResultFolder(run / "evaluation", run)


def run_of_checkpoint(checkpoint: str) -> Path | None:
    """Return the run folder of a checkpoint: the folder itself, or the parent of its export or `checkpoints/`."""
    path = Path(checkpoint)
    if not path.is_dir():
        return None
    for folder in (path, *path.absolute().parents[:2]):
        if (folder / run_folder.CONFIG).is_file() and (
            (folder / "checkpoints").is_dir() or (folder / "export").is_dir()
        ):
            return folder
    return None


def weights_identity(checkpoint: str) -> str:
    """Return an identity of the current weights: a digest of the folder's files, or the name on the Hub."""
    path = Path(checkpoint)
    if not path.is_dir():
        return checkpoint
    folders = [path]
    if run_of_checkpoint(checkpoint) == path:
        newest = checkpoints.newest_checkpoint(path / "checkpoints")
        folders = [folder for folder in (path / "export", newest) if folder is not None]
    files = (file for folder in folders for file in sorted(folder.resolve().rglob("*")) if file.is_file())
    return file_identity(files, WHOLE)
