"""Check of a configuration's keys on the command line's own composition, before heavy imports.

A node with a `_target_` takes the arguments of that class or function. A collection such as `callbacks` takes such
nodes under any name. Every other node takes the keys that conf/ declares for it: those of the composition without
experiments, conf/local and the command line.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from common.moved_targets import MOVED
from common.settings import NO_VALUE, SettingError, instead, nearest
from lit_modules.launching.conf_files import OF_HYDRA
from lit_modules.launching.signatures import Arguments, arguments

OF_TARGETS = ("callbacks", "logger", "corpus.sources", "corpus.cleaning")  # any name for a node with a _target_
OF_NAMES = ("stages", "corpus.categories", "rewrite.styles", "benchmark.num_fewshot")  # any name
WITHOUT_TARGET = {  # the class whose arguments are the keys of such a node
    "trainer": "lightning.Trainer",
    "corpus": "data_pipeline.corpus.recipe.Recipe",
    "stages.*": "lit_modules.linearization.stages.TrainingStage",
    "rewrite.styles.*": "data_pipeline.rewriting.styles.Style",
}
OF_TRAINER = {  # Lightning's arguments that other keys determine, and those keys
    "strategy": "strategy=ddp, fsdp or hsdp",
    "logger": "logger=csv or wandb",
    "callbacks": "the keys of callbacks",
    "enable_checkpointing": "callbacks.checkpoints=null for none",
    "enable_progress_bar": "callbacks.progress and log_every_tokens",
    "enable_model_summary": "job=plan",
    "log_every_n_steps": "log_every_tokens",
    "max_steps": "max_tokens",
    "max_epochs": "max_tokens",
    "min_steps": "max_tokens",
    "min_epochs": "max_tokens",
    "fast_dev_run": "max_tokens",
    "overfit_batches": "max_tokens",
    "limit_train_batches": "max_tokens",
    "limit_val_batches": "validation_tokens",
    "limit_test_batches": "validation_tokens",
    "limit_predict_batches": "validation_tokens",
    "val_check_interval": "validate_every_tokens",
    "check_val_every_n_epoch": "validate_every_tokens",
    "num_sanity_val_steps": "validate_every_tokens",
    "accumulate_grad_batches": "data.batch_tokens and data.micro_batch_size",
    "use_distributed_sampler": "data.batch_tokens and data.micro_batch_size",
    "reload_dataloaders_every_n_epochs": "seed, which the order of the data follows from",
    "inference_mode": "compile",
    "plugins": "strategy, and srun, torchrun or hydra/launcher=slurm",
    "default_root_dir": "runs_dir",
}


@dataclass(frozen=True)
class Composition:
    """A configuration and its origins, in plain containers with unresolved interpolations.

    Attributes:
        given: the whole configuration.
        declared: the keys that the groups' own files declare.
        choices: the choice of each group.
        keys_of_others: maps (group, node) to the keys of that node in each other choice of the group.
        is_shared: whether a root key of another job is allowed here.
    """

    given: dict[str, Any]
    declared: dict[str, Any]
    choices: dict[str, Any]
    keys_of_others: Callable[[str, str], dict[str, list[str]]]
    is_shared: Callable[[str], bool]

    def check(self) -> None:
        """Raise ValueError for a key that nothing reads, and for a value where keys belong."""
        self._check("", self.given, self.declared)
        for key in self.given.get("trainer") or {}:
            if key in OF_TRAINER:
                raise SettingError(f"trainer.{key}", NO_VALUE, f"give {OF_TRAINER[key]}", "follows from other keys")

    def _check(self, place: str, given: dict[Any, Any], declared: Any, free: bool = False) -> None:
        """Check a node and those below it.

        Args:
            free: the node is an argument of a target above it, which takes any keys or checks them itself.
        """
        names = declared if isinstance(declared, dict) else {}
        is_built, known = self._built_of(place, given)
        if not is_built and not free and isinstance(declared, dict):
            known = Arguments(tuple(map(str, declared)))
        check_target(place, given, names)
        for key, value in given.items():
            path = f"{place}.{key}" if place else str(key)
            if place in OF_TARGETS:
                self._check_named(place, path, key, value, names)
            elif place in OF_NAMES or (free and not is_built and value is None):
                check_new_name(place, str(key), names)
            elif known is not None and key not in (*known.names, *OF_HYDRA):
                self._check_other(place, path, str(key), known)
            below = self._resolved(names.get(key))
            self._check_kind(place, path, value, below)
            for where, node in mappings_in(path, value):
                self._check(where, node, below, free or is_built)

    def _built_of(self, place: str, given: dict[Any, Any]) -> tuple[bool, Arguments | None]:
        """Return whether a node's keys are arguments of a target, and those arguments if its source shows them."""
        pattern = matching_pattern(place, WITHOUT_TARGET)
        target = self._resolved(target_of(given)) or (WITHOUT_TARGET[pattern] if pattern else None)
        found = arguments(target) if target is not None else None
        if found is not None and found.names == ("cfg",):
            return False, None  # a job's function takes the whole configuration
        return target is not None, found

    def _check_kind(self, place: str, path: str, value: Any, declared: Any) -> None:
        """Raise ValueError for a single value where keys belong, for keys where a value belongs, and for a null."""
        if isinstance(value, dict):
            if isinstance(declared, int | float | list) or (isinstance(declared, str) and not is_unresolved(declared)):
                raise SettingError(path, NO_VALUE, f"give {path}=VALUE", "has no keys")
        elif isinstance(declared, dict) or matching_pattern(path, WITHOUT_TARGET):
            if value is not None and not is_unresolved(value):
                self._refuse_value(path, value, declared or {})
            if value is None and place not in OF_TARGETS and target_of(declared or {}) is not None:
                raise SettingError(path, None, f"give its keys, or leave {path} out", "leaves out what the job needs")

    def _refuse_value(self, path: str, value: Any, declared: dict[Any, Any]) -> None:
        keys = [str(key) for key in declared if key not in OF_HYDRA]
        fix = "it has keys" + (f", such as {path}.{keys[0]}" if keys else "")
        if path in self.choices:
            choice = value if isinstance(value, str) else "CHOICE"
            fix += f"; to choose one give {path}={choice}, or `override /{path}: {choice}` in a defaults list"
        raise SettingError(path, value, fix, "is not known")

    def _check_other(self, place: str, path: str, key: str, known: Arguments, fix: str = "") -> None:
        """Raise ValueError for an unknown key, unless the target takes any or another job shares it.

        Args:
            fix: what to give if no known key is meant.
        """
        if (known.others and not nearest(key, known.names)) or (not place and self.is_shared(key)):
            return
        first, _, rest = key.partition(".")
        if rest:
            raise SettingError(path, NO_VALUE, f"write {first}: {{{rest}: ...}}", "is one key with dots in it")
        group = re.sub(r"^hydra\.", "hydra/", place).partition(".")[0] or "job"
        others = self.keys_of_others(group, place) if self.choices.get(group) and place != "job" else {}
        having = [f"{group}={choice}" for choice, keys in others.items() if key in keys]
        if having:
            problem = f"is not a key of {group}={self.choices[group]}"
            raise SettingError(path, NO_VALUE, f"it is for {' and '.join(having)}", problem)
        names = [name for name in known.names if name not in (*OF_HYDRA, "hydra")]
        before = path.removesuffix(key)
        if not nearest(key, names):
            for choice, keys in others.items():
                for near in nearest(key, keys):
                    fix = f"did you mean {before}{near}, for {group}={choice}?"
                    raise SettingError(path, NO_VALUE, fix, "is not known")
        elif fix:
            fix = f"{instead(key, names, before)} Else {fix}"
        fix = fix or (instead(key, names, before) if names else f"{place} has no keys")
        raise SettingError(path, NO_VALUE, fix, "is not known")

    def _check_named(self, place: str, path: str, key: Any, value: Any, declared: dict[Any, Any]) -> None:
        """Raise ValueError for an entry of a collection that has no _target_ and does not set a known entry to null."""
        if isinstance(value, dict) and target_of(value) is not None:
            return
        if key not in declared:
            new = f"give {path}._target_, the class that it is made of"
            self._check_other(place, path, str(key), Arguments(tuple(declared)), "" if value is None else new)
        elif value is not None:
            raise SettingError(path, NO_VALUE, "give the class that it is made of, or null for none", "has no _target_")

    def _resolved(self, value: Any) -> Any:
        """Resolve an interpolation of one whole key as far as conf/ declares it."""
        while isinstance(value, str) and (found := re.fullmatch(r"\$\{([\w.]+)\}", value)):
            value = self.declared
            for key in found[1].split("."):
                value = value.get(key) if isinstance(value, dict) else None
        return value


def check_target(place: str, given: dict[Any, Any], declared: dict[Any, Any]) -> None:
    """Raise ValueError for a `_target_` that is not a path although conf/ has one there, or that has moved."""
    target, example = given.get("_target_"), target_of(declared)
    if example is not None and "_target_" in given and not isinstance(target, str):
        raise SettingError(f"{place}._target_", target, f"give the path of a class or function, such as {example}")
    if isinstance(target, str) and target in MOVED:
        raise SettingError(f"{place}._target_", target, f"give {MOVED[target]}", "has moved")


def check_new_name(place: str, name: str, known: Iterable[str]) -> None:
    """Raise ValueError for a user's new name that is probably a misspelt known one."""
    for near in nearest(name, known, cutoff=0.85) if name not in known else ():
        if near not in name:
            fix = f"did you mean {place}.{near}? Else give it another name"
            raise SettingError(f"{place}.{name}", NO_VALUE, fix, "is not known")


def target_of(node: dict[Any, Any]) -> str | None:
    """Return the `_target_` of a node, if it has one."""
    target = node.get("_target_")
    return target if isinstance(target, str) else None


def is_unresolved(value: Any) -> bool:
    """Return whether a value is an interpolation or still missing (???)."""
    return isinstance(value, str) and ("${" in value or value == "???")


def matching_pattern(path: str, patterns: dict[str, str]) -> str | None:
    """Return the pattern that a path matches: `stages.*` matches the nodes directly below `stages`."""
    parts = path.split(".")
    for pattern in patterns:
        wanted = pattern.split(".")
        if len(parts) == len(wanted) and all(want in ("*", part) for part, want in zip(parts, wanted, strict=True)):
            return pattern
    return None


def mappings_in(path: str, value: Any) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the mapping that a value is, or the mappings in a list."""
    if isinstance(value, dict):
        yield path, value
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from mappings_in(f"{path}[{number}]", each)
