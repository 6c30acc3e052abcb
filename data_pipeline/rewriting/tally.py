"""What a rewriting counts: by style, what was kept, what was left out and why, and what it cost."""

import hashlib
import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from data_pipeline.documents import Document

SAMPLE_CHARACTERS = 3000
KEPT_SAMPLES = 2  # of a style
LEFT_OUT_SAMPLES = 1  # of a style and a reason

COUNTS = ("kept", "left_out", "unsuited", "parts", "requests", "tries", "tokens_in", "tokens_out", "cleaned")


@dataclass
class Tally:
    """Counts of one style: documents kept, left out and not suited; parts; answers asked for, tries, tokens.

    `rejected`: answers by the screen that they failed (one may fail several). `reasons`: documents left out, by the
    first reason. `samples` holds, for "kept" and each reason, the few whose names hash lowest: the same ones whatever
    the order in which chunks end.
    """

    counts: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[dict]] = field(default_factory=lambda: defaultdict(list))

    def sample(self, kind: str, document: Document, source: str, rewritten: str) -> None:
        """Keep a pair of texts to show, if its name's hash is among the lowest of its kind."""
        order = hashlib.sha256(document.id.encode()).hexdigest()[:16]
        self._keep(
            kind, [{"order": order, "id": document.id, "source": _shown(source), "rewritten": _shown(rewritten)}]
        )

    def add(self, other: dict) -> None:
        """Add what another tally's `as_json` gave."""
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
    """Return the beginning of a text; what was left out for being no proper text can then be written down, too."""
    return text[:SAMPLE_CHARACTERS].replace("\0", "\ufffd").encode(errors="replace").decode()
