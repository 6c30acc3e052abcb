"""The choices of conf/'s groups, for the help and for errors about unknown choices."""

from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import MissingConfigException

from common.setting_nodes import plain_dict
from common.settings import NO_VALUE, SettingError, nearest
from lit_modules.launching import hydra_messages
from lit_modules.launching.conf_files import ConfFiles, is_part

FEW = 12  # most choices listed in a message


def choices(group: str) -> str:
    """Return the choices of a group on one line, for the help."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    return ", ".join(ConfFiles([Path(source.path) for source in sources if source.scheme() == "file"]).choices(group))


def read_choice(group: str, name: str, key: str) -> dict[str, Any]:
    """Return the keys of conf/GROUP/NAME.yaml, for a running job.

    Args:
        group: the group.
        name: the choice.
        key: the setting that names it, for the error.

    Raises:
        SettingError: it is not a choice.
    """
    try:
        if is_part(name):
            raise MissingConfigException(f"{name} is a part of others")
        return plain_dict(hydra.compose(f"{group}/{name}")[group])
    except MissingConfigException as error:
        raise SettingError(key, name, f"give one of {choices(group)}", "is not known") from error


def missing_choice(files: ConfFiles, error: MissingConfigException) -> SettingError:
    """Return the error for an unknown choice."""
    path = error.missing_cfg_file or ""
    group = hydra_messages.group_of_choices(error) or path.rpartition("/")[0]
    if group.startswith("experiment/") and files.is_group(group):  # an experiment in a folder, which another includes
        group = "experiment"
    name = path.removeprefix(f"{group}/")
    options = (choice for choice in error.options or () if not is_part(choice))
    there = sorted({*options, *files.choices(group)})
    inside = [choice for choice in there if choice.startswith(f"{name}/")]
    if inside:
        return SettingError(group, name, f"give one of {', '.join(inside)}", "is a folder")
    if group.startswith("experiment/"):
        fix = f"write `override /{group.removeprefix('experiment/')}: {name}`"
        return SettingError(group, NO_VALUE, fix, "is not a group")
    near = nearest(name, there, 3)
    fix = "palimpsest --help lists the choices"
    if len(there) <= FEW:
        fix = f"give one of {', '.join(there)}"
    elif near:
        fix = f"did you mean {', '.join(near[:-1])}{' or ' if near[1:] else ''}{near[-1]}?"
    return SettingError(group, name, fix, "is not known")
