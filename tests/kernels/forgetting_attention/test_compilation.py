"""Compilation: no recompilation during training, and programs that fit every chip of the table."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.forgetting_attention.triton.configs import TABLE
from tests.kernels.forgetting_attention.compile_offline import barriers_nobody_takes, registers_nothing_sets

# What a program may use of an SM's shared memory, by architecture (CUDA programming guide, compute capabilities).
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


def random_problem(draw, documents, make_inputs):
    """Draw inputs and options of random sizes, in bfloat16: packed documents, or a batch."""
    sizes = {"heads": (4, 2, 1), "head_dims": (64, 64), "dtype": torch.bfloat16}
    length = draw.choice([1, 16, 17, 128, draw.randint(1, 700)])
    if documents:
        bounds = sorted(draw.randint(0, length) for _ in range(draw.randint(0, 9)))
        return make_inputs(queries=length, **sizes), {"cu_seqlens": torch.tensor([0, *bounds, length]).int()}
    keys = length + draw.choice([0, 0, 1, draw.randint(0, 300)])
    return make_inputs(batch=draw.randint(1, 5), queries=length, keys=keys, **sizes), {}


@pytest.mark.gpu(needs="CUDA")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{}, {"prune": -10.0}, {"window": 100}], ids=["all", "pruned", "window"])
@pytest.mark.parametrize("documents", [False, True], ids=["batches", "documents"])
def test_a_hundred_lengths_batches_and_layouts_after_the_first_compile_nothing(
    make_inputs, out_and_gradients, triton_forgetting_attention, compiled_kernels, documents, options, deterministic
):
    draw = random.Random(0)

    def step():
        inputs, layout = random_problem(draw, documents, make_inputs)
        out_and_gradients(triton_forgetting_attention, inputs, **layout, **options)

    torch.use_deterministic_algorithms(deterministic)
    try:
        step()
        with compiled_kernels() as names:
            for _ in range(100):
                step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not names


@pytest.mark.gpu(needs="CUDA")
def test_the_count_of_compiled_kernels_sees_a_new_head_dim(
    make_inputs, out_and_gradients, triton_forgetting_attention, compiled_kernels
):
    inputs = make_inputs(queries=20, heads=(1, 1, 1), head_dims=(8, 24), dtype=torch.bfloat16)
    with compiled_kernels() as names:
        out_and_gradients(triton_forgetting_attention, inputs)
    assert names


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    """Compile every row of the table for its architecture; rows for 8 for Ada, with less shared memory than Ampere."""
    rows = [f"{90 if least == 9 else 89}:{name}:{head_dim}" for least, name, head_dim in TABLE]
    rows.append("80:forward:128")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "OMP_NUM_THREADS": "1",
    }
    program = Path(__file__).with_name("compile_offline.py")
    result = subprocess.run(
        [sys.executable, str(program), *rows], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.mark.long
def test_every_row_of_the_table_fits_into_the_shared_memory_of_its_chips(compiled):
    assert {record["row"] for record in compiled} >= {
        f"{90 if least == 9 else 89}:{name}:{head_dim}" for least, name, head_dim in TABLE
    }
    for record in compiled:
        assert record["shared"] <= SHARED[record["architecture"]], record


@pytest.mark.long
def test_kernels_on_hopper_keep_their_tiles_in_registers(compiled):
    # Bytes a thread, stored and loaded. A tile of 64 x 128 accumulators would be 512, in each iteration.
    assert not [record for record in compiled if record["architecture"] == 90 and record["spilled"] > 1024]


@pytest.mark.long
def test_matrix_products_on_hopper_are_not_serialized(compiled):
    hopper = [record for record in compiled if record["architecture"] == 90]
    assert {record["kernel"] for record in hopper} >= {"_forward", "_backward"}
    assert not [record for record in hopper if record["serialized"]]


@pytest.mark.long
def test_no_address_on_hopper_is_computed_from_a_register_that_nothing_sets(compiled):
    assert not [record for record in compiled if record.get("unset_registers")]


def test_a_register_that_nothing_sets_is_seen():
    assembly = """
        /*0270*/                   UMOV UR20, 0x10 ;
        /*0280*/                   UIADD3.64 UR52, UR20, UR20, URZ ;
        /*0290*/                   R2UR UR54, R4 ;
        /*02a0*/                   R2UR UR55, R5 ;
        /*02b0*/                   HGMMA.64x16x16.F32.BF16 R64, R40, gdesc[UR52].tnspB, R64, gsb0 ;
        /*1b90*/                   UIADD3 UR22, UP0, UR22, 0x20, URZ ;
        /*8a90*/                   HGMMA.64x16x16.F32.BF16 R64, gdesc[UR20].tnspA.tnspB, R64 ;
    """
    assert registers_nothing_sets(assembly) == [21, 22, 23]


@pytest.mark.long
def test_barriers_on_hopper_keep_their_memory(compiled):
    # The memory of a barrier that no group of warps takes is given to the groups' arguments, and its initialization may
    # land on top of them: pointers of the loading warp were lost to it, whenever another process used the GPU.
    hopper = [record for record in compiled if record["architecture"] == 90]
    assert not [record for record in hopper if record["dead_barriers"]]


def test_a_barrier_that_nobody_takes_is_seen():
    module = """
        %full = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64>
        %empty = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64>
        %1 = ttg.memdesc_index %full[%c0] : !ttg.memdesc<2x1xi64>
        ttng.init_barrier %1, 2 : !ttg.memdesc<1xi64>
        %2 = ttg.memdesc_index %empty[%c0] : !ttg.memdesc<2x1xi64>
        ttng.init_barrier %2, 1 : !ttg.memdesc<1xi64>
        ttg.warp_specialize(%full) attributes {requestedRegisters = array<i32: 240, 24>}
    """
    assert barriers_nobody_takes(module) == ["%empty"]
