"""LongBench's tables: by set, by group with differences, and a row for each cache; and the picture."""

import functools
import json
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evaluation import scores
from evaluation.longbench.documents import Definition
from evaluation.results import conditions_line
from evaluation.tables import UNDECIDED

GROUPS = {
    "single_document_qa": "Single-Document QA",
    "multi_document_qa": "Multi-Document QA",
    "summarization": "Summarization",
    "few_shot_learning": "Few-shot Learning",
    "synthetic_tasks": "Synthetic Tasks",
    "code_completion": "Code Completion",
}


def summary(found: scores.Estimates, definitions: Mapping[str, Definition]) -> dict[str, scores.Estimates]:
    """Return scores and differences of `sets`, of `groups` (means over their sets) and `overall` (over all sets)."""
    members: dict[str, list[str]] = {GROUPS.get(each.group, each.group): [] for each in definitions.values()}
    for each in definitions.values():
        members[GROUPS.get(each.group, each.group)].append(each.title)
    every = [title for titles in members.values() for title in titles]
    return {
        "sets": found,
        "groups": scores.averaged(found, members),
        "overall": scores.averaged(found, {"All sets": every}),
    }


def math_beside(report: Mapping[str, Any], folder: Path) -> scores.Estimates | None:
    """Return the exact match in GSM8K of the same weights under the same caches, if `benchmark=gsm8k` left it there."""
    file = folder / "gsm8k.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if any(found.get(key) != json.loads(json.dumps(report[key])) for key in ("weights", "caches", "dtype")):
        return None
    return {part: {"Math (GSM8K)": found[part]["strict-match"]} for part in ("score", "difference")}


def as_markdown(report: Mapping[str, Any]) -> str:
    """Format a row for each cache and a column for each group, then groups and sets with differences."""
    others = [report[name] for name in ("math", "groups", "overall") if report[name] is not None]
    groups = {part: functools.reduce(operator.or_, (each[part] for each in others)) for part in ("score", "difference")}
    parts = [f"# {report['checkpoint']}", "", *scores.columns(groups), ""]
    parts += [*scores.rows(groups, "group"), "", *scores.rows(report["sets"], "set"), ""]
    return "\n".join([*parts, *notes(report)]) + "\n"


def notes(report: Mapping[str, Any]) -> list[str]:
    """List the conditions of the scores."""
    settings = report["settings"]
    lines = ["- percent, by LongBench's metrics; groups are means over their sets, standard errors over documents"]
    if settings["chinese_words"] == "characters":
        told = "each Chinese character counts as a word, so Chinese scores are not LongBench's, which has jieba's words"
        lines.append(f"- **{told}** (benchmark.chinese_words=jieba)")
    if settings["limit"] is not None:
        lines.append(f"- **only the first {settings['limit']} documents of each set** (benchmark.limit)")
    cut, every = sum(report["cut_prompts"].values()), sum(report["documents"].values())
    lines.append(f"- {cut:,} of {every:,} prompts were too long and lost their middle")
    template = "in the tokenizer's chat template, if it has one" if settings["chat_template"] else "as they are"
    lines.append(f"- prompts {template}, read {settings['chunk']} tokens at a time")
    if len(report["caches"]) > 1:
        lines.append(f"- differences in points, paired by document. {UNDECIDED}")
    return [*lines, conditions_line(report, report["dtype"])]


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """Draw bars by group and cache."""
    return scores.draw_bars(report["groups"], f"LongBench, {report['checkpoint']}", path)
