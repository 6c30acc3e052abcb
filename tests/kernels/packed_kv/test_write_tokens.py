"""New tokens that are rotated as they are written into slots, against the same in PyTorch."""

import os

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

# Read when the kernels are defined, so before they are imported.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from kernels.packed_kv import rotate, rotate_and_write
from kernels.packed_kv.write_tokens import launch_rotation


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(
    heads: tuple[int, int, int], tokens: int, widths: tuple[int, int], turned: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return the arguments, in the layout of one product for queries, keys and values."""
    batch, slots = 3, 9
    sizes = [heads[0] * widths[0], heads[1] * widths[0], heads[2] * widths[1]]
    parts = random(batch, tokens, sum(sizes), seed=0, dtype=dtype).split(sizes, -1)
    q, k, v = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in zip(parts, heads, strict=True))
    tables = [random(batch, tokens, turned, seed=seed) for seed in (1, 2)]
    storages = [random(batch, n, slots, w, seed=3, dtype=dtype) for n, w in zip(heads[1:], widths, strict=True)]
    return [*storages, q, k, v, *tables, torch.tensor([tokens, 7, slots + 1], dtype=torch.int32)]


@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "tokens", "widths", "turned"),
    [
        ((4, 2, 2), 1, (16, 16), 16),
        ((3, 1, 3), 2, (24, 8), 10),
        ((1, 1, 1), 1, (8, 12), 8),
        ((9, 3, 3), 2, (80, 80), 80),
    ],
)
def test_one_launch_rotates_writes_and_maps(device, heads, tokens, widths, turned, dtype, maps) -> None:
    key_storage, value_storage, q, k, v, cosine, sine, end = make(heads, tokens, widths, turned, dtype)
    expected = [key_storage.clone(), value_storage.clone()]
    for row in range(2):  # the last row has no room for all its tokens
        where = slice(int(end[row]) - tokens, int(end[row]))
        expected[0][row, :, where] = rotate(k, cosine, sine)[row]
        expected[1][row, :, where] = v[row]
    key_map = random(widths[0], widths[0], seed=4).mT if maps else None
    there = [x.to(device) for x in (key_storage, value_storage, q, k, v, cosine, sine, end)]
    for launch in (launch_rotation, rotate_and_write) if device.type == "cuda" else (launch_rotation,):
        storages = [x.clone() for x in there[:2]]
        out, mapped = launch(*storages, *there[2:], None if key_map is None else key_map.to(device))
        torch.testing.assert_close(out.cpu(), rotate(q, cosine, sine))
        if key_map is None:
            assert mapped.numel() == 0
        else:
            torch.testing.assert_close(mapped.cpu(), (out.cpu().double() @ key_map.double()).to(dtype))
        for found, written in zip(storages, expected, strict=True):
            torch.testing.assert_close(found[:2].cpu(), written[:2])


def test_rotations_are_those_of_stock_models() -> None:
    *_, q, k, _, cosine, sine, _ = make((4, 2, 2), 3, (16, 16), 16, torch.float32)
    cosine, sine = (torch.cat((x[..., :8], x[..., :8]), -1) for x in (cosine, sine))
    for mine, theirs in zip(
        (rotate(x, cosine, sine) for x in (q, k)), apply_rotary_pos_emb(q, k, cosine, sine), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
