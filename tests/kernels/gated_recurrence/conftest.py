"""Inputs for the gated recurrence, and a function for its results with all gradients."""

import pytest
import torch
import torch.nn.functional as F


@pytest.fixture(scope="session")
def make_inputs():
    """make_inputs(...) -> q, k, v, log_decay and initial_state of the given sizes, as a dict.

    heads: of q, and of k and v; head_dims: of k and of v. form: "key", "value" or "head", what each gate is of.
    strength: of the gates, logsigmoid(N(0, 1)) times it; closed: the share of gates that are -inf; open_: the share
    exactly 0. states: how many; by default one a batch row, and with 0 there is no initial_state. bonus: whether.
    """

    def make(
        batch=1,
        length=8,
        heads=(2, 2),
        head_dims=(4, 3),
        *,
        form="key",
        strength=1.0,
        closed=0.0,
        open_=0.0,
        states=None,
        bonus=False,
        dtype=torch.float64,
        seed=0,
    ):
        generator = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        (query_heads, num_heads), (key_dim, value_dim) = heads, head_dims
        wide = torch.promote_types(dtype, torch.float32)
        channels = {"key": (key_dim,), "value": (value_dim,), "head": ()}[form]
        log_decay = F.logsigmoid(normal(batch, length, num_heads, *channels)) * strength
        chance = torch.rand(log_decay.shape, generator=generator)
        log_decay = log_decay.masked_fill(chance < closed, -torch.inf).masked_fill(chance > 1 - open_, 0.0)
        states = batch if states is None else states
        inputs = {
            "q": normal(batch, length, query_heads, key_dim).to(dtype),
            "k": normal(batch, length, num_heads, key_dim).to(dtype),
            "v": normal(batch, length, num_heads, value_dim).to(dtype),
            "log_decay": log_decay.to(wide),
        }
        if states:
            inputs["initial_state"] = normal(states, num_heads, key_dim, value_dim).to(wide)
        if bonus:
            inputs["bonus"] = normal(query_heads, key_dim).to(wide)
        return inputs

    return make


@pytest.fixture(scope="session")
def out_and_gradients():
    """out_and_gradients(function, inputs, **options) -> dict of out, final states and each input's gradient.

    The gradients are of one fixed loss that weighs all results. The function gives out and one state, or a pair.
    """

    def run(function, inputs, **options):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
        out, states = function(**leaves, **options)
        states = (states,) if isinstance(states, torch.Tensor) else states
        results = {"out": out, **{f"state {number}": state for number, state in enumerate(states)}}
        generator = torch.Generator().manual_seed(1)
        # Of so few digits that they are the same numbers, and it is the same loss, in every dtype.
        weights = [torch.randn(x.shape, generator=generator).bfloat16().to(x.dtype) for x in results.values()]
        gradients = torch.autograd.grad(list(results.values()), list(leaves.values()), weights)
        return {**{name: x.detach() for name, x in results.items()}, **dict(zip(leaves, gradients, strict=True))}

    return run


@pytest.fixture(scope="session")
def defined(out_and_gradients):
    """defined(reference, inputs, **options): `out_and_gradients` in float64, with gradients of 0 for closed gates."""

    def run(reference, inputs, **options):
        results = out_and_gradients(reference, {name: x.double() for name, x in inputs.items()}, **options)
        assert (results["log_decay"][inputs["log_decay"] == -torch.inf] == 0).all()
        return results

    return run
