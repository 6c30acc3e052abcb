"""A plan as text, JSON and a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from common.atomic_files import write_figure
from common.quantities import count, duration
from lit_modules.planning.estimating import Change, Estimate, RunPlan
from lit_modules.planning.memory import CONTEXT, PARTS, USABLE

GIB = 2**30
COLORS = ("#4c72b0", "#8172b3", "#55a868", "#64b5cd", "#dd8452", "#c44e52", "#937860", "#8c8c8c")
NAMES = {"one": "one device", "ddp": "DDP", "hsdp": "HSDP", "fsdp": "FSDP"}


def as_text(plan: RunPlan) -> str:
    """Format the plan for a terminal."""
    found, setup = plan.estimate, plan.estimate.setup
    parts = [
        [f"plan for {describe(found)}", ""],
        rows(
            [
                ("parameters", count(plan.parameters), f"{count(plan.ends)} of them beside the blocks"),
                ("arithmetic", f"{plan.flops_per_token / 1e9:.2f} GFLOP a token", f"{run_line(plan):.3g} in all"),
                ("checkpoint", size(plan.checkpoint), f"export {size(plan.export)}"),
                ("step", f"{count(setup.batch_tokens)} tokens", batches(found)),
            ]
        ),
        ["", "memory of a GPU, GiB", *memory_table(plan.strategies)],
        ["", f"peak: {found.memory.at}; {verdict(found)}"],
        [f"nvidia-smi shows {CONTEXT / GIB:.1f} GiB more at least: the driver's context, and blocks that torch keeps"],
        ["", "speed", *speed_lines(plan)],
        ["", *change_lines(plan)] if plan.changes or not found.fits else [],
    ]
    return "\n".join(line.rstrip() for part in parts for line in part)


def describe(found: Estimate) -> str:
    """Describe the GPUs and the setup in one line."""
    setup = found.setup
    gpus = f"{setup.ranks} x {found.gpu.name}" + (f" on {setup.nodes} nodes" if setup.nodes > 1 else "")
    shared = [f"{setup.tensor} share the heads"] * (setup.tensor > 1)
    shared += [f"{setup.context} share a sequence"] * (setup.context > 1)
    how = "compiled blocks" if setup.compile else "nothing compiled"
    return ", ".join(
        [gpus, NAMES[setup.strategy], *shared, how, f"recomputation {setup.recomputation}", setup.precision]
    )


def batches(found: Estimate) -> str:
    """Describe how a step's tokens are split into micro-batches."""
    setup = found.setup
    return (
        f"{setup.accumulation} x {setup.micro_batch_size} sequences of {setup.sequence_length} tokens, "
        f"on each of {setup.readers} reader{'s' if setup.readers > 1 else ''}"
    )


def run_line(plan: RunPlan) -> float:
    """Return the floating point operations of the run."""
    return float(plan.flops_per_token) * plan.tokens


def memory_table(estimates: Sequence[Estimate]) -> list[str]:
    """Format a table with one column per strategy and one line per part."""
    header = ["", *(NAMES[x.setup.strategy] for x in estimates)]
    lines = [
        [title, *(f"{getattr(x.memory, part) / GIB:.1f}" for x in estimates)]
        for part, title in PARTS.items()
        if any(getattr(x.memory, part) for x in estimates)
    ]
    lines.append(["at the peak", *(f"{x.memory.peak / GIB:.1f}" for x in estimates)])
    lines.append(["of", *(f"{x.gpu.memory / GIB:.1f}" for x in estimates)])
    return rows([header, *lines], right=True)


def verdict(found: Estimate) -> str:
    """Say whether the setup fits."""
    share = found.memory.peak / found.gpu.memory
    if found.fits:
        return f"it fits, with {share:.0%} of the GPU's memory"
    over = f"{share:.0%} of the GPU's memory, where {USABLE:.0%} can be counted on"
    return f"it does NOT fit: {over}"


def speed_lines(plan: RunPlan) -> list[str]:
    """Format tokens per second, the step's time by part, and the run's time."""
    speed = plan.estimate.speed
    total = sum(speed.parts.values())
    shares = [f"{name} {seconds / total:.0%}" for name, seconds in speed.parts.items() if seconds > 0.005 * total]
    each = speed.tokens_per_second / plan.estimate.setup.ranks
    return rows(
        [
            ("tokens/s", count(speed.tokens_per_second), f"{count(each)} on each GPU, MFU {speed.mfu:.1%}"),
            ("a step", f"{total:.2f} s", ", ".join(shares)),
            ("the run", duration(plan.seconds), f"{count(plan.tokens)} tokens, {plan.seconds / 86400:.2f} days"),
        ]
    )


def change_lines(plan: RunPlan) -> list[str]:
    """Format the proposed changes."""
    fits, changes = plan.estimate.fits, plan.changes
    lines = [
        (
            change.overrides,
            f"{change.estimate.memory.peak / GIB:.1f} GiB",
            f"{count(change.estimate.speed.tokens_per_second)} tokens/s",
            "fits" if change.estimate.fits else "",
        )
        for change in changes
    ]
    title = "faster, and still fitting" if fits else "to make it fit, the cheapest first"
    if fits or (changes and changes[-1].estimate.fits):
        return [title, *rows(lines)]
    return [title, *rows(lines), "  and that is not enough: take a GPU with more memory, or a smaller model"]


def rows(lines: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Align columns; with `right`, right-align all but the first."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if right and number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def size(number: float) -> str:
    """Format bytes as GiB or MiB."""
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:.2f} MiB"


def as_json(plan: RunPlan) -> dict[str, Any]:
    """Return the plan as plain values: bytes, seconds, tokens."""
    return {
        "parameters": plan.parameters,
        "flops_per_token": plan.flops_per_token,
        "flops": run_line(plan),
        "tokens": plan.tokens,
        "checkpoint_bytes": plan.checkpoint,
        "export_bytes": plan.export,
        "seconds": plan.seconds,
        **estimate_as_json(plan.estimate),
        "strategies": {x.setup.strategy: estimate_as_json(x) for x in plan.strategies},
        "changes": [change_as_json(x) for x in plan.changes],
    }


def estimate_as_json(found: Estimate) -> dict[str, Any]:
    """Return an estimate as plain values."""
    return {
        "setup": vars(found.setup),
        "gpu": vars(found.gpu),
        "fits": found.fits,
        "peak_bytes": round(found.memory.peak),
        "peak_at": found.memory.at,
        "memory_bytes": {part: round(getattr(found.memory, part)) for part in PARTS},
        "tokens_per_second": found.speed.tokens_per_second,
        "mfu": found.speed.mfu,
        "step_seconds": found.speed.parts,
    }


def change_as_json(change: Change) -> dict[str, Any]:
    """Return a change as plain values."""
    found = change.estimate
    rate = found.speed.tokens_per_second
    return {
        "overrides": change.overrides,
        "peak_bytes": round(found.memory.peak),
        "tokens_per_second": rate,
        "fits": found.fits,
    }


def draw(plan: RunPlan, path: Path) -> Path:
    """Draw memory by part: a bar per strategy and per change, and a line at the GPU's memory."""
    bars = [(NAMES[x.setup.strategy], x) for x in plan.strategies]
    bars += [(change.overrides.replace(" ", "\n"), change.estimate) for change in plan.changes]
    figure = Figure(figsize=(2.6 + 1.5 * len(bars), 5), layout="constrained")
    axes = figure.subplots()
    bottoms = [0.0] * len(bars)
    for (part, title), color in zip(PARTS.items(), COLORS, strict=True):
        heights = [getattr(found.memory, part) / GIB for _, found in bars]
        if any(heights):
            axes.bar(range(len(bars)), heights, 0.6, bottoms, color=color, label=title)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, top in enumerate(bottoms):
        axes.text(place, top, f"{top:.1f}", ha="center", va="bottom", fontsize=9)
    card = plan.estimate.gpu
    axes.axhline(card.memory / GIB, color="#555555", linestyle="--", linewidth=1, label=f"memory of a {card.name}")
    axes.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=8)
    axes.set_ylim(0, 1.12 * max(*bottoms, card.memory / GIB))
    axes.set_ylabel("GiB at the peak")
    axes.set_title(describe(plan.estimate), fontsize=9, wrap=True)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return write_figure(path, figure)
