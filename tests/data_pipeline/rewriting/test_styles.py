import pytest
import yaml
from omegaconf import OmegaConf

from data_pipeline.documents import Document
from data_pipeline.rewriting.screens import Screens
from data_pipeline.rewriting.styles import Malformed, Style, read_styles
from tests.conftest import composed
from tests.data_pipeline.rewriting.conftest import CONF

NAMES = sorted(path.stem for path in (CONF / "style").glob("[!_]*.yaml"))
VALUES = {
    "text": "T $section {x}",
    "title": "A title",
    "section": "One > Two",
    "context": "before",
    "category": "debug",
}


def shipped(name: str) -> Style:
    said = OmegaConf.to_container(composed(f"rewrite/style/{name}"))["rewrite"]
    return read_styles(said["styles"])[name]


def test_the_styles_of_the_corpus_are_there():
    assert NAMES == [
        "command_explained",
        "post_mortem",
        "question_answer",
        "rephrase_easy",
        "rephrase_expert",
        "rephrase_plain",
        "task_to_command",
        "textbook",
        "troubleshooting_dialogue",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_style_makes_a_prompt_with_the_document_in_it(name):
    style = shipped(name)
    first = (CONF / "style" / f"{name}.yaml").read_text().split("\n")[0]
    assert first == f"# @package rewrite.styles.{name}"
    system, user = style.messages(VALUES)
    assert (system["role"], user["role"]) == ("system", "user")
    assert "T $section {x}" in user["content"]  # what a document holds is no template
    assert "A title" in user["content"]
    screens = yaml.safe_load((CONF / "screens" / "technical.yaml").read_text())
    assert Screens(screens, name, style.screens).screens


def test_the_hash_follows_the_prompt_and_nothing_else():
    style = Style("a", "be plain", "$text")
    assert style.prompt_hash() == Style("b", "be plain", "$text", temperature=0.1).prompt_hash()
    assert style.prompt_hash() != Style("a", "be plainer", "$text").prompt_hash()


def test_a_style_suits_by_category_or_by_source():
    style = Style("a", "", "$text", categories=["debug*", "commands"])
    for metadata, suits in (
        ({"category": "debug"}, True),
        ({"category": "debug_capability"}, True),
        ({"source": "commands"}, True),
        ({"category": "general_system", "source": "arxiv"}, False),
        ({}, False),
    ):
        assert style.suits(Document("x", "x", metadata)) is suits


def test_the_longest_answer_follows_the_text():
    style = Style("a", "", "$text", max_tokens_ratio=2.0)
    assert style.max_tokens("x" * 3500) == 2000
    assert style.max_tokens("x") == 256


PAIRS = Style("p", "", "$text", form="pairs", pair_keys=["task", "command"], pair_text="$task\n$$ $command")


@pytest.mark.parametrize("fence", ["{}", "```json\n{}\n```", "```\n{}\n```"])
def test_pairs_are_written_out(fence):
    answer = '[{"task": "List $all.", "command": "ls -a"}, {"command": "pwd", "task": "Where?"}]'
    text, pairs = PAIRS.read(fence.format(answer))
    assert text == "List $all.\n$ ls -a\n\nWhere?\n$ pwd\n"
    assert pairs[1] == {"task": "Where?", "command": "pwd"}


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "{}",
        "Here: []",
        '[{"task": "a"}]',
        '[{"task": "a", "command": ""}]',
        '[{"task": "a", "command": 5}]',
        '[{"task": "a", "command": "b", "why": "c"}]',
        '[{"task": "a", "task": "b", "command": "c"}]',
        '[{"task": "a", "command": "b"}] so it is',
        '["a"]',
        "[" * 100_000,
    ],
)
def test_pairs_are_read_strictly(answer):
    with pytest.raises(Malformed):
        PAIRS.read(answer)
