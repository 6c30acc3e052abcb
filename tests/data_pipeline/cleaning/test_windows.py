import random

import numpy as np
import pytest

from data_pipeline.cleaning import windows as module
from data_pipeline.cleaning.prose import plain_words, split_prose
from data_pipeline.cleaning.windows import normalized, windows
from data_pipeline.cleaning.words import Words


def test_equal_windows_have_equal_hashes_and_others_have_not() -> None:
    text = b"one  two three\nfour one two\tthree five"
    [block] = windows(text, 3)
    passages = [b" ".join(text[start:end].split()) for start, end in zip(block.starts, block.ends, strict=True)]
    assert passages[0] == passages[4] == b"one two three"
    assert len(passages) == 6
    same = block.hashes[:, None] == block.hashes[None, :]
    assert same.sum() == 8  # each with itself, and those two with each other


def test_word_boundaries_count() -> None:
    assert next(windows(b"ab c", 2)).hashes != next(windows(b"a bc", 2)).hashes


def test_blocks_give_the_windows_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = random.Random(3)
    text = " ".join(choice.choice(["alpha", "beta", "gamma"]) + str(choice.random())[:5] for _ in range(5000)).encode()
    [whole] = windows(text, 7)
    monkeypatch.setattr(module, "BLOCK_BYTES", 999)
    blocks = list(windows(text, 7))
    assert len(blocks) > 50
    for name in ("hashes", "starts", "ends"):
        assert np.array_equal(np.concatenate([getattr(block, name) for block in blocks]), getattr(whole, name))


@pytest.mark.parametrize("text", [b"", b"  \n ", b"a b", b"x" * 3_000_000, b" " * 3_000_000])
def test_texts_without_a_window_give_none(text: bytes) -> None:
    assert sum(len(block.hashes) for block in windows(text, 3)) == 0


def test_normalized_keeps_letters_and_digits_in_lower_case() -> None:
    assert normalized("Don't use `rm -RF`!").split() == b"don t use rm rf".split()
    assert normalized("„Straße“ — Größe").split() == "straße größe".encode().split()


def test_prose_is_told_from_code_logs_and_tables() -> None:
    prose, other = split_prose(
        "The server starts in /etc/init.d when the machine does.\n"
        "$ systemctl restart nginx.service --now\n"
        "```\nthis is fenced as code though it reads well\n```\n"
        "Jan 12 10:00:01 web1 kernel: [12.3] eth0: link is down (0x1f)\n"
        "\n\n\n"
        "if (x == 1) { return y; }\n"
        "A paragraph that ends in a\nshort line.\n"
    )
    assert prose.strip().split("\n") == [
        "The server starts in /etc/init.d when the machine does.",
        "",
        "A paragraph that ends in a",
        "short line.",
    ]
    assert "fenced" in other
    assert "kernel" in other
    assert "/etc/init.d" not in plain_words(prose)


def test_sentences_cover_the_text_and_words_need_no_download() -> None:
    text = "One sentence. Another one?\n\nA heading\n\nthe end"
    spans = Words().span_tokenize(text)
    assert "".join(text[start:end] for start, end in spans) == text
    assert Words().sent_tokenize(text) == ["One sentence.", "Another one?", "A heading", "the end"]
    assert Words().word_tokenize("it's --long=3") == ["it's", "--", "long", "=", "3"]
    assert Words().sent_tokenize("") == []
