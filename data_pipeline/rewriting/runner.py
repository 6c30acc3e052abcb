"""Rewriting of one task: documents to requests, answers to the journal, finished chunks to shards.

datatrove's inference runner also sends requests to a server, but loses work. It queues an answer for its cache without
waiting, and only logs a failed write, so a kill or a full disk loses paid answers. A torn line at the end of a chunk's
checkpoint spoils the next chunk. It deletes a chunk's answers, then rewrites its counter of finished chunks in place: a
kill between the two repeats the chunk, and a kill during the write makes every later start fail. One document without
an answer ends the task. Hence the journal here, and the rename of a shard.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from common.atomic_files import is_full_disk
from common.settings import SettingError
from data_pipeline.documents import Document, Problems
from data_pipeline.rewriting.backends import Answer, Backend, BudgetSpent, Request, RewritingStopped
from data_pipeline.rewriting.folder import OutputFolder
from data_pipeline.rewriting.inputs import Corpus
from data_pipeline.rewriting.journal import Journal
from data_pipeline.rewriting.plan import Plan
from data_pipeline.rewriting.progress import Progress
from data_pipeline.rewriting.screens import Material
from data_pipeline.rewriting.sections import Part, cut, title_of
from data_pipeline.rewriting.styles import Malformed, Style
from data_pipeline.rewriting.tally import Tally

log = logging.getLogger(__name__)

SYNC_S = 1.0  # at most this is lost on a power failure; the death of this process loses nothing
OPEN_CHUNKS = 4  # one slow document does not block the others, and memory stays bounded


@dataclass
class Chunk:
    """Consecutive documents that become one shard. `answers`: those of its journal not yet used."""

    number: int
    journal: Journal
    answers: dict[str, dict]
    pending: int = 0
    closed: bool = False  # all of its documents have been read
    rows: dict[tuple[int, str], dict] = field(default_factory=dict)
    left_out: dict[tuple[int, str], dict] = field(default_factory=dict)
    tallies: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))


@dataclass(frozen=True)
class Rewritten:
    """Result of a part: the last answer's text, pairs and seed, and the reasons against it (empty if it is kept)."""

    text: str
    pairs: list[dict]
    reasons: list[str]
    seed: int


class Rewriting:
    """One task of a rewriting."""

    def __init__(self, plan: Plan, backend: Backend, task: int = 0) -> None:
        self.plan, self.backend, self.task = plan, backend, task
        self.folder = OutputFolder(plan.output)
        self.problems = Problems(plan.strict, "rewrite.strict")
        self._chunks: dict[int, Chunk] = {}
        self._out_of_budget: BudgetSpent | None = None
        self.documents = 0

    def run(self) -> None:
        """Rewrite what is unfinished; raise a one-line ValueError if the run must stop early."""

        def finished() -> str:
            return f"{self._progress.done_of_total()} are finished and stay"

        output = "rewrite.output", self.plan.output
        with self.folder.held(f"task-{self.task:05d}"):
            run_until_stopped(self._run(), *output, backend="rewrite.backend", finished=finished)

    async def _run(self) -> None:
        corpus = Corpus(self.plan.input)
        self._progress = Progress(corpus.rows(self.plan.tasks, self.task), len(self.plan.styles))
        requests, tokens = self._spent()
        try:
            await self.backend.start(self.folder.path, requests, tokens)
            self._requests = asyncio.Semaphore(self.backend.in_flight)
            self._window = asyncio.Semaphore(2 * self.backend.in_flight)
            self._room = asyncio.Semaphore(OPEN_CHUNKS)
            with self._progress:
                syncing = asyncio.create_task(self._sync_now_and_then())
                try:
                    async with asyncio.TaskGroup() as group:
                        await self._read(corpus, group)
                finally:
                    await _ended(syncing)
        finally:
            try:
                for chunk in self._chunks.values():
                    chunk.journal.close()
            finally:
                await self.backend.close()
        if self._out_of_budget is not None:
            raise self._out_of_budget
        totals = {"documents": self.documents, "problems": dict(self.problems.counts), "lines": self.problems.lines}
        self.folder.end_task(self.task, totals)

    def _spent(self) -> tuple[int, int]:
        """Return the requests and tokens that earlier runs of this task spent, in finished chunks and in journals."""
        requests = tokens = 0
        for path, _, counts in self.folder.counts():
            if path.name.startswith(f"train-{self.task:05d}-"):
                tallies = [tally["counts"] for tally in counts["styles"].values()]
                requests += sum(counts.get("tries", 0) for counts in tallies)
                tokens += sum(counts.get("tokens_in", 0) + counts.get("tokens_out", 0) for counts in tallies)
        for journal in self.folder.open_journals(self.task):
            for record in journal.read():
                requests += record["tries"]
                tokens += record["tokens_in"] + record["tokens_out"]
        return requests, tokens

    async def _read(self, corpus: Corpus, group: asyncio.TaskGroup) -> None:
        """Read the documents, chunk by chunk, and start to rewrite each as soon as there is room for it."""
        documents = corpus.documents(self.problems, self.plan.tasks, self.task)
        number = 0
        while self._out_of_budget is None:
            if self.folder.shard(self.task, number).exists():
                skipped = sum(1 for _ in islice(documents, self.plan.chunk_documents))
                self.documents += skipped
                self._progress.done_before(skipped)
                number += 1
                if skipped < self.plan.chunk_documents:
                    return
                continue
            await self._room.acquire()
            if self._out_of_budget is not None or not await self._begin_chunk(number, documents, group):
                return
            number += 1

    async def _begin_chunk(self, number: int, documents: Iterator[Document], group: asyncio.TaskGroup) -> bool:
        """Start all documents of a chunk; return whether another chunk may follow."""
        journal = self.folder.journal(self.task, number)
        chunk = Chunk(number, journal, {record["key"]: record for record in journal.read()})
        self._chunks[number] = chunk
        begun = 0
        for place, document in enumerate(islice(documents, self.plan.chunk_documents)):
            self.documents += 1
            begun += 1
            for style in self.plan.styles.values():
                await self._window.acquire()
                if self._out_of_budget is not None:
                    return False  # the chunk is never closed, so the next run continues it
                chunk.pending += 1
                group.create_task(self._document(chunk, place, document, style))
        chunk.closed = True
        if begun and chunk.pending == 0:
            await self._finish(chunk)
        return begun == self.plan.chunk_documents

    async def _document(self, chunk: Chunk, place: int, document: Document, style: Style) -> None:
        """Rewrite one document in one style, and finish its chunk if it was the last."""
        try:
            tally = chunk.tallies[style.name]
            if not style.suits(document):
                tally.counts["unsuited"] += 1
            elif len(document.text) > self.plan.max_document_characters:
                self._leave_out(chunk, place, document, style, ["document_too_long"], "")
            else:
                await self._rewrite(chunk, place, document, style)
        except BudgetSpent as spent:
            self._out_of_budget = spent  # requests in flight may finish: they are paid for
            self._room.release()  # unblock the reader: no further chunk may finish
            return
        finally:
            self._window.release()
        self._progress.advance()
        chunk.pending -= 1
        if chunk.closed and chunk.pending == 0:
            await self._finish(chunk)

    async def _rewrite(self, chunk: Chunk, place: int, document: Document, style: Style) -> None:
        title = document.metadata.get("title") or title_of(document.text)
        parts = cut(document.text, self.plan.part_characters, self.plan.context_characters)
        tally = chunk.tallies[style.name]
        tally.counts["parts"] += len(parts)
        results = await _gather([self._part(chunk, place, document, style, title, part) for part in parts])
        kept = [(part, result) for part, result in zip(parts, results, strict=True) if not result.reasons]
        missing = [(part, result) for part, result in zip(parts, results, strict=True) if result.reasons]
        if missing and (style.whole or not kept):
            part, result = missing[0]
            self._leave_out(chunk, place, document, style, result.reasons, result.text, part.text)
            return
        text = "\n\n".join(result.text.strip() for _, result in kept) + "\n"
        row = self._row(document, style, text, kept, len(parts))
        chunk.rows[place, style.name] = row
        tally.counts["kept"] += 1
        tally.sample("kept", document, "".join(part.text for part, _ in kept), text)

    def _row(self, document: Document, style: Style, text: str, kept: list[tuple[Part, Rewritten]], parts: int) -> dict:
        pairs = [pair for _, result in kept for pair in result.pairs]
        seeds = [result.seed for _, result in kept]
        settings = {name: getattr(style, name) for name in ("temperature", "top_p", "max_tokens_ratio")}
        return {
            **{name: document.metadata.get(name) for name in ("licence", "date", "url", "category")},
            **{name: document.metadata.get(name, "") for name in ("source", "origin")},
            "id": f"{document.id}#{style.name}",
            "text": text,
            "length": len(text.encode()),
            "split": document.metadata.get("split", "train"),
            "rewritten_from": document.id,
            "style": style.name,
            "parts": ",".join(str(part.number) for part, _ in kept),
            "source_parts": parts,
            "prompt_hash": style.prompt_hash(),
            "model": self.backend.model,
            "sampling": json.dumps({**settings, "seeds": seeds}),
            "pairs": json.dumps(pairs) if pairs else None,
        }

    def _leave_out(
        self,
        chunk: Chunk,
        place: int,
        document: Document,
        style: Style,
        reasons: list[str],
        made: str,
        source: str = "",
    ) -> None:
        tally = chunk.tallies[style.name]
        tally.counts["left_out"] += 1
        tally.reasons[reasons[0]] += 1
        tally.sample(reasons[0], document, source or document.text, made)
        chunk.left_out[place, style.name] = {"id": document.id, "style": style.name, "reasons": reasons}

    async def _part(
        self, chunk: Chunk, place: int, document: Document, style: Style, title: str, part: Part
    ) -> Rewritten:
        """Request a part until an answer passes the screens, up to the allowed attempts."""
        if not part.text.strip():
            return Rewritten("", [], [], 0)
        if len(part.text) > 2 * self.plan.part_characters:
            return Rewritten("", [], ["part_too_long"], 0)
        known = {"title": title, "section": part.section, "context": part.before}
        fields = {"text": part.text.strip("\n"), "category": document.metadata.get("category", ""), **known}
        messages = style.messages(fields)
        attempts = self.plan.attempts if style.temperature > 0 else 1  # at temperature 0 the answer would be the same
        for attempt in range(attempts):
            named = json.dumps([place, document.id, style.name, part.number, attempt, self.backend.model, messages])
            digest = hashlib.sha256(f"{self.plan.seed} {style.temperature} {style.top_p} {named}".encode())
            seed = int.from_bytes(digest.digest()[:4], "big") >> 1
            request = Request(messages, style.temperature, style.top_p, style.max_tokens(part.text), seed)
            answer = await self._answer(chunk, digest.hexdigest()[:32], document, style, part, attempt, request)
            result = self._screened(chunk.tallies[style.name], style, part, "\n".join(known.values()), answer, seed)
            if not result.reasons or answer.problem:
                break
        return result

    async def _answer(
        self, chunk: Chunk, key: str, document: Document, style: Style, part: Part, attempt: int, request: Request
    ) -> Answer:
        """Return the answer from the journal if it is paid for; else request it, and first write it there."""
        record = chunk.answers.pop(key, None)
        if record is None:
            async with self._requests:
                answer = await self.backend.complete(request)
                named = {"key": key, "id": document.id, "style": style.name, "part": part.number, "attempt": attempt}
                record = {**named, **{name: getattr(answer, name) for name in Answer.__slots__}}
                chunk.journal.append(record)
                self._progress.answered(answer)
        answer = Answer(*(record[name] for name in Answer.__slots__))
        counts = chunk.tallies[style.name].counts
        counts["requests"] += 1
        for name in ("tries", "tokens_in", "tokens_out"):
            counts[name] += getattr(answer, name)
        return answer

    def _screened(self, tally: Tally, style: Style, part: Part, known: str, answer: Answer, seed: int) -> Rewritten:
        """Return an answer as cleaned text, with the reasons against it; each reason is counted."""
        screens = self.plan.screens[style.name]
        cleaned = screens.clean(answer.text)
        tally.counts["cleaned"] += cleaned != answer.text.strip()
        text = cleaned
        pairs: list[dict[str, str]] = []
        reasons: list[str] = []
        if answer.problem:
            reasons = [answer.problem]
        elif not cleaned:
            reasons = ["empty"]
        elif answer.finish == "length":
            reasons = ["cut_short"]
        elif answer.finish == "content_filter":
            reasons = ["refusal"]
        elif _is_broken(cleaned):
            reasons = ["broken_text"]
        else:
            try:
                text, pairs = style.read(cleaned)
            except Malformed:
                # A refusal is not JSON either: report it as a refusal.
                refused = "refusal" in screens.failing(Material(part.text, known, cleaned))
                reasons = ["refusal" if refused else "malformed"]
            else:  # JSON escapes may hold characters that no text may contain
                broken = _is_broken(text)
                reasons = ["broken_text"] if broken else screens.failing(Material(part.text, known, text))
        tally.rejected.update(reasons)
        return Rewritten(text, pairs, reasons, seed)

    async def _finish(self, chunk: Chunk) -> None:
        """Write a chunk's shard, in document order, and remove its journal."""
        rows = [chunk.rows[key] for key in sorted(chunk.rows)]
        left_out = [chunk.left_out[key] for key in sorted(chunk.left_out)]
        counts = {"styles": {name: tally.as_json() for name, tally in sorted(chunk.tallies.items())}}
        await asyncio.to_thread(self.folder.write_shard, self.task, chunk.number, rows, left_out, counts)
        chunk.journal.remove()
        del self._chunks[chunk.number]
        self._room.release()

    async def _sync_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            for chunk in list(self._chunks.values()):
                chunk.journal.sync()


def _is_broken(text: str) -> bool:
    """Return whether a text contains a lone surrogate (not valid UTF-8) or NUL (not allowed in a corpus)."""
    return "\0" in text or any("\ud800" <= character <= "\udfff" for character in text)


async def _gather(parts: list[Coroutine[Any, Any, Rewritten]]) -> list[Rewritten]:
    """Run a document's parts concurrently; if one ends the run, the others still finish what they pay for."""
    results: list[Rewritten] = []
    for result in await asyncio.gather(*parts, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


async def _ended(task: asyncio.Task) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def run_until_stopped(work: Coroutine, key: str, folder: object, *, backend: str, finished: Callable[[], str]) -> None:
    """Run a coroutine that asks a backend to its end.

    Args:
        key, folder: the setting of the folder that the coroutine writes to, and its value.
        backend: the key of the backend's settings.
        finished: describes what is finished and stays.

    Raises:
        RewritingStopped: a setting or a full disk stopped it; the line says what is finished.
        ValueError, OSError: what else stopped it.
    """
    failed = _failure_of(work)
    if failed is None:
        return
    if is_full_disk(failed):
        failed = RewritingStopped(key, folder, "make room", f"is on a disk that takes no more ({failed.strerror})")
    if isinstance(failed, RewritingStopped):
        fix = f"{failed.fix}; {finished()}: the same command goes on from there"
        failed = RewritingStopped(failed.key, failed.value, fix, failed.problem)  # without its cause, which has the key
    raise failed.under(backend) if isinstance(failed, SettingError) else failed


def _failure_of(work: Coroutine) -> BaseException | None:
    """Run a coroutine to its end; return the ValueError or OSError that stopped it, the first of concurrent tasks'."""
    try:
        asyncio.run(work)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return error
    except (ValueError, OSError) as error:
        return error
    return None
