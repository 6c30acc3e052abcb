import pickle
from pathlib import Path

import pytest
import yaml
from datatrove.data import Document

from data_pipeline.cleaning.language import Language
from data_pipeline.cleaning.quality import Quality
from data_pipeline.cleaning.sites import Sites

pytestmark = pytest.mark.core

ENGLISH = "The scheduler moves a task to another processor when the queue of its own one has grown too long. "
GERMAN = "Der Prozess wird auf einen anderen Kern verschoben, wenn die eigene Warteschlange zu lang geworden ist. "
CODE = "```\nfor (int i = 0; i < n; ++i) { queue[i] = next(queue, i); }\nif (queue == NULL) { return -ENOMEM; }\n```\n"


def document(text: str, **metadata: str) -> Document:
    return Document(text, "d", metadata=metadata)


def kept(step: object, doc: Document) -> bool:
    return step.filter(doc) is True


class TestLanguage:
    def test_prose_in_another_language_is_dropped_and_named(self) -> None:
        assert Language().filter(document(GERMAN * 6)) == (False, "de")
        assert kept(Language(["de", "en"]), document(GERMAN * 6))

    def test_code_does_not_count(self) -> None:
        found = document(ENGLISH * 5 + CODE * 100)
        assert kept(Language(), found)
        assert found.metadata["language"] == "en"
        assert Language().filter(document(GERMAN * 5 + CODE * 100)) == (False, "de")

    def test_too_little_prose_is_kept(self) -> None:
        assert kept(Language(), document(CODE * 50))
        assert kept(Language(), document(GERMAN))

    def test_broken_characters_do_not_stop_it(self) -> None:
        assert kept(Language(), document(ENGLISH * 5 + "\ud800 \0 \ufffd"))

    @pytest.mark.parametrize(
        ("settings", "key"),
        [
            ({"languages": "en"}, "languages=en"),
            ({"languages": []}, "languages"),
            ({"threshold": 2}, "threshold=2"),
            ({"model": "/nowhere/lid.bin"}, "model=/nowhere/lid.bin"),
        ],
    )
    def test_wrong_settings_are_named(self, settings: dict, key: str) -> None:
        with pytest.raises(ValueError, match=f"cleaning.language.{key}"):
            Language(**settings)

    def test_an_unknown_code_is_named(self) -> None:
        with pytest.raises(ValueError, match=r"cleaning\.language\.languages=.*english.* is not known"):
            Language(["english"]).filter(document(ENGLISH * 5))


class TestSites:
    @pytest.mark.parametrize(
        ("url", "reason"),
        [
            ("https://docs.good.org/guide", None),
            ("https://good.org:8443/guide?x=1", None),
            ("good.org/guide", None),
            ("https://evilgood.org/guide", "host not allowed"),
            ("https://good.org@evil.net/", "host not allowed"),
            ("https://ads.good.org/x", "denied host"),
            ("https://good.org/TAG/linux", "denied path"),
            ("https://good.org/%74ag/linux", "denied path"),
            ("https://good.org/tag/keep/me", None),
            ("https://forum.good.org/users/7", "denied path"),
            ("https://docs.good.org/users/7", None),
            ("http://[broken", "broken url"),
            ("https:///guide", "broken url"),
        ],
    )
    def test_hosts_and_paths(self, url: str, reason: str | None) -> None:
        step = Sites(["good.org"], ["ads.good.org"], ["/tag/*", "forum.good.org/users/*"], ["/tag/keep/*"])
        assert step.filter(document("", url=url)) == (True if reason is None else (False, reason))

    def test_documents_without_a_url_stay(self) -> None:
        assert kept(Sites(["good.org"]), document(""))

    @pytest.mark.parametrize(
        ("settings", "key"),
        [
            ({"deny_hosts": "x.org"}, "deny_hosts=x.org"),
            ({"allow_hosts": ["https://x.org"]}, "allow_hosts"),
            ({"deny_paths": ["tag"]}, "deny_paths"),
            ({"deny_paths": ["https://x.org/*"]}, "deny_paths"),
        ],
    )
    def test_wrong_settings_are_named(self, settings: dict, key: str) -> None:
        with pytest.raises(ValueError, match=f"cleaning.sites.{key}"):
            Sites(**settings)


def shipped() -> dict:
    path = Path(__file__).parents[3] / "conf" / "cleaning" / "quality.yaml"
    return {key: value for key, value in yaml.safe_load(path.read_text()).items() if not key.startswith("_")}


REFERENCE = "".join(
    f"\nqueue_{name}\n\nParameters\n----------\nflags : int\n    {words}\n\nReturns\n-------\nint\n    {ending}\n"
    for name, words, ending in [
        ("open", "How the queue is made, as in open(2).", "A descriptor of the new queue."),
        ("close", "Whether to wait for those who read.", "Zero, or the error that the kernel gave."),
        ("send", "Whether a full queue blocks the caller.", "How many bytes were put into the queue."),
    ]
)
LOG = "".join(
    f"Jan 12 10:{m:02}:{s:02} web1 nginx[{m * s}]: upstream timed out (110)\n" for m in range(9) for s in range(9)
)


class TestQuality:
    @pytest.mark.parametrize(
        "text",
        [
            ENGLISH * 1 + "It is told to by the load balancer, which runs at each tick of the clock.\n" + CODE,
            "To list the queues and what is in them, type this as the one who runs the server:\n\n$ ipcs -q -i 3\n",
            REFERENCE,
            "The upstream servers do not answer in time. This is what the log has of it:\n\n" + LOG,
        ],
        ids=["code", "short answer", "reference", "log"],
    )
    def test_good_system_text_stays(self, text: str) -> None:
        assert kept(Quality(**shipped()), document(text))

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("Read more", "length: gopher_short_doc"),
            (ENGLISH * 60, "repetition: "),
            ("\n".join(f"Jan Novak{chr(97 + n % 26)} Petr Svoboda" for n in range(60)), "words: gopher_enough_stop"),
            ("Lorem ipsum dolor sit amet. " + ENGLISH, "boilerplate: lorem"),
            (ENGLISH + "The image is this one, as base64 of its bytes:\n" + "QUJD" * 2000, "encoded: long_words"),
            ("\n".join(["}); // end"] * 300) + ENGLISH, "repeated_code: "),
        ],
        ids=["short", "repeated", "names", "lorem", "base64", "same line"],
    )
    def test_bad_text_is_dropped_with_its_rule(self, text: str, reason: str) -> None:
        result = Quality(**shipped()).filter(document(text))
        assert result is not True
        assert result[1].startswith(reason)

    def test_no_line_is_changed(self) -> None:
        found = document(ENGLISH + "It ends\n    in indented {code}\n\n\n" + CODE)
        before = found.text
        assert kept(Quality(**shipped()), found)
        assert found.text == before

    def test_a_category_has_its_own_thresholds(self) -> None:
        rules = {"length": {"filter": "gopher_quality", "min_doc_words": 50, "min_stop_words": None}}
        step = Quality(rules, {"commands": {"length": {"min_doc_words": 5}}, "logs": {"length": None}})
        assert not kept(step, document("List the open files now."))
        assert kept(step, document("List the open files now.", category="commands"))
        assert not kept(step, document("List files.", category="commands"))
        assert kept(step, document("x", category="logs"))

    def test_a_rule_set_to_null_is_off(self) -> None:
        assert kept(Quality({"length": None}), document("x"))

    @pytest.mark.parametrize(
        "text", ["", " \n\n ", "\0\0\0", "!!! ???", "\ud800 " * 300, "a" * 2_000_000, "\n" * 100_000]
    )
    def test_odd_texts_get_a_verdict(self, text: str) -> None:
        Quality(**shipped()).filter(document(text))

    @pytest.mark.parametrize(
        ("arguments", "key"),
        [
            ({"rules": {"a": {"filter": "gofer"}}}, r"rules\.a\.filter=gofer"),
            ({"rules": {"a": {"filter": "c4", "part": "verse"}}}, r"rules\.a\.part=verse"),
            ({"rules": {"a": {"filter": "c4", "min_sentences": 3}}}, r"rules\.a\.min_sentences is not known"),
            ({"rules": {"a": None}, "by_category": {"logs": {"b": None}}}, r"by_category\.logs\.b is not a rule"),
        ],
    )
    def test_wrong_settings_are_named(self, arguments: dict, key: str) -> None:
        with pytest.raises(ValueError, match=f"cleaning.quality.{key}"):
            Quality(**arguments)


@pytest.mark.parametrize("step", [Language(), Sites(["x.org"]), Quality(**shipped())], ids=lambda step: step.name)
def test_steps_travel_to_other_processes(step: object) -> None:
    found = document(ENGLISH * 4, url="https://x.org/")
    step.filter(found)  # what it has loaded stays behind
    assert pickle.loads(pickle.dumps(step)).filter(found) == step.filter(found)
