"""Results that a killed measurement leaves are used by the next one, and by it alone if nothing else changed."""

import json

import pytest

from evaluation.saved_results import saved_results


@pytest.fixture
def squares(tmp_path):
    """Ask for squares; `asked` lists the batches that were computed."""

    def call(number, batch_size=2, identity=None, die_at=None):
        def compute(items):
            if die_at in items:
                raise KeyboardInterrupt
            call.asked.append(list(items))
            return [item**2 for item in items]

        return saved_results(tmp_path, "squares", identity or {"power": 2}, number, compute, batch_size)

    call.asked = []
    return call


def test_a_killed_measurement_goes_on_where_it_was(squares):
    with pytest.raises(KeyboardInterrupt):
        squares(7, die_at=5)
    assert squares.asked == [[0, 1], [2, 3]]
    assert squares(7) == [0, 1, 4, 9, 16, 25, 36]
    assert squares.asked == [[0, 1], [2, 3], [4, 5], [6]]


def test_more_items_and_other_batches_use_what_is_there(squares):
    assert squares(3) == [0, 1, 4]
    assert squares(5, batch_size=8) == [0, 1, 4, 9, 16]
    assert squares(2) == [0, 1]
    assert squares.asked == [[0, 1], [2], [3, 4]]


def test_another_identity_has_results_of_its_own(squares, tmp_path):
    squares(1)
    squares(1, identity={"power": 2, "seed": 1})
    assert squares.asked == [[0], [0]]
    assert {json.dumps(json.loads(file.read_text())["identity"]) for file in tmp_path.iterdir()} == {
        '{"power": 2}',
        '{"power": 2, "seed": 1}',
    }


def test_a_batch_with_too_few_results_is_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="shorter"):
        saved_results(tmp_path, "squares", {}, 2, lambda items: [1], 2)
