"""Training of the classifier on one part of the labelled sample, and its evaluation on the other."""

import hashlib
import json
import logging
from pathlib import Path

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from data_pipeline.labels.agreement import agreement
from data_pipeline.labels.classifier import train
from data_pipeline.labels.rubric import Label
from data_pipeline.labels.sample import Sampled

log = logging.getLogger(__name__)

LEAST_LABELS = 50  # including at least LEAST_HELD_OUT for evaluation
LEAST_HELD_OUT = 10
MODEL = "classifier.npz"

Labelled = list[tuple[Sampled, Label]]


class TrainClassifier(PipelineStep):
    """Step from `folder`/labelled.jsonl to the classifier and, in `folder`/report, its agreement with the LLM.

    Documents are held out if the hash of their excerpt, as a fraction of 1, is below `held_out`: they are never learned
    from, and a text that occurs twice is on one side. With `set_category`, categories must be learned.

    Raises:
        ValueError: there are too few labels, or all are the same.
    """

    type = "LABELS"
    name = "train"

    def __init__(self, folder: str, held_out: float, set_category: bool) -> None:
        super().__init__()
        self.folder, self.held_out, self.set_category = folder, held_out, set_category

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Train, evaluate, and write the classifier and the report."""
        from data_pipeline.labels.report import write_report

        folder = Path(self.folder)
        asked = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
        learned, held_out = self._sides(_read(folder / "labelled.jsonl"), asked)
        with self.track_time():
            classifier = train([sampled.excerpt for sampled, _ in learned], [label for _, label in learned])
            classifier.save(folder / MODEL)
            predicted = classifier.predict([sampled.excerpt for sampled, _ in held_out])
        found = {"asked": asked, **agreement(learned, held_out, *predicted)}
        write_report(folder / "report", found)
        words = f"quality {found['quality']['exact']:.0%}, within one {found['quality']['within_one']:.0%}"
        if "category" in found:
            words = f"category {found['category']['accuracy']:.0%}, {words}"
        log.info("labels: the classifier's agreement on %d documents held out: %s", len(held_out), words)
        return
        yield

    def _sides(self, labelled: Labelled, asked: dict) -> tuple[Labelled, Labelled]:
        """Return the learned and the held-out documents; raise ValueError if either is insufficient."""
        learned: Labelled = []
        held_out: Labelled = []
        for sampled, label in labelled:
            (held_out if _fraction(sampled.excerpt) < self.held_out else learned).append((sampled, label))
        of = f"{len(labelled):,} labels for {asked['sampled']:,} documents (corpus.cleaning.labels.documents)"
        if len(labelled) < LEAST_LABELS or len(held_out) < LEAST_HELD_OUT:
            raise ValueError(
                f"corpus.cleaning.labels: {of}, {len(held_out):,} of them held out: a classifier needs {LEAST_LABELS} "
                f"and {LEAST_HELD_OUT}; give it more documents, or an LLM that answers in the form the rubric asks for"
            )
        for name in ("quality", *(["category"] if self.set_category else [])):
            values = {getattr(label, name) for _, label in learned}
            if len(values) < 2:
                raise ValueError(
                    f"corpus.cleaning.labels: {of}, and all that are learned from have {name} {values.pop()}: "
                    "there is nothing to learn; change corpus.cleaning.labels.rubric, or the LLM"
                )
        return learned, held_out


def _read(path: Path) -> Labelled:
    labelled = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            label = Label(**entry.pop("label"))
            labelled.append((Sampled(**entry), label))
    return labelled


def _fraction(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
