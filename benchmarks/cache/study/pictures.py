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
COLUMNS = 2
MARKERS = {
    "plain": "o", "hadamard": "^", "oscar": "s", "balanced": "D", "ordered": "P", EVICTED: "x", "plain, debiased": "v",
    "balanced, debiased": "d", "ordered, 8 channels, debiased": "*", "ordered, debiased": "h",
}  # fmt: skip


def draw_losses(results: Sequence[Result], path: Path) -> Path | None:
    """Plot the loss above that of 16 bits against bits, by model: colors are policies, markers treatments."""
    models = list(dict.fromkeys(each.model for each in results if each.measure == "loss"))
    if not models:
        return None
    rows = -(-(len(models) + 1) // COLUMNS)
    figure = Figure(figsize=(6.5 * COLUMNS, 4.6 * rows), layout="constrained")
    panels = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes, model in zip(panels, models, strict=False):
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
    first, *others = panels[len(models) :]
    for axes in (first, *others):
        axes.set_axis_off()
    for policy, color in COLORS.items():
        first.plot([], [], color=color, marker="o", linestyle="none", label=policy.replace("_", " "))
    for treatment, marker in MARKERS.items():
        first.plot([], [], color="gray", marker=marker, linestyle="none", label=treatment)
    first.legend(loc="center", ncols=2)
    return write_figure(path, figure)


def draw_attention(results: Sequence[Result], path: Path) -> Path | None:
    """Plot coverage by reserved length, and the L1 error of plain 2 bits and of eviction, a row for each model."""
    models = list(dict.fromkeys(each.model for each in results if each.measure == "coverage"))
    if not models:
        return None
    figure = Figure(figsize=(11, 3.2 * len(models) + 1.2), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False)
    shown: dict = {}
    for row, model in zip(panels, models, strict=True):
        for axes, measure in zip(row, ("coverage", "l1"), strict=True):
            lines: dict = {}
            for each in results:
                if (each.model, each.measure) == (model, measure) and _is_drawn(each):
                    name = each.policy, each.treatment, each.match
                    lines.setdefault(name, {}).setdefault(each.reserved, []).extend(each.singles)
            for (policy, treatment, match), by_reserved in lines.items():
                name = policy.replace("_", " ") + {"any": "", "plain": ", 2 bits"}.get(treatment, f", {treatment}")
                name += "" if match == "slots" else f" ({match})"
                style = "--" if treatment == EVICTED else (":" if match == "tokens" else "-")
                means = [mean(by_reserved[reserved]) for reserved in sorted(RESERVED)]
                shown[name] = axes.errorbar(
                    sorted(RESERVED), [m.value for m in means], [m.standard_error or 0 for m in means], capsize=2,
                    color=COLORS.get(policy, "black"), linestyle=style, marker="o", markersize=3, label=name,
                )  # fmt: skip
            axes.set_title(f"{model}: {'coverage' if measure == 'coverage' else 'L1 error'}")
            axes.set_xlabel("slots in 16 bits")
            axes.set_xticks(sorted(RESERVED))
            axes.grid(alpha=0.3)
    figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=3, fontsize=8)
    return write_figure(path, figure)


def _is_drawn(result: Result) -> bool:
    return (
        result.measure == "coverage" or result.treatment == EVICTED or (result.treatment, result.bits) == ("plain", 2)
    )
