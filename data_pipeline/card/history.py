"""Sections of a card on how the corpus was built: steps, problems, rates and samples."""

import json
import re
from collections import Counter, defaultdict
from itertools import islice, zip_longest
from pathlib import Path

from data_pipeline.card.markdown import count, counted, fenced, folded, percent, picture, plain, size, table
from data_pipeline.card.pictures import OTHERS, draw_reasons, draw_steps
from data_pipeline.card.rates import PhaseRate, title

REASONS = 20  # per step in the table, and of all steps in the picture
REASON_SOURCES = 4
COUNTS = 20  # of a step's own counters
PROBLEM_KINDS = 40
PROBLEM_LINES = 20
SAMPLES_KEPT, SAMPLES_DROPPED = 3, 8  # shown per step; the record has more
SAMPLE_CHARACTERS, SAMPLE_LINES = 800, 20


def by_step(steps: list[dict], figures: Path) -> str:
    """Return each step's input, what it removed and why, and draw it."""
    if not steps:
        return "No step of cleaning was recorded."
    names = [title(step["name"]) for step in steps]
    rows, bars = [], []
    for name, step in zip(names, steps, strict=True):
        given, left, dropped = step["in"], step["out"], _dropped(step)
        cut = given["bytes"] - left["bytes"] - dropped["bytes"]
        lost = given["documents"] - left["documents"]
        rows.append(
            [
                plain(name),
                *(count(number) for number in (given["documents"], lost)),
                percent(lost, given["documents"]),
                *(size(length) for length in (given["bytes"], dropped["bytes"], cut, left["bytes"])),
                percent(given["bytes"] - left["bytes"], given["bytes"]),
            ]
        )
        bars.append((name, left["bytes"], dropped["bytes"], max(0, cut)))
    draw_steps(bars, figures / "steps.png")
    header = ["Step", "Documents in", "Dropped", "Share", "Text in", "Dropped", "Cut", "Left", "Removed"]
    return "\n\n".join(
        [
            "Text is dropped with its documents, or cut from documents that stay (less than 0: they grew).",
            table(header, rows),
            picture("figures/steps.png", "Text left and removed by each step"),
            *_reasons(names, steps, figures),
        ]
    )


def _dropped(step: dict) -> dict[str, int]:
    return {unit: sum(reason[unit] for reason in step["reasons"].values()) for unit in ("documents", "bytes")}


def _reasons(names: list[str], steps: list[dict], figures: Path) -> list[str]:
    rows, bars, counts = [], [], []
    for name, step in zip(names, steps, strict=True):
        reasons = sorted(step["reasons"].items(), key=lambda item: (-item[1]["documents"], item[0]))
        label = f"**{plain(name)}**"
        for reason, amount in reasons[:REASONS]:
            words = name if reason == step["name"] else reason  # a step with a single reason
            share = percent(amount["documents"], step["in"]["documents"])
            rows.append(
                [label, plain(words), count(amount["documents"]), share, size(amount["bytes"]), _sources(amount)]
            )
            bars.append((name, words, amount["bytes"]))
            label = ""
        if rest := [amount for _, amount in reasons[REASONS:]]:
            number, length = (sum(amount[unit] for amount in rest) for unit in ("documents", "bytes"))
            share = percent(number, step["in"]["documents"])
            rows.append(["", f"{count(len(rest))} more reasons", count(number), share, size(length), ""])
        own = [f"{plain(label)} {count(number)}" for label, number in step["counts"].items()][:COUNTS]
        counts += [f"- {plain(name)}: {', '.join(own)}"] if own else []
    parts = []
    if rows:
        shown = sorted(bars, key=lambda bar: -bar[2])[:REASONS]
        draw_reasons(shown, figures / "reasons.png")
        header = ["Step", "Reason", "Documents", "Share", "Size", "Documents by source"]
        parts = ["### Reasons", table(header, rows, left=2), picture("figures/reasons.png", "Text dropped by reason")]
    return parts + (["Steps have counted themselves:\n\n" + "\n".join(counts)] if counts else [])


def _sources(amount: dict) -> str:
    ordered = sorted(amount["sources"].items(), key=lambda item: (-item[1]["documents"], item[0]))
    named = [f"{plain(source)} {count(part['documents'])}" for source, part in ordered[:REASON_SOURCES]]
    if rest := sum(part["documents"] for _, part in ordered[REASON_SOURCES:]):
        named.append(f"{OTHERS} {count(rest)}")
    return ", ".join(named)


def problems(folder: Path) -> str:
    """Return what could not be read, by phase and kind, with the first lines."""
    kinds: Counter[tuple[str, str]] = Counter()
    lines: list[str] = []
    for path in sorted(folder.glob("*.json")):
        phase = re.sub(r"-\d+$", "", path.stem)
        found = json.loads(path.read_text(encoding="utf-8"))
        for kind, number in found["counts"].items():
            kinds[phase, kind] += number
        lines += found["lines"][: PROBLEM_LINES - len(lines)]
    if not kinds:
        return "Everything could be read."
    ordered = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    rows = [[plain(phase), plain(kind), count(number)] for (phase, kind), number in ordered[:PROBLEM_KINDS]]
    if rest := ordered[PROBLEM_KINDS:]:
        rows.append(["", f"{count(len(rest))} more kinds", count(sum(number for _, number in rest))])
    parts = ["What could not be read was skipped.", table(["Phase", "Kind", "Records"], rows, left=2)]
    if lines:
        block = fenced("\n".join(line.replace("\n", " ") for line in lines), 100 * SAMPLE_CHARACTERS, PROBLEM_LINES)
        parts.append(folded("The first of them" if kinds.total() > len(lines) else "All of them", block))
    return "\n\n".join(parts)


def rates(phases: list[PhaseRate]) -> str:
    """Return seconds and MB/s of each phase and step."""
    if not phases:
        return "No phase has left its times."
    total = sum(phase.seconds or 0 for phase in phases)
    rows: list[tuple[str, float | None, int, str]] = []
    for phase in phases:
        name = f"**{plain(phase.name)}**, {counted(phase.tasks, 'task')}"
        peak = size(phase.peak_memory) if phase.peak_memory is not None else ""
        rows.append((name, phase.seconds, phase.bytes, peak))
        rows += [(f"– {plain(step.name)}", step.seconds, step.bytes, "") for step in phase.steps]
        rest = (phase.seconds or 0) - sum(step.seconds for step in phase.steps)
        if phase.steps and rest >= 0.01:
            rows.append(("– between the steps", rest, phase.bytes, ""))
    if total:
        rows.append(("**Total**", total, phases[0].bytes, ""))
    header = ["Phase and step", "Seconds", "MB", "MB/s per core", "Share"]
    cells = [[name, *_rate(seconds, length, total)] for name, seconds, length, _ in rows]
    if any(peak for *_, peak in rows):
        header.append("Peak memory of a task")
        cells = [[*row, peak] for row, (*_, peak) in zip(cells, rows, strict=True)]
    words = (
        "Seconds are of processor time, of all tasks of a phase and of each of its steps, without the steps before it. "
        "MB is the text that a step was given, or that there was when it ran."
    )
    return f"{words}\n\n{table(header, cells)}"


def _rate(seconds: float | None, length: int, total: float) -> list[str]:
    megabytes = f"{length / 1e6:,.1f}"
    if seconds is None:
        return ["", megabytes, "", ""]
    rate = (
        f"{length / 1e6 / seconds:#,.3g}".rstrip(".") if seconds >= 0.01 else ""
    )  # below that the clock's resolution makes rates meaningless
    return [f"{seconds:,.1f}" if seconds >= 0.1 else f"{seconds:.2f}", megabytes, rate, percent(seconds, total)]


def samples(steps: list[dict]) -> str:
    """Return samples of documents that each step dropped and kept, folded."""
    parts = []
    for step in steps:
        dropped = list(islice(_one_of_each_reason(step["dropped_samples"]), SAMPLES_DROPPED))
        kept = step["kept_samples"][:SAMPLES_KEPT]
        parts += [
            folded(
                f"{plain(title(step['name']))}: {what} {counted(number, 'document')}", "\n\n".join(map(_sample, chosen))
            )
            for what, number, chosen in (
                ("dropped", step["in"]["documents"] - step["out"]["documents"], dropped),
                ("kept", step["out"]["documents"], kept),
            )
            if chosen
        ]
    if not parts:
        return ""
    words = "Chosen by a hash of the document's id, and cut; record/merged.json has more, and more of each."
    return "\n\n".join([words, *parts])


def _one_of_each_reason(chosen: list[dict]) -> list[dict]:
    """Return samples in rounds, each with one sample of every reason."""
    by_reason = defaultdict(list)
    for sample in chosen:
        by_reason[sample["reason"]].append(sample)
    rounds = zip_longest(*(by_reason[reason] for reason in sorted(by_reason)))
    return [sample for turn in rounds for sample in turn if sample is not None]


def _sample(sample: dict) -> str:
    reason = f"**{plain(sample['reason'])}**: " if "reason" in sample else ""
    names = ", ".join(plain(sample[key]) for key in ("source", "category") if sample.get(key))
    head = f"{reason}{plain(sample['id'], 160)} ({names}; {count(sample['length'])} characters)"
    return f"{head}\n\n{fenced(sample['text'], SAMPLE_CHARACTERS, SAMPLE_LINES)}"
