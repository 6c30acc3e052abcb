"""Compilation of the recurrence's kernels: none repeated during training, and programs that fit every chip."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import gated_recurrence

FORMS = ["key", "value", "head"]
# Each kernel of each form for Hopper; for Ada, which holds least, what takes most. In float16, whose products are in
# TF32, at the least width: the same kernels, and the assembler takes several times as long at 64. In float32 and
# for eight heads a state, what takes the compiler longest.
CASES = [
    "90:key:128:bfloat16", "90:value:128:bfloat16", "90:head:128:bfloat16", "90:alone:128:bfloat16",
    "90:key:16:float16", "90:key:128:float32:gradients_of_strong",
    "90:key:128:bfloat16:gradients_of_strong:16", "90:key:128:bfloat16:_gradients_of_weak:16",
    "89:key:256:bfloat16", "89:head:256:bfloat16", "90:alone:20:bfloat16",
]  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    program = str(Path(__file__).with_name("compile_recurrence_offline.py"))
    processes = []
    for part in range(2):  # side by side, with caches of their own: what is found in one leaves no assembler's log
        cache = str(tmp_path_factory.mktemp("triton"))
        environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        processes.append(subprocess.Popen([sys.executable, program, *CASES[part::2]], **pipes))
    try:
        outputs = [process.communicate(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "".join(stderr for _, stderr in outputs)[-2000:]
    return [record for stdout, _ in outputs for record in json.loads(stdout)]


@pytest.mark.long
def test_every_kernel_compiles_and_fits_into_shared_memory(compiled):
    assert {record["case"] for record in compiled} == set(CASES)
    by_channel = {"_decay_chunks", "_scan_forward", "_scan_backward", "_gradients_of_weak", "gradients_of_strong"}
    by_head = {"_sum_gates", "scan_forward_per_head", "scan_backward_per_head", "_gradients", "_gate_gradients"}
    on_hopper, shared = {"_forward", "_backward"}, {"_fill_tables", "_segment_sums", "_join"}
    assert {record["kernel"] for record in compiled} == by_channel | by_head | on_hopper | shared
    for record in compiled:
        assert record["shared"] <= record["allowed"], record


@pytest.mark.long
def test_matrix_products_on_hopper_are_not_serialized(compiled):
    on_hopper = [record for record in compiled if record["architecture"] == 90]
    serialized = {record["kernel"] for record in on_hopper if record["serialized"]}
    # Strong chunks are called, and a call ends what is in flight: there each product waits for the last one anyway.
    assert serialized <= {"gradients_of_strong", "_decay_chunks"}
    assert not all(record["serialized"] for record in on_hopper if record["kernel"] == "_decay_chunks")


@pytest.mark.long
def test_no_address_on_hopper_is_computed_from_a_register_that_nothing_sets(compiled):
    # ptxas does so with tiles of rows that are not aligned (20 channels) and of 32 channels: reads out of bounds.
    assert not [record for record in compiled if record.get("unset_registers")]


def test_kernels_are_short_enough_to_compile_in_seconds(compiled):
    # The compiler takes a second for 3,000 of them, and more for each where there are more: with loops over the heads
    # of a group unrolled, 28,000 and 17 s in float32.
    longest = max(compiled, key=lambda record: record.get("instructions", 0))
    assert longest["instructions"] <= 10_000, longest


def test_gradients_take_no_longer_to_compile_with_more_heads_a_state(compiled):
    # Unrolled, eight heads have four times the instructions of two, and compile for 14 s.
    for kernel in ("_gradients_of_weak", "gradients_of_strong"):
        few = [r["instructions"] for r in compiled if r["case"] == "90:key:128:bfloat16" and r["kernel"] == kernel]
        many = [r["instructions"] for r in compiled if r["case"] == f"90:key:128:bfloat16:{kernel}:16"]
        assert few
        assert all(size <= 1.1 * before for before, size in zip(sorted(few), sorted(many), strict=True))


@pytest.mark.gpu(needs="CUDA")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("documents", [False, True], ids=["batches", "documents"])
def test_a_hundred_lengths_batches_and_layouts_after_the_first_compile_nothing(
    make_inputs, out_and_gradients, form, documents
):
    from triton import knobs

    draw, names = random.Random(0), []

    def on_gpu(**arguments):
        moved = {n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
        return tuple(x.cpu() for x in gated_recurrence(**moved))

    def once(length, batch, inner):
        # Longer than what the kernel for a few tokens takes without gradients, which these have.
        sizes = {"heads": (4, 2), "head_dims": (64, 64), "form": form, "dtype": torch.bfloat16}
        options = {"decay_axis": "value" if form == "value" else "key"}
        if documents:
            batch, options["cu_seqlens"] = 1, torch.tensor([0, *sorted(inner), length], dtype=torch.int32)
        states = len(inner) + 1 if documents else batch
        out_and_gradients(on_gpu, make_inputs(batch, length, states=states, **sizes), **options)

    # Once with the sequences cut into segments, once without.
    once(700, 2, [3])
    once(70, 2, [3])
    before = knobs.runtime.jit_post_compile_hook
    # Called for each new combination of types and constants, even if its binary lies in the cache on disk.
    knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: names.append(kwargs["fn"].name)
    try:
        for _ in range(100):
            length = draw.choice([1, 16, 17, 64, 128, draw.randint(1, 1500)])
            once(length, draw.randint(1, 5), [draw.randint(0, length) for _ in range(draw.randint(0, 9))])
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert not names
