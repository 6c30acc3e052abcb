"""Apply the classifier: give every document a quality, and drop those below their category's threshold."""

from collections.abc import Mapping
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.writers.disk_base import DiskWriter

from data_pipeline.labels.classifier import Classifier, load
from data_pipeline.labels.sample import Excerpt

BATCH = 32  # documents per prediction: larger batches are no faster, and take memory
DEFAULT = "default"


class LabelFilter(BaseFilter):
    """Filter that writes metadata "quality" (0 to 5), and drops documents below their category's threshold.

    `model`: the classifier's file. `thresholds`: {category: least quality}, "default" for the others. With
    `set_category` the predicted category replaces a document's own before the threshold is looked up. The reason for
    dropping is "quality under 2.5".
    """

    name = "labels"

    def __init__(
        self,
        model: str,
        excerpt: Excerpt,
        thresholds: Mapping[str, float],
        set_category: bool = False,
        exclusion_writer: DiskWriter | None = None,
    ) -> None:
        super().__init__(exclusion_writer, batch_size=BATCH)
        self.model, self.excerpt = str(model), excerpt
        self.thresholds, self.set_category = dict(thresholds), set_category
        self._classifier: Classifier | None = None  # loaded in the worker, not pickled

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Return whether the document stays, or (False, the reason)."""
        return self.filter_batch([doc])[0]

    def filter_batch(self, batch: list[Document]) -> list[bool | tuple[bool, str]]:
        """Return for each document whether it stays, or (False, the reason)."""
        if self._classifier is None:
            self._classifier = load(Path(self.model))
        categories, qualities = self._classifier.predict([self.excerpt.of(document.text) for document in batch])
        return [
            self._verdict(document, category, float(quality))
            for document, category, quality in zip(batch, categories, qualities, strict=True)
        ]

    def _verdict(self, document: Document, category: str, quality: float) -> bool | tuple[bool, str]:
        if self.set_category:
            document.metadata["category"] = category
        document.metadata["quality"] = round(quality, 3)
        least = self.thresholds.get(document.metadata.get("category"), self.thresholds[DEFAULT])
        return True if quality >= least else (False, f"quality under {least:g}")

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_classifier": None}
