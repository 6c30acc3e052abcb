"""The small parts of the mixer against their definitions, written out one token at a time."""

import torch
from torch.testing import assert_close

from lit_modules.networks.mixers.attention import shift
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import locate
from lit_modules.networks.rotary import rotary_tables, rotate


def test_shift_mixes_each_token_with_its_predecessor_in_the_same_document():
    x, share = torch.randn(1, 6, 2, 3, dtype=torch.float64), torch.rand(1, 6, 2, dtype=torch.float64)
    index = torch.tensor([[0, 1, 2, 0, 1, 0]])
    expected = torch.empty_like(x)
    for t in range(6):
        previous = x[:, t - 1] if index[0, t] else torch.zeros_like(x[:, 0])
        expected[:, t] = share[:, t, :, None] * previous + (1 - share[:, t, :, None]) * x[:, t]
    assert_close(shift(x, None, share, index), expected)
    assert_close(shift(x[:, 1:3], x[:, 0], share[:, 1:3], index[:, 1:3]), expected[:, 1:3])


def test_head_norms_scale_each_head_by_weights_of_its_own():
    norm = RMSNorm(2, 4, eps=1e-6).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64)
    assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_a_norm_of_large_half_precision_numbers_does_not_overflow():
    norm = RMSNorm(4, eps=1e-6)
    assert norm(torch.full((1, 4), 6e4, dtype=torch.float16)).eq(1).all()


def test_rotation_makes_scores_depend_on_distance_alone_and_keeps_lengths():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(i: int, j: int) -> torch.Tensor:
        tables = rotary_tables(torch.tensor([[i, j]]), 8, 100.0)
        rotated = rotate(torch.cat((q, k), dim=1), tables)
        assert_close(rotated.norm(dim=-1), torch.cat((q, k), dim=1).norm(dim=-1), rtol=1e-6, atol=1e-6)
        return (rotated[0, 0] * rotated[0, 1]).sum()

    assert_close(score(9, 4), score(25, 20), rtol=1e-5, atol=1e-5)
    assert (score(9, 4) - score(9, 5)).abs() > 1e-4


def test_positions_count_from_each_document_and_from_the_first_real_token():
    device = torch.device("cpu")
    packed = locate(1, 6, 0, device, cu_seqlens=torch.tensor([0, 2, 2, 6], dtype=torch.int32))
    assert packed.index.tolist() == [[0, 1, 0, 1, 2, 3]]
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    padded = locate(4, 5, 0, device, attention_mask=mask)
    assert padded.kv_start.tolist() == [2, 0, 0, 5]
    assert padded.index.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]
    assert locate(4, 1, 4, device, attention_mask=mask).index.tolist() == [[2], [4], [4], [0]]
