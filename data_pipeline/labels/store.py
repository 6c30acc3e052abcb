"""Paid answers, stored for every later corpus with the same documents."""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from common.atomic_files import write_atomic
from common.settings import SettingError
from data_pipeline.fingerprint import fingerprint
from data_pipeline.labels.rubric import Rubric
from data_pipeline.rewriting.backends import Answer
from data_pipeline.rewriting.journal import Journal

log = logging.getLogger(__name__)


class Store:
    """Answers of one model to one question, in a folder under `path`; one process holds it at a time.

    The folder's name is a hash of all that shapes an answer but the text: prompt, categories and criteria, sampling,
    model and its `extra` settings. An answer's key is the excerpt's hash and the attempt's number. No text of a
    document is stored. Each answer is written immediately, and a torn last line does no harm.
    """

    def __init__(self, path: str, rubric: Rubric, model: str, extra: dict) -> None:
        question = {"messages": rubric.messages("$text"), "model": model, "extra": extra}
        sampling = {key: getattr(rubric, key) for key in ("temperature", "top_p", "max_tokens")}
        self.folder = Path(path).expanduser() / fingerprint({**question, **sampling})
        self._about = json.dumps({**question, **sampling}, indent=1) + "\n"
        self._journal = Journal(self.folder / "answers.jsonl")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the store; wait while another run holds it, since that one may pay for the same documents.

        Raises:
            ValueError: the store cannot be written to.
        """
        try:
            write_atomic(self.folder / "question.json", self._about)
            lock = FileLock(self.folder / ".lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                log.info("corpus.cleaning.labels.store: another run labels with the same question: waiting for its end")
                lock.acquire()
        except OSError as error:
            raise SettingError(
                "corpus.cleaning.labels.store", self.folder.parent, f"{error.strerror}; give a folder to write to"
            ) from error
        try:
            yield
        finally:
            self._journal.close()
            lock.release()

    def answers(self, texts: Iterable[str], attempts: int) -> dict[str, tuple[Answer, str]]:
        """Return {key: (answer, payer)} of the stored answers for these texts."""
        wanted = {self.key(text, attempt) for text in texts for attempt in range(attempts)}
        found = (record for record in self._journal.read() if record["key"] in wanted)
        return {
            record["key"]: (Answer(*(record[name] for name in Answer.__slots__)), record["payer"]) for record in found
        }

    def put(self, key: str, answer: Answer, payer: str) -> None:
        """Store an answer; raise OSError if the disk refuses it."""
        self._journal.append({"key": key, "payer": payer, **{name: getattr(answer, name) for name in Answer.__slots__}})

    def sync(self) -> None:
        """Flush stored answers to the disk."""
        self._journal.sync()

    @staticmethod
    def key(text: str, attempt: int) -> str:
        """Return the key of an answer."""
        return f"{hashlib.sha256(text.encode()).hexdigest()[:32]}-{attempt}"
