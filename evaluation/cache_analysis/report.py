"""The report of an analysis, and its tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evaluation.cache_analysis.coverage import NEWEST, POLICIES, SINKS
from evaluation.cache_analysis.distortion import EVICTED, PARTS
from evaluation.cache_analysis.heads import GATE, HEAVY, PROMPT
from evaluation.cache_analysis.values import Array, Values, mean_of_heads, relative_error
from evaluation.results import conditions_line
from evaluation.tables import difference, shown, table
from evaluation.uncertainty import Estimate, JsonEstimate, is_decided, mean, paired_difference
from lit_modules.networks.caches.choosing import VOTERS

TITLES = {
    "log_sparse": "log-sparse (LogQuant)",
    "recent": "recent (KiVi)",
    "recent_as_many": "recent, as many as log-sparse",
    "two_and_recent": "first 2 + recent (KiVi + sink)",
    "two_and_fewer": "first 2 + recent, as many as log-sparse",
    "four_and_recent": "first 4 + recent (StreamingLLM)",
    HEAVY: "heavy hitters + recent (H2O)",
    PROMPT: "read by the prompt's end + recent (SnapKV)",
    GATE: "chosen by the forget gate, a block more",
    "largest": "the largest now (upper bound)",
}
COVERAGES = ("mass", "share", "tokens")
OTHERS = ("recent", "two_and_recent", "two_and_fewer")
BY_CONTENT = (HEAVY, PROMPT, GATE)
AGAINST_LOG_SPARSE = ("recent", "recent_as_many", "four_and_recent", *BY_CONTENT)


def make_report(values: Values, edges: Sequence[int], reserved: Sequence[int]) -> dict[str, Any]:
    """Return every mean with its standard error over sequences, values by layer, and the comparisons."""
    ways: dict[str, list[str]] = {}
    for key in values.keys:
        if key[0] == "l1" and key[2] == reserved[0]:
            ways.setdefault(key[1], []).append(key[3])
    measured = {key[1] for key in values.keys if key[0] == "coverage"}
    policies = [policy for policy in POLICIES if policy in measured]
    rounded = list(dict.fromkeys(key[1] for key in values.keys if key[0] == "error"))
    return {
        "layers": values.layers,
        "coverage": {
            str(length): {policy: coverage(values, policy, length) for policy in policies} for length in reserved
        },
        "l1": {
            str(length): {name: {how: l1(values, name, length, how) for how in hows} for name, hows in ways.items()}
            for length in reserved
        },
        "kept": {
            str(length): {name: float(values.by_layer(("kept", name, length), mean_of_heads).mean()) for name in ways}
            for length in reserved
        },
        "distance": distance(values, edges),
        "errors": {name: {part: error(values, name, part) for part in PARTS} for name in rounded},
        "comparisons": comparisons(values, reserved, ways),
    }


def estimate(values: Array) -> JsonEstimate:
    """Return the mean over sequences of one number for each, with its standard error."""
    return mean(values.tolist()).as_json()


def coverage(values: Values, policy: str, length: int) -> dict[str, Any]:
    """Return mass, share and number of the reserved tokens."""
    found = values.by_layer(("coverage", policy, length), mean_of_heads)
    return {
        name: estimate(found[..., place].mean(1)) | {"by_layer": found[..., place].mean(0).tolist()}
        for place, name in enumerate(COVERAGES)
    }


def l1(values: Values, name: str, length: int, how: str) -> dict[str, Any]:
    """Return the mean over heads and layers, and the sum over them all."""
    key = ("l1", name, length, how)
    found, sums = values.by_layer(key, mean_of_heads), values.by_layer(key, np.sum)
    return {
        **estimate(found.mean(1)),
        "sum_over_heads": estimate(sums.sum(1)),
        "by_layer": found.mean(0).tolist(),
    }


def distance(values: Values, edges: Sequence[int]) -> dict[str, Any]:
    """Return the attention of a token by distance, and of each head on the first and on the newest tokens."""
    found = values.by_layer(("distance",), mean_of_heads)
    parts = values.by_layer(("first_and_newest",), mean_of_heads)
    heads = np.concatenate([np.stack([s[layer]["first_and_newest",] for s in values.sequences]).mean(0)
                            for layer in values.layers])  # fmt: skip
    return {
        "edges": list(edges),
        "mean": found.mean((0, 1)).tolist(),
        "by_layer": found.mean(0).tolist(),
        "first": estimate(parts[..., 0].mean(1)),
        "newest": estimate(parts[..., 1].mean(1)),
        "heads": {"first": heads[:, 0].tolist(), "newest": heads[:, 1].tolist()},
    }


def error(values: Values, name: str, part: str) -> dict[str, Any]:
    """Return the mean over layers of a relative error, or of the scores' root mean square."""
    found = values.by_layer(("error", name, part), relative_error)
    return estimate(found.mean(1)) | {"by_layer": found.mean(0).tolist()}


def comparisons(values: Values, reserved: Sequence[int], ways: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Compare log-sparse coverage with others', and L1 errors in the paper's order, on the same sequences.

    Args:
        values: the measured ones.
        reserved: the reserved lengths.
        ways: for each selection whose L1 error was measured, what becomes of the others.
    """

    def l1_of(name: str, length: int, how: str) -> Array:
        return values.by_layer(("l1", name, length, how), mean_of_heads).mean(1)

    def mass_of(policy: str, length: int) -> Array:
        return values.by_layer(("coverage", policy, length), mean_of_heads)[..., 0].mean(1)

    found = []
    for length in reserved:
        for policy in AGAINST_LOG_SPARSE:
            if policy in BY_CONTENT and policy not in ways:
                continue
            sides = [(TITLES[name], mass_of(name, length)) for name in ("log_sparse", policy)]
            found.append({"of": "coverage", "reserved": length, **compared(*sides)})
        evicting = [*OTHERS, *(name for name in BY_CONTENT if name in ways)]
        pairs = [(("log_sparse", EVICTED), (other, EVICTED)) for other in evicting]
        for how in ways["log_sparse"]:
            if how == EVICTED:
                continue
            pairs += [(("log_sparse", how), (other, how)) for other in OTHERS]
            pairs.append((("recent", how), ("log_sparse", EVICTED)))
        for pair in pairs:
            sides = [(f"{TITLES[name]}, {how}", l1_of(name, length, how)) for name, how in pair]
            found.append({"of": "L1", "reserved": length, **compared(*sides)})
    return found


def compared(left: tuple[str, Array], right: tuple[str, Array]) -> dict[str, Any]:
    """Return the difference of two methods, each a name and one number for each sequence, and the smaller one."""
    found = paired_difference(left[1].tolist(), right[1].tolist())
    smaller = (left[0] if found.value < 0 else right[0]) if is_decided(found) else "undecided"
    return {"left": left[0], "right": right[0], "difference": found.as_json(), "smaller": smaller}


def logged_values(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the values for the run's wandb run."""
    found: dict[str, float] = {}
    for length, policies in report["coverage"].items():
        found |= {f"coverage_{policy}_{length}": row["mass"]["value"] for policy, row in policies.items()}
    for length, selections in report["l1"].items():
        for name, ways in selections.items():
            found |= {f"l1_{name}_{length}/{how}": row["value"] for how, row in ways.items()}
    for name, parts in report["errors"].items():
        found |= {f"error_{part}/{name}": row["value"] for part, row in parts.items()}
    return found


def as_markdown(report: Mapping[str, Any]) -> str:
    """Format the tables, each with what it shows, and the conditions."""
    settings = report["settings"]
    parts = [
        f"# {report['checkpoint']}",
        "",
        f"Attention of the last {settings['queries']} tokens of {settings['sequences']} sequences of "
        f"{settings['length']:,} tokens; means over heads, layers and sequences, ± standard error over sequences.",
        "",
        *coverage_table(report),
        *l1_table(report),
        *error_table(report),
        *distance_table(report),
        *comparison_table(report),
        f"- text {settings['text']}, seed {settings['seed']}, groups of {settings['group']}",
        conditions_line(report, report["dtype"]),
    ]
    return "\n".join(parts) + "\n"


def coverage_table(report: Mapping[str, Any]) -> list[str]:
    lengths = list(report["coverage"])
    lines = [["policy", *(f"{length} reserved" for length in lengths), *(f"tokens of {length}" for length in lengths)]]
    for policy in report["coverage"][lengths[0]]:
        rows = [report["coverage"][length][policy] for length in lengths]
        mass = [shown(row["mass"]["value"], row["mass"]["standard_error"], True) for row in rows]
        lines.append([TITLES[policy], *mass, *(f"{row['tokens']['value']:.0f}" for row in rows)])
    note = (
        f"Percent of attention on the reserved tokens, without the first {SINKS} tokens; tokens: the mean number. The "
        f"prompt's end: the {VOTERS} tokens before the measured ones."
    )
    return ["## Attention coverage (arXiv 2503.19950, figure 4)", "", note, "", *table(lines), ""]


def l1_table(report: Mapping[str, Any]) -> list[str]:
    parts = ["## L1 error of the attention distribution (arXiv 2503.19950, table 2)", ""]
    parts += [
        "Sum over tokens of |p - p'|, from 0 to 2, with the keys' groups along tokens or channels; evicted: the others "
        "normalized anew. The sums over all heads and layers are in the JSON file.",
        "",
    ]
    for length, selections in report["l1"].items():
        ways = list(next(iter(selections.values())))
        lines = [[f"{length} reserved", "tokens", *ways]]
        for name, row in selections.items():
            errors = [shown(row[h]["value"], row[h]["standard_error"], False) if h in row else "" for h in ways]
            lines.append([TITLES[name], f"{report['kept'][length][name]:.0f}", *errors])
        parts += [*table(lines), ""]
    return parts


def error_table(report: Mapping[str, Any]) -> list[str]:
    lines = [["rounding", *PARTS]]
    for name, parts in report["errors"].items():
        lines.append([name, *(shown(parts[part]["value"], parts[part]["standard_error"], False) for part in PARTS)])
    note = (
        f"All but the last {min(report['settings']['reserved'])} tokens are quantized. Keys and values: relative to "
        "their norm, quantized tokens only. Scores: root mean square error of their logits, less each query's mean. "
        "Outputs: relative, with keys and values quantized. Means over layers, which the JSON file has one by one."
    )
    return ["## Reconstruction error", "", note, "", *table(lines), ""]


def distance_table(report: Mapping[str, Any]) -> list[str]:
    found, edges = report["distance"], report["distance"]["edges"]
    lines = [["tokens back", "attention of one token"]]
    for first, last, each in zip(edges, edges[1:], found["mean"], strict=False):
        lines.append([f"{first}" if last == first + 1 else f"{first} to {last - 1}", f"{each:.2e}"])
    first, newest = (shown(found[part]["value"], found[part]["standard_error"], True) for part in ("first", "newest"))
    note = f"The first {SINKS} tokens have {first}% of the attention, the newest {NEWEST} have {newest}%."
    return ["## Attention by distance (arXiv 2503.19950, figure 3)", "", note, "", *table(lines), ""]


def comparison_table(report: Mapping[str, Any]) -> list[str]:
    lines = [["of", "reserved", "left", "right", "left - right"]]
    for row in report["comparisons"]:
        found, decided = Estimate(**row["difference"]), row["smaller"] != "undecided"
        lines.append([row["of"], str(row["reserved"]), row["left"], row["right"], difference(found, decided)])
    note = "On the same sequences; an asterisk: two standard errors or more. Coverage: share of the attention."
    return ["## Comparisons", "", note, "", *table(lines), ""]
