"""The caches that a measurement compares: names of files in conf/cache/, and changes to their settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import DynamicCache
from transformers.cache_utils import Cache

from common.setting_nodes import plain_dict
from common.settings import SettingError, flattened
from data_pipeline.identity import WHOLE, file_identity
from lit_modules.launching.choices import read_choice
from lit_modules.networks.caches import CacheSettings, CompressedCache
from lit_modules.networks.caches.rotations import COMMAND

KEY = "benchmark.caches"


@dataclass(frozen=True)
class NamedCache:
    """A kind of cache.

    Attributes:
        name: as it is in tables: the file's name and what was changed.
        plain: the keys of its file, with the changes.
        settings: the same, checked.
    """

    name: str
    plain: dict[str, Any]
    settings: CacheSettings

    def new(self, model: Any) -> Cache:
        """Return an empty cache for `past_key_values` of the model: its own where that does the same.

        Raises:
            ValueError: the model has no attention that can be compressed, or the settings do not fit it.
        """
        if not self.settings.is_full:
            return CompressedCache(model.config, self.settings)
        return model.new_cache() if hasattr(model, "new_cache") else DynamicCache(config=model.config)

    def identity(self) -> dict[str, Any]:
        """Return what decides the results: the settings, with the content of the rotations instead of their place."""
        if self.settings.rotations is None:
            return self.plain
        return self.plain | {"rotations": file_identity([Path(self.settings.rotations)], WHOLE)}


def bits_per_element(cache: Cache, dtype: torch.dtype) -> float:
    """Return the bits that a cache holds for each number of its keys and values, metadata included.

    Args:
        cache: one that has read its tokens.
        dtype: of the model, which a cache that compresses nothing keeps.
    """
    return cache.bits_per_element if isinstance(cache, CompressedCache) else float(torch.finfo(dtype).bits)


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
        if cache.name in [other.name for other in found[:number]]:
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
    plain = plain_dict(OmegaConf.merge(read_choice("cache", name, KEY), changes), resolve=False)
    try:
        settings = CacheSettings.of(plain)
    except SettingError as error:
        key = f"{KEY}.{name}.{error.key.removeprefix('cache.')}"
        raise SettingError(key, error.value, error.fix, error.problem) from error
    if settings.rotations is not None and not Path(settings.rotations).is_file():
        fix = f"give the file that job=calibrate wrote ({COMMAND})"
        raise SettingError(f"{KEY}.{name}.rotations", settings.rotations, fix, "is not a file")
    flat = flattened(changes)
    changed = [f"{key}={Path(value).name if isinstance(value, str) else value}" for key, value in flat.items()]
    return NamedCache(" ".join([name, *changed]), plain, settings)
