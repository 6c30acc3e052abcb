"""Small classifier: hashed words and punctuation, and linear models on them, stored as plain arrays."""

import functools
import importlib.util
import io
import json
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.atomic_files import write_atomic
from data_pipeline.labels.rubric import HIGHEST, Label

FEATURES = 2**18
# Runs of punctuation (--, ](, ```, &&) separate code, tables and menus from prose. With them, single words beat word
# pairs and character n-grams, on kinds of manual pages and documentation, and on the faults of damaged copies.
WORD = r"\w+|[^\w\s]+"
MARGIN = 1.0  # C of the support vector machine
SHRINKING = 0.3  # alpha of the ridge regression
FORM = 1  # file format version; others cannot be read


def require_scikit_learn() -> None:
    """Raise ValueError, with the install command, if scikit-learn is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        raise ValueError("corpus.cleaning.labels: scikit-learn is not installed: pip install 'palimpsest-lm[corpus]'")


@dataclass(frozen=True)
class Classifier:
    """Linear models on a text's `FEATURES` hashed features.

    `categories`: names, [c]; empty if no category was learned. `weights`, `biases`: float32 `[FEATURES, c + 1]` and
    `[c + 1]`, the last column for quality. `scales`: float32 `[FEATURES]`, the inverse document frequencies.
    """

    categories: tuple[str, ...]
    weights: np.ndarray
    biases: np.ndarray
    scales: np.ndarray

    def predict(self, texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
        """Return the category of each text ("" if none was learned) and its quality, from 0 to 5."""
        scores = _scaled(hashed(texts), self.scales) @ self.weights + self.biases
        quality = np.clip(scores[:, -1], 0, HIGHEST)
        if not self.categories:
            return [""] * len(texts), quality
        return [self.categories[best] for best in scores[:, :-1].argmax(axis=1)], quality

    def save(self, path: Path) -> None:
        """Write arrays and names to one file, atomically."""
        content = io.BytesIO()
        about = json.dumps({"form": FORM, "categories": self.categories})
        np.savez_compressed(content, about=about, weights=self.weights, biases=self.biases, scales=self.scales)
        write_atomic(path, content.getvalue())


def load(path: Path) -> Classifier:
    """Return a saved classifier; the file is read as arrays, and no code in it runs.

    Raises:
        ValueError: the file is not a classifier.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(str(arrays["about"]))
            found = Classifier(tuple(about["categories"]), *(arrays[n] for n in ("weights", "biases", "scales")))
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"corpus.cleaning.labels: {path} is not a classifier of labels: {error}") from error
    outputs = len(found.categories) + 1
    shapes = (found.weights.shape, found.biases.shape, found.scales.shape)
    if about.get("form") != FORM or shapes != ((FEATURES, outputs), (outputs,), (FEATURES,)):
        raise ValueError(f"corpus.cleaning.labels: {path} is a classifier of another form: train it again")
    return found


def train(texts: Sequence[str], labels: Sequence[Label]) -> Classifier:
    """Train a classifier of categories and quality.

    Category: a linear support vector machine, one-vs-rest; omitted if all labels have the same category. Quality: ridge
    regression, since predicting 3 for a 4 is a smaller error than 0 for a 4.
    """
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.linear_model import Ridge
    from sklearn.svm import LinearSVC

    counts = hashed(texts)
    scales = TfidfTransformer().fit(counts).idf_.astype(np.float32)
    features = _scaled(counts, scales)
    categories = sorted({label.category for label in labels})
    quality = Ridge(SHRINKING, solver="lsqr").fit(features, [label.quality for label in labels])
    columns, biases = [quality.coef_], [quality.intercept_]
    if len(categories) > 1:
        model = LinearSVC(C=MARGIN, random_state=0)
        model.fit(features, [categories.index(label.category) for label in labels])
        two = len(categories) == 2  # sklearn then has one column, for the second against the first
        columns = [*([-model.coef_[0]] if two else []), *model.coef_, *columns]
        biases = [*([-model.intercept_[0]] if two else []), *model.intercept_, *biases]
    weights, offsets = np.stack(columns, axis=1).astype(np.float32), np.array(biases, np.float32)
    return Classifier(tuple(categories) if len(categories) > 1 else (), weights, offsets, scales)


def hashed(texts: Iterable[str]) -> Any:
    """Return how often each feature occurs in each text: a sparse float32 matrix `[texts, FEATURES]`."""
    return _vectorizer().transform(texts)


@functools.cache
def _vectorizer() -> Any:
    from sklearn.feature_extraction.text import HashingVectorizer

    return HashingVectorizer(token_pattern=WORD, n_features=FEATURES, alternate_sign=False, norm=None, dtype=np.float32)


def _scaled(counts: Any, scales: np.ndarray) -> Any:
    """Return L2-normalized tf-idf rows, with 1 + log(count) as term frequency."""
    from sklearn.preprocessing import normalize

    scaled = counts.copy()
    scaled.data = (1 + np.log(scaled.data)) * scales[scaled.indices]
    return normalize(scaled, copy=False)
