"""Write the page and the pictures of what `runs` has measured.

    python -m benchmarks.cache.study.report [--output FOLDER]

Reads cache_study.csv; writes cache_study.md and cache_study_*.png beside it.
"""

import math
from collections.abc import Iterable, Sequence

from benchmarks.cache.study.cases import (
    BEST,
    EVICTED,
    EVICTING,
    FIRST_AND_RECENT,
    FULL_CASE,
    GATE,
    HEAVY,
    KEYS,
    KIVI_AT_BALANCED,
    KIVI_OF_BEST,
    MAIN,
    PARTIAL,
    PROMPT,
    QUANTIZED,
    RECENT,
    RESERVED,
    SPARSE,
    SPARSE_AT_EVICTED,
    Case,
)
from benchmarks.cache.study.pictures import draw_attention, draw_losses
from benchmarks.cache.study.records import FILE, IN_CHUNKS, Records, Result
from benchmarks.measuring.report import CommandLine, page, publish
from benchmarks.measuring.tables import table
from evaluation.uncertainty import Estimate, is_decided, mean, paired_difference

TITLES = {
    SPARSE: "log-sparse (LogQuant)", RECENT: "recent (KiVi)", FIRST_AND_RECENT: "first + recent (KiVi + sink)",
    PROMPT: "read by the prompt's end (SnapKV)", GATE: "chosen by the gate", PARTIAL: "partial (PartialLogQuant)",
    HEAVY: "heavy hitters (H2O)", "full": "16 bits", "largest": "largest attention, the upper bound",
}  # fmt: skip
LOSS, RIGHT = "loss", "right"
LEAST_SHARE, MOST_LOSS = 0.95, 1 / 3
"""The target: the part of recall that stays, and the part of KiVi's loss that is left."""


class Findings:
    """The results of one model, by case and measure, over all texts."""

    def __init__(self, model: str, results: Iterable[Result]) -> None:
        self.model = model
        self.results = [result for result in results if result.model == model]

    def texts(self, measure: str) -> list[str]:
        """Return the texts of a measure, in the order of measuring."""
        return list(dict.fromkeys(each.text for each in self.results if each.measure == measure))

    def of(self, case: Case, measure: str, text: str | None = None) -> list[Result]:
        """Return the results of a case, of one text or of all."""
        found = [r for r in self.results if (r.case, r.measure) == (case.key, measure)]
        return [r for r in found if text in (None, r.text)]

    def singles(self, case: Case, measure: str, text: str | None = None) -> list[float]:
        """Return the values of all single texts, in a fixed order."""
        return [v for r in sorted(self.of(case, measure, text), key=lambda r: r.text) for v in r.singles]

    def bits(self, case: Case, measure: str) -> float:
        """Return the mean bits for each number."""
        found = self.of(case, measure)
        return sum(r.bits_per_number for r in found) / len(found)

    def against(self, case: Case, base: Case, measure: str) -> Estimate | None:
        """Return the mean difference of two cases on the same texts, None if one was not measured on the same."""
        one, two = self.singles(case, measure), self.singles(base, measure)
        return paired_difference(one, two) if one and len(one) == len(two) else None

    def perplexity(self, case: Case, text: str | None = None) -> float | None:
        """Return the perplexity of all tokens."""
        losses = self.singles(case, LOSS, text)
        return math.exp(sum(losses) / len(losses)) if losses else None


def cell(found: Estimate | None, digits: int = 4) -> str:
    """Format a difference, with an asterisk if it is decided."""
    if found is None:
        return ""
    error = "" if found.standard_error is None else f" ± {found.standard_error:.{digits}f}"
    return f"{found.value:+.{digits}f}{error}{'*' if is_decided(found) else ''}"


def title(case: Case) -> str:
    """Return the name of a row."""
    return {"full": "16 bits"}.get(case.policy, TITLES.get(case.policy, case.policy))


def measured(findings: Findings, every: Iterable[Case], measure: str = LOSS) -> list[Case]:
    """Return the cases that have results."""
    return [case for case in every if findings.of(case, measure)]


def loss_table(findings: Findings, every: Sequence[Case], label: str) -> str:
    """Return a row for each case: bits, perplexity by text, and the loss above that of 16 bits."""
    texts = findings.texts(LOSS)
    lines = []
    for case in every:
        words = [f"{findings.perplexity(case, text):.3f}" if findings.of(case, LOSS, text) else "" for text in texts]
        name = f"{title(case)}, {case.treatment}" if case.treatment not in (EVICTED, "none") else title(case)
        what = f"{name}{'' if case.match in ('slots', 'full') else f' ({case.match})'}"
        lines.append(
            [what, f"{findings.bits(case, LOSS):.2f}", *words,
             "" if case == FULL_CASE else cell(findings.against(case, FULL_CASE, LOSS)),
             "" if case == FULL_CASE else cell(findings.against(case, FULL_CASE, "late_loss"))]
        )  # fmt: skip
    return table([label, "bits", *texts, "nats above 16 bits", "second half"], lines)


def quantized(reserved: int, bits: int, treatment: str, match: str = "slots") -> list[Case]:
    """Return the cases of all policies that quantize."""
    return [Case(policy, treatment, bits, reserved, match) for policy in QUANTIZED]


def loss_sections(findings: Findings) -> list[str]:
    """Return the tables of losses: equal slots, equal bytes, and treatments."""
    found = []
    for bits in (2, 4):
        for reserved in (64, *sorted(RESERVED)):
            rows = [case for treatment in KEYS for case in quantized(reserved, bits, treatment)]
            rows += [Case(RECENT, "plain", bits, reserved, KIVI_AT_BALANCED), KIVI_OF_BEST] if bits == 2 else []
            rows += [case for t in MAIN for case in quantized(reserved, bits, t, "tokens")]
            if bits == 2:
                rows += [Case(p, EVICTED, 0, reserved, m) for m in ("slots", SPARSE_AT_EVICTED) for p in EVICTING]
            rows = [case for case in measured(findings, rows) if case.reserved == reserved]
            if rows:
                label = f"{bits} bits, {reserved} slots"
                found.append(loss_table(findings, [FULL_CASE, *rows], label))
    return found


def recall_table(findings: Findings, in_chunks: bool) -> str:
    """Return the share of right answers by kind and length, and the part of the full cache's."""
    asked = [text for text in findings.texts(RIGHT) if text.endswith(IN_CHUNKS) == in_chunks]
    texts = [text for text in asked if findings.of(FULL_CASE, RIGHT, text)]
    seen: dict[tuple, Result] = {}
    for result in findings.results:
        if result.measure == RIGHT and result.text in texts:
            seen.setdefault(result.case, result)
    compared = [t for t in texts if sum(r.text == t and r.measure == RIGHT for r in findings.results) > 1]
    lines = []
    for case in (Case(*key) for key in seen):
        shares, right, most = [], 0.0, 0.0
        for text in compared:
            own = findings.of(case, RIGHT, text)
            shares.append(f"{100 * own[0].value:.0f}" if own else "")
            right += sum(own[0].singles) if own else 0.0
            most += sum(findings.of(FULL_CASE, RIGHT, text)[0].singles)
        difference = None
        if case != FULL_CASE and compared:
            pairs = [(findings.singles(case, RIGHT, t), findings.singles(FULL_CASE, RIGHT, t)) for t in compared]
            pairs = [(a, b) for a, b in pairs if a]
            difference = paired_difference([v for a, _ in pairs for v in a], [v for _, b in pairs for v in b])
        what = f"{title(case)}, {case.treatment}, {case.bits} bits" if case.bits < 16 else title(case)
        what += "" if case.match in ("slots", "full") else f" ({case.match})"
        share = f"{100 * right / most:.1f}%" if most else ""
        lines.append([what, f"{findings.bits(case, RIGHT):.2f}", *shares, share, cell(difference, 3)])
    label = "right, %, prompts in chunks" if in_chunks else "right, %, prompts whole"
    heads = [text.removesuffix(IN_CHUNKS) for text in compared]
    return table([label, "bits", *heads, "of 16 bits", "difference"], lines) if compared else ""


def attention_table(findings: Findings, measure: str) -> str:
    """Return coverage, or L1 errors, by policy and reserved length."""
    seen: dict[tuple, None] = {}
    for result in findings.results:
        if result.measure == measure:
            seen.setdefault((result.policy, result.treatment, result.bits, result.match))
    lines = []
    for policy, treatment, bits, match in seen:
        cells, tokens = [], []
        for reserved in sorted(RESERVED):
            case = Case(policy, treatment, bits, reserved, match)
            values = findings.singles(case, measure)
            estimate = mean(values) if values else None
            scale = 100 if measure == "coverage" else 1
            error = estimate.standard_error or 0.0 if estimate else 0.0
            cells.append(f"{scale * estimate.value:.3g} ± {scale * error:.2g}" if estimate else "")
            tokens.append(f"{findings.bits(case, measure):.3f}" if estimate else "")
        how = "" if treatment == "any" else f", {treatment}" + (f", {bits} bits" if bits else "")
        lines.append(
            [
                f"{title(Case(policy, treatment, bits, 0))}{how}{'' if match == 'slots' else f' ({match})'}",
                *cells,
                *tokens,
            ]
        )
    heads = [f"{reserved} slots" for reserved in sorted(RESERVED)]
    label = "coverage, %" if measure == "coverage" else "L1 error"
    return table([label, *heads, *(f"16-bit tokens, bits, {h}" for h in heads)], lines) if lines else ""


def questions(reserved: int) -> list[tuple[str, Case, Case]]:
    """Return the study's questions: the name, and the two cases that are compared."""

    def case(policy: str, treatment: str = "plain", match: str = "slots") -> Case:
        return Case(policy, treatment, 0 if treatment == EVICTED else 2, reserved, match)

    sparse, kivi, best = case(SPARSE), case(RECENT), case(FIRST_AND_RECENT, "balanced")
    return [
        ("LogQuant - KiVi, equal slots", sparse, kivi),
        ("LogQuant - KiVi, equal tokens", sparse, case(RECENT, match="tokens")),
        ("LogQuant - KiVi + sink", sparse, case(FIRST_AND_RECENT)),
        ("KiVi - LogQuant evicted, equal slots", kivi, case(SPARSE, EVICTED)),
        ("KiVi - LogQuant evicted, equal bytes", kivi, case(SPARSE, EVICTED, SPARSE_AT_EVICTED)),
        ("KiVi - StreamingLLM, equal bytes", kivi, case(FIRST_AND_RECENT, EVICTED, SPARSE_AT_EVICTED)),
        ("KiVi - H2O, equal bytes", kivi, case(HEAVY, EVICTED, SPARSE_AT_EVICTED)),
        *(
            (f"log spacing - first + recent, {way}", case(SPARSE, way), case(FIRST_AND_RECENT, way))
            for way in ("hadamard", "oscar", "balanced")
        ),
        ("log spacing - first + as many recent, balanced", case(SPARSE, "balanced"),
         case(FIRST_AND_RECENT, "balanced", "tokens")),
        ("gate - log spacing, plain", case(GATE), sparse),
        ("gate - log spacing, balanced", case(GATE, "balanced"), case(SPARSE, "balanced")),
        ("gate - first + recent, balanced", case(GATE, "balanced"), best),
        ("balanced - oscar, first + recent", best, case(FIRST_AND_RECENT, "oscar")),
        ("balanced - hadamard, first + recent", best, case(FIRST_AND_RECENT, "hadamard")),
        ("keys' clip 0.92 - 0.96", case(FIRST_AND_RECENT, "balanced, keys' clip 0.92"), best),
        ("keys' clip 1 - 0.96", case(FIRST_AND_RECENT, "balanced, keys' clip 1"), best),
        ("keys along tokens - channels", case(FIRST_AND_RECENT, "balanced, keys along tokens"), best),
        ("keys ordered, 16 channels in 4 bits - balanced", case(FIRST_AND_RECENT, "ordered"), best),
        ("16 - 8 channels in 4 bits", case(FIRST_AND_RECENT, "ordered"),
         case(FIRST_AND_RECENT, "ordered, 8 channels")),
        ("first + recent balanced - KiVi, equal bytes", best, case(RECENT, match=KIVI_AT_BALANCED)),
        *(
            (f"read by the prompt's end - first + recent, {way}", case(PROMPT, way), case(FIRST_AND_RECENT, way))
            for way in ("plain", "balanced", "ordered, 8 channels", "ordered, debiased")
        ),
        ("KiVi, debiased - not", case(RECENT, "plain, debiased"), kivi),
        ("balanced, read by the prompt's end, debiased - not", case(PROMPT, "balanced, debiased"),
         case(PROMPT, "balanced")),
        ("8 channels, read by the prompt's end, debiased - not", case(PROMPT, "ordered, 8 channels, debiased"),
         case(PROMPT, "ordered, 8 channels")),
    ]  # fmt: skip


def answers(every: Sequence[Findings], reserved: int) -> str:
    """Return the answers to the study's questions: a row for each, and a column for each model."""
    lines = []
    for what, one, two in questions(reserved):
        cells = [cell(findings.against(one, two, LOSS)) for findings in every]
        if any(cells):
            lines.append([what, *cells])
    return table([f"first - second, nats, {reserved} slots", *(findings.model for findings in every)], lines)


def target(every: Sequence[Findings]) -> str:
    """Return what `cache=best` loses against KiVi with as many bytes, and the part of recall that it keeps."""
    lines = []
    for findings in every:
        words = [findings.perplexity(each) for each in (FULL_CASE, KIVI_OF_BEST, BEST)]
        full, plain, own = words
        if full is None or plain is None or own is None or plain <= full:
            continue
        part = (own - full) / (plain - full)
        bits = f"{findings.bits(BEST, LOSS):.2f}, {findings.bits(KIVI_OF_BEST, LOSS):.2f}"
        kept = [recall_kept(findings, in_chunks) for in_chunks in (False, True)]
        lines.append(
            [findings.model, bits, *(f"{each:.3f}" for each in words), f"{part:.2f}",
             "yes" if part <= MOST_LOSS else "no", *("" if each is None else f"{100 * each:.1f}%" for each in kept),
             "" if kept[0] is None else "yes" if kept[0] >= LEAST_SHARE else "no"]
        )  # fmt: skip
    heads = ["model", "bits", "16 bits", "KiVi", "best", "loss against KiVi's", "at most a third", "recall kept",
             "in chunks", "at least 95%"]  # fmt: skip
    return table(heads, lines)


def model_page(findings: Findings) -> str:
    """Return the page of one model: losses, recall and attention under all caches."""
    return page(
        f"The study of caches: {findings.model}",
        "What is measured, and how: [the study](cache_study.md).",
        *loss_sections(findings),
        recall_table(findings, in_chunks=False),
        recall_table(findings, in_chunks=True),
        attention_table(findings, "coverage"),
        attention_table(findings, "l1"),
    )


def recall_kept(findings: Findings, in_chunks: bool) -> float | None:
    """Return the right answers of `cache=best` as a part of those with 16 bits, None if it was not asked."""
    texts = [text for text in findings.texts(RIGHT) if text.endswith(IN_CHUNKS) == in_chunks]
    own, full = (
        sum(value for text in texts for value in findings.singles(case, RIGHT, text) if findings.of(BEST, RIGHT, text))
        for case in (BEST, FULL_CASE)
    )
    return own / full if full else None


def main() -> None:
    """Write the page."""
    options = CommandLine(__doc__).parse_args()
    records = Records(options.output / FILE)
    models = list(dict.fromkeys(result.model for result in records.results))
    every = [Findings(model, records.results) for model in models]
    conditions = sorted({(result.gpu, result.commit) for result in records.results})
    parts = [
        "Every cache reads the same texts, in chunks, so that what is scored has been seen as the cache has kept it. "
        "Prompts are read whole, as the methods' authors read them, where not said otherwise: their end sees all of it "
        "in 16 bits, the answer sees what is kept. "
        "Bits: of each number of keys and values at the end of a text, metadata and all slots in 16 bits counted. "
        "Differences are paired over sequences or questions; an asterisk marks two standard errors or more, the others "
        "are undecided. What `slots`, `tokens` and `bytes` stand for: benchmarks/cache/study/cases.py.",
        page("Target", target(every), level=2),
        page("Answers", "Below 0 the first has the smaller loss.", *(answers(every, r) for r in RESERVED), level=2),
    ]
    for draw, name in ((draw_losses, "losses"), (draw_attention, "attention")):
        picture = draw(records.results, options.output / f"cache_study_{name}.png")
        if picture is not None:
            parts.append(f"![{name}]({picture.name})")
    links = []
    for findings in every:
        path = options.output / f"cache_study_{findings.model.lower()}.md"
        publish(path, model_page(findings))
        links.append(f"[{findings.model}]({path.name})")
    parts.append(f"All tables: {', '.join(links)}.")
    parts.append("; ".join(f"{gpu}, commit {commit}" for gpu, commit in conditions))
    publish(options.output / "cache_study.md", page("The study of caches", *parts))


if __name__ == "__main__":
    main()
