"""What Hydra's errors say in their text alone: Hydra 1.3 gives these keys, values and groups as no attribute."""

import re

from hydra.errors import HydraException


def built_key(error: HydraException) -> str | None:
    """Return the key of the node whose `_target_` raised; None for the top of a configuration."""
    _, named, key = str(error).rpartition("full_key: ")
    return key.strip() if named else None


def merged_override(error: BaseException) -> tuple[str, str] | None:
    """Return key and value of an override that cannot replace what is there: a list for a mapping."""
    found = re.fullmatch(r"Error merging override ([^=]*)=(.*)", str(error), re.DOTALL)
    return (found[1], found[2]) if found else None


def key_left_out(error: BaseException) -> str | None:
    """Return the key that the code reads and the configuration lacks: that of a group that was left out."""
    found = re.match(r"Key '([^']+)' is not in struct", str(error))
    return found[1] if found else None


def group_of_choices(error: HydraException) -> str | None:
    """Return the group without the wanted choice."""
    found = re.search(r"Available options in '([^']+)'", str(error))
    return found[1] if found else None


def unknown_group(error: HydraException) -> str | None:
    """Return the group of an override that no defaults list has."""
    found = re.search(r"Could not override '([^'@]+)(@[^']*)?'\.\s+No match in the defaults list", str(error))
    return found[1] if found else None
