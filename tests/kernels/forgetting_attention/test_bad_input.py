"""Invalid input raises one line that says what was given and what is needed."""

import pytest
import torch

from kernels import forgetting_attention

pytestmark = pytest.mark.core


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def changed(name, change):
    return lambda inputs: inputs | {name: change(inputs[name])}


def with_options(**options):
    return lambda inputs: inputs | options


REFUSED = {
    "q of three axes": (changed("q", lambda q: q[0]), r"q has shape \[6, 4, 8\].*\[batch, time, heads, head_dim\]"),
    "a v without channels": (changed("v", lambda v: v[..., :0]), "v has shape.*at least one head and one channel"),
    "integers": (changed("q", lambda q: q.int()), "q is torch.int32.*float16, bfloat16, float32 or float64"),
    "mixed dtypes": (changed("v", lambda v: v.bfloat16()), "v is torch.bfloat16.*q is torch.float32"),
    "another device": (
        changed("k", lambda k: k.to("meta")),
        "k is torch.float32 on meta but q is torch.float32 on cpu",
    ),
    "unequal batches": (changed("q", lambda q: torch.cat([q, q])), "batch, and time of k and v, must agree"),
    "k and v of two lengths": (changed("v", lambda v: v[:, :5]), "batch, and time of k and v, must agree"),
    "head_dim of k": (changed("k", lambda k: k[..., :5]), "q has head_dim 8 but k has 5"),
    "heads that do not divide": (changed("k", lambda k: k[:, :, :1].repeat(1, 1, 3, 1)), "k has 3 heads.*4 heads of q"),
    "more queries than keys": (changed("q", lambda q: torch.cat([q, q], 1)), "12 queries but 6 keys"),
    "gates of key heads": (changed("log_forget", lambda g: g[..., :2]), r"shape \[1, 6, 2\].*\[1, 6, 4\]"),
    "gates in bfloat16": (changed("log_forget", lambda g: g.bfloat16()), "bfloat16.*apply logsigmoid to float32"),
    "gates elsewhere": (changed("log_forget", lambda g: g.to("meta")), "log_forget is on meta but q is on cpu"),
    "gates over 1": (changed("log_forget", lambda g: -g), "log_forget holds .*0 or less"),
    "an infinite sum": (
        lambda inputs: inputs | {"log_forget": inputs["log_forget"] - torch.inf, "cumulative": True},
        "-inf with cumulative=True",
    ),
    "cumulative of nothing": (with_options(log_forget=None, cumulative=True), "log_forget is None"),
    "an empty window": (with_options(window=0), "window=0.*1 or more"),
    "int64 bounds": (with_options(cu_seqlens=torch.tensor([0, 6])), "cu_seqlens is torch.int64.*must be int32"),
    "one bound": (with_options(cu_seqlens=int32(0)), "cu_seqlens has 1 entries.*N \\+ 1"),
    "bounds that begin late": (with_options(cu_seqlens=int32(1, 6)), "runs from 1 to 6; it must run from 0 to 6"),
    "bounds that end early": (with_options(cu_seqlens=int32(0, 5)), "runs from 0 to 5; it must run from 0 to 6"),
    "bounds that decrease": (with_options(cu_seqlens=int32(0, 4, 2, 6)), "decreases at entry 2"),
    "bounds elsewhere": (with_options(cu_seqlens=int32(0, 6).to("meta")), "cu_seqlens is on meta but q is on cpu"),
    "documents and padding": (with_options(cu_seqlens=int32(0, 6), kv_start=int32(0)), "with kv_start or kv_end"),
    "documents of fewer queries": (
        lambda inputs: inputs | {"q": inputs["q"][:, 1:], "cu_seqlens": int32(0, 6)},
        "batch 1, 5 queries and 6 keys",
    ),
    "kv_start of another batch": (with_options(kv_start=int32(0, 0)), "kv_start has 2 entries.*1 batch rows"),
    "kv_start as a matrix": (with_options(kv_start=int32(0)[None]), r"kv_start is torch.int32 of shape \[1, 1\]"),
    "kv_start beyond": (with_options(kv_start=int32(7)), r"kv_start\[0\] is 7"),
    "negative kv_start": (with_options(kv_start=int32(-1)), r"kv_start\[0\] is -1"),
    "kv_end before the queries": (with_options(kv_end=int32(5)), r"kv_end\[0\] is 5.*6 queries and 6 keys"),
    "kv_end beyond": (with_options(kv_end=int32(7)), r"kv_end\[0\] is 7"),
    "positive prune": (with_options(prune=0.1), "prune=0.1.*0 or less"),
    "prune that is no number": (with_options(prune=float("nan")), "prune=nan"),
    "prune without gates": (with_options(log_forget=None, prune=-1.0), "prune was given without log_forget"),
    "a bound without prune": (with_options(logit_bound=1.0), "logit_bound was given without prune"),
    "a negative bound": (with_options(prune=-1.0, logit_bound=-2.0), "logit_bound=-2.0"),
    "a bound of other heads": (with_options(prune=-1.0, logit_bound=torch.ones(3)), r"logit_bound has shape \[3\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_line(make_inputs, case):
    change, message = REFUSED[case]
    inputs = make_inputs(queries=6, heads=(4, 2, 1), head_dims=(8, 8), dtype=torch.float32)
    with pytest.raises(ValueError, match=message) as refusal:
        forgetting_attention(**change(inputs))
    assert "\n" not in str(refusal.value)


def test_documents_of_a_batch_are_refused(make_inputs):
    with pytest.raises(ValueError, match="batch 2"):
        forgetting_attention(**make_inputs(batch=2, queries=6), cu_seqlens=int32(0, 6))


def test_values_are_checked_in_a_compiled_call_too(make_inputs):
    torch.compiler.reset()
    inputs = make_inputs(queries=6)
    inputs["log_forget"] *= -1
    with pytest.raises(ValueError, match="0 or less"):
        torch.compile(forgetting_attention, fullgraph=True, backend="eager")(**inputs)
