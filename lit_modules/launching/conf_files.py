"""The YAML files of conf/ without Hydra: the keys that each declares before composition."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from lit_modules.launching.signatures import arguments

OF_HYDRA = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, if libyaml is installed
GLOBAL = "# @package _global_"  # first line of a file whose keys are at the root


class ConfFiles:
    """The files of conf/, and of a folder that --config-dir adds."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self._bodies: dict[str, dict[Any, Any]] = {}

    def is_group(self, name: str) -> bool:
        """Return whether a name is a group (a folder of choices) and not a key."""
        return name.startswith("hydra/") or any((folder / name).is_dir() for folder in self.folders)

    def choices(self, group: str) -> list[str]:
        """Return the choices of a group; experiments include subfolders: fox/fox_pro_360m."""
        pattern = "**/*.yaml" if group == "experiment" else "*.yaml"
        found = ((folder / group, file) for folder in self.folders for file in (folder / group).glob(pattern))
        return sorted({str(file.relative_to(above).with_suffix("")) for above, file in found if not is_part(file.name)})

    def body(self, path: str) -> dict[Any, Any]:
        """Return a file's contents, including its defaults list.

        Raises:
            ValueError: it holds a list.
        """
        if path not in self._bodies:
            file = next((file for folder in self.folders if (file := folder / f"{path}.yaml").is_file()), None)
            body = None if file is None else yaml.load(file.read_text(encoding="utf-8"), LOADER)
            if isinstance(body, str):
                body = {body: None}  # as Hydra reads it
            if isinstance(body, list):
                raise ValueError(f"{file} holds a list: give keys with values, as `max_tokens: 1_000_000`")
            self._bodies[path] = body if isinstance(body, dict) else {}
        return self._bodies[path]

    def refuse_other_encodings(self) -> None:
        """Raise ValueError for a file that is not UTF-8, which Hydra's own error does not name."""
        for file in (file for folder in self.folders for file in folder.rglob("*.yaml")):
            try:
                file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file} is not UTF-8 text: save it as UTF-8") from error

    def whole(self, path: str) -> dict[Any, Any]:
        """Return a file's keys merged over the files that it includes, without the choices of groups."""
        whole = self.included(path)
        set_at(whole, [], {key: value for key, value in self.body(path).items() if key != "defaults"})
        return whole

    def included(self, path: str) -> dict[Any, Any]:
        """Merge the files that a defaults list includes by name; later ones override earlier ones."""
        group = "experiment" if path.startswith("experiment/") else path.rpartition("/")[0]
        said: dict[Any, Any] = {}
        for entry in self.body(path).get("defaults", []):
            if isinstance(entry, str) and entry != "_self_":
                name, _, package = entry.partition("@")
                name = name[1:] if name.startswith("/") else f"{group}/{name}"
                set_at(said, package.split(".") if package else [], self.whole(name))
        return said

    def merged(self, placed: Iterable[tuple[str, str]]) -> dict[str, Any]:
        """Merge files given as (path, package); interpolations are not resolved."""
        whole: dict[str, Any] = {}
        for path, package in placed:
            body = {key: value for key, value in self.body(path).items() if key != "defaults"}
            set_at(whole, package.split(".") if package else [], body)
        return whole

    def keys(self, path: str, below: str) -> list[str]:
        """Return the keys of a node of a file: those that it declares and the arguments of its target."""
        node: Any = self.whole(path)
        for key in below.split(".") if below else ():
            node = node.get(key) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            return []
        found = arguments(node["_target_"]) if isinstance(node.get("_target_"), str) else None
        return [str(key) for key in node if key not in OF_HYDRA] + list(found.names if found else ())

    def groups(self, path: str) -> list[str]:
        """Return the groups in a file's defaults list that can be selected by name."""
        entries = [key for entry in self.body(path).get("defaults", []) if isinstance(entry, dict) for key in entry]
        names = [key.removeprefix("optional ").lstrip("/") for key in entries if not key.startswith("override ")]
        return [name for name in names if "@" not in name]

    def job_keys(self) -> dict[str, list[str]]:
        """Return, per job, the root keys that it has in addition to those of all jobs."""
        found = {}
        for job in self.choices("job"):
            at_root = self.whole(f"job/{job}") if self.is_global(f"job/{job}") else {}
            keys = [str(key) for key in at_root if key not in ("defaults", "hydra", "job")]
            groups = [group.partition("/")[0] for group in self.groups(f"job/{job}")]
            found[job] = list(dict.fromkeys([*keys, *groups]))
        return found

    def is_global(self, path: str) -> bool:
        """Return whether a file's keys are at the root."""
        files = [folder / f"{path}.yaml" for folder in self.folders]
        return any(file.is_file() and GLOBAL in file.read_text(encoding="utf-8") for file in files)


def is_part(name: str) -> bool:
    """Return whether a file is a part that others include, rather than a choice."""
    return name.startswith("_")


def set_at(node: dict[Any, Any], keys: list[str], value: Any) -> None:
    """Set the value at a path of keys below a node; a mapping is merged into an existing one."""
    if not keys:
        for key, each in value.items():
            set_at(node, [key], each)
    elif isinstance(value, dict) or keys[1:]:
        below = node.get(keys[0])
        if not isinstance(below, list):
            node[keys[0]] = dict(below) if isinstance(below, dict) else {}
            set_at(node[keys[0]], keys[1:], value)
        elif not keys[1:]:  # a longer path would address an element of the list
            node[keys[0]] = value
    else:
        node[keys[0]] = value
