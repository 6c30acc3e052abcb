"""conf/ says a thing once: a file says what it changes, and the files that it includes say the rest."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from lit_modules.launching.conf_files import OF_HYDRA, ConfFiles, is_part
from tests.conftest import ROOT

pytestmark = pytest.mark.core

CONF = ROOT / "conf"
FILES = ConfFiles([CONF])
PATHS = sorted(
    str(file.relative_to(CONF).with_suffix("")) for file in CONF.rglob("*.yaml") if "local" not in file.parts
)

MOST_ALIKE = 6  # values that two files of a group may share: more belong into a part that both include


def values(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """What a file says, value by value, its defaults list and Hydra's own keys left out."""
    if not isinstance(node, dict):
        yield place, node
        return
    for key, each in node.items():
        if key not in ("defaults", *OF_HYDRA):
            yield from values(each, f"{place}.{key}" if place else str(key))


def included(path: str) -> list[str]:
    """Return the names of the files that a file's defaults list includes."""
    entries = FILES.body(path).get("defaults", [])
    return [entry.partition("@")[0] for entry in entries if isinstance(entry, str) and entry != "_self_"]


@pytest.mark.parametrize("path", [path for path in PATHS if included(path)])
def test_no_file_repeats_what_it_includes(path):
    below = dict(values(FILES.included(path)))
    assert below
    repeated = [key for key, value in values(FILES.body(path)) if key in below and repr(below[key]) == repr(value)]
    assert not repeated, f"leave these out of conf/{path}.yaml: {', '.join(repeated)}"


def test_every_part_is_included_by_a_file():
    parts = {path.rpartition("/")[2] for path in PATHS if is_part(path.rpartition("/")[2])}
    assert parts == {name for path in PATHS for each in included(path) if is_part(name := each.rpartition("/")[2])}


def test_no_two_files_of_a_group_say_the_same():
    said = {path: {(key, repr(value)) for key, value in values(FILES.body(path))} for path in PATHS}
    for one, other in itertools.combinations(PATHS, 2):
        if one.rpartition("/")[0] == other.rpartition("/")[0]:
            both = sorted(key for key, _ in said[one] & said[other])
            assert len(both) <= MOST_ALIKE, f"conf/{one}.yaml and conf/{other}.yaml both say {', '.join(both)}"
