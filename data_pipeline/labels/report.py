"""Report on the labels and the classifier: numbers as JSON, a Markdown page, and pictures."""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from common.atomic_files import write_atomic, write_figure
from data_pipeline.card.markdown import table
from data_pipeline.labels.rubric import HIGHEST

QUALITIES = [str(points) for points in range(HIGHEST + 1)]


def write_report(folder: Path, found: dict) -> None:
    """Write agreement.json, agreement.md, quality.png and, if categories were learned, category.png."""
    if "category" in found:
        category = found["category"]
        draw(folder / "category.png", category["confusion"], category["names"], "category")
    draw(folder / "quality.png", found["quality"]["confusion"], QUALITIES, "quality (rounded)")
    write_atomic(folder / "agreement.md", page(found))
    write_atomic(folder / "agreement.json", json.dumps(found, indent=1) + "\n")


def page(found: dict) -> str:
    """Return the report's Markdown page."""
    asked, quality = found["asked"], found["quality"]
    lines = [
        f"An LLM ({_code(asked['model'])}) labelled {asked['labelled']:,} of {asked['sampled']:,} sampled documents"
        f"{_unlabelled(asked['unlabelled'])}. The classifier learned from {found['learned']:,} of them; "
        f"on the other {found['held_out']:,} it agrees with the LLM as follows (95% intervals in brackets).",
        "",
    ]
    if "category" in found:
        category = found["category"]
        frequent = category["most_frequent"]
        rows = [
            ["classifier", _share(category, "accuracy"), f"{category['macro_f1']:.2f}"],
            [f"the most frequent ({frequent['label']})", _share(frequent, "accuracy"), ""],
        ]
        if "came_with" in category:
            rows.append(["the one documents came with", _share(category["came_with"], "accuracy"), ""])
        lines += [table(["category", "accuracy", "macro F1"], rows), ""]
    guesses = {
        "classifier": quality,
        f"the most frequent ({quality['most_frequent']['label']})": quality["most_frequent"],
        "the most frequent of the category documents came with": quality["came_with"],
    }
    rows = [
        [name, _share(row, "exact"), f"{100 * row['within_one']:.0f}%", f"{row['weighted_kappa']:z.2f}"]
        for name, row in guesses.items()
    ]
    lines.append(table(["quality, 0 to 5", "exact", "within one", "weighted kappa"], rows))
    labels = ", ".join(f"{count:,} of {points}" for points, count in enumerate(quality["labels"]))
    lines += ["", f"Labels of quality: {labels}. The classifier is off by {quality['mean_error']:.2f} in the mean.", ""]
    return "\n".join(lines)


def _share(row: dict, name: str) -> str:
    low, high = row["interval"]
    return f"{100 * row[name]:.0f}% ({100 * low:.0f} to {100 * high:.0f})"


def _unlabelled(reasons: dict[str, int]) -> str:
    words = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in reasons.items())
    return f" (without a label: {words})" if words else ""


def _code(name: str) -> str:
    return f"`{name.replace('`', '')}`"


def draw(path: Path, confusion: list[list[int]], names: list[str], what: str) -> None:
    """Draw a confusion matrix: counts of each label by prediction, shaded by the label's share."""
    counts = np.array(confusion)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    size = max(3.2, 0.75 * len(names) + 1.6)
    figure = Figure(figsize=(size + 0.4, size), layout="constrained")
    axes = figure.subplots()
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.ndindex(*counts.shape):
        colour = "white" if shares[row, column] > 0.6 else "black"
        axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(range(len(names)), names, rotation=0 if max(map(len, names)) < 3 else 30, ha="center")
    if max(map(len, names)) >= 3:
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel(f"{what} by the classifier")
    axes.set_ylabel(f"{what.partition(' ')[0]} by the LLM")
    axes.set_title("held-out documents; shade: share of the row", fontsize=9)
    write_figure(path, figure, bbox_inches=None)
