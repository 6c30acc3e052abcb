"""Figures of a run as PNG files, drawn without a display."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from common.atomic_files import write_figure

TRAIN, HELD_OUT, MARK = "#4c72b0", "#c44e52", "#555555"


def moving_average(values: np.ndarray, weights: np.ndarray, window: int) -> np.ndarray:
    """Return the weighted mean of `values` over a centred window (shorter at the ends); NaN without weight."""
    half = window // 2
    total = np.concatenate([[0.0], np.cumsum(np.where(weights > 0, values, 0.0) * weights)])
    weight = np.concatenate([[0.0], np.cumsum(weights)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (total[high] - total[low]) / (weight[high] - weight[low])


def draw_loss(train: Sequence[tuple[float, float]], held_out: Sequence[tuple[float, float]], path: Path) -> Path:
    """Draw loss in nats per token over tokens: `train` and `held_out` are (tokens, loss) pairs."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), color=TRAIN, label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color=HELD_OUT, marker="o", markersize=4, label="held out")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    return write_figure(path, figure)


def draw_position_loss(
    loss: np.ndarray, tokens: np.ndarray, window: int, training_length: int, path: Path, least: int = 32
) -> Path:
    """Draw the loss L(i) with i tokens of context, smoothed, and the perplexity P(l) up to l of them (FoX, figure 2).

    Args:
        loss: [positions], mean loss in nats after 1, 2, ... tokens of a document's part within one sequence: the
            context that the model sees. If a sequence ends within a document, the rest starts without context.
        tokens: [positions], number of held-out tokens in each mean.
        window: tokens of the moving average.
        training_length: position of the dashed line.
        least: positions past the last one with this many tokens are noise, and are not drawn.
    """
    enough = np.flatnonzero(tokens >= least)
    shown = int(enough[-1]) + 1 if len(enough) else len(tokens)
    loss, tokens = loss[:shown], tokens[:shown]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    position = np.arange(1, shown + 1)
    left.plot(position, moving_average(loss, tokens, window), color=HELD_OUT)
    left.set_ylabel(f"loss (nats, {window}-token average)")
    left.set_xlabel("tokens of context i (of the document, within its sequence)")
    seen = np.cumsum(np.where(tokens > 0, loss, 0.0) * tokens) / np.maximum(np.cumsum(tokens), 1)
    from_start = slice(min(window, shown) // 2, None)  # earlier values average only a few tokens
    right.plot(position[from_start], np.exp(seen)[from_start], color=HELD_OUT)
    right.set_ylabel("perplexity with up to l tokens of context")
    right.set_xlabel("tokens of context l")
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
        if training_length <= shown * 1.05:
            axes.axvline(training_length, color=MARK, linestyle="--", linewidth=1, label="training length")
            axes.legend()
    return write_figure(path, figure)


def draw_gates(maps: Sequence[tuple[str, np.ndarray | None, np.ndarray]], path: Path) -> Path:
    """Draw the forget-gate matrix F and the attention A of chosen heads (FoX, figure 3).

    Args:
        maps: for each head its title, F [tokens, tokens] with F_ij = prod of f_l for j < l <= i (None without a gate),
            and A [tokens, tokens].
    """
    gated = any(forget is not None for _, forget, _ in maps)
    rows = 2 if gated else 1
    figure = Figure(figsize=(3.1 * len(maps) + 0.8, 3.2 * rows), layout="constrained")
    grid = figure.subplots(rows, len(maps), squeeze=False, sharex=True, sharey=True)
    for column, (title, forget, attention) in enumerate(maps):
        future = np.triu(np.ones_like(attention, dtype=bool), 1)
        grid[0, column].set_title(title, fontsize=9)
        if gated and forget is not None:
            image = grid[0, column].imshow(np.ma.array(forget, mask=future), vmin=0, vmax=1, cmap="viridis")
        shown = np.ma.array(np.clip(attention, 1e-4, 1), mask=future)
        last = grid[-1, column].imshow(shown, norm=LogNorm(1e-4, 1), cmap="magma")
    if gated:
        figure.colorbar(image, ax=grid[0], label="forget gate F", shrink=0.8)
    figure.colorbar(last, ax=grid[-1], label="attention A", shrink=0.8)
    for axes in grid.flat:
        axes.tick_params(labelsize=7)
    figure.supxlabel("key position", fontsize=9)
    figure.supylabel("query position", fontsize=9)
    return write_figure(path, figure)
