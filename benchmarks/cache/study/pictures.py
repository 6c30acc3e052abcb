"""Plots of the study."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.cache.study.cases import (
    EVICTED,
    FIRST_AND_RECENT,
    FULL,
    GATE,
    HEAVY,
    PARTIAL,
    PROMPT,
    RECENT,
    RESERVED,
    SPARSE,
)
from benchmarks.cache.study.records import Result
from common.atomic_files import write_figure
from evaluation.uncertainty import mean, paired_difference

POLICIES = (SPARSE, RECENT, FIRST_AND_RECENT, GATE, PARTIAL, HEAVY, PROMPT)
COLORS = dict(zip(POLICIES, colormaps["tab10"].colors, strict=False))
MARKERS = {
    "plain": "o", "hadamard": "^", "oscar": "s", "balanced": "D", "ordered": "P", EVICTED: "x", "plain, debiased": "v",
    "balanced, debiased": "d", "ordered, 8 channels, debiased": "*", "ordered, debiased": "h",
}  # fmt: skip


def draw_losses(results: Sequence[Result], path: Path) -> Path | None:
    """Plot the loss above that of 16 bits against bits, by model: colors are policies, markers treatments."""
    models = list(dict.fromkeys(each.model for each in results if each.measure == "loss"))
    if not models:
        return None
    figure = Figure(figsize=(5.5 * len(models), 4.8), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        own = [each for each in results if (each.model, each.measure) == (model, "loss")]
        by_case: dict = {}
        for each in sorted(own, key=lambda r: r.text):
            by_case.setdefault(each.case, []).append(each)
        full = [v for case, found in by_case.items() if case[0] == FULL for r in found for v in r.singles]
        for (policy, treatment, *_), found in by_case.items():
            singles = [v for r in found for v in r.singles]
            if policy == FULL or treatment not in MARKERS or len(singles) != len(full):
                continue
            above = paired_difference(singles, full)
            axes.errorbar(
                found[0].bits_per_number, max(above.value, 1e-4), yerr=above.standard_error, color=COLORS[policy],
                marker=MARKERS[treatment], markersize=5, capsize=2, linestyle="none", alpha=0.8,
            )  # fmt: skip
        axes.set_yscale("log")
        axes.set_xlabel("bits for each number at the end of the text")
        axes.set_ylabel("nats a token above 16 bits")
        axes.set_title(model)
        axes.grid(alpha=0.3, which="both")
    for policy, color in COLORS.items():
        figure.axes[0].plot([], [], color=color, marker="o", linestyle="none", label=policy.replace("_", " "))
    for treatment, marker in MARKERS.items():
        figure.axes[0].plot([], [], color="gray", marker=marker, linestyle="none", label=treatment)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(11, 4 * len(models)),
        fontsize=8,
    )
    return write_figure(path, figure)


def draw_attention(results: Sequence[Result], path: Path) -> Path | None:
    """Plot coverage by reserved length, and the L1 error of plain 2 bits and of eviction, a column for each model."""
    models = list(dict.fromkeys(each.model for each in results if each.measure == "coverage"))
    if not models:
        return None
    figure = Figure(figsize=(4.5 * len(models), 7.5), layout="constrained")
    panels = figure.subplots(2, len(models), squeeze=False)
    for column, model in enumerate(models):
        for axes, measure in zip(panels[:, column], ("coverage", "l1"), strict=True):
            lines: dict = {}
            for each in results:
                if (each.model, each.measure) == (model, measure) and _is_drawn(each):
                    name = each.policy, each.treatment, each.match
                    lines.setdefault(name, {}).setdefault(each.reserved, []).extend(each.singles)
            for (policy, treatment, match), by_reserved in lines.items():
                name = policy.replace("_", " ") + {"any": "", "plain": ", 2 bits"}.get(treatment, f", {treatment}")
                style = "--" if treatment == EVICTED else (":" if match == "tokens" else "-")
                means = [mean(by_reserved[reserved]) for reserved in sorted(RESERVED)]
                axes.errorbar(
                    sorted(RESERVED), [m.value for m in means], [m.standard_error or 0 for m in means], capsize=2,
                    color=COLORS.get(policy, "black"), linestyle=style, marker="o", markersize=3,
                    label=name + ("" if match == "slots" else f" ({match})"),
                )  # fmt: skip
            axes.set_title(f"{model}: {'coverage' if measure == 'coverage' else 'L1 error'}")
            axes.set_xlabel("slots in 16 bits")
            axes.set_xticks(sorted(RESERVED))
            axes.grid(alpha=0.3)
            axes.legend(fontsize=6)
    return write_figure(path, figure)


def _is_drawn(result: Result) -> bool:
    return (
        result.measure == "coverage" or result.treatment == EVICTED or (result.treatment, result.bits) == ("plain", 2)
    )
