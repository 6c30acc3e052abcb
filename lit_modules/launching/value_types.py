"""Checks the values of a configuration against the type hints of what it builds."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue

from common.setting_types import check_type, type_hints

REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def check_arguments(cfg: DictConfig, groups: Iterable[str]) -> None:
    """Check every argument of what the groups of a configuration build, by its type hint.

    Raises:
        ValueError: a value is of another type. The line names its key, or the key that it is taken from.
    """
    for group in groups:
        if not OmegaConf.is_missing(cfg, group) and OmegaConf.is_dict(cfg.get(group)):
            check_node(group, cfg[group])


def check_node(path: str, node: DictConfig, function: Callable[..., Any] | None = None) -> None:
    """Check the arguments of `function`, or of what `_target_` names, and first those of what is built for them."""
    hints = type_hints(function or built_by(node))
    written = OmegaConf.to_container(node, resolve=False)
    for name in (name for name in node if not str(name).startswith("_") and is_given(node, name)):
        reference = REFERENCE.fullmatch(str(written[name]))
        key, value = reference[1] if reference else f"{path}.{name}", node[name]
        if OmegaConf.is_dict(value):
            check_node(key, value)
        if name in hints and not (OmegaConf.is_dict(value) and "_target_" in value):
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            check_type(key, plain, hints[name])


def is_given(node: DictConfig, name: str) -> bool:
    """Whether a key has a value; one without is named where it is used."""
    try:
        node[name]
    except (MissingMandatoryValue, InterpolationToMissingValueError):
        return False
    return True


def built_by(node: DictConfig) -> Callable[..., Any] | None:
    """What `_target_` names; None without one, or where there is no such thing, which is said when it is built."""
    target = node.get("_target_")
    try:
        return hydra.utils.get_object(target) if isinstance(target, str) else None
    except (ImportError, ValueError, HydraException):
        return None
