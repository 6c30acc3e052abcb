"""The short convolution: torch's own, cut at the starts of documents, continued from a cache."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from lit_modules.networks.caches import RecurrentCacheLayer
from lit_modules.networks.positions import locate
from lit_modules.networks.short_convolution import ShortConvolution

EXACT = {"rtol": 0, "atol": 1e-12}


def convolution(width: int, bias: bool = True, channels: int = 3) -> ShortConvolution:
    torch.manual_seed(0)
    module = ShortConvolution(channels, width, bias).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def by_torch(module: ShortConvolution, x: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x.transpose(1, 2), (module.weight.shape[1] - 1, 0))
    return F.conv1d(padded, module.weight[:, None], module.bias, groups=x.shape[2]).transpose(1, 2)


def inputs(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def index(batch: int, length: int, **arguments) -> torch.Tensor:
    return locate(batch, length, 0, torch.device("cpu"), **arguments).index


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4, 9])
@pytest.mark.parametrize("length", [1, 3, 20])
def test_outputs_and_gradients_are_those_of_torchs_grouped_convolution(width, length, bias):
    module, x = convolution(width, bias), inputs(2, length).requires_grad_()
    variables = [x, *module.parameters()]
    weights = torch.randn(2, length, 3, dtype=torch.float64)
    out, expected = module(x, index(2, length)), by_torch(module, x)
    assert_close(out, expected, **EXACT)
    ours, theirs = (torch.autograd.grad((y * weights).sum(), variables) for y in (out, expected))
    assert_close(ours, theirs, **EXACT)


def test_packed_documents_and_their_gradients_do_not_meet():
    lengths = [1, 2, 7, 3, 5]
    module, x = convolution(4), inputs(1, sum(lengths)).requires_grad_()
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    variables = [x, *module.parameters()]
    packed = module(x, index(1, sum(lengths), cu_seqlens=bounds))
    alone = torch.cat([by_torch(module, document) for document in x.split(lengths, dim=1)], dim=1)
    assert_close(packed, alone, **EXACT)
    ours, theirs = (torch.autograd.grad(y.square().sum(), variables) for y in (packed, alone))
    assert_close(ours, theirs, **EXACT)


def test_padding_on_the_left_is_not_seen_even_where_it_is_not_a_number():
    module, x = convolution(4), inputs(2, 8)
    x[0, :5] = torch.nan
    mask = torch.ones(2, 8)
    mask[0, :5] = 0
    out = module(x, index(2, 8, attention_mask=mask))
    assert_close(out[:1, 5:], by_torch(module, x[:1, 5:]), **EXACT)
    assert_close(out[1:], by_torch(module, x[1:]), **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[1] * 12, [2, 7, 1, 2], [12]])
def test_pieces_through_a_cache_are_the_whole(sizes):
    module, x, cache = convolution(4), inputs(2, 12), RecurrentCacheLayer()
    pieces = zip(x.split(sizes, dim=1), index(2, 12).split(sizes, dim=1), strict=True)
    out = torch.cat([module(piece, places, cache, "x") for piece, places in pieces], dim=1)
    assert_close(out, by_torch(module, x), **EXACT)


def test_bf16_inputs_are_summed_in_float32():
    module, x = convolution(4).float(), inputs(2, 50).bfloat16()
    out = module(x, index(2, 50))
    assert out.dtype == torch.bfloat16
    assert out.equal(by_torch(module, x.float()).bfloat16())


def test_only_the_inputs_are_kept_for_the_backward_pass():
    module, kept = convolution(4, channels=16).float(), []
    x = torch.randn(1, 1000, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        module(x, index(1, 1000))
    assert sum(y.numel() * y.element_size() for y in kept) < 1.2 * 1000 * 16 * 4 + 1000 * 8


def test_it_compiles_without_a_graph_break_forward_and_backward():
    module, x = convolution(4), inputs(2, 9).requires_grad_()
    expected = torch.autograd.grad(module(x, index(2, 9)).square().sum(), [x, *module.parameters()])
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(torch.autograd.grad(compiled(x, index(2, 9)).square().sum(), [x, *module.parameters()]), expected)
