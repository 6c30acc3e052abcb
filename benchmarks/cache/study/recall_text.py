"""Write documents with facts and questions about them, so that a small model learns to find a fact again.

    python -m benchmarks.cache.study.recall_text --text train.jsonl --output recall.jsonl --bytes 20000000

A model of some 25M parameters does not learn recall from ordinary text in minutes. The documents have the forms of
evaluation/recall, with other words, and many questions each, because only answers teach. Half are lists of pairs, half
are sentences of a text with facts among them.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from evaluation.recall.questions import sentences_of

TRAINING_WORDS = tuple(
    words.split()
    for words in (
        "able active alert basic better blank broken careful central cheap clean clear common complex correct current "
        "deep direct double dry empty exact extra false fast final fine flat free full glad good great hard heavy high "
        "hot huge idle inner joint known large last legal light local long loose main major minor narrow native new",
        "account action address answer archive array author backup barrel binary board border branch bridge bucket "
        "buffer button cable camera carbon carpet cell chain channel circle client clock column command compiler "
        "console copy counter cursor daemon data device digit disk domain driver editor engine entry error event",
        "apple arrow axle banner basket battery bell belt bench blade blanket bolt book bottle bowl box brick brush "
        "cabinet candle card chair chart coin comb cord cup curtain desk dial door drawer drum engine fan fence file "
        "filter flag flask fork frame funnel gear glass glove guitar hammer handle helmet hinge hook horn jar kettle",
    )
)
LENGTHS = (300, 30_000)
"""Characters of a document, the logarithm drawn evenly."""

PAIR, NEEDLE, QUESTION = 32, 70, 130
"""About so many characters has a pair, a fact in a text, and a question with its answer."""


def keys_and_values(draw: random.Random, number: int) -> list[tuple[str, str]]:
    """Draw so many different keys of three words, and numbers of six digits."""
    keys = dict.fromkeys(" ".join(draw.choice(words) for words in TRAINING_WORDS) for _ in range(number))
    return [(key, str(draw.randrange(100_000, 1_000_000))) for key in keys]


def pairs(draw: random.Random, characters: int) -> str:
    """Return a list of pairs, and a question for each pair in another order, as many as there is room for."""
    facts = keys_and_values(draw, max(2, characters // (PAIR + 3 * PAIR)))
    lines = ["Access codes:", *(f"{key}: {value}" for key, value in facts), ""]
    for key, value in draw.sample(facts, len(facts)):
        lines += [f"The access code of {key}:", f"{key}: {value}", ""]
    return "\n".join(lines)


def needles(draw: random.Random, characters: int, sentences: list[str]) -> str:
    """Return sentences with facts among them, and a question for each fact."""
    facts = keys_and_values(draw, max(2, min(24, characters // (2 * (NEEDLE + QUESTION)))))
    room, begin, text = characters - len(facts) * (NEEDLE + QUESTION), draw.randrange(len(sentences)), []
    while room > 0:
        text.append(sentences[begin % len(sentences)])
        room, begin = room - len(text[-1]) - 1, begin + 1
    for key, value in facts:
        text.insert(draw.randrange(len(text) + 1), f"The access code of the {key} is {value}.")
    asked = [
        f"Question: What is the access code of the {key}?\nAnswer: The access code of the {key} is {value}"
        for key, value in draw.sample(facts, len(facts))
    ]
    return "\n\n".join([" ".join(text), *asked])


def documents(sentences: list[str], size: int, seed: int) -> Iterator[str]:
    """Yield documents of `size` characters in all."""
    draw, written = random.Random(seed), 0
    low, high = LENGTHS
    while written < size:
        characters = round(low * (high / low) ** draw.random())
        text = needles(draw, characters, sentences) if draw.random() < 0.5 else pairs(draw, characters)
        written += len(text)
        yield text


def main() -> None:
    """Write the documents."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help=".jsonl with a text in each line, for sentences")
    parser.add_argument("--output", type=Path, required=True, help="a .jsonl file")
    parser.add_argument("--bytes", type=int, default=20_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with options.text.open(encoding="utf-8") as file:
        sentences = [
            each for _, line in zip(range(100), file, strict=False) for each in sentences_of(json.loads(line)["text"])
        ]
    with options.output.open("w", encoding="utf-8") as file:
        for number, text in enumerate(documents(sentences, options.bytes, options.seed)):
            file.write(json.dumps({"id": f"recall-{number}", "text": text}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
