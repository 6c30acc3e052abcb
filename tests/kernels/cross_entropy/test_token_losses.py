"""Losses of logits and their gradients: the reference against autograd, the kernel against the reference."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kernels.cross_entropy import token_losses, triton_token_losses

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# With a teacher, a mask, a temperature; of columns, the used ones and all.
CASES = [
    {"targets": True},
    {"teacher": True, "temperature": 2.0},
    {"targets": True, "teacher": True, "mask": True, "temperature": 0.5},
    {"teacher": True, "mask": True},
    {"targets": True, "sizes": (50, 64)},
    {"targets": True, "teacher": True, "sizes": (64, 64)},
]


def inputs(
    dtype, targets=False, teacher=False, mask=False, temperature=1.0, sizes=(150, 192), tokens=7
) -> tuple[torch.Tensor, dict]:
    """Return logits and the other arguments; padding columns hold values that must not be read."""
    generator = torch.Generator().manual_seed(tokens)
    logits, teacher_logits = (3 * torch.randn(tokens, sizes[1], generator=generator) for _ in range(2))
    logits[:, sizes[0] :] = 100
    goals = torch.randint(0, sizes[0], (tokens,), generator=generator)
    goals[2:4] = -100
    return logits.to(dtype), {
        "targets": goals if targets else None,
        "teacher_logits": teacher_logits.to(dtype) if teacher else None,
        "mask": torch.arange(tokens) % 3 > 0 if mask else None,
        "vocab_size": sizes[0],
        "temperature": temperature,
        "weights": torch.tensor([0.7, 0.2]),
    }


def by_autograd(logits, targets, teacher_logits, mask, vocab_size, temperature, weights) -> dict[str, torch.Tensor]:
    logits = logits.double().requires_grad_()
    losses, used = torch.zeros(2, len(logits), dtype=torch.float64), logits[:, :vocab_size]
    if targets is not None:
        losses[0] = F.cross_entropy(used, targets, reduction="none")
    if teacher_logits is not None:
        log_q = torch.log_softmax(used / temperature, -1)
        p = torch.softmax(teacher_logits.double()[:, :vocab_size] / temperature, -1)
        losses[1] = temperature**2 * (p * (p.log() - log_q)).sum(-1)
        if mask is not None:
            losses[1] *= mask
    (weights.double() @ losses).sum().backward()
    return {"losses": losses.detach(), "gradient": logits.grad}


def results(function, logits, arguments) -> dict[str, torch.Tensor]:
    moved = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    logits = logits.to(DEVICE, copy=True)
    losses = function(logits, **moved)
    return {"losses": losses.cpu(), "gradient": logits.cpu()}


def kernel(logits, **arguments):
    names = ("targets", "teacher_logits", "mask", "weights", "vocab_size", "temperature")
    return triton_token_losses.fused_token_losses(logits, *(arguments[name] for name in names), True)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(triton_token_losses, "BLOCK", 64)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_autograd(case, assert_close):
    logits, arguments = inputs(torch.float64, **case)
    found = token_losses(logits.clone(), **arguments)
    overwritten = logits.clone()
    token_losses(overwritten, **arguments)
    assert_close({"losses": found, "gradient": overwritten}, by_autograd(logits, **arguments), 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-4)])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_gives_what_the_reference_gives(case, dtype, tolerance, small_blocks, assert_close):
    logits, arguments = inputs(dtype, **case)
    found = results(kernel, logits, arguments)
    expected = by_autograd(logits, **arguments)
    assert_close({"losses": found["losses"]}, {"losses": expected["losses"]}, 1e-5)
    assert_close({"gradient": found["gradient"]}, {"gradient": expected["gradient"]}, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [token_losses, kernel])
def test_padding_and_tokens_left_out_have_no_gradient(function, small_blocks):
    logits, arguments = inputs(torch.float32, targets=True, teacher=True, mask=True)
    gradient = results(function, logits, arguments)["gradient"]
    assert (gradient[:, 150:] == 0).all()
    # Of 2 and 3, which have no target, the mask leaves 3 out, and of the others 0 and 6.
    assert (gradient != 0).any(-1).tolist() == [True, True, True, False, True, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("function", [token_losses, kernel])
def test_a_teacher_that_is_the_student_gives_exactly_0(function, small_blocks):
    logits, arguments = inputs(torch.float16, teacher=True, temperature=1.7)
    found = results(function, logits, arguments | {"teacher_logits": logits.clone()})
    assert (found["losses"] == 0).all()
    assert (found["gradient"] == 0).all()


@pytest.mark.gpu
def test_large_logits_of_either_model_do_not_overflow(small_blocks, assert_close):
    logits, arguments = inputs(torch.float32, targets=True, teacher=True)
    logits, arguments["teacher_logits"] = 1000 + 30 * logits, -1000 + 30 * arguments["teacher_logits"]
    assert_close(results(kernel, logits, arguments), by_autograd(logits, **arguments), 1e-4)


def test_without_a_gradient_logits_stay_as_they_are():
    logits, arguments = inputs(torch.float32, targets=True, teacher=True)
    before = logits.clone()
    losses = token_losses(logits, **arguments, gradient=False)
    assert torch.equal(logits, before)
    assert torch.equal(losses, token_losses(logits, **arguments))


@pytest.mark.gpu
def test_a_target_that_is_no_token_reads_nothing_and_is_seen(small_blocks):
    logits, arguments = inputs(torch.float32, targets=True)
    arguments["targets"][0] = 150
    losses = results(kernel, logits, arguments)["losses"][0]
    assert losses[0].isnan()
    assert losses[1:].isfinite().all()


@pytest.mark.gpu
def test_the_operation_is_one_of_torch(small_blocks):
    logits, arguments = inputs(torch.float32, targets=True, teacher=True, mask=True)
    tensors = [
        x.to(DEVICE) for x in (logits, *(arguments[n] for n in ("targets", "teacher_logits", "mask", "weights")))
    ]
    torch.library.opcheck(triton_token_losses.fused_token_losses, (*tensors, 150, 2.0, True))


def test_the_kernel_compiles_without_spilling_and_loads_16_bytes_at_a_time(tmp_path):
    program = Path(__file__).with_name("compile_losses_offline.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    records = json.loads(done.stdout)
    assert len(records) == 3
    for record in records:
        assert record["spilled"] == 0, record
        assert record["load_width"] == record["store_width"] == 4, record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 193}, "for a vocabulary of 193"),
        ({"targets": torch.zeros(3).long()}, r"targets is \[3\] for logits \[7, 192\]"),
        ({"mask": torch.ones(3).bool()}, r"mask is \[3\] for logits \[7, 192\]"),
        ({"teacher_logits": torch.ones(7, 150)}, r"teacher_logits are \[7, 150\]"),
        ({"temperature": -1.0}, "temperature=-1.0 is not positive"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    logits, arguments = inputs(torch.float32, targets=True)
    with pytest.raises(ValueError, match=message):
        token_losses(logits, **arguments | change)
