"""Packing in one launch gives the bytes of the definition."""

import os

import pytest
import torch
from torch import Tensor

# Read when the kernels are defined, so before they are imported.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from kernels.packed_kv import Format, Packed, pack, unpack
from kernels.packed_kv.triton.pack import pack_slots

FORMATS = [
    (Format(2, "channels", 64), 64, 32),
    (Format(2, "channels", 16), 64, 16),
    (Format(4, "channels", 48), 96, 48),
    (Format(2, "tokens", 64), 64, 64),
    (Format(4, "tokens", 48), 96, 48),
    (Format(2, "channels", 64, clip=0.92), 64, 32),
    (Format(2, "channels", 32, clip=0.7), 64, 16),
    (Format(4, "channels", 96, clip=0.96), 96, 48),
    (Format(2, "tokens", 64, clip=0.9), 64, 64),
    (Format(2, "tokens", 64, high_channels=8), 64, 64),
    (Format(2, "tokens", 48, high_channels=24, clip=0.95), 96, 48),
]


def packed_in_slots(x: Tensor, slots: Tensor, format: Format, block: int, by_channel: bool) -> tuple[Packed, Packed]:
    """Pack the slots of rows 2 and 0 into blocks 1 and 3 of four, and return that beside the definition."""
    wide = slots.repeat_interleave(x.shape[1] // slots.shape[1], 1)[..., None].expand(len(x), -1, -1, x.shape[3])
    expected = pack(x.gather(2, wide), format, block, by_channel=by_channel)
    found = expected.map(lambda each: torch.zeros_like(each).repeat_interleave(2, 2))
    cells = torch.tensor([[2, 2, 0, 0], [0, 1, 0, 1], [1, 3, 3, 1]], device=x.device)
    pack_slots(x, slots, found, cells)
    return found, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("format", "dim", "block"), FORMATS)
def test_the_bytes_are_those_of_the_definition(device, format, dim, block, by_channel, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 3 * block, dim, generator=generator).to(dtype)
    x[0, 0, 5], x[0, 1, :, 3] = 0.0, 6e4  # a group without a step, and a channel of outliers
    x[2, 3, 7:9, :16] = torch.tensor([-6e4, 6e4])[:, None]
    slots = torch.stack([torch.randperm(3 * block, generator=generator)[: 2 * block] for _ in range(3)])[:, None]
    x, slots = x.to(device), slots.to(device)
    found, expected = packed_in_slots(x, slots, format, block, by_channel)
    for one, other in zip(found.tensors(), expected.tensors(), strict=True):
        for row, source, target in ((2, 0, 1), (2, 1, 3), (0, 0, 3), (0, 1, 1)):
            assert torch.equal(one[row, :, target], other[row, :, source])
        assert not one[1].any()
        assert not one[:, :, ::2].any()


def test_groups_of_heads_have_slots_of_their_own(device) -> None:
    x = torch.randn(3, 4, 40, 64, device=device)
    slots = torch.stack([torch.randperm(40, device=device)[:32] for _ in range(6)]).view(3, 2, 32)
    found, expected = packed_in_slots(x, slots, Format(2, "channels", 64), 16, False)
    assert torch.equal(found.low[2, :, 1], expected.low[2, :, 0])
    assert torch.equal(found.low[0, :, 3], expected.low[0, :, 0])


@pytest.mark.parametrize("along", ["channels", "tokens"])
def test_nan_stays_in_its_group(device, along) -> None:
    x = torch.randn(3, 1, 32, 64, device=device)
    x[2, 0, 5, 7] = torch.nan
    slots = torch.arange(32, device=device)[None, None]
    found, expected = packed_in_slots(x, slots, Format(2, along, 64 if along == "channels" else 16), 16, False)
    assert torch.equal(unpack(found)[2, 0, 16:32].isnan(), unpack(expected)[2, 0, :16].isnan())
    assert unpack(found)[2].isnan().sum() == (64 if along == "channels" else 16)
