"""The head's loss without its logits: the same numbers and gradients as cross-entropy of all logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from lit_modules.networks.linear_cross_entropy import LOGITS_AT_ONCE, linear_cross_entropy


def example(tokens: int, width: int = 8, vocab: int = 23, ignored: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[:ignored] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 100, None])
@pytest.mark.parametrize(("tokens", "ignored"), [(13, 0), (13, 5), (1, 0), (8, 7)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_equal_those_of_all_logits(tokens, ignored, chunk_size, reduction):
    hidden, weight, targets = example(tokens, ignored=ignored)
    expected = F.cross_entropy(hidden @ weight.T, targets, reduction=reduction)
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk_size=chunk_size)
    assert_close(loss, expected)
    assert_close(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(expected, (hidden, weight)))


@pytest.mark.parametrize("tokens", [5, 0])
def test_without_a_target_loss_and_gradients_are_zero(tokens):
    hidden, weight, targets = example(tokens, ignored=tokens)
    loss = linear_cross_entropy(hidden, weight, targets)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(loss, (hidden, weight)))


def test_gradients_are_those_of_finite_differences():
    hidden, weight, targets = example(6, width=4, vocab=9, ignored=2)
    assert torch.autograd.gradcheck(
        lambda h, w: 3 * linear_cross_entropy(h, w, targets, chunk_size=4), (hidden, weight)
    )


def test_two_backward_passes_add_up():
    hidden, weight, targets = example(6)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    (2 * loss).backward()
    assert_close(weight.grad, 3 * once)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen):
    hidden, weight, targets = example(9)
    free = {"hidden": weight, "weight": hidden}[frozen]
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    expected = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets), free)
    assert_close(torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, chunk_size=4), free), expected)


def test_losses_by_token_are_float32_and_zero_where_left_out():
    hidden, weight, targets = example(12, ignored=3, dtype=torch.bfloat16)
    losses = linear_cross_entropy(hidden.view(3, 4, -1), weight, targets.view(3, 4), reduction="none", chunk_size=5)
    expected = F.cross_entropy((hidden @ weight.T).float(), targets, reduction="none").view(3, 4)
    assert losses.dtype == torch.float32
    assert not losses.requires_grad
    assert_close(losses, expected)


def test_under_autocast_products_are_bf16_and_the_softmax_float32():
    hidden, weight, targets = example(40, width=16, dtype=torch.float32)
    exact = F.cross_entropy(hidden @ weight.T, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, chunk_size=7)
        reference = F.cross_entropy((hidden @ weight.T).float(), targets)
    assert loss.dtype == torch.float32
    assert_close(loss, reference, rtol=1e-6, atol=1e-6)
    assert loss != exact
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float32]
    for gradient, expected in zip(gradients, torch.autograd.grad(exact, (hidden, weight)), strict=True):
        assert (gradient - expected).norm() < 0.02 * expected.norm()


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_as_large_as_all_logits_is_ever_made(reduction):
    hidden, weight, targets = example(512, width=4, vocab=256, dtype=torch.float32)
    with LargestTensor() as largest:
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk_size=32)
        if reduction == "mean":
            loss.backward()
    assert largest.elements == 32 * 256
    with LargestTensor() as largest:
        F.cross_entropy(hidden @ weight.T, targets).backward()
    assert largest.elements == 512 * 256


def test_a_long_sequence_is_cut_without_being_asked(monkeypatch):
    monkeypatch.setattr("lit_modules.networks.linear_cross_entropy.LOGITS_AT_ONCE", 40 * 256)
    hidden, weight, targets = example(512, width=4, vocab=256, dtype=torch.float32)
    with LargestTensor() as largest:
        linear_cross_entropy(hidden, weight, targets).backward()
    assert largest.elements == 40 * 256
    assert LOGITS_AT_ONCE * 4 == 256 * 2**20


@pytest.mark.parametrize(("vocab", "width_of_products"), [(23, 64), (64, 64), (130, 192)])
def test_products_are_taken_with_a_multiple_of_64_tokens_and_gradients_have_the_true_shape(vocab, width_of_products):
    hidden, weight, targets = example(90, vocab=vocab, dtype=torch.bfloat16)
    with LargestTensor() as largest:
        loss = linear_cross_entropy(hidden, weight, targets, chunk_size=80)
    assert largest.elements == 64 * width_of_products  # and of tokens, too
    gradients = torch.autograd.grad(loss, (hidden, weight))
    expected = F.cross_entropy((hidden.double() @ weight.double().T), targets)
    for gradient, like, wanted in zip(
        gradients, (hidden, weight), torch.autograd.grad(expected, (hidden, weight)), strict=True
    ):
        assert (gradient.shape, gradient.dtype) == (like.shape, like.dtype)
        assert gradient.is_contiguous()
        assert (gradient - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "max"}, "reduction=max is not known"),
        ({"targets": torch.zeros(4).long()}, r"targets are \[4\]"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    hidden, weight, targets = example(5)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets} | change)
