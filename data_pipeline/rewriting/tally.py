"""Counters of a rewriting, by style: kept, dropped with reasons, and cost."""

import hashlib
import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from data_pipeline.documents import Document

SAMPLE_CHARACTERS = 3000
KEPT_SAMPLES = 2  # per style
LEFT_OUT_SAMPLES = 1  # per style and reason

COUNTS = ("kept", "left_out", "unsuited", "parts", "requests", "tries", "tokens_in", "tokens_out", "cleaned")


@dataclass
class Tally:
    """Counts of one style: documents kept, dropped and unsuited; parts; answers requested, tries, tokens.

    `rejected`: answers by the screen they failed (one may fail several). `reasons`: dropped documents by the first
    reason. `samples`: for "kept" and each reason, the few documents whose ids have the lowest hashes, independent of
    the order in which chunks finish.
    """

    counts: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict]] = field(default_factory=lambda: defaultdict(list))

    def sample(self, kind: str, document: Document, source: str, rewritten: str) -> None:
        """Keep a pair of texts to show, if its id's hash is among the lowest of its kind."""
        order = hashlib.sha256(document.id.encode()).hexdigest()[:16]
        self._keep(
            kind, [{"order": order, "id": document.id, "source": _shown(source), "rewritten": _shown(rewritten)}]
        )

    def add(self, other: dict) -> None:
        """Add the counts of another tally's `as_json`."""
        for name in ("counts", "rejected", "reasons"):
            getattr(self, name).update(other[name])
        for kind, entries in other["samples"].items():
            self._keep(kind, entries)

    def _keep(self, kind: str, entries: list[dict]) -> None:
        limit = KEPT_SAMPLES if kind == "kept" else LEFT_OUT_SAMPLES
        self.samples[kind] = heapq.nsmallest(limit, [*self.samples[kind], *entries], key=lambda entry: entry["order"])

    def as_json(self) -> dict:
        """Return everything as plain containers."""
        return {
            "counts": dict(self.counts),
            "rejected": dict(self.rejected),
            "reasons": dict(self.reasons),
            "samples": dict(self.samples),
        }


def _shown(text: str) -> str:
    """Return the beginning of a text with invalid characters replaced, so that broken texts can be written too."""
    return text[:SAMPLE_CHARACTERS].replace("\0", "\ufffd").encode(errors="replace").decode()
