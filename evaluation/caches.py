"""The caches that a measurement compares: names of files in conf/cache/, and changes to their settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf
from transformers import DynamicCache
from transformers.cache_utils import Cache

from common.settings import NO_VALUE, SettingError

KEY = "benchmark.caches"
FULL = "full"


@dataclass(frozen=True)
class NamedCache:
    """A kind of cache.

    Attributes:
        name: as it is in tables: the file's name and what was changed.
        settings: the keys of its file, with the changes.
    """

    name: str
    settings: dict[str, Any]

    def new(self, model: Any) -> Cache:
        """Return an empty cache for `past_key_values` of the model."""
        if hasattr(model, "new_cache"):
            return model.new_cache()
        return DynamicCache(config=model.config)


def read_caches(asked: Any) -> list[NamedCache]:
    """Return the caches of `benchmark.caches`: each a name, or {name: {key: value}}.

    Raises:
        SettingError: there is none, one is not known, or two are the same.
    """
    given = OmegaConf.to_container(asked, resolve=True) if OmegaConf.is_config(asked) else asked
    entries = [given] if isinstance(given, str) else given
    if not isinstance(entries, Sequence) or not entries:
        raise SettingError(KEY, given, "name one or more, as [full,logquant]")
    found = [read_cache(entry) for entry in entries]
    for number, cache in enumerate(found):
        if cache in found[:number]:
            raise SettingError(KEY, cache.name, "name it once", "is there twice")
    return found


def read_cache(entry: Any) -> NamedCache:
    """Return one cache."""
    if isinstance(entry, Mapping) and len(entry) == 1:
        name, changes = next(iter(entry.items()))
    else:
        name, changes = entry, {}
    if not isinstance(name, str) or not isinstance(changes, Mapping):
        raise SettingError(KEY, entry, "give a name, or {name: {key: value}}", "is no cache")
    settings = read_file(name)
    flat = flattened(changes)
    for key in flat:
        if OmegaConf.select(OmegaConf.create(settings), key, default=NO_VALUE) is NO_VALUE:
            raise SettingError(f"{KEY}.{name}.{key}", flat[key], f"conf/cache/{name}.yaml has the keys", "is not known")
    merged = OmegaConf.to_container(OmegaConf.merge(settings, changes))
    return NamedCache(" ".join([name, *(f"{key}={value}" for key, value in flat.items())]), merged)


def read_file(name: str) -> dict[str, Any]:
    """Return the keys of conf/cache/NAME.yaml."""
    if name == FULL:
        return {}
    try:
        return OmegaConf.to_container(hydra.compose(f"cache/{name}").cache, resolve=True)
    except MissingConfigException as error:
        raise SettingError(KEY, name, "conf/cache/ has the choices", "is not known") from error


def flattened(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in changes.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
