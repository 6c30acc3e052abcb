"""Inputs for forgetting attention, and one way to take its output with all gradients."""

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture(scope="session")
def make_inputs():
    """make_inputs(...) -> q, k, v, log_forget of the given sizes, as a dict (log_forget left out with gates=None).

    gates: the mean logit of the forget gates; closed: the share of gates that are -inf; open_: the share exactly 0.
    """

    def make(
        batch=1,
        queries=8,
        keys=None,
        heads=(2, 2, 2),
        head_dims=(4, 4),
        *,
        dtype=torch.float64,
        gates=1.0,
        closed=0.0,
        open_=0.0,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        keys = queries if keys is None else keys
        inputs = {
            "q": normal(batch, queries, heads[0], head_dims[0]).to(dtype),
            "k": normal(batch, keys, heads[1], head_dims[0]).to(dtype),
            "v": normal(batch, keys, heads[2], head_dims[1]).to(dtype),
        }
        if gates is not None:
            log_forget = F.logsigmoid(normal(batch, keys, heads[0]) + gates)
            chance = torch.rand(log_forget.shape, generator=generator)
            log_forget = log_forget.masked_fill(chance < closed, -torch.inf).masked_fill(chance > 1 - open_, 0.0)
            inputs["log_forget"] = log_forget.to(torch.promote_types(dtype, torch.float32))
        return inputs

    return make


@pytest.fixture(scope="session")
def out_and_gradients():
    """out_and_gradients(function, inputs, **options) -> dict of out and each input's gradient, for one fixed loss."""

    def run(function, inputs, **options):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
        out = function(**leaves, **options)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
        gradients = torch.autograd.grad(out, list(leaves.values()), weight)
        return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}

    return run
