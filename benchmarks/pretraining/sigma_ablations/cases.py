"""The cases of tables 1 to 6 (arXiv 2501.13629) over `experiment=sigma/ablation_small`, and the paper's numbers."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring.tables import read_csv

PAPER = Path(__file__).parent / "published.csv"
EXPERIMENT = "sigma/ablation_small"
QUARTER, HALF_WIDTH, AUGMENTED = "a quarter of the K heads", "half the K width", "AugQ 768"
MHA, GQA, GQA_4 = "MHA", "GQA-8", "GQA-4"
SELECTED = "Sel.V"

K, V, Q = "num_key_heads", "num_value_heads", "augmented_query_dim"
WIDTH, F = "key_head_dim", "intermediate_size"
DELTA, FEED_FORWARD = 768, 1408


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        settings: keys of `model` that differ from GQA with 8 heads.
        tier: of importance; 0 first.
    """

    name: str
    settings: dict[str, int]
    tier: int

    @property
    def overrides(self) -> list[str]:
        """The settings for the command line."""
        return [f"model.{key}={value}" for key, value in self.settings.items()]

    @property
    def folder(self) -> str:
        """The name of the folder of its runs."""
        return self.name.lower().replace(",", "").replace(" ", "_")


def heads(keys: int, values: int) -> dict[str, int]:
    """Return the settings of numbers of key and value heads."""
    return {K: keys, V: values}


CASES = (
    Case(f"{GQA}, {QUARTER}", {K: 2}, 0),
    Case(f"{GQA}, a quarter of the V heads", {V: 2}, 0),
    Case(f"{GQA_4}, one K head", heads(1, 4), 0),
    Case(f"{GQA_4}, one V head", heads(4, 1), 0),
    Case(f"{GQA}, {AUGMENTED}", {Q: DELTA}, 0),
    Case(f"{GQA}, AugF 768", {F: FEED_FORWARD + DELTA}, 0),
    Case(GQA, {}, 1),
    Case(GQA_4, heads(4, 4), 1),
    Case(f"{GQA}, {HALF_WIDTH}", {WIDTH: 16}, 1),
    Case(MHA, heads(16, 16), 1),
    Case(f"{MHA}, {HALF_WIDTH}", heads(16, 16) | {WIDTH: 16}, 1),
    Case(f"{GQA_4}, {HALF_WIDTH}", heads(4, 4) | {WIDTH: 16}, 1),
    Case(f"{GQA}, {AUGMENTED}, {QUARTER}", {Q: DELTA, K: 2}, 1),
    Case(f"{GQA}, {AUGMENTED}, {HALF_WIDTH}", {Q: DELTA, WIDTH: 16}, 1),
    Case(f"{GQA}, {QUARTER}, {HALF_WIDTH}", {K: 2, WIDTH: 16}, 1),
    Case(f"{GQA}, {AUGMENTED}, {QUARTER}, {HALF_WIDTH}", {Q: DELTA, K: 2, WIDTH: 16}, 1),
    Case(f"{GQA}, AugQ 1024", {Q: 1024}, 1),
    Case(f"{GQA}, AugQ 1408", {Q: 1408}, 1),
    Case(f"{MHA}, half the K heads", heads(8, 16), 2),
    Case(f"{MHA}, half the V heads", heads(16, 8), 2),
    Case(f"{MHA}, AugQ 1408", heads(16, 16) | {Q: 1408}, 2),
    Case(f"{GQA_4}, AugQ 1408", heads(4, 4) | {Q: 1408}, 2),
    *(Case(f"{GQA}, AugF {more * DELTA}", {F: FEED_FORWARD + more * DELTA}, 2) for more in (2, 3, 5)),
    *(
        Case(f"{GQA}, AugF {more * DELTA}, {AUGMENTED}", {F: FEED_FORWARD + more * DELTA, Q: DELTA}, 2)
        for more in (1, 2, 3)
    ),
)
"""In the order in which they are run."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of one of the paper's tables.

    row: in the paper's words. case: the name of the case here. overall: the mean of the nine tasks that follow, which
    are accuracies in percent.
    """

    table: int
    row: str
    case: str
    overall: float
    hellaswag: float
    openbookqa: float
    winogrande: float
    arc: float
    piqa: float
    sciq: float
    boolq: float
    logiqa: float
    lambada: float


def published() -> list[Published]:
    """Return the rows of the paper's tables 1 to 6."""
    return read_csv(PAPER, Published)


@dataclass(frozen=True)
class Pair:
    """Two cases that a table of the paper compares: what the second changes."""

    table: int
    change: str
    first: str
    second: str


def pairs() -> list[Pair]:
    """Return the comparisons: each row of a table with the row above that it changes, and equal savings and costs."""
    found: list[Pair] = []
    for table in range(1, 7):
        base = ""
        for row in (row for row in published() if row.table == table):
            if row.case in (MHA, GQA, GQA_4):
                base = row.case
            else:
                found.append(Pair(table, f"{base}: {row.case.removeprefix(f'{base}, ')}", base, row.case))
    return [*EQUAL, *found]


EQUAL = (
    Pair(1, "a quarter of the K heads, not of the V heads", f"{GQA}, a quarter of the V heads", f"{GQA}, {QUARTER}"),
    Pair(1, "one K head, not one V head", f"{GQA_4}, one V head", f"{GQA_4}, one K head"),
    Pair(1, "half the K heads, not half the V heads", f"{MHA}, half the V heads", f"{MHA}, half the K heads"),
    Pair(5, "AugQ, not AugF, as many parameters", f"{GQA}, AugF 768", f"{GQA}, {AUGMENTED}"),
    Pair(5, "AugF 768 and AugQ, not AugF 1536", f"{GQA}, AugF 1536", f"{GQA}, AugF 768, {AUGMENTED}"),
    Pair(5, "AugF 1536 and AugQ, not AugF 2304", f"{GQA}, AugF 2304", f"{GQA}, AugF 1536, {AUGMENTED}"),
)
"""Pairs with caches, or parameters, of the same size."""
