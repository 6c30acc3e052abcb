"""Check of a configuration's values against the type hints of the objects that it builds."""

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
    """Check the arguments of all objects that the groups of a configuration build, by type hint.

    Raises:
        ValueError: a value has another type. The line names its key, or the key that it references.
    """
    for group in groups:
        if not OmegaConf.is_missing(cfg, group) and OmegaConf.is_dict(cfg.get(group)):
            check_node(group, cfg[group])


def check_node(path: str, node: DictConfig, function: Callable[..., Any] | None = None) -> None:
    """Check the arguments of `function`, or of the node's `_target_`, after those of nested nodes."""
    target = function or built_by(node)
    hints = {} if target is None else type_hints(target)
    written: Any = OmegaConf.to_container(node, resolve=False)
    for name in (name for name in map(str, node) if not name.startswith("_") and is_given(node, name)):
        reference = REFERENCE.fullmatch(str(written[name]))
        key, value = reference[1] if reference else f"{path}.{name}", node[name]
        if OmegaConf.is_dict(value):
            check_node(key, value)
        if name in hints and not (OmegaConf.is_dict(value) and "_target_" in value):
            plain = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            check_type(key, plain, hints[name])


def is_given(node: DictConfig, name: str) -> bool:
    """Return whether a key has a value; missing ones are reported where they are used."""
    try:
        node[name]
    except (MissingMandatoryValue, InterpolationToMissingValueError):
        return False
    return True


def built_by(node: DictConfig) -> Callable[..., Any] | None:
    """Return the object that `_target_` names; None without one or if it does not exist, which its build reports."""
    target = node.get("_target_")
    try:
        return hydra.utils.get_object(target) if isinstance(target, str) else None
    except (ImportError, ValueError, HydraException):
        return None
