"""Groups of runs that differ by their seed alone, and the settings in which the groups differ."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from common.settings import shown
from evaluation.compare.reading import EVALUATED, FINISHED, Run
from evaluation.significance import Sample
from evaluation.uncertainty import Estimate, mean
from lit_modules.launching.run_folder import CHANGEABLE_KEYS

OF_SPEED_AND_TEXT = (
    "trainer.accelerator",
    "trainer.devices",
    "trainer.num_nodes",
    "strategy",
    "compile",
    "activation_checkpointing",
    "data.micro_batch_size",
    "data.source.path",
    "data.source.paths",
    "data.path",
    "data.corpus",
)
"""Settings that a resumed run may change, and that are compared all the same."""

HIDDEN = tuple(key for key in CHANGEABLE_KEYS if key not in OF_SPEED_AND_TEXT)
"""Settings that say nothing of the training: where it is kept, what it logs."""

MOST_COLUMNS = 8
EXPERIMENT = "experiment"
SEED, SEED_ITSELF = "seed", "${seed}"


@dataclass
class Group:
    """Runs with the same settings but for the seed.

    Attributes:
        columns: the settings in which the groups differ, as text.
        runs: one for each seed.
        repeated: earlier runs of a seed that a later run repeats; they count nowhere.
    """

    columns: dict[str, str]
    runs: list[Run]
    repeated: list[Run] = field(default_factory=list)
    name: str = ""

    @property
    def finished(self) -> list[Run]:
        """The runs that have a final loss."""
        return [run for run in self.runs if run.state == FINISHED]

    def sample(self, unit: str) -> Sample:
        """Return the final loss of the held-out text by seed."""
        losses = {run.seed: run.loss(unit) for run in self.finished}
        return Sample({seed: loss for seed, loss in losses.items() if loss is not None})

    def value(self, name: str) -> Estimate | None:
        """Return a result of `job=evaluate`: the mean over seeds, of one seed with its own standard error."""
        found = [run.results.values[name] for run in self.runs if name in run.results.values]
        if len(found) < 2:
            return found[0] if found else None
        return mean([each.value for each in found])


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    """Return the groups in the order of their first runs, and all settings in which they differ.

    Evaluations of checkpoints that are of no run come last, each in a group of its own, without settings. A group's
    `columns` leave out what the choice of a file of conf/ explains, such as the sizes of two `model=...`.
    """
    trained = [run for run in runs if run.state != EVALUATED]
    differing = differing_keys(trained)
    found: dict[Hashable, Group] = {}
    kept = columns_of(trained, differing)
    for run in trained:
        key = tuple(text_of(run, each) for each in differing)
        group = found.setdefault(key, Group({each: text_of(run, each) for each in kept}, []))
        group.repeated += [other for other in group.runs if other.seed == run.seed]
        group.runs = [other for other in group.runs if other.seed != run.seed] + [run]
    short = short_names(kept)
    for group in found.values():
        words = [f"{short[key]}={value}" for key, value in group.columns.items() if value]
        group.name = ", ".join(words) or "/".join(group.runs[0].folder.parts[-2:])
        group.runs.sort(key=lambda run: run.seed)
    others = [Group({}, [run], name=str(run.results.checkpoint)) for run in runs if run.state == EVALUATED]
    return [*found.values(), *others], differing


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the settings and choices of groups in which runs differ, apart from seeds and what is hidden."""
    keys = dict.fromkeys(key for run in runs for key in (*(f"{name}=" for name in run.choices), *run.settings))
    return [key for key in keys if not is_hidden(key.removesuffix("=")) and differs(runs, key)]


def is_hidden(key: str) -> bool:
    """Return whether a setting is the seed or says nothing of the training."""
    return any(key == each or key.startswith((f"{each}.", f"{each}/")) for each in (SEED, *HIDDEN, "hydra", "local"))


def differs(runs: Sequence[Run], key: str) -> bool:
    """Return whether the runs have several values of a key: both as written and once references are resolved.

    A switch that is off is the same as one that an earlier version did not have.
    """
    resolved = {text_of(run, key) for run in runs}
    written = {shown(run.written.get(key)) for run in runs}
    return len(resolved) > 1 and not resolved <= {"", "null", "false"} and (key.endswith("=") or len(written) > 1)


def text_of(run: Run, key: str) -> str:
    """Return the text of a setting, or of a choice (`model=`); empty if the run has none."""
    if key.endswith("="):
        return str(run.choices.get(key[:-1]) or "")
    if run.written.get(key) == SEED_ITSELF:
        return SEED_ITSELF
    return shown(run.settings[key]) if key in run.settings else ""


def columns_of(runs: Sequence[Run], differing: Sequence[str]) -> list[str]:
    """Return the settings that stand beside each group: those that no choice explains.

    Of many, as where pretraining is compared with linearization, only those that tell groups apart which the ones
    before them do not.
    """
    kept = unexplained(runs, differing)
    if len(kept) <= MOST_COLUMNS:
        return kept
    telling: list[str] = []
    for key in kept:
        before = {tuple(text_of(run, each) for each in telling) for run in runs}
        if len({tuple(text_of(run, each) for each in [*telling, key]) for run in runs}) > len(before):
            telling.append(key)
    return telling


def unexplained(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """Return the keys whose value does not follow from the choice of their group, or of the experiment."""
    choices = sorted((key for key in keys if key.endswith("=")), key=lambda key: key != f"{EXPERIMENT}=")
    kept: list[str] = []
    for key in [*choices, *(key for key in keys if key not in choices)]:
        above = [each for each in choices if each != key and each in kept and covers(each[:-1], key)]
        if not any(follows(runs, key, each) for each in above):
            kept.append(key)
    return kept


def covers(group: str, key: str) -> bool:
    """Return whether a key's value may follow from the choice of a group."""
    return group == EXPERIMENT or key.startswith(f"{group}.")


def follows(runs: Sequence[Run], key: str, choice: str) -> bool:
    """Return whether runs with the same choice have the same value of a key."""
    values: dict[str, str] = {}
    return all(values.setdefault(text_of(run, choice), text_of(run, key)) == text_of(run, key) for run in runs)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted key, or the whole of it where two end alike."""
    ends = [key.rstrip("=").rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key.rstrip("=") for key, end in zip(keys, ends, strict=True)}
