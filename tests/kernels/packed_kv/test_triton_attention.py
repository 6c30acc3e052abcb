"""The Triton kernels against the definition in float64: compiled on a GPU, elsewhere in Triton's interpreter."""

import os
from dataclasses import replace

import pytest
import torch

# Read when the kernels are defined, so before they are imported.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from kernels.packed_kv import (
    Format,
    PackedPast,
    pack,
    packed_attention,
    packed_attention_reference,
)
from kernels.packed_kv.formats import MANY_QUERIES
from kernels.packed_kv.triton import launch
from kernels.packed_kv.triton.unpack import attend_unpacked
from tests.kernels.packed_kv.test_against_reference import FORMATS, SHAPES, make

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
CHANNELS, TOKENS = Format(2, "channels", 64), Format(2, "tokens", 64)


def moved(past: PackedPast, device: torch.device) -> PackedPast:
    sides = [side.map(lambda x: x.to(device)) for side in (past.keys, past.values)]
    rest = (past.blocks, past.decay, past.key_rotation, past.value_rotation)
    return PackedPast(*sides, *(None if x is None else x.to(device) for x in rest), past.debias)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    actual = actual.cpu().double()
    assert actual.isfinite().all()
    assert (actual - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@pytest.fixture(scope="session")
def agree(device):
    """Compare a call with the definition: for few queries, and as for many."""

    def check(args: tuple, options: dict, dense_start: torch.Tensor | None = None) -> None:
        q, keys, values, end, past = args
        scale, decay = q.shape[-1] ** -0.5, options["decay"]
        there = [None if x is None else x.to(device) for x in (q, keys, values, end, dense_start, decay)]
        expected = packed_attention_reference(
            q.double(), keys.double(), values.double(), end, past, **options, dense_start=dense_start
        )
        attends = [launch.attend] if q.shape[2] <= MANY_QUERIES else [attend_unpacked]
        if q.shape[2] <= MANY_QUERIES and not past.debias:
            attends.append(attend_unpacked)
        for attend in attends:
            close(attend(*there, moved(past, device), scale), expected, q.dtype)

    return check


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "queries", "dims"), SHAPES)
@pytest.mark.parametrize("gates", [False, True])
def test_heads_widths_queries_and_gates(agree, dtype, heads, queries, dims, gates) -> None:
    formats = TOKENS, Format(2, "channels", dims[1])
    agree(*make(4, heads, queries, dims, formats, gates=gates, rotated=gates, dtype=dtype))


@pytest.mark.parametrize("values", [format for format in FORMATS if not format.high_channels])
@pytest.mark.parametrize("keys", FORMATS)
def test_formats(agree, keys, values) -> None:
    agree(*make(2, (4, 2, 2), 1, (64, 64), (keys, values), dtype=DTYPES[-1]))


@pytest.mark.parametrize("keys", FORMATS)
@pytest.mark.parametrize("queries", [1, 5, 21])
@pytest.mark.parametrize("gates", [False, True])
def test_logits_less_half_the_variance_of_their_error(agree, keys, queries, gates) -> None:
    formats, heads = (keys, CHANNELS), (4, 2, 2)
    agree(*make(3, heads, queries, (64, 64), formats, gates=gates, rotated=gates, debias=True, dtype=DTYPES[0]))


def test_padding_has_no_part_in_the_mean_of_many_queries(agree) -> None:
    options = {"debias": True, "dtype": DTYPES[0]}
    (q, keys, values, end, past), decay = make(2, (4, 2, 2), 40, (64, 64), (TOKENS, CHANNELS), **options)
    start = torch.tensor([0, end[1] - 12], dtype=torch.int32)
    keys[1, :, : start[1]] = values[1, :, : start[1]] = torch.nan
    q[1, :, :28] = torch.nan
    past = replace(past, blocks=torch.tensor([3, 0], dtype=torch.int32))
    out = packed_attention(q, keys, values, end, past, dense_start=start, **decay)
    assert out[1, :, 28:].isfinite().all()
    q[1, :, :28] = 100.0
    agree((q, keys, values, end, past), decay, start)


@pytest.mark.parametrize("format", [TOKENS, CHANNELS])
def test_outliers_of_float16(agree, format) -> None:
    (q, keys, values, end, past), options = make(1, (2, 1, 1), 1, (64, 64), (format, CHANNELS), dtype=torch.float16)
    x = torch.randn(1, 1, 192, 64, dtype=torch.float16)
    x[..., 3], x[0, 0, 5, 7] = 6e4, -6e4
    q = 1e-3 * q
    agree((q, keys, values, end, PackedPast(pack(x, format, 64), past.values, past.blocks)), options)


@pytest.mark.parametrize("tensor", ["keys", "values"])
@pytest.mark.parametrize("formats", [(CHANNELS, CHANNELS), (TOKENS, TOKENS)])
def test_nan_in_packed_tokens_shows(device, formats, tensor) -> None:
    (q, keys, values, end, past), _ = make(1, (4, 2, 2), 1, (64, 64), formats, dtype=torch.float16)
    x = torch.randn(2, 1, 2, 192, 64)
    x[0 if tensor == "keys" else 1, 0, 1, 70, 9] = torch.nan
    sides = pack(x[0], formats[0], 64), pack(x[1], formats[1], 64, by_channel=True)
    past = moved(PackedPast(*sides, past.blocks), device)
    there = [x.to(device) for x in (q, keys, values, end)]
    for attend in (launch.attend, attend_unpacked):
        is_nan = attend(*there, None, None, past, 0.1).isnan()[0, :, 0].cpu()
        assert not is_nan[:2].any()
        of_one_channel = tensor == "values" and formats[1] == TOKENS
        assert is_nan[2:].sum() == (2 if of_one_channel else 128)


def test_left_padding_among_the_dense_tokens(agree) -> None:
    (q, keys, values, end, past), options = make(2, (4, 2, 2), 8, (64, 64), (CHANNELS, CHANNELS), dtype=DTYPES[0])
    start = torch.tensor([0, end[1] - 5], dtype=torch.int32)  # three of row 1's queries are padding
    keys[1, :, : start[1]] = values[1, :, : start[1]] = torch.nan
    past = PackedPast(past.keys, past.values, torch.tensor([3, 0], dtype=torch.int32))
    agree((q, keys, values, end, past), options, start)


def test_blocks_of_128_and_storage_beyond_the_blocks_in_use(agree) -> None:
    args, options = make(
        3, (8, 2, 2), 1, (128, 128), (Format(2, "tokens", 128), Format(2, "channels", 128)), block=128, dtype=DTYPES[0]
    )
    for side in (args[4].keys, args[4].values):
        for x in side.tensors():
            x[1:, :, 2:] = -1  # rows 1 and 2 use fewer
    agree((*args[:4], PackedPast(args[4].keys, args[4].values, torch.tensor([3, 2, 0], dtype=torch.int32))), options)


@pytest.mark.parametrize("block", [16, 48, 96])
@pytest.mark.parametrize("along", ["tokens", "channels"])
def test_blocks_that_are_no_power_of_two(agree, block, along) -> None:
    keys = Format(2, along, block if along == "tokens" else 64)
    agree(*make(2, (4, 2, 2), 1, (64, 64), (keys, CHANNELS), block=block, dtype=DTYPES[0]))


def test_many_rows_are_rotated_in_a_launch_of_their_own(agree, monkeypatch) -> None:
    monkeypatch.setattr(launch, "MANY_ROWS", 1)
    agree(*make(3, (4, 2, 2), 5, (64, 48), (TOKENS, Format(2, "channels", 48)), rotated=True, dtype=DTYPES[0]))


def test_queries_that_are_mapped_already(device) -> None:
    (*args, past), options = make(2, (8, 2, 2), 1, (64, 64), (TOKENS, CHANNELS), rotated=True, dtype=DTYPES[0])
    there, past = [x.to(device) for x in args], moved(past, device)
    expected = launch.attend(*there, None, options["decay"], past, 0.1)
    past_q = (there[0] @ past.key_rotation).contiguous()
    found = launch.attend(*there, None, options["decay"], replace(past, key_rotation=None), 0.1, past_q)
    torch.testing.assert_close(found, expected)


def test_many_queries_with_a_buffer_for_one_row(agree, monkeypatch) -> None:
    monkeypatch.setattr("kernels.packed_kv.triton.unpack.BUFFER_BYTES", 1)
    agree(*make(3, (4, 2, 2), 20, (64, 64), (TOKENS, CHANNELS), gates=True, rotated=True, dtype=DTYPES[0]))


@pytest.mark.gpu(needs="CUDA")
def test_the_operation_reaches_the_kernels_and_compiles(device) -> None:
    args, options = make(2, (8, 2, 2), 1, (128, 128), (CHANNELS, CHANNELS), gates=True, dtype=torch.bfloat16)
    q, keys, values, end, decay = (x.to(device) for x in (*args[:4], options["decay"]))
    past = moved(args[4], device)
    run = torch.compile(lambda q: packed_attention(q, keys, values, end, past, decay=decay), fullgraph=True)
    expected = launch.attend(q, keys, values, end, None, decay, past, 128**-0.5)
    assert torch.equal(run(q), expected)
