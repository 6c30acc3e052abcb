"""One token at a time against a growing list of all keys; the kernel compiled on a GPU, elsewhere interpreted."""

import os

import pytest
import torch
import torch.nn.functional as F

# Read when the kernels are defined, so before they are imported.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from kernels.gated_recurrence import windowed_step
from kernels.gated_recurrence.decode import triton_windowed_step as triton_module
from kernels.gated_recurrence.decode.triton_windowed_step import triton_windowed_step
from kernels.gated_recurrence.decode.windowed_step import plain_windowed_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 8e-3}
STATE_SCALE, WINDOW_SCALE = 0.7, 0.4
CASES = {
    "one token in sight": {"window": 1},
    "odd window": {"window": 5, "length": 13},
    "sinks": {"window": 5, "sinks": 2, "length": 14},
    "more sinks than window": {"window": 2, "sinks": 3, "length": 9},
    "left padding": {"window": 4, "kv_start": [0, 3], "length": 11},
    "sinks behind left padding": {"window": 3, "sinks": 2, "kv_start": [5, 0], "length": 12},
    "grouped heads": {"window": 4, "heads": (4, 1)},
    "two groups, wider keys": {"window": 4, "heads": (4, 2), "head_dims": (32, 16), "sinks": 1},
    "narrower keys, odd sizes": {"window": 3, "head_dims": (5, 19)},
    "gate per head": {"window": 4, "per_head": True, "heads": (4, 2)},
}


def make_inputs(
    window=4, sinks=0, length=7, heads=(2, 2), head_dims=(8, 16), kv_start=None, per_head=False, dtype=torch.float64,
    seed=0,
):  # fmt: skip
    """Return the arguments of all steps, [B, T, ...], and the sizes of the ring."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    (query_heads, heads), (key_dim, dim), batch = heads, head_dims, 2
    return {
        "q": normal(batch, length, query_heads, key_dim).to(dtype),
        "k": normal(batch, length, heads, key_dim).to(dtype),
        "v": normal(batch, length, heads, dim).to(dtype),
        "log_decay": F.logsigmoid(normal(batch, length, heads, *(() if per_head else (key_dim,)))).to(wide),
        "q_window": normal(batch, length, query_heads, dim).to(dtype),
        "k_window": normal(batch, length, heads, dim).to(dtype),
        "state_weight": torch.linspace(0.2, 0.8, query_heads, dtype=wide),
        "window_weight": torch.linspace(1.0, 0.5, query_heads, dtype=wide),
        "kv_start": None if kv_start is None else torch.tensor(kv_start, dtype=torch.int32),
        "window": window,
        "sinks": sinks,
    }


def by_definition(inputs):
    """Return out [B, T, Hq, D] and the state [B, Hk, Dk, D] in float64, row by row, head by head, token by token."""
    x = {name: t.double() if torch.is_tensor(t) else t for name, t in inputs.items()}
    batch, length, query_heads, _ = x["q"].shape
    heads = x["k"].shape[2]
    out = torch.zeros(batch, length, query_heads, x["v"].shape[3], dtype=torch.float64)
    states = torch.zeros(batch, heads, x["k"].shape[3], x["v"].shape[3], dtype=torch.float64)
    for b in range(batch):
        start = 0 if inputs["kv_start"] is None else int(inputs["kv_start"][b])
        for h in range(query_heads):
            key_head = h // (query_heads // heads)
            state = torch.zeros_like(states[0, 0])
            for t in range(start, length):
                decay = x["log_decay"][b, t, key_head].exp()
                state = decay.reshape(-1, 1) * state + torch.outer(x["k"][b, t, key_head], x["v"][b, t, key_head])
                seen = [j for j in range(start, t + 1) if j > t - inputs["window"] or j < start + inputs["sinks"]]
                scores = WINDOW_SCALE * x["k_window"][b, seen, key_head] @ x["q_window"][b, t, h]
                from_window = scores.softmax(0) @ x["v"][b, seen, key_head]
                from_state = STATE_SCALE * x["q"][b, t, h] @ state
                out[b, t, h] = x["state_weight"][h] * from_state + x["window_weight"][h] * from_window
            states[b, key_head] = state
    return out, states


def by_steps(inputs, step):
    """Return out, the state and the ring after stepping through all tokens, from a ring filled with NaN."""
    batch, length, heads, key_dim = inputs["k"].shape
    dim, wide = inputs["v"].shape[3], inputs["log_decay"].dtype
    x = {name: t.to(DEVICE) if torch.is_tensor(t) else t for name, t in inputs.items()}
    state = torch.zeros(batch, heads, key_dim, dim, dtype=wide, device=DEVICE)
    slots = inputs["sinks"] + inputs["window"]
    ring = [torch.full((batch, slots, heads, dim), torch.nan, dtype=x["q"].dtype, device=DEVICE) for _ in range(2)]
    tokens, outs = torch.zeros(1, dtype=torch.int32, device=DEVICE), []
    for t in range(length):
        q, k, v, log_decay, q_window, k_window = (
            x[name][:, t : t + 1] for name in ("q", "k", "v", "log_decay", "q_window", "k_window")
        )
        weights = (x["kv_start"], x["state_weight"], x["window_weight"])
        outs.append(
            step(
                q,
                k,
                v,
                log_decay,
                state,
                q_window,
                k_window,
                *ring,
                tokens,
                *weights,
                x["sinks"],
                STATE_SCALE,
                WINDOW_SCALE,
            )
        )
        assert tokens.item() == t
        tokens += 1
    return torch.cat(outs, 1).cpu(), state.cpu(), [x.cpu() for x in ring]


def after_padding(out, kv_start):
    """Return out without the padding before each row's first token."""
    time = torch.arange(out.shape[1])
    return out if kv_start is None else out[time >= kv_start[:, None]]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_the_plain_form_equals_the_definition(case, assert_close):
    inputs = make_inputs(**CASES[case])
    out, state, _ = by_steps(inputs, plain_windowed_step)
    right, right_state = by_definition(inputs)
    kept = inputs["kv_start"]
    found = {"out": after_padding(out, kept), "state": state}
    assert_close(found, {"out": after_padding(right, kept), "state": right_state}, 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        *((case, torch.float16) for case in ("sinks", "left padding")),
        *(
            # The interpreter's products of bfloat16 are wrong.
            pytest.param(case, torch.bfloat16, marks=pytest.mark.gpu(needs="CUDA"))
            for case in ("sinks", "left padding")
        ),
    ],
    ids=str,
)
def test_the_kernel_equals_the_definition(case, dtype, assert_close):
    inputs = make_inputs(**CASES[case], dtype=dtype)
    out, state, ring = by_steps(inputs, triton_windowed_step)
    right, right_state = by_definition(inputs)
    kept = inputs["kv_start"]
    assert_close({"out": after_padding(out, kept)}, {"out": after_padding(right, kept)}, TOLERANCE[dtype])
    assert_close({"state": state}, {"state": right_state}, 3e-6)
    _, _, plain_ring = by_steps(inputs, plain_windowed_step)
    for found, expected in zip(ring, plain_ring, strict=True):
        assert torch.equal(found.nan_to_num(-7.0), expected.nan_to_num(-7.0))


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "sinks"), [(17, 3), (16, 0)], ids=["tiles of slots", "one tile"])
def test_a_ring_of_many_slots_equals_the_definition(window, sinks, assert_close, monkeypatch):
    monkeypatch.setattr(triton_module, "RING_BYTES", 1024)  # 16 slots of float32
    inputs = make_inputs(window, sinks, length=25, heads=(2, 1), head_dims=(4, 16), dtype=torch.float32)
    out, state, _ = by_steps(inputs, triton_windowed_step)
    right, right_state = by_definition(inputs)
    assert_close({"out": out, "state": state}, {"out": right, "state": right_state}, 3e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [plain_windowed_step, triton_windowed_step], ids=["plain", "kernel"])
def test_padding_leaves_the_state_empty_and_sees_nothing(step):
    inputs = make_inputs(kv_start=[0, 7], dtype=torch.float32)
    out, state, _ = by_steps(inputs, step)
    assert (out[1] == 0).all()
    assert (state[1] == 0).all()
    assert (out[0] != 0).any()


@pytest.mark.gpu
def test_views_of_heads_of_a_real_size_equal_the_definition(assert_close):
    inputs = make_inputs(length=3, heads=(8, 2), head_dims=(128, 128), dtype=torch.float32)
    right, right_state = by_definition(inputs)
    for name in ("q", "k", "v", "q_window", "k_window", "log_decay"):
        spoilt = torch.full([size + 2 for size in inputs[name].shape], torch.nan, dtype=inputs[name].dtype)
        inputs[name] = spoilt[tuple(slice(1, -1) for _ in range(4))].copy_(inputs[name])
    out, state, _ = by_steps(inputs, triton_windowed_step)
    assert_close({"out": out, "state": state}, {"out": right, "state": right_state}, 3e-6)


def arguments(dtype=torch.float32, **changes):
    """Return positional and keyword arguments of `windowed_step` for one token."""
    inputs = make_inputs(length=1, sinks=1, dtype=dtype)
    ring = torch.zeros(2, 5, 2, 16, dtype=dtype)
    given = {
        **{name: inputs[name] for name in ("q", "k", "v", "log_decay")},
        "state": torch.zeros(2, 2, 8, 16, dtype=inputs["log_decay"].dtype),
        "q_window": inputs["q_window"],
        "k_window": inputs["k_window"],
        "ring_keys": ring,
        "ring_values": ring.clone(),
        "tokens": torch.zeros(1, dtype=torch.int32),
        "state_weight": inputs["state_weight"],
        "window_weight": inputs["window_weight"],
        "sinks": 1,
    }
    return {**given, **changes}


def test_scales_have_defaults(assert_close):
    found = arguments()
    out = windowed_step(**found)
    right = windowed_step(**arguments(), state_scale=1.0, window_scale=16**-0.5)
    assert torch.equal(out, right)
    assert found["state"].abs().sum() > 0
    assert found["ring_keys"][:, 0].equal(found["ring_keys"][:, 1])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"q_window": torch.zeros(2, 1, 2, 8)}, r"q_window has shape \[2, 1, 2, 8\]; it must be \[2, 1, 2, 16\]"),
        ({"ring_values": torch.zeros(2, 6, 2, 16)}, r"ring_values has shape \[2, 6, 2, 16\]; it must be"),
        ({"sinks": 5}, r"with a window of 1 or more"),
        ({"ring_keys": torch.zeros(2, 2, 5, 16).transpose(1, 2)}, "must be contiguous"),
        ({"ring_keys": torch.zeros(2, 5, 2, 16).half()}, "ring_keys is torch.float16"),
        ({"tokens": torch.zeros(1)}, r"tokens is torch.float32 of shape \[1\] on cpu; it must be torch.int32 \[1\]"),
        ({"kv_start": torch.zeros(3, dtype=torch.int32)}, r"kv_start .* must be torch.int32 \[2\]"),
        ({"window_weight": torch.ones(2).half()}, r"window_weight .* must be torch.float32 \[2\]"),
        ({"q": torch.zeros(2, 2, 2, 8)}, "batch and time must agree"),
    ],
)
def test_what_does_not_fit_is_named(changes, line):
    with pytest.raises(ValueError, match=line):
        windowed_step(**arguments(**changes))


def test_a_compiled_step_has_no_graph_break():
    compiled = torch.compile(windowed_step, backend="aot_eager", fullgraph=True)
    eager, traced = arguments(), arguments()
    assert torch.equal(compiled(**traced), windowed_step(**eager))
    for name in ("state", "ring_keys", "ring_values"):
        assert torch.equal(traced[name], eager[name])
        assert traced[name].abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("operation", [plain_windowed_step, triton_windowed_step], ids=["plain", "kernel"])
def test_the_operations_say_what_they_write(operation):
    given = arguments()
    given.update(kv_start=torch.tensor([0, 0], dtype=torch.int32), state_scale=1.0, window_scale=0.3)
    given = {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in given.items()}
    order = (
        "q", "k", "v", "log_decay", "state", "q_window", "k_window", "ring_keys", "ring_values", "tokens", "kv_start",
        "state_weight", "window_weight", "sinks", "state_scale", "window_scale",
    )  # fmt: skip
    torch.library.opcheck(
        operation, tuple(given[name] for name in order), test_utils=("test_schema", "test_faketensor")
    )
