"""Selective attention by its definition, and its PyTorch form against that."""

import pytest
import torch

from kernels.forgetting_attention import forgetting_attention_reference
from kernels.selective_attention import selective_attention, selective_attention_reference

SHAPES = [((4, 4, 4), (8, 8)), ((4, 2, 1), (16, 20)), ((8, 1, 4), (6, 5)), ((6, 2, 3), (4, 7)), ((1, 1, 1), (1, 1))]


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def chosen_keys(call, inputs, top_values: int, **options) -> list[list[int]]:
    """Return the keys that each query head of the first row reads: those whose value shows in its output."""
    keys = inputs["k"].shape[1]
    one_hot = torch.eye(keys, dtype=inputs["q"].dtype)[None, :, None].expand(len(inputs["k"]), -1, 1, -1)
    weights = call(**inputs | {"v": one_hot}, top_values=top_values, **options)[0, 0]
    return [row.nonzero()[:, 0].tolist() for row in weights]


def test_of_scores_by_hand_the_two_highest_are_read():
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([1.0, 3.0, 0.0, 2.0]).view(1, 4, 1, 1)
    v = torch.tensor([[5.0], [7.0], [torch.nan], [11.0]]).view(1, 4, 1, 1)
    e = torch.tensor(1.0).exp()
    for call in (selective_attention, selective_attention_reference):
        torch.testing.assert_close(call(q, k, v, 2).view(()), (7 * e + 11) / (e + 1))


def test_the_gates_take_part_in_the_choice():
    q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 5, 1, 1)
    decay = torch.tensor([[0.0, -9.0, -10.0, -10.5, -11.0], [3.0, 3.0, 3.0, 3.0, 3.0]]).T[None]
    inputs = {"q": q, "k": k, "decay": decay}
    for call in (selective_attention, selective_attention_reference):
        # The sums of the first head fall, so its newest keys are read; those of the second are equal.
        assert chosen_keys(call, inputs, 3) == [[2, 3, 4], [0, 1, 2]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("heads", "dims"), SHAPES)
@pytest.mark.parametrize("gates", [False, True])
def test_the_pytorch_form_equals_the_definition(make, assert_close, dtype, heads, dims, gates):
    for keys, whole in ((1, False), (2, False), (37, False), (200, True)):
        inputs = make(3, keys, heads, dims, dtype=dtype, gates=gates, whole=whole)
        bounds = {"kv_start": int32(0, 0, keys // 2), "kv_end": int32(keys, keys // 2 + 1, keys)}
        for top_values in (1, 5, 36, 500):
            for options in ({}, {"softcap": 2.0, "scale": 0.7, **bounds}):
                expected = selective_attention_reference(**inputs, top_values=top_values, **options)
                found = selective_attention(**inputs, top_values=top_values, **options)
                assert_close({"out": found}, {"out": expected}, 1e-12 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("call", [selective_attention, selective_attention_reference])
@pytest.mark.parametrize("gates", [False, True])
def test_with_as_many_values_as_keys_it_is_plain_attention(make, assert_close, call, gates):
    inputs = make(3, 40, gates=gates)
    bounds = {"kv_start": int32(0, 10, 30), "kv_end": int32(40, 33, 31)}
    plain = {name: x for name, x in inputs.items() if name != "decay"} | {"log_forget": inputs.get("decay")}
    expected = forgetting_attention_reference(**plain, cumulative=gates, **bounds)
    # The longest row has 40 keys; the others have fewer than 23.
    assert_close({"out": call(**inputs, top_values=40, **bounds)}, {"out": expected}, 1e-12)
    assert_close({"out": call(**inputs, top_values=23, **bounds)[1:]}, {"out": expected[1:]}, 1e-12)
    assert not torch.allclose(call(**inputs, top_values=5, **bounds), expected)


@pytest.mark.parametrize("call", [selective_attention, selective_attention_reference])
def test_of_equal_scores_the_earlier_keys_are_read(make, call):
    inputs = make(2, 30, (3, 1, 1), dtype=torch.float32)
    inputs["q"][:, :, 0] = 0.0
    inputs["q"][:, :, 1], inputs["k"][:, :, :, 0] = torch.eye(16)[0], 1.0
    inputs["k"][:, [3, 8, 21], :, 0] = 2.0
    found = chosen_keys(call, inputs, 5, kv_start=int32(2, 0))
    assert found[:2] == [[2, 3, 4, 5, 6], [2, 3, 4, 8, 21]]
    assert len(found[2]) == 5
    # Below the smallest float32 two scores are zeros of other signs, which are equal.
    tiny = {"q": torch.ones(1, 1, 1, 1), "k": torch.tensor([-1e-30, 1e-30, -1e-30]).view(1, 3, 1, 1)}
    assert chosen_keys(call, tiny, 1, scale=1e-30) == [[0]]


@pytest.mark.parametrize("call", [selective_attention, selective_attention_reference])
def test_nan_shows_in_the_heads_that_read_it_and_nowhere_else(make, call):
    inputs = make(2, 30, (4, 2, 4), gates=True)
    bounds = {"kv_start": int32(4, 0), "kv_end": int32(20, 27)}
    expected = call(**inputs, top_values=6, **bounds)
    for name in ("k", "v", "decay"):
        inputs[name][0, :4], inputs[name][0, 20:], inputs[name][1, 27:] = torch.nan, torch.nan, torch.nan
    assert call(**inputs, top_values=6, **bounds).equal(expected)
    inputs["k"][1, 7, 1] = torch.nan
    found = call(**inputs, top_values=6, **bounds)
    assert found[1, 0, 2:].isnan().all()
    assert found[:, :, :2].equal(expected[:, :, :2])


@pytest.mark.parametrize("call", [selective_attention, selective_attention_reference])
def test_a_row_without_a_key_gives_zero(make, call):
    out = call(**make(2, 9, gates=True), top_values=3, kv_start=int32(5, 8), kv_end=int32(5, 9))
    assert (out[0] == 0).all()
    assert (out[1] != 0).all()


def test_no_rows_give_an_empty_output(make):
    inputs = {name: x[:0] for name, x in make(2, 9).items()}
    assert selective_attention(**inputs, top_values=3).shape == (0, 1, 4, 20)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"top_values": 0}, "top_values=0: it counts the values that a head reads, so it must be 1 or more"),
        ({"top_values": True}, "top_values=True"),
        ({"top_values": 2.5}, "top_values=2.5"),
        ({"softcap": 0.0}, "softcap=0.0: it bounds the logits"),
        ({"q": torch.zeros(2, 3, 4, 16)}, "q has 3 queries a row; selection is for decoding"),
        ({"k": torch.zeros(2, 9, 3, 16)}, "k has 3 heads, which do not divide the 4 heads of q"),
        ({"v": torch.zeros(2, 8, 1, 20)}, "batch, and time of k and v, must agree"),
        ({"decay": torch.zeros(2, 9, 2)}, r"decay has shape \[2, 9, 2\]; \[batch, keys, heads of q\] is \[2, 9, 4\]"),
        ({"decay": torch.zeros(2, 9, 4).half()}, "decay is torch.float16 on cpu; sums of log gates must be float32"),
        ({"kv_end": int32(9)}, "kv_end has 1 entries; it needs one for each of the 2 batch rows"),
        ({"kv_end": int32(9, 10)}, r"kv_end\[1\] is 10; it must lie between 1 queries and 9 keys"),
        ({"kv_start": torch.tensor([0, 1])}, "kv_start is torch.int64"),
        ({"kv_start": int32(0, 10)}, r"kv_start\[1\] is 10"),
    ],
)
def test_arguments_that_do_not_fit_are_named_in_one_line(make, change, said):
    inputs = make(2, 9, dtype=torch.float32) | {"top_values": 3} | change
    with pytest.raises(ValueError, match=said) as error:
        selective_attention(**inputs)
    assert "\n" not in str(error.value)
