"""The order of the groups, the baseline, and each group's difference to it with its noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.settings import SettingError, flattened, shown
from evaluation.compare.groups import Group, group_runs, short_names, text_of
from evaluation.compare.reading import BITS, EVALUATED, NATS, Run
from evaluation.significance import Noise, compare, pooled
from evaluation.uncertainty import is_decided, paired_difference

ONE_SEED = "one seed, noise unknown"
OTHER_TEXT = "other held-out text"


@dataclass(frozen=True)
class Difference:
    """A group's loss minus the baseline's.

    Attributes:
        margin: the difference is decided above it; None if the noise is not known.
        how: what the noise was taken from.
    """

    value: float
    margin: float | None
    decided: bool
    how: str

    @property
    def verdict(self) -> str:
        """The result in one word."""
        if not self.decided:
            return "undecided"
        return "lower" if self.value < 0 else "higher"


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        unit: of the losses: nats per token, or bits per byte for runs of different tokenizers.
        groups: the lowest final loss first, then those that have not finished, then evaluations alone.
        baseline: what the others are compared with; None if no training was found.
        differences: by the name of the group, where both have finished on the same held-out text.
        columns: the settings that tell the groups apart.
        differing: all settings in which they differ.
        notes: what the reader must know of single runs.
    """

    unit: str
    groups: list[Group]
    baseline: Group | None
    differences: dict[str, Difference]
    columns: list[str]
    differing: list[str]
    notes: list[str]

    @property
    def runs(self) -> list[Run]:
        """All runs that count."""
        return [run for group in self.groups for run in group.runs]


def compare_runs(runs: Sequence[Run], baseline: str | Mapping[str, Any] | None = None) -> Comparison:
    """Group the runs, order the groups, and compare each with the baseline.

    Args:
        baseline: a run's folder, or settings by their keys; None: the first group with a finished run.

    Raises:
        SettingError: `baseline` is of no group, or of several.
    """
    groups, differing = group_runs(runs)
    tokenizers = {run.tokenizer for run in runs if run.state != EVALUATED}
    unit = NATS if len(tokenizers) < 2 else BITS
    trained = [group for group in groups if group.runs[0].state != EVALUATED]
    base = next((group for group in trained if group.finished), next(iter(trained), None))
    if baseline is not None:
        base = chosen_group(trained, baseline, differing)
    noise = pooled(sample for group in trained if (sample := group.sample(unit)).values)
    differences = {}
    if base is not None:
        found = {group.name: difference(group, base, unit, noise) for group in trained if group is not base}
        differences = {name: each for name, each in found.items() if each is not None}
    return Comparison(
        unit=unit,
        groups=sorted(groups, key=lambda group: place_of(group, unit)),
        baseline=base,
        differences=differences,
        columns=list(trained[0].columns) if trained else [],
        differing=differing,
        notes=notes_of(groups, unit),
    )


def place_of(group: Group, unit: str) -> tuple[int, float]:
    """Return a key that sorts groups by their final loss."""
    if group.runs[0].state == EVALUATED:
        return 2, 0.0
    sample = group.sample(unit)
    return (0, sample.mean) if sample.values else (1, 0.0)


def chosen_group(groups: Sequence[Group], asked: str | Mapping[str, Any], differing: Sequence[str]) -> Group:
    """Return the group that `baseline` names.

    Raises:
        SettingError: it names none, or several.
    """
    if isinstance(asked, str):
        folder = Path(asked).resolve()
        found = [group for group in groups if folder in [run.folder.resolve() for run in group.runs]]
        fix = "give the folder of a run that is compared, or settings, as {KEY: VALUE}"
    else:
        found = [group for group in groups if has_settings(group.runs[0], flattened(asked), differing)]
        fix = f"give what tells one of these from the others: {'; '.join(group.name for group in groups)}"
    if len(found) != 1:
        raise SettingError("baseline", asked, fix, "fits several" if found else "fits none of the runs")
    return found[0]


def has_settings(run: Run, wanted: Mapping[str, Any], differing: Sequence[str]) -> bool:
    """Return whether a run has settings; keys may be given by their last part.

    Raises:
        SettingError: a key is none of those in which the runs differ.
    """
    short = short_names(differing)
    for key, value in wanted.items():
        keys = [each for each in differing if key in (each, each.rstrip("="), short[each])]
        if not keys:
            fix = f"they differ in {', '.join(each.rstrip('=') for each in differing) or 'nothing but the seed'}"
            raise SettingError(f"baseline.{key}", value, fix, "is no setting in which the runs differ")
        if shown(value) not in [text_of(run, each) for each in keys]:
            return False
    return True


def difference(group: Group, base: Group, unit: str, noise: Noise) -> Difference | None:
    """Return a group's difference to the baseline; None if one has not finished, or they have other held-out texts.

    Without noise over seeds, the two are compared on the sequences of a text that both were measured on.
    """
    first, second = base.sample(unit), group.sample(unit)
    if not first.values or not second.values or texts_of(base) != texts_of(group):
        return None
    found = compare(first, second, noise)
    if found.margin is not None:
        how = f"{found.seeds} seeds, paired" if found.seeds else "spread over all seeds"
        return Difference(found.difference, found.margin, found.decided, how)
    return by_sequences(group.finished[0], base.finished[0], unit) or Difference(
        found.difference, None, False, ONE_SEED
    )


def by_sequences(run: Run, base: Run, unit: str) -> Difference | None:
    """Compare two runs on the sequences of a text, the full cache first; None if there is no such text."""
    theirs, ours, scale = base.results.sequences, run.results.sequences, run.scale[unit]
    common = [key for key in ours if len(theirs.get(key, ())) == len(ours[key]) > 1]
    if not common or run.tokenizer != base.tokenizer or scale is None:
        return None
    key = min(common, key=lambda key: not key.startswith("full "))
    found = paired_difference(ours[key], theirs[key])
    margin = 2 * (found.standard_error or 0.0) * scale
    return Difference(found.value * scale, margin, is_decided(found), f"one seed, {len(ours[key])} sequences of a text")


def texts_of(group: Group) -> set[object]:
    """Return what tells the held-out texts of a group's runs apart: their bytes, or else tokens."""
    names = ("validation_bytes", "validation_tokens")
    return {next((size for name in names if (size := run.summary.get(name))), None) for run in group.finished}


def notes_of(groups: Sequence[Group], unit: str) -> list[str]:
    """Return what the reader must know of single runs, one line each."""
    notes = [note for group in groups for run in group.runs for note in run.notes]
    for group in groups:
        notes += [
            f"{run.folder}: a later run has the same settings and seed, and counts instead" for run in group.repeated
        ]
        for run in group.runs:
            if unit == BITS and run.state != EVALUATED and run.scale[BITS] is None:
                why = "its bytes per token are not known until it has finished, and its curves are left out"
                notes.append(f"{run.folder}: {why}")
    if len({text for group in groups for text in texts_of(group)}) > 1:
        notes.append("held-out texts differ in size between runs: losses of different texts are not compared")
    return notes
