"""Labels from the LLM: requested once per document, through the backends of rewriting."""

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from common.atomic_files import write_atomic
from data_pipeline.labels.rubric import Label, Rubric
from data_pipeline.labels.sample import Sampled, merged
from data_pipeline.labels.store import Store
from data_pipeline.rewriting.backends import Answer, Backend, BudgetSpent, Request
from data_pipeline.rewriting.runner import run_until_stopped

log = logging.getLogger(__name__)

LOG_EVERY_S = 30.0
SYNC_EVERY_S = 1.0  # at most this is lost on a power failure; the death of this process loses nothing
INVALID = "invalid_answer"


class LabelSample(PipelineStep):
    """Step that labels the sample in one task, and writes `folder`/labelled.jsonl and asked.json.

    A document is asked about up to `attempts` times until an answer has a valid label; without one it stays unlabelled,
    and is counted. The backend is started here, and only if there is something to ask.

    Raises:
        ValueError: the run ends early; the line names the key. Answers so far stay in `store`.
    """

    type = "LABELS"
    name = "label"

    def __init__(
        self, folder: str, tasks: int, size: int, rubric: Rubric, backend: Backend, store: str, attempts: int, seed: int
    ) -> None:
        super().__init__()
        self.folder, self.tasks, self.size = folder, tasks, size
        self.rubric, self.backend, self.store = rubric, backend, store
        self.attempts, self.seed = attempts, seed

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Merge the tasks' samples, ask, and write the results."""
        sample, seen = merged(str(Path(self.folder, "sample")), self.tasks, self.size)
        asking = Asking(self.rubric, self.backend, self.store, self.attempts, self.seed, self.folder)
        with self.track_time():
            labelled, counts = asking.labels(sample)
        lines = (json.dumps({**asdict(sampled), "label": asdict(label)}) for sampled, label in labelled)
        write_atomic(Path(self.folder, "labelled.jsonl"), "".join(f"{line}\n" for line in lines))
        asked = {"model": self.backend.model, "seen": seen, **counts}
        write_atomic(Path(self.folder, "asked.json"), json.dumps(asked, indent=1) + "\n")
        for key in ("labelled", "from_store", "requests", "tokens_in", "tokens_out"):
            self.stat_update(key, value=asked[key])
        return
        yield


class Asking:
    """Labels from the store, else from a backend. `folder`: for the log of a server that the backend starts."""

    def __init__(
        self, rubric: Rubric, backend: Backend, store: str, attempts: int, seed: int, folder: Path | str
    ) -> None:
        self.rubric, self.backend, self.seed, self.folder = rubric, backend, seed, Path(folder)
        self.attempts = attempts if rubric.temperature > 0 else 1  # at temperature 0 the answer would be the same
        self._place = store
        self._store = Store(store, rubric, backend.model, dict(getattr(backend, "extra", {})))
        self._payer = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:16]
        self._found: dict[str, Label | str] = {}  # by excerpt: its label, or the reason for having none
        self._counts: Counter[str] = Counter()
        self._spent: BudgetSpent | None = None
        self._of = 0
        self._logged = self._synced = time.monotonic()

    def labels(self, sample: list[Sampled]) -> tuple[list[tuple[Sampled, Label]], dict]:
        """Return the labelled documents, in order, and the counts of documents, answers and tokens.

        Raises:
            ValueError: the run ends early, as in `LabelSample`.
        """
        excerpts = list(dict.fromkeys(sampled.excerpt for sampled in sample))
        self._of = len(excerpts)
        with self._store.held():
            stored = self._store.answers(excerpts, self.attempts)
            self._counts["from_store"] = len(stored)
            unsettled = []
            for excerpt in excerpts:
                attempt = self._first_unanswered(excerpt, stored)
                if attempt is not None:
                    unsettled.append((excerpt, attempt))
            if unsettled:
                self._ask(unsettled, [answer for answer, payer in stored.values() if payer == self._payer])
        log.info("labels: %s", self._line())
        found = [(sampled, self._found[sampled.excerpt]) for sampled in sample]
        labelled = [(sampled, label) for sampled, label in found if isinstance(label, Label)]
        keys = ("from_store", "requests", "tries", "invalid_answers", "tokens_in", "tokens_out")
        unlabelled = Counter(why for _, why in found if isinstance(why, str))
        return labelled, {
            "sampled": len(sample),
            "labelled": len(labelled),
            "unlabelled": dict(unlabelled.most_common()),
            **{key: self._counts[key] for key in keys},
        }

    def _line(self) -> str:
        labelled = sum(isinstance(found, Label) for found in self._found.values())
        return (
            f"{labelled:,} of {self._of:,} excerpts labelled, {len(self._found) - labelled:,} without a valid answer, "
            f"{self._counts['requests']:,} answers asked for, {self._counts['from_store']:,} from the store"
        )

    def _first_unanswered(self, excerpt: str, stored: dict[str, tuple[Answer, str]]) -> int | None:
        """Apply stored answers to an excerpt; return the next attempt to ask, or None if it is settled."""
        for attempt in range(self.attempts):
            known = stored.get(self._store.key(excerpt, attempt))
            if known is None:
                return attempt
            if self._settle(excerpt, attempt, known[0]):
                return None
        return None

    def _settle(self, excerpt: str, attempt: int, answer: Answer) -> bool:
        """Apply an answer; return whether the excerpt is settled: it has a label, or a reason for having none."""
        label = None if answer.problem else self.rubric.read(answer.text)
        self._counts["invalid_answers"] += label is None
        if label is None and not answer.problem and attempt + 1 < self.attempts:
            return False
        self._found[excerpt] = label or answer.problem or INVALID
        return True

    def _ask(self, unsettled: list[tuple[str, int]], paid: list[Answer]) -> None:
        """Ask about (excerpt, first attempt), as many at once as the backend allows. `paid`: by an earlier run."""
        store = "corpus.cleaning.labels.store", self._place
        run_until_stopped(
            self._ask_all(iter(unsettled), paid), *store, backend="corpus.cleaning.labels.backend", finished=self._line
        )

    async def _ask_all(self, unsettled: Iterator[tuple[str, int]], paid: list[Answer]) -> None:
        requests, tokens = sum(answer.tries for answer in paid), sum(a.tokens_in + a.tokens_out for a in paid)
        try:
            await self.backend.start(self.folder, requests, tokens)
            async with asyncio.TaskGroup() as group:
                for _ in range(self.backend.in_flight):
                    group.create_task(self._work(unsettled))
        finally:
            await self.backend.close()
        if self._spent is not None:
            raise self._spent

    async def _work(self, unsettled: Iterator[tuple[str, int]]) -> None:
        """Ask about one excerpt after the other, until none is left or the budget is spent."""
        for excerpt, first in unsettled:
            if self._spent is not None:
                return
            try:
                for attempt in range(first, self.attempts):
                    if self._settle(excerpt, attempt, await self._answer(excerpt, attempt)):
                        break
            except BudgetSpent as spent:
                self._spent = spent  # requests in flight may finish: they are paid for
                return
            self._tell()

    async def _answer(self, excerpt: str, attempt: int) -> Answer:
        """Ask once, and store the answer before anything else."""
        key = self._store.key(excerpt, attempt)
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {key}".encode()).digest()[:4], "big") >> 1
        sampling = (self.rubric.temperature, self.rubric.top_p, self.rubric.max_tokens)
        answer = await self.backend.complete(Request(self.rubric.messages(excerpt), *sampling, seed))
        self._store.put(key, answer, self._payer)
        self._counts["requests"] += 1
        for name in ("tries", "tokens_in", "tokens_out"):
            self._counts[name] += getattr(answer, name)
        return answer

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._synced >= SYNC_EVERY_S:
            self._synced = now
            self._store.sync()
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            log.info("labels: %s", self._line())
