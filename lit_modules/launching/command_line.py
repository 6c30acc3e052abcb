"""Composition and check of the command line's configuration, before the run has a folder."""

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from common.settings import NO_VALUE, SettingError, nearest
from lit_modules.launching import hydra_messages
from lit_modules.launching.choices import FEW, missing_choice
from lit_modules.launching.conf_files import GLOBAL, ConfFiles, set_at
from lit_modules.launching.known_keys import Composition

CONFIG = "config"  # the name of the primary file
SEARCH_PATH = "hydra.searchpath"
INFORMATION_FLAGS = ("-h", "--help", "--hydra-help", "--version", "-i", "--info", "-sc", "--shell-completion")
BODIES = ("experiment/", "local/")  # files that set keys but declare none


def check_command_line(given: Sequence[str], conf: Path) -> None:
    """Check the command line against conf/; errors that Hydra itself reports are left to Hydra.

    Raises:
        ValueError: a key that nothing reads, a value where keys belong, or an unknown choice.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-path", "-cp")
    flags, others = parser.parse_known_args(given)
    if flags.config_name or flags.config_path or any(each.partition("=")[0] in INFORMATION_FLAGS for each in others):
        return
    lines = [each for each in others if each.startswith("~") or (not each.startswith("-") and "=" in each)]
    if flags.config_dir:
        lines.append(f"{SEARCH_PATH}=[file://{os.path.abspath(flags.config_dir)}]")
    with hydra.initialize_config_dir(str(conf), version_base="1.3"):
        loader, files = GlobalHydra.instance().config_loader(), ConfFiles([conf])
        try:
            overrides = OverridesParser.create(loader).parse_overrides(lines)
            for each in overrides:
                if each.key_or_group == SEARCH_PATH and isinstance(added := each.value(), list):
                    files.folders += [Path(path.removeprefix("file://")) for path in added]
            for variant in overrides_without_sweeps(overrides, loader, files):
                compose_command_line(loader, files, variant).check()
        except MissingConfigException as error:
            raise missing_choice(files, error) from error
        except ConfigCompositionException as error:
            refuse_unknown_group(files, error)
        except UnicodeDecodeError:
            files.refuse_other_encodings()
        except (HydraException, OmegaConfBaseException):
            return


def overrides_without_sweeps(
    overrides: list[Override], loader: ConfigLoader, files: ConfFiles
) -> Iterator[list[Override]]:
    """Yield overrides without sweeps: the first value of each, then every further choice of a group, one at a time."""
    values = [
        [f"{each.get_key_element()}={value}" for value in sweep_values(each)] or [str(each.input_line)]
        for each in overrides
    ]
    first = [each[0] for each in values]
    lines = [first]
    for place, each in enumerate(values):
        if is_choice(overrides[place], files):
            lines += [[*first[:place], value, *first[place + 1 :]] for value in each[1:]]
    return (OverridesParser.create(loader).parse_overrides(each) for each in lines)


def sweep_values(override: Override) -> list[str]:
    """Return the values of a sweep; empty for an override without a sweep."""
    return list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []


def is_choice(override: Override, files: ConfFiles) -> bool:
    """Return whether an override selects a choice of a group, rather than setting a key."""
    return files.is_group(override.key_or_group) and not isinstance(override.value(), dict)


def compose_command_line(loader: ConfigLoader, files: ConfFiles, overrides: list[Override]) -> Composition:
    """Compose conf/ with the overrides, adding unknown keys, and collect the keys that conf/ declares.

    Raises:
        ValueError: a group's value is not a choice, or an experiment's keys would be placed under the key `experiment`,
            where nothing reads them.
    """
    chosen = [each for each in overrides if is_choice(each, files)]
    for each in chosen:
        check_choice(each, files)
    lines = [str(each.input_line) for each in overrides if each in chosen or each.key_or_group == SEARCH_PATH]
    found = loader.compute_defaults_list(CONFIG, lines, RunMode.RUN)
    for each in found.defaults:
        if each.config_path.startswith(BODIES) and each.package.partition(".")[0] in ("experiment", "local"):
            raise ValueError(f"{each.config_path}.yaml: give it the first line `{GLOBAL}`")
    given = files.merged((each.config_path, each.package) for each in found.defaults)
    for each in overrides:
        if each not in chosen and not each.is_delete():
            set_at(given, re.split(r"[.\[\]]+", each.key_or_group.rstrip("]")), each.value())
    declared = declared_keys(files, found, {f"{each.key_or_group}/{each.value()}" for each in chosen if each.is_add()})
    elsewhere = OtherChoices(loader, files, lines, found)
    return Composition(
        given=given | {"hydra": launcher_config(given)},
        declared=declared | {"hydra": launcher_config(declared)},
        choices=elsewhere.choices,
        keys_of_others=elsewhere.keys_of_others,
        is_shared=elsewhere.is_shared,
    )


def check_choice(override: Override, files: ConfFiles) -> None:
    """Raise ValueError for a group's value that is neither a name nor a list of names."""
    if not override.is_delete() and not isinstance(override.value(), str | list):
        some = ", ".join(files.choices(override.key_or_group)[:FEW])
        key = override.get_key_element().lstrip("+")
        fix = f"give {key}=CHOICE, such as {some}" if some else "it has keys"
        raise SettingError(key, override.value(), fix, "is not a choice")


def declared_keys(files: ConfFiles, found: Any, added: set[str]) -> dict[str, Any]:
    """Return the keys of conf/'s files, without those of experiments and conf/local.

    Args:
        added: files of groups that the command line adds; they only set values of keys declared without them.
    """
    own, with_added = (
        files.merged((each.config_path, each.package) for each in found.defaults if not is_added(each, found, among))
        for among in (added, set())
    )
    declared = {key: with_added[key] for key in own}
    for group in (*files.groups(CONFIG), *files.groups(f"job/{found.overrides.known_choices.get('job')}")):
        if "/" not in group and not f"{group}/".startswith(BODIES):
            declared.setdefault(group, None)  # a group that is left out has no keys
    return declared


class OtherChoices:
    """The keys that other jobs and other choices than those of the command line declare."""

    def __init__(self, loader: ConfigLoader, files: ConfFiles, lines: list[str], found: Any) -> None:
        self.loader, self.files, self.lines = loader, files, lines
        self.bodies = [each.config_path for each in found.defaults if each.config_path.startswith(BODIES)]
        self.choices = found.overrides.known_choices

    def is_shared(self, key: str) -> bool:
        """Return whether a key of another job is allowed here.

        conf/local applies to all jobs. An experiment applies to its own job and to jobs that inspect it (job=plan).
        """
        writers = [path for path in self.bodies if key in self.files.body(path)]
        if any(path.startswith("local/") for path in writers):
            return any(key in keys for keys in self.files.job_keys().values())
        if not writers:
            return False
        alone = [line for line in self.lines if line.startswith(("experiment=", SEARCH_PATH))]
        made_for = self.loader.compute_defaults_list(CONFIG, alone, RunMode.RUN).overrides.known_choices["job"]
        return key in self.files.job_keys()[made_for]

    def keys_of_others(self, group: str, place: str) -> dict[str, list[str]]:
        """Return the keys that a node has in each other choice of its group."""
        below = place.removeprefix(group.replace("/", ".")).strip(".")
        others = [choice for choice in self.files.choices(group) if choice != self.choices[group]]
        if group == "job":
            return {choice: self.files.job_keys()[choice] for choice in others}
        return {choice: self.files.keys(f"{group}/{choice}", below) for choice in others}


def launcher_config(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of Hydra's launcher; Hydra checks the rest of `hydra` itself."""
    return {"launcher": tree["hydra"].get("launcher", {})} if isinstance(tree["hydra"], dict) else {}


def is_added(file: Any, found: Any, added: set[str]) -> bool:
    """Return whether a file was included by an experiment, conf/local, or a group that the command line adds."""
    parents = {each.config_path: each.parent for each in found.defaults}
    path = file.config_path
    while path in parents:
        if path.startswith(BODIES) or path in added:
            return True
        path = parents[path]
    return False


def refuse_unknown_group(files: ConfFiles, error: ConfigCompositionException) -> None:
    """Raise SettingError for an unknown group in a defaults list or on the command line."""
    found = hydra_messages.unknown_group(error)
    if found is None:
        return
    group = found.removeprefix("experiment/")
    if group != found:
        raise ValueError(f"override {group}: write `override /{group}: CHOICE`") from error
    of_jobs = {job: files.groups(f"job/{job}") for job in files.choices("job")}
    having = [f"job={job}" for job, groups in of_jobs.items() if group in groups]
    if having:
        problem = f"is for {' and '.join(having)}"
        raise SettingError(group, NO_VALUE, f"give that, or leave out {group}", problem) from error
    near = nearest(group, {*files.groups(CONFIG), *(group for groups in of_jobs.values() for group in groups)})
    fix = f"did you mean {near[0]}?" if near else "palimpsest --help lists the groups"
    raise SettingError(group, NO_VALUE, fix, "is not a group") from error
