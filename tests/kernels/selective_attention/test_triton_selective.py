"""The Triton kernels against the definition: compiled on a GPU, elsewhere in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Read when the kernels are defined, so before they are imported.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"

from kernels.selective_attention import selective_attention_reference
from kernels.selective_attention.operator import operation
from kernels.selective_attention.triton import launch

TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(scope="session")
def attend(device):
    """attend(inputs, top_values, ...) -> what the kernels give, on the CPU."""

    def run(inputs, top_values, *, scale=0.25, softcap=None, kv_start=None, kv_end=None, num_splits=None):
        tensors = [inputs[name].to(device) for name in ("q", "k", "v")]
        others = (None if x is None else x.to(device) for x in (inputs.get("decay"), kv_start, kv_end))
        return launch.attend(*tensors, top_values, *others, scale, softcap, num_splits).cpu()

    return run


@pytest.fixture(scope="session")
def agree(attend, assert_close):
    def check(inputs, top_values, *, num_splits=None, scale=0.25, **options):
        exact = {name: x.double() for name, x in inputs.items()}
        expected = selective_attention_reference(**exact, top_values=top_values, scale=scale, **options)
        found = attend(inputs, top_values, num_splits=num_splits, scale=scale, **options)
        assert_close({"out": found}, {"out": expected}, TOLERANCE[inputs["q"].dtype])

    return check


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [1, 2, 31, 33, 129, 1000])
def test_any_number_of_keys_equals_the_definition(make, agree, dtype, keys):
    agree(make(2, keys, (2, 2, 1), (16, 20), dtype=dtype), 10)


@pytest.mark.parametrize("top_values", [1, 7, 100, 129, 999, 1000, 5000])
def test_any_number_of_values_equals_the_definition(make, agree, top_values):
    agree(make(1, 1000, (2, 1, 2), (16, 16), dtype=torch.float32), top_values, num_splits=3)


@pytest.mark.parametrize("top_values", [1, 40, 300])
@pytest.mark.parametrize("keys", [150, 4500])
def test_of_equal_scores_the_earlier_keys_are_read(make, agree, keys, top_values):
    """Whole numbers have a few dozen scores, so that the last chosen one has many ties."""
    inputs = make(1, keys, (2, 1, 1), (4, 16), dtype=torch.float32, whole=True)
    agree(inputs, top_values, kv_start=int32(5), num_splits=2)


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_program_cannot_hold_at_once_it_reads_in_blocks(make, agree, monkeypatch, whole):
    monkeypatch.setattr(launch, "BLOCK", 32)
    inputs = make(1, 1500, (2, 1, 1), (4, 16), dtype=torch.float32, whole=whole)
    for top_values in (3, 40):
        agree(inputs, top_values, kv_start=int32(33))


def test_where_all_scores_are_equal_the_first_keys_are_read(make, attend):
    inputs = make(1, 5000, (1, 1, 1), (16, 16), dtype=torch.float32)
    inputs["q"].zero_()
    found = attend(inputs, 100, kv_start=int32(40))
    torch.testing.assert_close(found[0, 0, 0], inputs["v"][0, 40:140, 0].mean(0))


@pytest.mark.parametrize(
    ("heads", "dims"),
    [
        ((8, 2, 4), (16, 16)),
        ((6, 2, 3), (17, 5)),
        ((3, 1, 3), (64, 128)),
        ((40, 1, 2), (16, 16)),
        ((2, 2, 2), (256, 40)),
    ],
    ids=str,
)
def test_heads_and_widths_equal_the_definition(make, agree, heads, dims):
    agree(make(1, 70, heads, dims, dtype=torch.float32, gates=True), 9)


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_padding_gates_and_capped_logits(make, agree, gates, softcap, num_splits):
    inputs = make(4, 300, (2, 1, 2), (16, 16), dtype=torch.float32, gates=gates)
    bounds = {"kv_start": int32(0, 40, 299, 130), "kv_end": int32(300, 41, 300, 255)}
    agree(inputs, 20, softcap=softcap, num_splits=num_splits, **bounds)


def test_strong_gates_leave_chunks_of_very_low_scores(make, agree):
    inputs = make(1, 2000, (2, 1, 1), (16, 16), dtype=torch.float32, gates=True)
    inputs["decay"] *= 50
    agree(inputs, 30)
    agree(inputs | {"decay": inputs["decay"].double() - 1e6}, 30)


def test_what_lies_outside_the_keys_in_use_does_not_matter_even_if_it_is_nan(make, attend):
    inputs = make(3, 200, (4, 2, 1), (16, 20), dtype=torch.float32, gates=True)
    options = {"kv_start": int32(3, 0, 64), "kv_end": int32(9, 190, 64), "num_splits": 2}
    before = attend(inputs, 12, **options)
    for name in ("k", "v", "decay"):
        for row, (start, end) in enumerate([(3, 9), (0, 190), (64, 64)]):
            inputs[name][row, :start] = inputs[name][row, end:] = torch.nan
    assert attend(inputs, 12, **options).equal(before)
    assert before.isfinite().all()
    assert (before[2] == 0).all()


def test_nan_shows_in_the_heads_that_read_it_alone(make, attend):
    inputs = make(1, 100, (4, 2, 1), (16, 16), dtype=torch.float32)
    before = attend(inputs, 12)
    inputs["k"][0, 55, 1, 3] = torch.nan
    after = attend(inputs, 12)
    assert after[:, :, 2:].isnan().all()
    assert after[:, :, :2].equal(before[:, :, :2])


def test_zeros_of_both_signs_are_equal(attend):
    k = torch.tensor([-1e-30, 1e-30, -1e-30]).view(1, 3, 1, 1).expand(-1, -1, -1, 16)
    v = torch.arange(3.0).view(1, 3, 1, 1)
    for scale in (1e-30, -1e-30):
        assert attend({"q": torch.ones(1, 1, 1, 16), "k": k.contiguous(), "v": v}, 1, scale=scale).item() == 0.0


def test_views_are_read_in_place(make, device, monkeypatch):
    inputs = {name: x.to(device) for name, x in make(2, 90, (4, 2, 2), dtype=torch.float32, gates=True).items()}
    rest = (None, int32(90, 71).to(device), 0.25, None)
    expected = launch.attend(*[inputs[name] for name in "qkv"], 9, inputs["decay"], *rest)
    heads_first = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    wider = {name: torch.cat((x, x), 2)[:, :, : x.shape[2]] for name, x in inputs.items()}

    def refuse(x, *args, **kwargs):
        raise AssertionError("a copy was made")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", refuse)
        for views in (heads_first, wider):
            found = launch.attend(*[views[name] for name in "qkv"], 9, views["decay"], *rest)
            assert found.equal(expected)
    spread = {name: x.mT.contiguous().mT for name, x in inputs.items() if name != "decay"}
    stretched = torch.stack((inputs["decay"],) * 2, -1)[..., 0]
    assert launch.attend(*spread.values(), 9, stretched, *rest).equal(expected)


def test_the_operation_passes_opcheck(make):
    inputs = make(2, 9, dtype=torch.float32, gates=True)
    tensors = [inputs[name] for name in "qkv"]
    torch.library.opcheck(operation, (*tensors, 4, inputs["decay"], int32(0, 3), int32(9, 7), 0.5, None))
    torch.library.opcheck(operation, (*tensors, 400, None, None, None, 0.5, 3.0))


def test_it_compiles_without_a_graph_break(make):
    torch.compiler.reset()
    inputs = make(2, 9, dtype=torch.float32)
    arguments = (*inputs.values(), 4, None, int32(0, 3), int32(9, 7), 0.5, None)
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager")
    assert compiled(*arguments).equal(operation(*arguments))


@pytest.mark.gpu(needs="CUDA")
def test_a_captured_call_is_right_for_every_later_token(make, assert_close):
    inputs = {name: x.cuda() for name, x in make(2, 3000, (8, 2, 4), (64, 64), gates=True).items()}
    half = {name: x.float() if name == "decay" else x.bfloat16() for name, x in inputs.items()}
    tensors, end = [half[name] for name in "qkv"], int32(10, 7).cuda()
    arguments = (*tensors, 50, half["decay"], int32(0, 5).cuda(), end, 0.125, None)
    operation(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = operation(*arguments)
    exact = {name: x.double() for name, x in half.items()}
    for tokens in (10, 49, 50, 51, 800, 3000):
        end.fill_(tokens)
        graph.replay()
        expected = selective_attention_reference(**exact, top_values=50, scale=0.125, kv_start=arguments[5], kv_end=end)
        assert_close({"out": out}, {"out": expected}, TOLERANCE[torch.bfloat16])
        assert operation(*arguments).equal(out)


@pytest.mark.gpu(needs="CUDA")
def test_other_lengths_batches_and_numbers_of_values_compile_nothing_new(make, attend):
    from triton import knobs

    names = []
    sizes = {"heads": (6, 1, 3), "dims": (48, 48), "dtype": torch.float16}
    attend(make(2, 64, **sizes), 10, kv_end=int32(50, 64), num_splits=2)
    knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: names.append(kwargs["fn"].name)
    try:
        for batch, keys, num_splits, top_values in ((1, 1, 3, 1), (2, 65, 2, 16), (3, 200, 16, 999), (5, 4131, 5, 100)):
            ends = torch.full((batch,), keys, dtype=torch.int32)
            attend(make(batch, keys, **sizes), top_values, kv_end=ends, num_splits=num_splits)
    finally:
        knobs.runtime.jit_post_compile_hook = None
    assert not names


@pytest.mark.long
def test_the_kernels_fit_absent_gpus(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("compile_selective_offline.py")
    result = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    records = json.loads(result.stdout)
    assert {(record["kernel"], record["architecture"]) for record in records} == {
        (kernel, architecture) for kernel in ("score_split", "choose_and_attend") for architecture in (89, 90)
    }
    # Ada has the least shared memory, 99 KB.
    assert not [record for record in records if record["shared"] > 99 * 1024]
    # A tile of 16 x 128 scores would be 64 bytes of a thread.
    assert not [record for record in records if record.get("spilled", 0) >= 64]
