"""A Liger layer's step from its projections: the kernel, compiled on a GPU, elsewhere interpreted, and its plain form.

Decoding tests the plain form: with it, decoding equals the parallel pass.
"""

import os

import pytest
import torch

# Read when the kernels are defined, so before they are imported.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from kernels.gated_recurrence import forms, liger_step, windowed_step
from kernels.gated_recurrence.decode.liger_step import plain_liger_step
from kernels.gated_recurrence.decode.triton_liger_step import triton_liger_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
GATES = (*forms.PER_CHANNEL, *forms.PER_HEAD, *forms.CONSTANT)
WINDOW = 3
RINGS = ("ring_keys", "ring_values", "late_keys")
LATE = {"delayed": True, "length": 2 * WINDOW + 1}
CASES = {
    **{gate: {"gate": gate, "shift": gate not in forms.CONSTANT} for gate in GATES},
    **{f"{gate}, no map": {"gate": gate, "feature_map": "none"} for gate in ("gla", "hgrn2", "mamba2")},
    "temperature": {"temperature": 16.0},
    "temperature of hgrn2": {"gate": "hgrn2", "temperature": 3.0},
    "left padding": {"kv_start": [3, 0], "rows_of_tables": 2},
    "sinks": {"sinks": 2, "length": 6},
    "sinks behind left padding, grouped heads": {"sinks": 1, "kv_start": [2, 0], "heads": (4, 2), "length": 6},
    "four queries for a key": {"heads": (4, 1), "length": 3},
    "three queries for a key": {"gate": "hgrn2", "heads": (3, 1), "length": 3},
    "heads of 64": {"dim": 64, "rotated": 64, "heads": (2, 1), "length": 2},
    "odd heads, half of them rotated": {"dim": 80, "rotated": 40, "heads": (2, 1), "length": 2},
    "gates near 1": {"gate": "hgrn2", "temperature": 16.0, "shift": 9.0},
    "gates near 0": {"gate": "rwkv6", "shift": 90.0},
    "large queries and keys": {"size": 60.0},
    **{f"late {gate}": {"gate": gate, "shift": gate not in forms.CONSTANT, "heads": (2, 1), **LATE} for gate in GATES},
    **{f"late {gate}, no map": {"gate": gate, "feature_map": "none", **LATE} for gate in ("gla", "hgrn2")},
    "late hgrn2 with a temperature": {"gate": "hgrn2", "temperature": 3.0, **LATE},
    "late, left padding": {"gate": "hgrn2", "kv_start": [3, 0], "rows_of_tables": 2, **LATE},
    "late, sinks": {"sinks": 2, **LATE},
    "late, sinks behind left padding, grouped heads": {"sinks": 1, "kv_start": [2, 0], "heads": (4, 2), **LATE},
    "late, two programs for a head": {"dim": 64, "rotated": 64, "heads": (2, 1), **LATE},
    "late, odd heads, half of them rotated": {"dim": 80, "rotated": 40, "heads": (2, 1), **LATE},
    "late, gates near 0": {"gate": "rwkv6", "shift": 90.0, **LATE},
}


def make_inputs(
    gate="gla", feature_map="softmax", temperature=1.0, shift=False, length=5, heads=(2, 2), dim=16, rotated=12,
    sinks=0, kv_start=None, rows_of_tables=1, size=2.0, delayed=False, dtype=torch.float32,
):  # fmt: skip
    """Return the projections of all steps, concatenated as one product gives them, and the other arguments."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    (query_heads, heads), batch = heads, 2
    angles = 6 * normal(rows_of_tables, length, rotated // 2).repeat(1, 1, 2)
    return {
        "projected": (size * normal(length, batch, (query_heads + 2 * heads) * dim)).to(dtype),
        "cosine": angles.cos(),
        "sine": angles.sin(),
        "gate_shift": float(shift) * (1 + normal(heads) / 4) if shift else None,
        "kv_start": None if kv_start is None else torch.tensor(kv_start, dtype=torch.int32),
        "state_weight": torch.linspace(0.2, 0.8, query_heads),
        "window_weight": torch.linspace(1.0, 0.5, query_heads),
        "sizes": (query_heads, heads, dim),
        "names": (gate, temperature, feature_map, sinks, 0.4),
        "delayed": delayed,
    }


def by_steps(inputs, step, change=lambda x: x):
    """Return out, the state and the rings after stepping through all tokens, from rings filled with NaN.

    change: applied to the projections before each step.
    """
    x = {name: t.to(DEVICE) if torch.is_tensor(t) else t for name, t in inputs.items()}
    (query_heads, heads, dim), (*names, sinks, scale) = x["sizes"], x["names"]
    projected = x["projected"]
    length, batch, _ = projected.shape
    wide = torch.promote_types(projected.dtype, torch.float32)
    state = torch.zeros(batch, heads, dim, dim, dtype=wide, device=DEVICE)
    rings = [
        projected.new_full((batch, slots, heads, dim), torch.nan) for slots in (sinks + WINDOW,) * 2 + (WINDOW + 1,)
    ]
    rings = rings if x["delayed"] else [*rings[:2], None]
    tokens, outs = torch.zeros(1, dtype=torch.int32, device=DEVICE), []
    for t in range(length):
        parts = projected[t].split([query_heads * dim, heads * dim, heads * dim], dim=-1)
        q, k, v = (change(part.unflatten(-1, (-1, dim))[:, None]) for part in parts)
        tables = (x[name][:, t : t + 1] for name in ("cosine", "sine"))
        small = (x[name] for name in ("kv_start", "gate_shift", "state_weight", "window_weight"))
        outs.append(step(q, k, v, *tables, state, *rings, tokens, *small, *names, sinks, scale))
        tokens += 1
    real = torch.ones(batch, length).bool()
    if inputs["kv_start"] is not None:
        real = torch.arange(length) >= inputs["kv_start"][:, None]
    rings = {name: held.cpu() for name, held in zip(RINGS, rings, strict=True) if held is not None}
    return {"out": torch.cat(outs, 1).cpu()[real], "state": state.cpu()}, rings


def in_float64(inputs):
    return {name: x.double() if torch.is_tensor(x) and x.dtype.is_floating_point else x for name, x in inputs.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        *((case, torch.float16) for case in ("gla", "hgrn2", "mamba2", "sinks", "four queries for a key", "late gla")),
        *(
            # The interpreter's products of bfloat16 are wrong.
            pytest.param(case, torch.bfloat16, marks=pytest.mark.gpu(needs="CUDA"))
            for case in ("gla", "hgrn2", "mamba2", "four queries for a key", "late gla")
        ),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:overflow")  # of gates near 0, whose logarithm is infinite
def test_the_kernel_equals_the_plain_form_in_float64(case, dtype, assert_close):
    inputs = make_inputs(**CASES[case], dtype=dtype)
    found, rings = by_steps(inputs, triton_liger_step)
    right, right_rings = by_steps(in_float64(inputs), plain_liger_step)
    assert_close(found, right, TOLERANCE[dtype])
    for name, expected in right_rings.items():
        held = rings[name]
        assert torch.equal(held.isnan(), expected.isnan())
        assert_close({name: held.nan_to_num()}, {name: expected.nan_to_num()}, TOLERANCE[dtype] / 2)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [plain_liger_step, triton_liger_step], ids=["plain", "kernel"])
@pytest.mark.parametrize("gate", ["gla", "hgrn2"])
def test_a_late_state_is_that_of_a_window_ago(step, gate, assert_close):
    late = make_inputs(gate, shift=True, **LATE)
    ago = {**late, "delayed": False, "projected": late["projected"][:-WINDOW]}
    state, right = (by_steps(x, step)[0]["state"] for x in (late, ago))
    assert right.abs().amax() > 0.1
    assert_close({"state": state}, {"state": right}, 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [plain_liger_step, triton_liger_step], ids=["plain", "kernel"])
def test_a_late_state_takes_in_no_padding_and_no_sink(step):
    """Of a row of 3 + WINDOW tokens: all that the window has lost are padding and two sinks; of the other, one more."""
    inputs = make_inputs("hgrn2", sinks=2, kv_start=[1, 0], delayed=True, length=3 + WINDOW)
    state = by_steps(inputs, step)[0]["state"]
    assert (state[0] == 0).all()
    assert (state[1] != 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("delayed", [False, True], ids=["", "late"])
@pytest.mark.parametrize("gate", ["gla", "hgrn2"])
def test_keys_enter_the_state_rounded_as_a_prefix_leaves_them(gate, delayed, assert_close):
    inputs = make_inputs(gate, delayed=delayed, dtype=torch.float16)
    found, right = (by_steps(inputs, step)[0]["state"] for step in (triton_liger_step, plain_liger_step))
    assert_close({"state": found}, {"state": right}, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", ["gla", "hgrn2", "gated_retention", "fixed"])
def test_without_map_and_rotation_it_is_windowed_step(gate):
    inputs = in_float64(make_inputs(gate, "none", rotated=2))
    inputs["cosine"], inputs["sine"] = torch.ones_like(inputs["cosine"]), torch.zeros_like(inputs["sine"])

    def of_parts(q, k, v, cosine, sine, state, keys, values, late, tokens, kv_start, shift, alpha, beta, gate, *rest):
        logits = {"hgrn2": k, "gla": k, "gated_retention": k.mean(-1), "fixed": None}[gate]
        recurrence = forms.liger(gate, q, k, v, logits)
        weights = {"state_weight": alpha, "window_weight": beta}
        return windowed_step(*recurrence, state, q, k, keys, values, tokens, **weights, window_scale=rest[-1])

    for found, right in zip(by_steps(inputs, plain_liger_step), by_steps(inputs, of_parts), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [plain_liger_step, triton_liger_step], ids=["plain", "kernel"])
def test_padding_leaves_the_state_empty(step):
    _, state = by_steps(make_inputs(kv_start=[0, 5]), step)[0].values()
    assert (state[1] == 0).all()
    assert (state[0] != 0).any()


@pytest.mark.gpu
def test_any_strides_will_do(assert_close):
    inputs = make_inputs(heads=(4, 2), length=2)
    spread = lambda x: x.mT.contiguous().mT  # noqa: E731
    assert spread(torch.zeros(2, 1, 4, 16)).stride(-1) == 4
    assert_close(by_steps(inputs, triton_liger_step, spread)[0], by_steps(inputs, triton_liger_step)[0], 1e-7)


def arguments(dtype=torch.float32, **changes):
    """Return arguments of `liger_step` for one token of two rows, four query heads and two key heads of width 16."""
    query = torch.linspace(-2, 2, 2 * 4 * 16).view(2, 1, 4, 16)
    ring = torch.zeros(2, 5, 2, 16, dtype=dtype)
    given = {
        "q": query.to(dtype),
        "k": query[:, :, :2].flip(0).to(dtype),
        "v": query[:, :, 2:].to(dtype),
        "cosine": torch.full((1, 1, 8), 0.6),
        "sine": torch.full((1, 1, 8), 0.8),
        "state": torch.zeros(2, 2, 16, 16, dtype=torch.promote_types(dtype, torch.float32)),
        "ring_keys": ring,
        "ring_values": ring.clone(),
        "tokens": torch.zeros(1, dtype=torch.int32),
        "state_weight": torch.full((4,), 0.5, dtype=torch.promote_types(dtype, torch.float32)),
        "window_weight": torch.full((4,), 0.5, dtype=torch.promote_types(dtype, torch.float32)),
        "gate": "gla",
        "sinks": 1,
    }
    return {**given, **changes}


def test_what_may_be_left_out_has_its_usual_value():
    out = liger_step(**arguments())
    usual = {"temperature": 1.0, "feature_map": "softmax", "window_scale": 16**-0.5, "gate_shift": torch.zeros(2)}
    assert torch.equal(out, liger_step(**arguments(), **usual))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"gate": "slots"}, "gate='slots' is not known: give one of gla, hgrn2, rwkv6, mamba2, mlstm, gated_retention"),
        ({"feature_map": "relu"}, "feature_map='relu' is not known: give one of softmax, none"),
        ({"temperature": 0.0}, "temperature=0.0: log gates are divided by it, give a number above 0"),
        ({"q": torch.zeros(2, 2, 4, 16)}, "batch and time must agree"),
        ({"v": torch.zeros(2, 1, 2, 8)}, "q and k have head_dim 16 but v has 8; they must agree"),
        ({"state": torch.zeros(2, 2, 16, 8)}, r"state has shape \[2, 2, 16, 8\]"),
        ({"state": torch.zeros(2, 2, 16, 16).mT}, "must be contiguous"),
        ({"cosine": torch.zeros(1, 1, 18)}, r"cosine has shape \[1, 1, 18\]; it must be \[batch or 1, 1, R\], 2 rows"),
        ({"cosine": torch.zeros(3, 1, 8)}, r"cosine has shape \[3, 1, 8\]"),
        ({"cosine": torch.zeros(8)}, r"cosine has shape \[8\]"),
        (
            {"sine": torch.zeros(1, 1, 7)},
            r"sine has shape \[1, 1, 7\]; .* of an even number R of channels, 16 or fewer",
        ),
        ({"sine": torch.zeros(1, 1, 6)}, "cosine and sine must be floating-point tensors of one shape"),
        ({"gate_shift": torch.zeros(4)}, r"gate_shift is torch.float32 of shape \[4\] .* \[heads of k\], \[2\]"),
        ({"gate": "fixed", "gate_shift": torch.zeros(2)}, "gate='fixed' has no logits"),
        ({"ring_values": torch.zeros(2, 6, 2, 16)}, r"ring_values has shape \[2, 6, 2, 16\]; it must be"),
        ({"sinks": 5}, "with a window of 1 or more"),
        (
            {"late_keys": torch.zeros(2, 4, 2, 16)},
            r"late_keys has shape \[2, 4, 2, 16\]; .* \[batch, window \+ 1, heads of k, head_dim\], \[2, 5, 2, 16\]",
        ),
        ({"late_keys": torch.zeros(2, 5, 16, 2).mT}, "late_keys has strides .* must be contiguous"),
        ({"late_keys": torch.zeros(2, 5, 2, 16).half()}, "late_keys is torch.float16 on cpu but q is torch.float32"),
        ({"tokens": torch.zeros(1)}, "tokens is torch.float32"),
        ({"window_weight": torch.ones(2)}, r"window_weight .* must be torch.float32 \[4\]"),
    ],
)
def test_what_does_not_fit_is_named(changes, line):
    with pytest.raises(ValueError, match=line):
        liger_step(**arguments(**changes))


def test_several_tokens_are_refused():
    tokens = {name: torch.zeros(2, 3, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    with pytest.raises(ValueError, match="q has 3 tokens; a step with a window takes one for each row"):
        liger_step(**arguments(**tokens))


def full(late):
    """Return changes of `arguments` for a state that lags behind, at a step where a token enters it."""
    if not late:
        return {"late_keys": None}
    late_keys, ring_values = torch.ones(2, 5, 2, 16), torch.ones(2, 5, 2, 16)
    return {"late_keys": late_keys, "ring_values": ring_values, "tokens": torch.full((1,), 6, dtype=torch.int32)}


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_a_compiled_step_has_no_graph_break(late):
    compiled = torch.compile(liger_step, backend="aot_eager", fullgraph=True)
    eager, traced = arguments(**full(late)), arguments(**full(late))
    assert torch.equal(compiled(**traced), liger_step(**eager))
    for name in ("state", *RINGS[: 2 + late]):
        assert torch.equal(traced[name], eager[name])
        assert not torch.equal(traced[name], arguments(**full(late))[name])


@pytest.mark.gpu
@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
def test_the_operation_says_what_it_writes(late):
    given = arguments(gate_shift=torch.zeros(2), kv_start=None, temperature=2.0, feature_map="none", window_scale=0.3)
    given.update(full(late))
    given = {name: x.to(DEVICE) if torch.is_tensor(x) else x for name, x in given.items()}
    order = (
        "q", "k", "v", "cosine", "sine", "state", *RINGS, "tokens", "kv_start", "gate_shift", "state_weight",
        "window_weight", "gate", "temperature", "feature_map", "sinks", "window_scale",
    )  # fmt: skip
    torch.library.opcheck(
        triton_liger_step, tuple(given[name] for name in order), test_utils=("test_schema", "test_faketensor")
    )
