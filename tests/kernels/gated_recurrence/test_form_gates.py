"""The gates of the forms: precision and gradients at the ends of their range, and dtypes."""

import pytest
import torch
import torch.nn.functional as F

from kernels import gated_recurrence, gated_slot_attention
from kernels.gated_recurrence import forms, gated_recurrence_reference

pytestmark = pytest.mark.core


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V, P = (random(2, 5, 3, 4, seed=seed) for seed in range(4))

# Every form as a function of q, k, v and the logits of its gates, [B, T, H, Dk]; more of them, the more it remembers.
FORMS = {
    "gla": forms.gla,
    "hgrn2": lambda q, k, v, p: forms.hgrn2(q, p, v, lower_bound=torch.zeros_like(p[0, 0]).requires_grad_()),
    "rwkv6": lambda q, k, v, p: forms.rwkv6(q, k, v, -p),
    "mamba2": lambda q, k, v, p: forms.mamba2(v, F.softplus(-p[..., 0]), torch.zeros_like(p[0, 0, :, 0]), k, q),
    "mamba2_decay": lambda q, k, v, p: forms.mamba2_decay(q, k, v, -p[..., 0]),
    "mlstm": lambda q, k, v, p: forms.mlstm(q, k, v, p[..., 1], p[..., 0])[0],
    "gated_retention": lambda q, k, v, p: forms.gated_retention(q, k, v, p[..., 0]),
    "slots": forms.slots,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bound", [0.0, 0.3, 0.99])
def test_hgrn2_gates_have_all_digits_of_float32_however_open_or_closed(bound, dtype):
    logits = torch.linspace(-80, 80, 1601).view(1, -1, 1, 1)
    bound = torch.tensor(bound, dtype=dtype)
    actual = forms.hgrn2(logits, logits, logits, lower_bound=bound)
    wide, bound = logits.double(), bound.double()
    written = (1 - bound) * torch.sigmoid(-wide)
    log_decay = torch.where(written < 0.5, torch.log1p(-written), (bound + (1 - bound) * torch.sigmoid(wide)).log())
    torch.testing.assert_close(actual.k.double(), written, rtol=1e-6, atol=0)
    torch.testing.assert_close(actual.log_decay.double(), log_decay, rtol=1e-6, atol=0)


@pytest.mark.parametrize("logit", [-20.0, -12.0, 12.0, 20.0])
def test_hgrn2_gradients_have_all_digits_of_float32_however_open_or_closed(logit):
    """Against `d log f / dp = (1 - b) s (1 - s) / f` and `dk / dp = -(1 - b) s (1 - s)`, with s = sigmoid(p)."""
    p = torch.full((1, 1, 1, 1), logit, requires_grad=True)
    form = forms.hgrn2(p.detach(), p, p.detach(), lower_bound=0.25)
    gradients = [torch.autograd.grad(x.sum(), p, retain_graph=True)[0].item() for x in (form.k, form.log_decay)]
    s, rest = (torch.sigmoid(torch.tensor(sign * logit, dtype=torch.float64)).item() for sign in (1, -1))
    slope = 0.75 * s * rest
    assert gradients == pytest.approx([-slope, slope / (0.25 + 0.75 * s)], rel=1e-6)


def test_an_infinite_hgrn2_logit_changes_nothing():
    form = forms.hgrn2(Q, torch.full_like(P, torch.inf), V, lower_bound=0.3)
    assert not form.k.any()
    assert not form.log_decay.any()


def test_slots_are_written_with_what_little_an_open_gate_forgets():
    logits = torch.linspace(-20, 30, 101).view(1, -1, 1, 1)
    expected = -torch.expm1(F.logsigmoid(logits.double()) / 8)
    torch.testing.assert_close(forms.slots(logits, logits, logits, logits).slots.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
@pytest.mark.parametrize("name", FORMS)
def test_gates_beyond_float32_have_finite_gradients(name, size):
    ones = torch.ones(1, 5, 1, 4)
    logits = (size * torch.tensor([-1.0, 1.0, -1.0, -1.0, 1.0]).view(1, 5, 1, 1) * ones).requires_grad_()
    form = FORMS[name](ones, ones, ones, logits)
    out, _ = gated_slot_attention(*form) if name == "slots" else gated_recurrence(*form)
    (gradient,) = torch.autograd.grad(out.sum(), logits)
    assert out.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("largest", [17.0, 27.0, 110.0])
def test_keys_that_are_their_own_decay_have_gradients_to_rounding_however_large(
    assert_close, out_and_gradients, largest
):
    """RWKV6 in a linearized model, where `w = exp(-exp(k))`: what a closed gate gets is multiplied by exp(k)."""

    def rwkv6(function):
        return lambda q, k, v: function(*forms.rwkv6(q, k, v, k))

    inputs = {name: random(1, 130, 2, 16, seed=seed).float() for seed, name in enumerate("qkv")}
    inputs["k"] = inputs["k"].tanh() * largest
    expected = out_and_gradients(rwkv6(gated_recurrence_reference), {n: x.double() for n, x in inputs.items()})
    assert_close(out_and_gradients(rwkv6(gated_recurrence), inputs), expected, 1e-6)


def test_a_lower_bound_of_0_can_be_learned():
    bound = torch.zeros(4, requires_grad=True)
    ones = torch.ones(1, 4, 1, 4)
    out, _ = gated_recurrence(*forms.hgrn2(ones, torch.linspace(-20, 20, 4) * ones, ones, lower_bound=bound))
    (gradient,) = torch.autograd.grad(out.sum(), bound)
    assert gradient.isfinite().all()
    assert (gradient != 0).all()


@pytest.mark.parametrize("name", FORMS)
def test_gates_are_float32_and_the_rest_keeps_its_dtype(name):
    form = FORMS[name](*(x.bfloat16() for x in (Q, K, V, P)))
    for field, x in form._asdict().items():
        assert x.dtype == (torch.float32 if field == "log_decay" else torch.bfloat16), field


LINEARIZED = {
    "gla": (forms.gla, lambda p: p.sigmoid() ** (1 / 16)),
    "hgrn2": (lambda q, k, v, p: forms.hgrn2(q, p, v), torch.sigmoid),
    "rwkv6": (forms.rwkv6, lambda p: (-p.exp()).exp()),
    "slots": (lambda q, k, v, p: forms.slots(q, k, v, p, temperature=16.0), lambda p: p.sigmoid() ** (1 / 16)),
    "mamba2": (forms.mamba2_decay, lambda p: (-F.softplus(p)).exp()),
    "mlstm": (lambda q, k, v, p: forms.gated_retention(q, k, v, p, temperature=1.0), torch.sigmoid),
}


@pytest.mark.parametrize("name", LINEARIZED)
def test_a_form_has_the_gate_that_linearized_models_take_from_the_pooled_key(name):
    """arXiv 2503.01496, table 1."""
    form, gate = LINEARIZED[name]
    torch.testing.assert_close(form(Q, K, V, P).log_decay.exp(), gate(P), rtol=1e-12, atol=0)
