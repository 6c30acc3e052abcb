"""The shipped thresholds, on a text with a good rewriting and one bad rewriting per screen."""

import pytest
import yaml

from data_pipeline.rewriting.screens import Material, Screens
from tests.data_pipeline.rewriting.conftest import CONF

SETTINGS = yaml.safe_load((CONF / "screens" / "technical.yaml").read_text())
CODE = "```sh\nsysctl -w vm.dirty_ratio=10\ncat /proc/sys/vm/dirty_ratio\n```"
SOURCE = f"""## Writeback

The kernel keeps changed pages in memory and writes them to the disk later. When more than vm.dirty_ratio percent of
memory is dirty (the default is 20), a process that writes has to wait until the flusher has caught up. Background
writing begins much sooner, at vm.dirty_background_ratio, and every page that has been dirty for 30 seconds is written
whatever the ratios say. On a machine with 512 GB of memory 20 percent means 102 GB, which a disk that takes 200 MB/s
needs more than 8 minutes for, so the value is lowered there:

{CODE}

Add the line to /etc/sysctl.d/90-writeback.conf to keep it after a reboot.
"""
GOOD = f"""## How writeback is bounded

Changed pages do not go to disk at once: the kernel holds them in memory first. Two settings bound how many may pile up.
As soon as vm.dirty_background_ratio is exceeded, flusher threads start to write in the background, unnoticed by anyone.
Past vm.dirty_ratio, by default 20 percent of memory, writers themselves are made to wait. Age counts as well: after 30
seconds a dirty page is written in any case.

Large memories make the default dangerous. With 512 GB of RAM, 20 percent comes to 102 GB, and a disk at 200 MB/s would
be busy with that for over 8 minutes. Lower it:

{CODE}

To have this survive a reboot, put the setting into /etc/sysctl.d/90-writeback.conf as well.
"""
GERMAN = f"""## Wie das Zurückschreiben begrenzt wird

Geänderte Seiten gehen nicht sofort auf die Platte, der Kern hält sie zunächst im Speicher. Sobald die Grenze in
vm.dirty_background_ratio überschritten ist, beginnen Threads im Hintergrund zu schreiben. Jenseits von vm.dirty_ratio,
das sind sonst 20 Prozent, müssen die Schreibenden selbst warten, und nach 30 seconds wird jede Seite geschrieben.
Bei 512 GB Speicher sind das 102 GB, wofür eine Platte mit 200 MB/s mehr als 8 minutes braucht:

{CODE}

Damit das bleibt, gehört die Zeile nach /etc/sysctl.d/90-writeback.conf.
"""
HALF = "\n\n".join(GOOD.split("\n\n")[:2])
BAD = {
    "language": GERMAN,
    "length": f"Two settings.\n\n{CODE}",
    "copied": SOURCE.replace("## Writeback", "## Bounded writeback"),
    "repetition": GOOD + "The setting is then read again by the kernel at the next start of it.\n" * 12,
    "refusal": "I'm sorry, I cannot rewrite this in full. " + GOOD,
    "meta_talk": GOOD.replace("Large memories", "As the provided text explains, large memories"),
    "facts": GOOD.replace("vm.dirty_background_ratio", "a second setting")
    .replace("vm.dirty_ratio, by default 20 percent", "a first one")
    .replace("30\nseconds", "a while")
    .replace("512 GB", "much")
    .replace("102 GB", "plenty")
    .replace("200 MB/s", "its pace")
    .replace("8 minutes", "minutes")
    .replace("/etc/sysctl.d/90-writeback.conf", "a file"),
}


def failing(rewritten, source=SOURCE, settings=SETTINGS, overrides=None):
    screens = Screens(settings, "style", overrides or {})
    return screens.failing(Material(source, "", screens.clean(rewritten)))


def test_a_good_rewriting_passes_every_screen():
    assert failing(GOOD) == []


@pytest.mark.parametrize("name", BAD)
def test_each_screen_catches_its_own_and_can_be_switched_off(name):
    assert name in failing(BAD[name])
    assert set(failing(BAD[name])) <= {name, *({"facts"} if name == "length" else ())}
    assert name not in failing(BAD[name], settings={**SETTINGS, name: None})
    assert name not in failing(BAD[name], overrides={name: None})


def test_invented_facts_fail():
    told = GOOD.replace(
        "Lower it", "Set vm.swappiness=1, vm.overcommit_memory=2 and net.core.somaxconn=4096 with --all"
    )
    assert failing(told) == ["facts"]


def test_a_style_sets_its_own_thresholds():
    assert failing(GOOD, overrides={"length": {"max_ratio": 0.5}}) == ["length"]
    assert failing(BAD["facts"], overrides={"facts": {"min_kept": 0.0}}) == []


def test_code_may_be_copied_and_short_text_is_not_judged_by_its_language():
    log = "```\n" + "".join(
        f"[{n}.{n}] task {n} blocked for more than 120 seconds on cpu {n} of it\n" for n in range(30)
    )
    assert failing(f"Short.\n\n{log}```\n", source=f"A log.\n\n{log}```\n") == []


def test_a_table_may_repeat_what_its_source_repeats():
    table = "| an entry | a value |\n" * 40
    assert failing(f"Well, so it is.\n{table}", f"It is so.\n{table}", overrides={"copied": None}) == []


def test_a_loop_without_line_ends_is_repetition():
    assert "repetition" in failing(GOOD + "and so on " * 100)
    assert "repetition" in failing(GOOD + "a" * 3000, overrides={"length": None})


CLEANED = [
    (f"Here is the rewritten text:\n\n{HALF}", HALF),
    (f"Sure! Here's a version for beginners:\n---\n{HALF}", HALF),
    (f"Certainly.\n{HALF}\n\nLet me know if you need anything else!", HALF),
    (f"**Rewritten text:**\n\n{HALF}\n\n---\n\nI hope this helps!", HALF),
    (f"<think>\nThe user wants ...\n</think>\n\n{HALF}", HALF),
    (f"```markdown\n{HALF}\n```", HALF),
    (CODE, CODE),
    (f"Here is how the kernel does it: it waits.\n\n{HALF}", f"Here is how the kernel does it: it waits.\n\n{HALF}"),
    ("Here is the text:", "Here is the text:"),
]


@pytest.mark.parametrize(("answer", "expected"), CLEANED)
def test_talk_around_the_text_is_taken_off(answer, expected):
    assert Screens(SETTINGS, "style", {}).clean(answer) == expected.strip()


REFUSALS = [
    "I'm sorry, but I can't assist with that request.",
    "I’m sorry, but I can’t help.",
    "As an AI language model, I do not have access to files.",
    "Unfortunately, no passage was provided. Please share the text.",
    "Please provide the text you would like me to rewrite.",
    "I cannot fulfill this request.",
]


@pytest.mark.parametrize("text", REFUSALS)
def test_refusals_are_known_whatever_their_words(text):
    assert "refusal" in failing(text)


def test_a_text_about_refusals_is_none():
    assert failing(GOOD + "\nA server says 'I cannot provide this' when it has no such page.\n") == []
    source = SOURCE + "\nThe model answered: as an AI, it would not know.\n"
    assert failing(GOOD + "\nAsked, the model said that as an AI it would not know.\n", source) == []


def test_thoughts_that_never_end_are_no_text():
    assert "facts" in failing("<think>\nThe user wants me to rewrite this, so I shall " + "think about it more " * 20)
