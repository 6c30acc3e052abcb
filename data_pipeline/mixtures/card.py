"""Description of a mixture for people: a Markdown table and two pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from common.atomic_files import write_figure
from data_pipeline.card.markdown import table


def markdown(manifest: Mapping) -> str:
    """Return the tables of a mixture's manifest: its components, and what each phase reads."""
    rows = []
    for name, component in manifest["components"].items():
        train, held_out = component["train"], component["validation"]
        limit = "" if component["max_epochs"] is None else f"{component['max_epochs']:g}"
        counts = (train["bytes"], train["tokens"], held_out["tokens"], component["read_tokens"])
        cells = [f"{train['documents']:,}", *map(_count, counts), f"{component['epochs']:.2f}", limit]
        rows.append([name, *cells])
    names = list(manifest["components"])
    phases = [
        [phase["name"], _count(phase["tokens"]), *(_share(phase["components"][name]) for name in names)]
        for phase in manifest["phases"]
    ]
    parts = [
        "# Mixture",
        f"{_count(manifest['run_tokens'])} tokens in sequences of {manifest['sequence_length']}.",
        table(["component", "documents", "bytes", "tokens", "held-out tokens", "read", "epochs", "at most"], rows),
        table(["phase", "tokens", *names], phases),
        *(["\n".join(f"- {line}" for line in manifest["reduced"])] if manifest["reduced"] else []),
    ]
    return "\n\n".join(parts) + "\n"


def _share(found: Mapping) -> str:
    if not found["asked_share"]:
        return ""
    asked = "" if abs(found["share"] - found["asked_share"]) < 5e-4 else f" (asked: {found['asked_share']:.1%})"
    return f"{found['share']:.1%}{asked}"


def _count(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def draw_mixture(manifest: Mapping, path: Path) -> None:
    """Draw the components' shares over the run, stacked, and the epochs read of each."""
    from matplotlib import color_sequences
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, PercentFormatter

    length, phases = manifest["sequence_length"], manifest["phases"]
    edges = [0, *(phase["end"] * length for phase in phases)]
    names = [name for name, component in manifest["components"].items() if component["read_tokens"]]
    palette = color_sequences["tab10" if len(names) <= 10 else "tab20"]
    colours = {name: palette[number % len(palette)] for number, name in enumerate(names)}
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    bottom, ylabel = [0.0] * len(phases), "epochs read"
    for name in names:
        shares = [phase["components"][name]["share"] for phase in phases]
        top = [a + b for a, b in zip(bottom, shares, strict=True)]
        above.stairs(top, edges, baseline=bottom, fill=True, color=colours[name], label=name)
        bottom = top
        epochs = [0.0, *(phase["components"][name]["epochs_at_end"] for phase in phases)]
        below.plot(edges, epochs, color=colours[name], marker="o", markersize=3)
        limit = manifest["components"][name]["max_epochs"]
        if limit is not None and epochs[-1] > 0.8 * limit:
            below.axhline(limit, color=colours[name], linestyle=":", linewidth=1)
            ylabel = "epochs read (dotted: at most)"
    for edge in edges[1:-1]:
        for axes in (above, below):
            axes.axvline(edge, color="#555555", linestyle="--", linewidth=0.8)
    if len(phases) > 1:
        for phase, first, end in zip(phases, edges, edges[1:], strict=False):
            turned = {"rotation": 30, "ha": "left"} if len(phases) > 5 else {"ha": "center"}
            above.text((first + end) / 2, 1.02, phase["name"], va="bottom", fontsize=8, **turned)
    above.set_ylim(0, 1)
    above.set_xlim(0, edges[-1])
    above.yaxis.set_major_formatter(PercentFormatter(1.0))
    above.set_ylabel("share of the tokens")
    below.set_ylabel(ylabel)
    below.set_ylim(bottom=0)
    below.grid(alpha=0.3)
    below.set_xlabel("tokens of the run")
    below.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(*above.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    write_figure(path, figure)


def draw_held_out(names: Sequence[str], bits_per_byte: Sequence[float], whole: float, path: Path) -> None:
    """Draw the bits per byte of each component's held-out text as bars, and of all held-out text as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 0.35 * len(names)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(range(len(names)), bits_per_byte, color="#c44e52")
    axes.bar_label(bars, fmt="%.3f", padding=-32, color="white", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(whole, color="#555555", linestyle="--", linewidth=1, label=f"all of it: {whole:.3f}")
    axes.set_xlabel("bits per byte of held-out text")
    figure.legend(loc="outside upper right", fontsize=8)
    write_figure(path, figure)
