"""Inputs for forgetting attention, a function for its output with all gradients, and shared fixtures."""

from contextlib import contextmanager

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
    """out_and_gradients(function, inputs, **options) -> dict of out and each input's gradient, for one fixed loss.

    With return_lse it is a loss of both, and the dict has also lse, 0 for queries that see nothing, and `blind`: which.
    """

    def run(function, inputs, **options):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
        results = function(**leaves, **options)
        results = results if options.get("return_lse") else (results,)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
        gradients = torch.autograd.grad(results, list(leaves.values()), weights)
        found = {"out": results[0].detach(), **dict(zip(leaves, gradients, strict=True))}
        for lse in results[1:]:
            blind = lse.detach() == -torch.inf
            found |= {"lse": lse.detach().masked_fill(blind, 0.0), "blind": blind}
        return found

    return run


@pytest.fixture(scope="session")
def triton_forgetting_attention(device):
    """Return `forgetting_attention` by the Triton kernels on any device; it takes and returns CPU tensors."""
    from kernels.forgetting_attention.operator import triton_attention

    def run(q, k, v, log_forget=None, *, scale=None, window=None, cumulative=False, prune=None, **options):
        bound, return_lse = options.pop("logit_bound", None), options.pop("return_lse", False)
        bounds = bound if isinstance(bound, torch.Tensor) else None
        tensors = [options.pop(name, None) for name in ("cu_seqlens", "kv_start", "kv_end")]
        assert not options, options
        tensors = (None if x is None else x.to(device) for x in (q, k, v, log_forget, *tensors, bounds))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        number = None if bound is None or bounds is not None else float(bound)
        out, *_, lse = triton_attention(*tensors, scale, window, cumulative, prune, number, return_lse)
        return (out.to(q.device), lse.to(q.device)) if return_lse else out.to(q.device)

    return run


@pytest.fixture(scope="session")
def compiled_kernels():
    """with compiled_kernels() as names: ... -> the names of the kernels that Triton compiled meanwhile."""
    from triton import knobs

    @contextmanager
    def count():
        names = []
        # Called for each new combination of types and constants, even if its binary lies in the cache on disk.
        knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: names.append(kwargs["fn"].name)
        try:
            yield names
        finally:
            knobs.runtime.jit_post_compile_hook = None

    return count
