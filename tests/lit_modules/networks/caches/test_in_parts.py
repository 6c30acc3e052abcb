"""Attention part by part against the kernels' definition."""

import pytest
import torch

from kernels.packed_kv import Format, PackedPast, pack, packed_attention_reference, read_squares
from lit_modules.networks.caches import in_parts
from lit_modules.networks.caches.in_parts import Side, attend_in_parts


@pytest.mark.parametrize("keys", [Format(2, "tokens", 16), Format(2, "channels", 32)])
@pytest.mark.parametrize("tokens", [1, 24])
@pytest.mark.parametrize("debias", [False, True])
def test_packed_and_dense_tokens_are_one_softmax(keys, tokens, debias, monkeypatch):
    monkeypatch.setattr(in_parts, "MAX_WEIGHTS", 4 * 2 * (48 + 30) * 5)  # five queries at a time
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, dense_keys, dense_values = draw(2, 4, tokens, 32), draw(2, 2, 30, 32), draw(2, 1, 30, 16)
    past = PackedPast(
        pack(2 * draw(2, 2, 48, 32), keys, 16),
        pack(draw(2, 1, 48, 16), Format(2, "channels", 16), 16, by_channel=True),
        torch.tensor([3, 2], dtype=torch.int32),
        key_rotation=torch.linalg.qr(draw(32, 32)).Q,
        debias=debias,
    )
    end, start = torch.tensor([28, 26], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32)
    expected = packed_attention_reference(q, dense_keys, dense_values, end, past, dense_start=start, scale=0.3)
    found = attend_in_parts(
        q,
        Side(dense_keys, end, past.keys, past.blocks, past.key_rotation),
        Side(dense_values, end, past.values, past.blocks),
        scale=0.3,
        start=start,
        squares=read_squares(q, past.key_rotation, end, start, 0.3) if debias else None,
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
