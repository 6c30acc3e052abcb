"""Nodes of a composed configuration as plain Python values."""

from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf


def plain_dict(
    node: DictConfig | ListConfig, *, resolve: bool = True, throw_on_missing: bool = False
) -> dict[str, Any]:
    """Return a mapping of settings as a dict; with `resolve`, references are replaced by what they name."""
    plain: Any = OmegaConf.to_container(node, resolve=resolve, throw_on_missing=throw_on_missing)
    return plain
