import numpy as np
import pytest

from data_pipeline.instructions.packing import OPEN_SEQUENCES, Concatenated, Whole
from data_pipeline.instructions.rendering import Example
from data_pipeline.tokens.batches import IGNORED

FILLER = 9


def example(start: int, size: int, learned: int) -> Example:
    """Return tokens start, start + 1, ..., the last `learned` of which are learned."""
    return Example(np.arange(start, start + size, dtype=np.int32), np.arange(size) >= size - learned)


def pack(packer, examples):
    return [*(sequence for one in examples for sequence in packer.add(one)), *packer.finish()]


def lists(sequences):
    return [tuple(part.tolist() for part in sequence) for sequence in sequences]


def test_concatenated_examples_run_on_with_a_document_at_each_piece():
    found = pack(Concatenated(4, FILLER, False), [example(10, 3, 2), example(20, 6, 4)])
    assert lists(found) == [
        ([10, 11, 12, 20], [11, 12, IGNORED, IGNORED], [0, 3]),
        ([21, 22, 23, 24], [22, 23, 24, 25], [0]),
        ([25, 9, 9, 9], [IGNORED] * 4, [0, 1]),
    ]


def test_whole_examples_go_where_there_is_room_first():
    found = pack(Whole(6, FILLER, False), [example(10, 4, 1), example(20, 4, 3), example(30, 2, 1), example(40, 1, 0)])
    assert lists(found) == [
        ([10, 11, 12, 13, 30, 31], [IGNORED, IGNORED, 13, IGNORED, 31, IGNORED], [0, 4]),
        ([20, 21, 22, 23, 40, 9], [21, 22, 23, IGNORED, IGNORED, IGNORED], [0, 4, 5]),
    ]


@pytest.mark.parametrize("packing", [Concatenated, Whole])
def test_across_documents_a_sequence_is_one(packing):
    found = pack(packing(8, FILLER, True), [example(10, 3, 2), example(20, 3, 1)])
    assert lists(found) == [([10, 11, 12, 20, 21, 22, 9, 9], [11, 12, IGNORED, IGNORED, 22, *[IGNORED] * 3], [0])]


@pytest.mark.parametrize("packing", [Concatenated, Whole])
@pytest.mark.parametrize("length", [8, 13, 64])
def test_every_learned_token_is_a_target_once(packing, length):
    draw = np.random.default_rng(length)
    sizes = [int(size) for size in draw.integers(2, 9, 200)]
    starts = 1000 + np.cumsum([0, *sizes[:-1]])
    examples = [
        example(int(start), size, int(draw.integers(1, size))) for start, size in zip(starts, sizes, strict=True)
    ]
    found = pack(packing(length, FILLER, False), examples)
    assert {len(sequence.inputs) for sequence in found} == {len(sequence.targets) for sequence in found} == {length}
    inputs, targets = (np.concatenate([sequence[part] for sequence in found]) for part in (0, 1))
    assert sorted(inputs[inputs >= 1000]) == list(range(1000, 1000 + sum(sizes)))
    wanted = np.concatenate([one.tokens[one.learned] for one in examples])
    assert sorted(targets[targets != IGNORED]) == sorted(wanted)
    learned = targets != IGNORED
    assert (targets[learned] == inputs[learned] + 1).all()  # the next token, also behind a sequence's end
    beginnings = {int(token) for token in starts}
    for sequence in found:
        inside = {int(token) for token in sequence.inputs[sequence.starts]} - {FILLER}
        assert inside >= beginnings & set(sequence.inputs.tolist())
        assert packing is Concatenated or inside <= beginnings


@pytest.mark.parametrize("packing", [Concatenated, Whole])
def test_an_example_that_fills_a_sequence_leaves_nothing_over(packing):
    found = pack(packing(5, FILLER, False), [example(10, 5, 4)])
    assert lists(found) == [([10, 11, 12, 13, 14], [11, 12, 13, 14, IGNORED], [0])]


def test_the_fullest_sequence_is_closed_when_too_many_are_open():
    packer = Whole(10, FILLER, False)
    fuller = [example(100, 7, 1), *[example(0, 6, 1)] * (OPEN_SEQUENCES - 1)]
    assert [sequence for one in fuller for sequence in packer.add(one)] == []
    (closed,) = packer.add(example(200, 6, 1))
    assert closed.inputs[0] == 100
    assert list(packer.add(example(300, 4, 1))) == []  # fits into the one that took its place
    rest = list(packer.finish())
    assert len(rest) == OPEN_SEQUENCES
    assert rest[0].inputs.tolist() == [*range(200, 206), *range(300, 304)]
