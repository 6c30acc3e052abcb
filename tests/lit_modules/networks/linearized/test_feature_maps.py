"""Feature maps of queries and keys: their initial values, and that each head has its own map."""

import pytest
import torch
from torch import Tensor

from lit_modules.networks.linearized.feature_maps import make_feature_map

HEADS, HEAD_DIM = 3, 8


def draw(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 5, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_softmax_has_no_parameter_and_is_a_distribution_over_the_channels():
    feature_map = make_feature_map("softmax", HEADS, HEAD_DIM)
    x = draw()
    assert not list(feature_map.parameters())
    torch.testing.assert_close(feature_map(x), x.softmax(-1))


def test_the_learned_map_begins_as_the_softmax_of_a_head_and_of_its_negative():
    x = draw(torch.float32)
    out = make_feature_map("learned", HEADS, HEAD_DIM)(x)
    torch.testing.assert_close(out, torch.cat((x.softmax(-1), (-x).softmax(-1)), -1))


def test_the_rectified_map_begins_as_the_rectifier_alone():
    x = draw(torch.float32)
    torch.testing.assert_close(make_feature_map("relu", HEADS, HEAD_DIM)(x), x.relu())


def test_none_is_no_map():
    assert make_feature_map("none", HEADS, HEAD_DIM) is None


@pytest.mark.parametrize("name", ["learned", "relu"])
def test_each_head_has_a_map_of_its_own(name: str):
    feature_map = make_feature_map(name, HEADS, HEAD_DIM)
    x = draw(torch.float32)
    before = feature_map(x)
    with torch.no_grad():
        feature_map.weight[1].copy_(torch.randn(HEAD_DIM, HEAD_DIM, generator=torch.Generator().manual_seed(1)))
    changed = (feature_map(x) - before).abs().amax((0, 1, 3))
    assert (changed > 0).tolist() == [False, True, False]
    expected = x[:, :, 1] @ feature_map.weight[1].T  # W x, not W^T x
    halves = (expected.softmax(-1), (-expected).softmax(-1)) if name == "learned" else (expected.relu(),)
    torch.testing.assert_close(feature_map(x)[:, :, 1], torch.cat(halves, -1))


@pytest.mark.parametrize("name", ["softmax", "learned", "relu"])
def test_bfloat16_is_mapped_in_float32_and_comes_back_as_bfloat16(name: str):
    feature_map = make_feature_map(name, HEADS, HEAD_DIM)
    assert all(parameter.dtype == torch.float32 for parameter in feature_map.parameters())
    x = draw(torch.bfloat16)
    out = feature_map(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, feature_map(x.float()).bfloat16())


@pytest.mark.parametrize("name", ["learned", "relu"])
def test_initial_values_are_given_again_for_parameters_made_without_memory(name: str):
    with torch.device("meta"):
        feature_map = make_feature_map(name, HEADS, HEAD_DIM)
    feature_map.to_empty(device="cpu")
    with torch.no_grad():
        for key, value in feature_map.initial_values().items():
            getattr(feature_map, key).copy_(value)
    x = draw(torch.float32)
    assert torch.equal(feature_map(x), make_feature_map(name, HEADS, HEAD_DIM)(x))
