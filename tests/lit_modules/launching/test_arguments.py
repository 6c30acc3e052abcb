"""Interpretation of the command line before Hydra."""

import re
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hypothesis import assume, example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lit_modules.launching import arguments
from tests.conftest import ROOT

pytestmark = pytest.mark.core

CONF = ROOT / "conf"
PARSER = OverridesParser.create()


def read(argument: str) -> str:
    """The prompt that a job reads."""
    (given,) = [each for each in arguments.prepare_arguments([argument], CONF) if each.startswith("prompt=")]
    value = PARSER.parse_override(given).value()
    return OmegaConf.create({"prompt": value.text if isinstance(value, QuotedString) else value}).prompt


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world",
        "What's up?",
        "def f(x):",
        "true",
        "null",
        "1e5",
        "",
        " two  spaces ",
        "a=b",
        "[1, 2]",
        "{x: 1}",
        "# a comment",
        "line\nline\n",
        "C:\\new\\",
        "${oc.env:HOME} \\${x}",
        '"One," he said, "and two."',
        "it's 'quoted' inside",
        "日本 é",
    ],
)
def test_a_prompt_is_text_whatever_it_holds(text):
    assert read(f"prompt={text}") == text


@pytest.mark.parametrize(
    ("quoted", "text"),
    [
        ("'Hello, world'", "Hello, world"),
        ('"What\'s up?"', "What's up?"),
        ("'What\\'s up?'", "What's up?"),
        ("\"'quoted'\"", "'quoted'"),
        ("''", ""),
    ],
)
def test_one_pair_of_quotes_around_a_whole_prompt_is_taken_off(quoted, text):
    assert read(f"prompt={quoted}") == text


@given(st.text(st.sampled_from("'\"\\${},[]:=a \n\té~+()?0"), max_size=12))
@example("????")
@example("<???>")
def test_every_text_reaches_the_job_as_it_is(text):
    assume(arguments.argument_text(f"prompt={text}") != arguments.MISSING)  # refused: the test below
    assert read(f"prompt={text}") == arguments.argument_text(f"prompt={text}")
    assert read(f"prompt=<{text}>") == f"<{text}>"


def test_a_prompt_that_the_shell_has_cut_is_refused_in_words():
    with pytest.raises(ValueError, match="world is not key=value: put quotes around the whole prompt"):
        arguments.prepare_arguments(["job=generate", "prompt=Hello,", "world"], CONF)
    arguments.prepare_arguments(["prompt=Hello", "-m", "~callbacks"], CONF)


@pytest.mark.parametrize("argument", ["prompt=???", "prompt='???'"])
def test_the_one_text_that_means_no_value_is_refused(argument):
    with pytest.raises(ValueError, match=re.escape("prompt=??? means no value here")):
        arguments.prepare_arguments([argument], CONF)


def test_settings_in_the_current_folder_are_searched_unless_others_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert arguments.prepare_arguments(["seed=1"], CONF) == ["seed=1"]
    Path("conf").mkdir()
    assert arguments.prepare_arguments(["seed=1"], CONF) == ["--config-dir", str(tmp_path / "conf"), "seed=1"]
    assert arguments.prepare_arguments(["seed=1"], tmp_path / "conf") == ["seed=1"]
    for given_folder in (["--config-dir", "x"], ["--config-dir=x"], ["-cd", "x"]):
        assert arguments.prepare_arguments(given_folder, CONF) == given_folder
