"""Divergence from a teacher without the logits: the numbers and gradients that all logits give."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from lit_modules.networks.linear_kl_divergence import (
    linear_cross_entropy_and_kl,
    linear_kl_divergence,
    linear_top_k_kl,
    top_k_log_probabilities,
)


def example(tokens: int, vocab: int = 23, dtype=torch.float64):
    """A student of width 8 and a teacher of width 12."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    student = draw(tokens, 8).requires_grad_(), draw(vocab, 8).requires_grad_()
    return *student, draw(tokens, 12), draw(vocab, 12)


def exact(hidden, weight, teacher_hidden, teacher_weight, temperature=1.0):
    """Of each token, from all logits."""
    log_q, log_p = (
        torch.log_softmax(h @ w.T / temperature, -1) for h, w in ((hidden, weight), (teacher_hidden, teacher_weight))
    )
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves, retain_graph=True)


@pytest.mark.parametrize("vocab", [23, 64, 130])
@pytest.mark.parametrize(("tokens", "chunk_size"), [(13, 4), (13, None), (1, None), (200, 100)])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_and_gradients_equal_those_of_all_logits(tokens, chunk_size, vocab, temperature):
    hidden, weight, *teacher = example(tokens, vocab)
    loss = linear_kl_divergence(hidden, weight, *teacher, temperature=temperature, chunk_size=chunk_size)
    expected = exact(hidden, weight, *teacher, temperature).mean()
    assert_close(loss, expected)
    assert_close(gradients(loss, hidden, weight), gradients(expected, hidden, weight))


def test_only_tokens_of_the_mask_count():
    hidden, weight, *teacher = example(12)
    mask = torch.arange(12).view(3, 4) % 3 == 0
    rows = hidden.view(3, 4, -1), weight, teacher[0].view(3, 4, -1), teacher[1], mask
    expected = exact(hidden, weight, *teacher)[mask.flatten()]
    for reduction, value in (("mean", expected.mean()), ("sum", expected.sum())):
        loss = linear_kl_divergence(*rows, reduction=reduction, chunk_size=5)
        assert_close(loss, value)
        assert_close(gradients(loss, hidden, weight), gradients(value, hidden, weight))
    by_token = linear_kl_divergence(*rows, reduction="none", chunk_size=5)
    assert not by_token.requires_grad
    assert_close(by_token[mask], expected.detach())
    assert (by_token[~mask] == 0).all()


def test_a_teacher_gets_no_gradient():
    hidden, weight, *teacher = example(5)
    teacher = [x.requires_grad_() for x in teacher]
    linear_kl_divergence(hidden, weight, *teacher).backward()
    assert [x.grad for x in teacher] == [None, None]


@pytest.mark.parametrize("tokens", [5, 0])
def test_where_no_token_counts_all_is_zero(tokens):
    hidden, weight, *teacher = example(tokens)
    mask, targets = torch.zeros(tokens, dtype=torch.bool), torch.full((tokens,), -100)
    indices, log_probabilities = torch.zeros(tokens, 1).int(), torch.zeros(tokens, 1)
    for loss in (
        linear_kl_divergence(hidden, weight, *teacher, mask),
        linear_top_k_kl(hidden, weight, indices, log_probabilities, mask),
        linear_cross_entropy_and_kl(hidden, weight, targets, *teacher, mask)[0],
    ):
        assert loss == 0
        assert all((gradient == 0).all() for gradient in gradients(loss, hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_equal_models_do_not_diverge(dtype):
    hidden, weight, *_ = example(40, vocab=97, dtype=dtype)
    loss = linear_kl_divergence(hidden, weight, hidden.detach(), weight.detach(), temperature=2.0)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(loss, hidden, weight))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen):
    hidden, weight, *teacher = example(9)
    free = {"hidden": weight, "weight": hidden}[frozen]
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    loss = linear_kl_divergence(hidden, weight, *teacher, chunk_size=4)
    assert_close(gradients(loss, free), gradients(exact(hidden, weight, *teacher).mean(), free))


def test_under_autocast_products_are_bf16_and_the_softmax_float32():
    hidden, weight, *teacher = example(40, dtype=torch.float32)
    everything = exact(hidden, weight, *teacher).mean()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_kl_divergence(hidden, weight, *teacher, chunk_size=7)
        log_q, log_p = (F.log_softmax((h @ w.T).float(), -1) for h, w in ((hidden, weight), teacher))
    assert_close(loss, F.kl_div(log_q, log_p, log_target=True, reduction="batchmean"), rtol=1e-5, atol=1e-6)
    assert loss != everything
    for gradient, expected in zip(gradients(loss, hidden, weight), gradients(everything, hidden, weight), strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - expected).norm() < 0.02 * expected.norm()


def test_autocast_rounds_products_with_the_heads_and_nothing_after_them():
    hidden, weight, *teacher = example(40, dtype=torch.float32)
    targets, rounded = torch.arange(40) % 23, [x.bfloat16() for x in (hidden, weight, *teacher)]
    log_p, indices = top_k_log_probabilities(*rounded[2:], 5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        both = linear_cross_entropy_and_kl(hidden, weight, targets, *teacher)
        likeliest = top_k_log_probabilities(*(x.float() for x in teacher), 5)
        top_k = linear_top_k_kl(hidden, weight, indices, log_p)
    assert_close(both, linear_cross_entropy_and_kl(*rounded[:2], targets, *rounded[2:]), rtol=1e-6, atol=1e-6)
    assert_close(likeliest, (log_p, indices))
    assert_close(top_k, linear_top_k_kl(*rounded[:2], indices, log_p), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_cross_entropy_and_divergence_come_from_one_product(temperature):
    hidden, weight, *teacher = example(21)
    targets, mask = torch.arange(21) % 23, torch.arange(21) > 7
    targets[:4] = -100
    loss, cross_entropy, divergence = linear_cross_entropy_and_kl(
        hidden, weight, targets, *teacher, mask, cross_entropy_weight=0.3, kl_weight=2.0, temperature=temperature
    )
    own = F.cross_entropy(hidden @ weight.T, targets)
    kl = exact(hidden, weight, *teacher, temperature)[mask].mean()
    assert_close((cross_entropy, divergence), (own.detach(), kl.detach()))
    assert_close(loss, 0.3 * own + 2.0 * kl)
    assert_close(gradients(loss, hidden, weight), gradients(0.3 * own + 2.0 * kl, hidden, weight))


def coarse(hidden, weight, teacher_hidden, teacher_weight, k):
    """KL where all but the teacher's k likeliest tokens are one."""
    p, q = torch.softmax(teacher_hidden @ teacher_weight.T, -1), torch.softmax(hidden @ weight.T, -1)
    indices = p.topk(k).indices
    p, q = (torch.cat((x.gather(1, indices), 1 - x.gather(1, indices).sum(1, keepdim=True)), 1) for x in (p, q))
    return (p * (p / q).log()).sum(1)


@pytest.mark.parametrize(("k", "chunk_size"), [(1, None), (5, 4), (21, None)])
def test_a_teacher_known_by_its_likeliest_tokens_gives_the_divergence_of_those_and_the_rest(k, chunk_size):
    hidden, weight, *teacher = example(13)
    log_probabilities, indices = top_k_log_probabilities(*teacher, k, chunk_size, dtype=torch.float64)
    mask = torch.arange(13) != 4
    loss = linear_top_k_kl(hidden, weight, indices, log_probabilities, mask, chunk_size=chunk_size)
    expected = coarse(hidden, weight, *teacher, k)[mask].mean()
    assert_close(loss, expected)
    assert_close(gradients(loss, hidden, weight), gradients(expected, hidden, weight))
    assert loss < linear_kl_divergence(hidden, weight, *teacher, mask)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float16, 2e-3)])
def test_with_every_token_known_nothing_is_left_out(dtype, tolerance):
    hidden, weight, *teacher = example(13)
    log_probabilities, indices = top_k_log_probabilities(*teacher, 23, dtype=dtype)
    loss = linear_top_k_kl(hidden, weight, indices, log_probabilities)
    expected = linear_kl_divergence(hidden, weight, *teacher)
    assert_close(loss, expected, rtol=tolerance, atol=0)
    found, wanted = gradients(loss, hidden, weight), gradients(expected, hidden, weight)
    assert_close(found, wanted, rtol=10 * tolerance, atol=10 * tolerance)


def test_a_student_sure_of_the_teachers_tokens_keeps_what_is_left_exact():
    # 1 - sum q is 0 in float32 where the rest has 1e-9: taken so, the loss would be infinite.
    logits = torch.tensor([[20.0, 0.0, -1.0]])
    log_p = torch.tensor([[0.5]]).log()
    loss = linear_top_k_kl(torch.ones(1, 1), logits.T.contiguous(), torch.zeros(1, 1).int(), log_p)
    q = torch.softmax(logits.double(), -1)[0]
    assert_close(loss.double(), 0.5 * (0.5 / q[0]).log() + 0.5 * (0.5 / (q[1] + q[2])).log())


def test_the_likeliest_tokens_are_in_order_and_small():
    _, _, hidden, weight = example(12)
    log_probabilities, indices = top_k_log_probabilities(hidden.view(3, 4, -1), weight, 5, chunk_size=5)
    highest = torch.log_softmax(hidden @ weight.T, -1).topk(5)
    assert (log_probabilities.dtype, indices.dtype) == (torch.float16, torch.int32)
    assert_close(indices.view(12, 5).long(), highest.indices)
    assert_close(log_probabilities.view(12, 5).double(), highest.values, rtol=1e-3, atol=0)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_as_large_as_all_logits_is_ever_made(monkeypatch):
    monkeypatch.setattr("lit_modules.networks.linear_cross_entropy.LOGITS_AT_ONCE", 2 * 32 * 256)
    hidden, weight, *teacher = example(512, vocab=256, dtype=torch.float32)
    with LargestTensor() as largest:
        linear_kl_divergence(hidden, weight, *teacher).backward()
        linear_top_k_kl(hidden, weight, *reversed(top_k_log_probabilities(*teacher, 4, 32)), chunk_size=32).backward()
    assert largest.elements == 32 * 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "max"}, "reduction=max is not known"),
        ({"temperature": 0.0}, "temperature=0.0 is not positive"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, r"mask is torch.bool \[4\]"),
        ({"mask": torch.ones(5)}, r"mask is torch.float32 \[5\]"),
        ({"teacher_weight": torch.zeros(24, 12)}, "the teacher's head has 24 tokens and the student's 23"),
        ({"teacher_hidden": torch.zeros(4, 12)}, r"teacher_hidden is \[4, 12\]"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight")
    with pytest.raises(ValueError, match=message):
        linear_kl_divergence(**dict(zip(names, example(5), strict=True)) | change)


def test_indices_of_other_tokens_are_named():
    hidden, weight, *_ = example(5)
    with pytest.raises(ValueError, match=r"indices are \[4, 2\]"):
        linear_top_k_kl(hidden, weight, torch.zeros(4, 2).int(), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="k=24 tokens of a vocabulary of 23"):
        top_k_log_probabilities(hidden, weight, 24)
