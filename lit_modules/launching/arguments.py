"""Command-line arguments for Hydra: the prompt quoted, and ./conf added to the search path."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString

from common.settings import SettingError

PROMPT = "prompt="
MISSING = "???"  # OmegaConf reads this as a missing value, even in quotes
OWN_CONF = Path("conf")


def prepare_arguments(arguments: Sequence[str], conf: Path) -> list[str]:
    """Return the arguments to pass to Hydra.

    Args:
        arguments: the command line as the shell passed it.
        conf: the project's own folder of settings.

    Raises:
        ValueError: the prompt was split at its spaces (no quotes in the shell), or is ???.
    """
    check_prompt_is_whole(arguments)
    if any(each.startswith(PROMPT) and argument_text(each) == MISSING for each in arguments):
        raise SettingError("prompt", MISSING, "give that text in a file, prompt_file=FILE", "means no value here")
    quoted = [PROMPT + quote(argument_text(each)) if each.startswith(PROMPT) else each for each in arguments]
    return [*installed_settings(arguments, conf), *quoted]


def check_prompt_is_whole(arguments: Sequence[str]) -> None:
    for before, argument in itertools.pairwise(arguments):
        if before.startswith(PROMPT) and "=" not in argument and not argument.startswith(("-", "~")):
            raise ValueError(
                f"{argument} is not key=value: put quotes around the whole prompt, as in prompt='Hello, world', "
                "or give prompt_file=FILE (prompt_file=- for standard input)"
            )


def argument_text(argument: str) -> str:
    """Return the text of `prompt=...`: verbatim, or the inside of one pair of quotes that encloses all of it."""
    text = argument.removeprefix(PROMPT)
    for mark in ("'", '"'):
        inside = re.fullmatch(rf"{mark}((?:[^{mark}\\]|\\.)*){mark}", text, re.DOTALL)
        if inside:
            return re.sub(rf"(\\+)(?={mark}|$)", lambda run: run[1][: len(run[1]) // 2], inside[1])
    return text


def quote(text: str) -> str:
    """Quote a text so that Hydra and OmegaConf read it verbatim, without interpolation."""
    plain = re.sub(r"(\\*)\$\{", lambda match: rf"{match[1] * 2}\${{", text)
    return QuotedString(plain, Quote.single).with_quotes()


def installed_settings(arguments: Sequence[str], conf: Path) -> list[str]:
    """Return the flag that adds ./conf; none if it is the project's own or another folder is given."""
    given = any(each.partition("=")[0] in ("--config-dir", "-cd") for each in arguments)
    if given or not OWN_CONF.is_dir() or OWN_CONF.samefile(conf):
        return []
    return ["--config-dir", str(OWN_CONF.absolute())]
