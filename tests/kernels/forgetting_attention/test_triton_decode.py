"""The decoding kernels against the reference: compiled on a GPU, elsewhere in Triton's interpreter."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

# Read when the kernels are defined, so before they are imported.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from kernels.forgetting_attention import forgetting_attention_reference
from kernels.forgetting_attention.decode import kernel as triton_decode
from kernels.forgetting_attention.decode import tiling as decode_tiling
from kernels.forgetting_attention.decode.kernel import decode, forgetting_attention_decode
from kernels.forgetting_attention.decode.tiling import Tiling, choose_splits

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
HEADS = [(1, 1, 1), (4, 4, 4), (4, 2, 1), (8, 1, 4), (6, 2, 3), (8, 4, 1), (3, 1, 1)]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(scope="session")
def decoded(device):
    """decoded(inputs, ...) -> {"out": what the kernels give}, on the CPU; scale 1 / sqrt(Dk) unless given."""

    def run(inputs, *, scale=None, window=None, kv_start=None, kv_end=None, cumulative=False, num_splits=None):
        q, k, v, log_forget = (inputs[name].to(device) if name in inputs else None for name in (*"qkv", "log_forget"))
        kv_start, kv_end = (None if x is None else x.to(device) for x in (kv_start, kv_end))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        rest = (log_forget, kv_start, kv_end, scale, window, cumulative, num_splits)
        return {"out": forgetting_attention_decode(q, k, v, *rest)[0].cpu()}

    return run


@pytest.fixture(scope="session")
def agree(assert_close, decoded):
    def check(inputs, *, num_splits=None, **options):
        expected = forgetting_attention_reference(**{name: x.double() for name, x in inputs.items()}, **options)
        actual = decoded(inputs, num_splits=num_splits, **options)
        assert_close(actual, {"out": expected}, TOLERANCE[inputs["q"].dtype])

    return check


@st.composite
def problems(draw):
    """Draw consistent sizes and options; lengths on both sides of a tile of keys."""
    queries, batch = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    keys = queries - 1 + draw(st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 261])))
    options = {"num_splits": draw(st.integers(1, 4))}
    if draw(st.booleans()):
        options["kv_end"] = int32(*(draw(st.integers(queries, keys)) for _ in range(batch)))
    if draw(st.booleans()):
        ends = options["kv_end"].tolist() if "kv_end" in options else [keys] * batch
        options["kv_start"] = int32(*(draw(st.integers(0, end)) for end in ends))
    if draw(st.booleans()):
        options["window"] = draw(st.sampled_from([1, 2, 7, 130, 2**40]))
    if draw(st.booleans()):
        options["scale"] = 0.2
    heads, gates = draw(st.sampled_from(HEADS)), draw(st.sampled_from([None, -8.0, 1.0, 6.0]))
    closed, open_ = draw(st.sampled_from([(0.0, 0.0), (0.1, 0.2), (1.0, 0.0), (0.0, 1.0)]))
    if gates is not None and closed == 0.0:
        options["cumulative"] = draw(st.booleans())
    shape = {"batch": batch, "queries": queries, "keys": keys, "heads": heads, "head_dims": (16, 16)}
    return {**shape, "gates": gates, "closed": closed, "open_": open_, "seed": draw(st.integers(0, 99))}, options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(problem=problems())
def test_output_equals_the_definition(make_inputs, agree, dtype, problem):
    shape, options = problem
    inputs = make_inputs(dtype=dtype, **shape)
    if options.get("cumulative"):
        inputs["log_forget"] = inputs["log_forget"].cumsum(1)
    agree(inputs, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 100), (100, 72), (17, 5), (64, 128), (256, 256)], ids=str)
def test_any_head_dim_equals_the_definition(make_inputs, agree, dtype, head_dims):
    inputs = make_inputs(queries=2, keys=75, heads=(4, 1, 2), head_dims=head_dims, dtype=dtype, gates=3.0)
    agree(inputs, num_splits=2)


@pytest.mark.parametrize("queries", [1, 16])
@pytest.mark.parametrize("heads", [(32, 4, 16), (16, 16, 2), (12, 2, 12), (16, 1, 1)], ids=str)
def test_many_heads_that_share_equal_the_definition(make_inputs, agree, heads, queries):
    agree(make_inputs(queries=queries, keys=90, heads=heads, head_dims=(16, 32), dtype=torch.float32), num_splits=2)


@pytest.mark.parametrize(("num_splits", "keys"), [(1, 530), (2, 530), (3, 530), (7, 530), (40, 530), (40, 5200)])
def test_any_number_of_splits_gives_one_softmax(make_inputs, agree, num_splits, keys):
    inputs = make_inputs(batch=2, queries=3, keys=keys, heads=(2, 1, 1), head_dims=(16, 16), dtype=torch.float32)
    agree(inputs, num_splits=num_splits, kv_start=int32(0, 400))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_what_lies_outside_the_keys_in_use_does_not_matter_even_if_it_is_nan(make_inputs, decoded, num_splits):
    inputs = make_inputs(batch=2, queries=3, keys=150, heads=(4, 2, 1), head_dims=(16, 20), dtype=torch.float32)
    options = {"kv_start": int32(2, 0), "kv_end": int32(9, 140), "num_splits": num_splits}
    for cumulative in (False, True):
        before = decoded(inputs, cumulative=cumulative, **options)
        spoilt = {name: x.clone() for name, x in inputs.items()}
        for name in ("k", "v", "log_forget"):
            for row, (start, end) in enumerate([(2, 9), (0, 140)]):
                spoilt[name][row, :start] = torch.nan
                spoilt[name][row, end:] = torch.nan
        after = decoded(spoilt, cumulative=cumulative, **options)
        assert torch.equal(before["out"], after["out"])
        assert after["out"].isfinite().all()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_query_that_sees_no_key_gives_zero(make_inputs, decoded, num_splits):
    inputs = make_inputs(batch=3, queries=4, keys=40, head_dims=(16, 16), dtype=torch.float32)
    inputs["q"][0, :2] = torch.nan
    starts, ends = int32(22, 40, 0), int32(24, 40, 4)
    out = decoded(inputs, kv_start=starts, kv_end=ends, num_splits=num_splits)["out"]
    assert (out[0, :2] == 0).all()
    assert (out[1] == 0).all()
    assert (out[0, 2:] != 0).all()
    assert (out[2] != 0).all()


def test_a_closed_gate_hides_all_before_it_in_its_head_alone(make_inputs, decoded):
    inputs = make_inputs(queries=2, keys=50, heads=(2, 1, 1), head_dims=(16, 16), dtype=torch.float32)
    inputs["log_forget"][0, 30, 0] = -torch.inf
    before = decoded(inputs)["out"]
    inputs["k"][:, :30] *= 3
    inputs["v"][:, :30] = 1e30
    after = decoded(inputs)["out"]
    assert torch.equal(before[:, :, 0], after[:, :, 0])
    assert not torch.isclose(before[:, :, 1], after[:, :, 1]).any()


def test_head_of_a_shared_group_takes_nothing_from_another_even_if_it_overflows(make_inputs, decoded):
    inputs = make_inputs(keys=20, queries=1, heads=(8, 2, 4), head_dims=(16, 16), dtype=torch.float32)
    before = decoded(inputs)["out"]
    inputs["v"][:, 3, 1] = torch.inf
    inputs["k"][:, 3, 1] = torch.nan
    after = decoded(inputs)["out"]
    assert torch.equal(before[:, :, :2], after[:, :, :2])
    assert not after[:, :, 2:].isfinite().any()


def test_differences_of_a_float64_sum_keep_its_precision(make_inputs, decoded, assert_close):
    inputs = make_inputs(queries=2, keys=60, heads=(4, 2, 1), head_dims=(16, 16), dtype=torch.float32)
    near = inputs["log_forget"].double().cumsum(1)
    options = {"cumulative": True, "num_splits": 2}
    assert_close(
        decoded({**inputs, "log_forget": near - 1e6}, **options),
        decoded({**inputs, "log_forget": near}, **options),
        1e-6,
    )


def test_views_of_larger_tensors_are_read_in_place(make_inputs, device, monkeypatch):
    inputs = make_inputs(batch=2, queries=3, keys=40, heads=(4, 2, 4), head_dims=(16, 24), dtype=torch.float32)
    wider = {}
    for name, x in inputs.items():
        larger = torch.full([size + 3 for size in x.shape], torch.nan, device=device)
        wider[name] = larger[tuple(slice(1, 1 + size) for size in x.shape)].copy_(x)
    heads_first = {name: x.to(device).transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    # Gates lie with their heads together; other layouts of these, small as they are, are copied.
    heads_first["log_forget"] = wider["log_forget"]
    rest = (None, int32(40, 31).to(device), 0.25, None, True)
    expected, _ = decode(*(x.to(device) for x in inputs.values()), *rest)

    def refuse(x, *args, **kwargs):
        raise AssertionError("a copy was made")

    monkeypatch.setattr(torch.Tensor, "contiguous", refuse)
    assert torch.equal(decode(*wider.values(), *rest)[0], expected)
    assert torch.equal(decode(*heads_first.values(), *rest)[0], expected)


def test_the_stride_of_an_axis_of_one_does_not_narrow_the_loads():
    x = torch.zeros(1, 9, 2, 16).as_strided((1, 9, 1, 16), (1, 32, 3, 1))
    assert triton_decode.strides_in_units(x) == (4, [0, 8, 0])


def test_other_layouts_are_copied(make_inputs, device):
    inputs = make_inputs(queries=2, keys=20, heads=(4, 2, 1), head_dims=(16, 16), dtype=torch.float32)
    rest = (None, None, 0.25, None, True)
    expected, _ = decode(*(x.to(device) for x in inputs.values()), *rest)
    last_first = [x.to(device).mT.contiguous().mT for x in inputs.values()]
    assert torch.equal(decode(*last_first, *rest)[0], expected)


def test_no_queries_or_no_rows_give_an_empty_output(make_inputs, decoded):
    inputs = make_inputs(batch=2, queries=4, keys=9, heads=(4, 2, 1), head_dims=(16, 20), dtype=torch.float32)
    assert decoded({**inputs, "q": inputs["q"][:, :0]})["out"].shape == (2, 0, 4, 20)
    assert decoded({name: x[:0] for name, x in inputs.items()})["out"].shape == (0, 4, 4, 20)


@pytest.mark.parametrize("heads", [(32, 4, 16), (32, 16, 4), (32, 32, 32), (32, 8, 8), (40, 8, 8), (6, 2, 3)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("queries", [1, 4])
def test_every_key_and_value_is_read_by_one_program(make_inputs, heads, head_dim, queries):
    inputs = make_inputs(1, queries, 8, heads, (head_dim, head_dim), dtype=torch.bfloat16)
    tiling = Tiling.of(*inputs.values())
    assert tiling.groups * tiling.key_heads == heads[1]
    assert tiling.groups * tiling.value_heads == heads[2]
    assert tiling.groups * tiling.heads == heads[0]
    assert tiling.queries * tiling.padded_heads >= 16  # or the tensor cores refuse


def test_splits_fill_the_device_and_no_split_is_too_short(monkeypatch):
    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    at_once = 132 * decode_tiling.PROGRAMS_PER_MULTIPROCESSOR
    for programs in (1, 4, 8, 60, 64, 100, 200, 264, 512, 5000):
        splits = choose_splits(programs, 2**17, torch.device("cuda"))
        rounds = -(-programs * splits // at_once)
        assert programs * splits / (rounds * at_once) > 0.85
        for keys in (1, 255, 256, 3000):
            assert 1 <= choose_splits(programs, keys, torch.device("cuda")) <= max(1, keys // 256)


def test_the_operation_passes_opcheck(make_inputs, device):
    inputs = make_inputs(batch=2, queries=2, keys=9, heads=(4, 2, 1), head_dims=(16, 20), dtype=torch.float32)
    tensors = [x.to(device) for x in inputs.values()]
    operation = torch.ops.palimpsest.forgetting_attention_decode.default
    bounds = (int32(0, 3).to(device), int32(9, 7).to(device))
    torch.library.opcheck(operation, (*tensors, *bounds, 0.5, None, False))
    torch.library.opcheck(operation, (*tensors[:3], None, None, None, 0.5, 4, False, 2, True))


def test_compiles_without_a_graph_break(make_inputs, device):
    torch.compiler.reset()
    inputs = make_inputs(batch=2, queries=2, keys=9, heads=(4, 2, 1), head_dims=(16, 20), dtype=torch.float32)
    arguments = (*(x.to(device) for x in inputs.values()), None, int32(9, 7).to(device), 0.5, 4, True)
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments)[0], decode(*arguments)[0])


@pytest.mark.gpu(needs="CUDA")
def test_other_lengths_batches_and_splits_compile_nothing_new(make_inputs, decoded, compiled_kernels):
    sizes = {"queries": 1, "heads": (6, 1, 3), "head_dims": (48, 48), "dtype": torch.float16}
    with compiled_kernels() as names:
        decoded(make_inputs(batch=2, keys=64, **sizes), kv_end=int32(50, 64), num_splits=2)
    assert names
    with compiled_kernels() as names:
        for batch, keys, num_splits, window in ((1, 1, 3, 1), (2, 65, 2, 2**40), (3, 200, 16, 16), (5, 1031, 5, None)):
            ends = torch.full((batch,), keys, dtype=torch.int32)
            decoded(make_inputs(batch=batch, keys=keys, **sizes), kv_end=ends, num_splits=num_splits, window=window)
    assert not names
