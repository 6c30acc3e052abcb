"""End of a rewriting: summary.json, samples.md, and the manifest that marks it as complete."""

import html
import json

from common import checksums
from common.atomic_files import write_atomic
from data_pipeline.job_folder import SETTINGS
from data_pipeline.rewriting.folder import OutputFolder
from data_pipeline.rewriting.plan import Plan
from data_pipeline.rewriting.tally import COUNTS, Tally

SAMPLES = "samples.md"
SUMMARY = "summary.json"


def finish(plan: Plan, folder: OutputFolder) -> dict | None:
    """Write summary, samples and manifest, and return the summary; only return None while tasks are unfinished."""
    ended = folder.ended_tasks()
    if len(ended) < plan.tasks:
        return None
    styles: dict[str, Tally] = {name: Tally() for name in plan.styles}
    shards = []
    for path, rows, counts in folder.counts():
        name = path.relative_to(folder.path).as_posix()
        written = checksums.manifest_entries(folder.path, [name])[name]
        shards.append({"file": name, "documents": rows, "bytes": written["bytes"], "written": written})
        for name, tally in counts["styles"].items():
            styles[name].add(tally)
    summary = {
        "documents": sum(task["documents"] for task in ended.values()),
        "skipped": _sum([task["problems"] for task in ended.values()]),
        "problems": [line for task in ended.values() for line in task["lines"]],
        "styles": {name: _style_summary(tally) for name, tally in styles.items()},
    }
    summary["total"] = _sum([{key: style[key] for key in COUNTS} for style in summary["styles"].values()])
    write_atomic(folder.path / SUMMARY, json.dumps(summary, indent=1) + "\n")
    write_atomic(folder.path / SAMPLES, samples_page(styles))
    settings = json.loads((folder.path / SETTINGS).read_text(encoding="utf-8"))
    manifest = {"identity": settings, "shards": shards, "documents": sum(shard["documents"] for shard in shards)}
    write_atomic(folder.manifest, json.dumps(manifest, indent=1) + "\n")
    folder.clean()
    return summary


def samples_page(styles: dict[str, Tally]) -> str:
    """Return a Markdown page of texts before and after rewriting: kept ones, and those each screen rejected."""
    lines = ["# Samples", ""]
    for name, tally in styles.items():
        for kind in sorted(tally.samples, key=lambda kind: (kind != "kept", kind)):
            for sample in tally.samples[kind]:
                title = "kept" if kind == "kept" else f"left out: {kind}"
                lines += [f"## {name}, {title}", "", f"`{sample['id']}`".replace("\n", " "), ""]
                cells = "".join(_cell(sample[key]) for key in ("source", "rewritten"))
                lines += ["<table><tr><th>source</th><th>rewritten</th></tr>", f"<tr>{cells}</tr></table>", ""]
    return "\n".join(lines)


def summary_lines(summary: dict) -> list[str]:
    """Return the summary as log lines."""
    lines = []
    for name, style in summary["styles"].items():
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in style["left_out_by_reason"].items())
        lines.append(
            f"{name}: {style['kept']:,} kept, {style['left_out']:,} left out{f' ({reasons})' if reasons else ''}, "
            f"{style['requests']:,} answers in {style['tries']:,} tries, "
            f"{style['tokens_in']:,} tokens in, {style['tokens_out']:,} out"
        )
    return lines


def _style_summary(tally: Tally) -> dict:
    return {
        **{key: tally.counts[key] for key in COUNTS},
        "left_out_by_reason": dict(tally.reasons.most_common()),
        "rejected_answers_by_screen": dict(tally.rejected.most_common()),
    }


def _sum(counts: list[dict[str, int]]) -> dict[str, int]:
    keys = dict.fromkeys(key for count in counts for key in count)
    return {key: sum(count.get(key, 0) for count in counts) for key in keys}


def _cell(text: str) -> str:
    # A blank line would end the HTML block of a Markdown page; its entity does not.
    escaped = html.escape(text, quote=False).strip("\n").replace("\n", "&#10;")
    return f'<td valign="top"><pre>{escaped}</pre></td>'
