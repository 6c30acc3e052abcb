"""Attention in a sliding window with sinks, against softmax over all pairs of tokens, in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_modules.networks.linearized.windows import window_attention
from lit_modules.networks.positions import Positions, locate

SCALE = 0.6
LAYOUTS = ("plain", "padded", "packed")


def place(layout: str, length: int) -> Positions:
    """Two rows; two rows with 0 and with some padding on the left; or three documents in one row, one of one token."""
    if layout == "packed":
        ends = torch.tensor([0, length // 3, length // 3 + 1, length], dtype=torch.int32)
        return locate(1, length, 0, torch.device("cpu"), cu_seqlens=ends)
    mask = None
    if layout == "padded":
        mask = torch.ones(2, length)
        mask[1, : max(1, length // 4)] = 0
    return locate(2, length, 0, torch.device("cpu"), mask)


def draw(positions: Positions, q_heads: int = 4, k_heads: int = 2, dim: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    generator, (batch, length) = torch.Generator().manual_seed(0), positions.index.shape
    shapes = [(batch, length, heads, dim) for heads in (q_heads, k_heads, k_heads)]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)


def all_pairs(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int, positions: Positions) -> Tensor:
    """The definition: a mask [B, T, T] of who sees whom, token by token."""
    batch, length = positions.index.shape
    index, group = positions.index, q.shape[2] // k.shape[2]
    mask = torch.zeros(batch, length, length, dtype=torch.bool)
    for b in range(batch):
        padding = 0 if positions.kv_start is None else int(positions.kv_start[b])
        for i in range(padding, length):
            first = i - int(index[b, i])
            for j in range(first, i + 1):
                mask[b, i, j] = i - j < window or j - first < sinks
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * SCALE
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("length", "window", "sinks"),
    [(47, 16, 4), (64, 20, 0), (13, 20, 3), (23, 1, 2), (40, 18, 30), (33, 5, 5), (50, 3, 1)],
)
def test_it_is_softmax_over_the_window_and_the_sinks_that_left_it(layout: str, length: int, window: int, sinks: int):
    positions = place(layout, length)
    inputs = draw(positions)
    expected = all_pairs(*inputs, window, sinks, positions)
    out = window_attention(*inputs, window=window, sinks=sinks, positions=positions, scale=SCALE)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)
    references = torch.autograd.grad((expected * weight).sum(), inputs)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-8)


def test_queries_in_the_padding_give_zero():
    positions = place("padded", 21)
    out = window_attention(*draw(positions), window=4, sinks=2, positions=positions, scale=SCALE)
    assert torch.equal(out[1, :5], torch.zeros_like(out[1, :5]))


def test_bfloat16_comes_back_as_bfloat16_and_is_summed_in_float32():
    positions = place("plain", 70)
    inputs = draw(positions)
    low = [x.detach().bfloat16() for x in inputs]
    out = window_attention(*low, window=16, sinks=4, positions=positions, scale=SCALE)
    expected = all_pairs(*(x.double() for x in low), 16, 4, positions)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-9)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(window_attention(*low, window=16, sinks=4, positions=positions, scale=SCALE), out)


def test_no_tensor_grows_with_the_square_of_the_length():
    length, window = 4096, 32
    positions = locate(1, length, 0, torch.device("cpu"))
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, Tensor) else 0)
            return out

    q, k, v = (x.detach() for x in draw(positions, 1, 1, 1))
    with Largest():
        window_attention(q, k, v, window=window, sinks=4, positions=positions, scale=SCALE)
    assert largest <= length * (2 * window + 4)
