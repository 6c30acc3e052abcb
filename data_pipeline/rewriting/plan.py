"""Checked settings of a rewriting."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from common.settings import check_whole
from data_pipeline.identity import EARLIER, SAMPLE
from data_pipeline.rewriting.inputs import Corpus
from data_pipeline.rewriting.screens import Screens
from data_pipeline.rewriting.styles import Style, read_styles


@dataclass(frozen=True)
class Plan:
    """Settings of a rewriting.

    Documents are cut into parts of about `part_characters`, each with `context_characters` of preceding text. A part is
    requested up to `attempts` times until an answer passes the screens. `chunk_documents` documents form a shard, and
    are held in memory at once. `tasks` is the number of pieces that can run separately, on several nodes.
    """

    input: str
    output: str
    styles: dict[str, Style]
    screens: dict[str, Screens]
    part_characters: int
    context_characters: int
    max_document_characters: int
    attempts: int
    chunk_documents: int
    tasks: int
    seed: int
    strict: bool
    screen_settings: dict

    def identity(self, backend: Mapping[str, Any], model: str, by: str = SAMPLE) -> dict:
        """Return the settings that a continued run must share with its start: all that shapes the text.

        Of the backend only the model and `extra` count: a run may continue at another address, faster, or with a larger
        budget.
        """
        keys = ("part_characters", "context_characters", "max_document_characters", "attempts", "chunk_documents")
        return {
            "input": {**({"path": self.input} if by == EARLIER else {}), "files": Corpus(self.input).identity(by)},
            "styles": {name: asdict(style) for name, style in self.styles.items()},
            "screens": self.screen_settings,
            "backend": {"model": model, "extra": dict(backend.get("extra") or {})},
            **{key: getattr(self, key) for key in (*keys, "tasks", "seed")},
        }


def read_plan(settings: Mapping[str, Any]) -> Plan:
    """Return the plan for a configuration's `rewrite`, given in plain containers.

    Raises:
        ValueError: a setting is missing or wrong; the line names the key.
    """
    whole: dict[str, int] = {}
    for key, least in (
        ("part_characters", 200),
        ("context_characters", 0),
        ("max_document_characters", 1),
        ("attempts", 1),
        ("chunk_documents", 1),
        ("tasks", 1),
        ("seed", 0),
    ):
        check_whole(f"rewrite.{key}", settings[key], least)
        whole[key] = settings[key]
    styles = read_styles(settings.get("styles") or {})
    general = settings.get("screens") or {}
    screens = {name: Screens(general, name, style.screens) for name, style in styles.items()}
    return Plan(
        input=str(settings["input"]),
        output=str(settings["output"]),
        **whole,
        styles=styles,
        screens=screens,
        strict=bool(settings["strict"]),
        screen_settings=dict(general),
    )
