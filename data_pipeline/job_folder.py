"""Output folder of a job: records the job's settings, and is locked by one run at a time."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from common.atomic_files import write_atomic
from common.moved_targets import with_current_targets
from common.settings import differences
from data_pipeline.fingerprint import MANIFEST

SETTINGS = "settings.json"


class JobFolder:
    """The folder `path`, given by the setting `<group>.output`.

    `settings.json` holds the settings it was started with. `manifest.json`, written last, marks it as complete.
    """

    def __init__(self, path: str | Path, group: str) -> None:
        self.path, self.group = Path(path).expanduser(), group
        self.manifest = self.path / MANIFEST

    @property
    def key(self) -> str:
        """Setting and value, as error messages name it."""
        return f"{self.group}.output={self.path}"

    def _refused(self, error: OSError) -> ValueError:
        return ValueError(f"{self.key}: {error.strerror}; give a folder to write to")

    def begin(self, settings: dict, earlier: dict | None = None) -> None:
        """Create the folder, or check that it was started with the same settings.

        Args:
            earlier: the settings as earlier versions wrote them, with files identified by path, size and time.

        Raises:
            ValueError: a setting differs (the line names it), the folder holds something else, or access is denied.
        """
        path = self.path / SETTINGS
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path / ".begin.lock"):  # tasks may start together
                if not path.exists():
                    if any(not present.name.startswith(".") for present in self.path.iterdir()):
                        raise ValueError(f"{self.key} holds something else: give a new or empty folder")
                    write_atomic(path, json.dumps(settings, indent=1) + "\n")
            began = with_current_targets(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise self._refused(error) from error
        given = (json.loads(json.dumps(form)) for form in (settings, earlier or settings))
        differing = min((differences(began, form) for form in given), key=len)
        if differing:
            key, (before, now) = min(differing.items())
            raise ValueError(
                f"{self.group}.{key} differs from what {self.key} was started with "
                f"({_short(before)}, now {_short(now)}): set it back, or give a new {self.group}.output"
            )

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Lock the folder, or one task's part of it.

        Raises:
            ValueError: another process holds the lock.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._refused(error) from error
        lock = FileLock(self.path / f".{name}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(f"{self.key} is in use by another run: wait for it, or give another folder") from None
        except OSError as error:
            raise self._refused(error) from error
        try:
            yield
        finally:
            lock.release()


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
