"""Packing and attention over packed tokens, against the definition."""

import pytest
import torch
from torch import Tensor

from kernels.packed_kv import (
    Format,
    PackedPast,
    dequantize,
    error_variance,
    pack,
    packed_attention,
    packed_attention_reference,
    quantize,
    read_squares,
    unpack,
)

ALONG_TOKENS = Format(2, "tokens", 64)
FORMATS = [
    Format(2, "channels", 64),
    Format(4, "channels", 32),
    ALONG_TOKENS,
    Format(4, "tokens", 64),
    Format(2, "tokens", 64, high_channels=16),
    Format(2, "channels", 64, clip=0.96),
]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("by_channel", [False, True])
def test_unpacking_gives_exactly_the_dequantized_codes(format: Format, by_channel: bool) -> None:
    x = random(2, 3, 192, 64)
    packed = pack(x, format, 64, by_channel=by_channel)
    assert torch.equal(unpack(packed), dequantize(*quantize(x, format), format))
    assert (packed.head_dim, packed.block, packed.blocks) == (64, 64, 3)
    one = packed.map(lambda held: held[:, :, :1])
    assert torch.equal(unpack(one), unpack(packed)[:, :, :64])


@pytest.mark.parametrize("format", FORMATS)
def test_a_number_is_off_by_half_a_step_at_most(format: Format) -> None:
    x = random(1, 2, 128, 64)
    codes, scales, zeros = quantize(x, format)
    rounded = dequantize(codes, scales, zeros, format)
    steps = dequantize(torch.ones_like(codes), scales, torch.zeros_like(zeros), format)
    # float16 metadata move the ends of a group by 2^-11 of their size.
    off = (rounded - x).abs() - 0.5 * steps
    assert format.clip < 1 or off.max() < 1e-2


def test_the_bytes_are_those_of_the_format() -> None:
    x = random(1, 2, 256, 128)
    for format in (Format(2, "channels", 128), Format(2, "tokens", 128), Format(4, "tokens", 128)):
        packed = pack(x, format, 128)
        assert 8 * packed.nbytes / x.numel() == format.bits_per_number(128)


def test_outliers_of_float16_stay_finite() -> None:
    x = random(1, 1, 64, 64, dtype=torch.float16)
    x[..., 3], x[0, 0, 5, 7] = 6e4, -6e4
    back = unpack(pack(x, ALONG_TOKENS, 64))
    assert back.isfinite().all()
    assert torch.allclose(back[..., 3], x[..., 3].float(), rtol=1e-3)


def test_nan_stays_visible() -> None:
    x = random(1, 1, 64, 64)
    x[0, 0, 5, 7] = torch.nan
    assert unpack(pack(x, Format(2, "channels", 64), 64))[0, 0, 5].isnan().all()


def make(
    batch: int,
    heads: tuple[int, int, int],
    queries: int,
    dims: tuple[int, int],
    formats: tuple[Format, Format],
    *,
    gates: bool = False,
    rotated: bool = False,
    debias: bool = False,
    dtype: torch.dtype = torch.float32,
    block: int = 64,
) -> tuple:
    """Return random arguments of packed_attention: three blocks at most, rows of different lengths."""
    hq, hk, hv = heads
    dk, dv = dims
    slots, blocks = queries + 70, 3
    q = random(batch, hq, queries, dk, seed=1, dtype=dtype)
    keys, values = random(batch, hk, slots, dk, seed=2, dtype=dtype), random(batch, hv, slots, dv, seed=3, dtype=dtype)
    end = torch.tensor([queries + 60 - 7 * row for row in range(batch)], dtype=torch.int32)
    decay = past_decay = None
    if gates:
        total = 0.05 * random(batch, hq, blocks * block + slots, seed=4).abs().neg().cumsum(2)
        past_decay, decay = total[..., : blocks * block].unflatten(2, (-1, block)), total[..., blocks * block :]
    rotations = [torch.linalg.qr(random(d, d, seed=d)).Q if rotated else None for d in dims]
    past = PackedPast(
        pack(3 * random(batch, hk, blocks * block, dk, seed=5, dtype=dtype), formats[0], block),
        pack(random(batch, hv, blocks * block, dv, seed=6, dtype=dtype), formats[1], block, by_channel=True),
        torch.tensor([blocks - row % (blocks + 1) for row in range(batch)], dtype=torch.int32),
        past_decay, rotations[0], rotations[1], debias,
    )  # fmt: skip
    for row in range(batch):  # slots out of use may hold anything
        keys[row, :, end[row] :] = torch.nan
        values[row, :, end[row] :] = torch.nan
    return (q, keys, values, end, past), {"decay": decay}


SHAPES = [
    ((4, 2, 2), 1, (64, 64)),
    ((4, 2, 4), 5, (64, 32)),
    ((6, 6, 2), 1, (128, 128)),
    ((3, 1, 3), 33, (96, 48)),
    ((2, 2, 2), 1, (256, 256)),
]


@pytest.mark.parametrize(("heads", "queries", "dims"), SHAPES)
@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("debias", [False, True])
def test_attention_is_that_of_the_dequantized_past(heads, queries, dims, gates, rotated, debias) -> None:
    formats = Format(2, "tokens", 64), Format(2, "channels", dims[1])
    args, options = make(4, heads, queries, dims, formats, gates=gates, rotated=rotated, debias=debias)
    out = packed_attention(*args, **options)
    expected = packed_attention_reference(*args, **options)
    assert out.isfinite().all()
    assert (out - expected).abs().max() < 2e-5
    exact = packed_attention_reference(
        args[0].double(), args[1].double(), args[2].double(), *args[3:], decay=options["decay"]
    )
    assert (out - exact).abs().max() < 2e-5


@pytest.mark.parametrize("keys", FORMATS)
@pytest.mark.parametrize("values", FORMATS)
def test_any_two_formats_go_together(keys: Format, values: Format) -> None:
    args, _ = make(2, (4, 2, 2), 3, (64, 64), (keys, values))
    assert (packed_attention(*args) - packed_attention_reference(*args)).abs().max() < 2e-5


def test_soft_capped_logits() -> None:
    args, options = make(2, (4, 2, 2), 3, (64, 64), (FORMATS[0], FORMATS[0]), gates=True)
    out = packed_attention(*args, **options, softcap=5.0)
    assert (out - packed_attention_reference(*args, **options, softcap=5.0)).abs().max() < 2e-5
    assert (out - packed_attention(*args, **options)).abs().max() > 1e-3


def test_padding_before_the_dense_tokens_is_not_seen() -> None:
    (q, keys, values, end, past), _ = make(2, (4, 2, 2), 8, (64, 64), (FORMATS[0], FORMATS[0]))
    start = torch.tensor([0, end[1] - 5], dtype=torch.int32)  # three of row 1's queries are padding
    keys[1, :, : start[1]] = torch.nan
    values[1, :, : start[1]] = torch.nan
    past = PackedPast(past.keys, past.values, torch.tensor([3, 0], dtype=torch.int32))
    out = packed_attention(q, keys, values, end, past, dense_start=start)
    assert (out[1, :, :3] == 0).all()
    expected = packed_attention_reference(q, keys, values, end, past, dense_start=start)
    assert (out - expected).abs().max() < 2e-5


def test_segments_of_one_block_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    args, options = make(3, (4, 2, 2), 5, (64, 64), (FORMATS[0], FORMATS[2]), gates=True)
    whole = packed_attention(*args, **options)
    monkeypatch.setattr("kernels.packed_kv.chunked.MAX_SCORES", 1)
    assert (packed_attention(*args, **options) - whole).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bits": 3}, "bits=3"),
        ({"groups_along": "heads"}, "groups_along='heads'"),
        ({"group": 60}, "group=60"),
        ({"group": 24, "groups_along": "tokens"}, "group=24"),
        ({"high_channels": 16}, "high_channels=16"),
        ({"clip": 0.0}, "clip=0.0"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Format(**settings)


@pytest.mark.parametrize(
    ("head_dim", "format", "block", "named"),
    [
        (60, Format(2, "channels", 64), 64, "head_dim=60"),
        (96, Format(2, "channels", 64), 64, "head_dim=96 is not a multiple of group=64"),
        (64, Format(2, "tokens", 128), 64, "group=128"),
        (64, Format(2, "channels", 64), 48, "block=48"),
    ],
)
def test_sizes_that_do_not_fit_are_named(head_dim: int, format: Format, block: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        pack(torch.zeros(1, 1, 64, head_dim), format, block)


@pytest.mark.parametrize("format", [Format(2, "tokens", 64), Format(2, "channels", 32)])
def test_packed_tokens_get_their_share_of_attention(format) -> None:
    """Keys of small errors: with many of them, weights are right on average, and too large without the correction."""
    generator = torch.Generator().manual_seed(0)
    q, keys = (torch.randn(1, 1, n, 64, generator=generator, dtype=torch.float64) for n in (1, 4096))
    packed = pack(keys, format, 64)
    scale = 0.2
    exact, rounded = ((scale * q @ x.mT) for x in (keys, unpack(packed, torch.float64)))
    excess = error_variance(packed, read_squares(q, None, torch.ones(1), None, scale)) / 2
    share = (rounded.logsumexp(-1) - exact.logsumexp(-1)).item()
    corrected = ((rounded - excess).logsumexp(-1) - exact.logsumexp(-1)).item()
    assert share > 0.15
    assert abs(corrected) < 0.2 * share
