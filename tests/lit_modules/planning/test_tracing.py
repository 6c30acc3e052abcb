"""Counts on fake tensors equal those of real tensors."""

import sys
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lit_modules.networks import PalimpsestConfig
from lit_modules.networks.block import Block
from lit_modules.networks.positions import Positions, locate
from lit_modules.networks.swiglu import SwiGLU
from lit_modules.planning.compiled import trace_compiled
from lit_modules.planning.eager import trace_eager
from lit_modules.planning.network import Network, on_meta_device
from lit_modules.planning.setup import Setup

TOKENS, WIDTH = 96, 32


def config(**others) -> PalimpsestConfig:
    sizes = {"vocab_size": 128, "hidden_size": WIDTH, "num_layers": 2, "num_heads": 2, "intermediate_size": 48}
    return PalimpsestConfig(**sizes | others)


def setup(**others) -> Setup:
    return Setup(**{"gpu": "h200", "sequence_length": TOKENS, "micro_batch_size": 1, "batch_tokens": TOKENS} | others)


def saved_bytes(run, inputs, parameters) -> int:
    """What autograd really keeps of `run(*inputs)`: its storages, each once, without the parameters' and the shared."""
    known = {x.untyped_storage().data_ptr() for x in (*inputs[1:], *parameters)}
    kept = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = run(*inputs)
    known.add(out.untyped_storage().data_ptr())
    return sum(number for place, number in kept.items() if place not in known)


@pytest.mark.parametrize("switches", [(), ("qk_norm", "kv_shift", "output_norm", "output_gate")], ids=["plain", "pro"])
def test_a_block_keeps_what_autograd_saves(switches):
    given = config(**dict.fromkeys(switches, True))

    def forward(block, hidden, index, bounds):
        return block(hidden, Positions(index, cu_seqlens=bounds))

    block = Block(given, "attention")
    layout = locate(1, TOKENS, 0, torch.device("cpu"), cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32))
    inputs = torch.randn(1, TOKENS, WIDTH, requires_grad=True), layout.index, layout.cu_seqlens
    with torch.autocast("cpu", torch.bfloat16):
        real = saved_bytes(partial(forward, block), inputs, list(block.parameters()))

    with torch.device("meta"):
        block = Block(given, "attention")
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        on_meta_device(block, torch.float32)
        fakes = [torch.empty(x.shape, dtype=x.dtype, requires_grad=x.requires_grad) for x in inputs]
        traced = trace_eager(partial(forward, block), fakes, list(block.parameters()))
    assert traced.kept == real
    matrices = sum(p.numel() for name, p in block.named_parameters() if "_proj" in name)  # the gates' stays float32
    assert traced.casts == 2 * matrices


def test_a_compiled_module_keeps_what_the_compiler_saves():
    module = SwiGLU(WIDTH, 48)
    compiled = torch.compile(module, backend="aot_eager_decomp_partition")
    real = saved_bytes(compiled, (torch.randn(1, TOKENS, WIDTH, requires_grad=True),), list(module.parameters()))
    with torch.device("meta"):
        module = SwiGLU(WIDTH, 48)
    with FakeTensorMode():
        on_meta_device(module, torch.float32)
        traced = trace_compiled(module, module, [torch.empty(1, TOKENS, WIDTH, requires_grad=True)], "none")
    assert traced.kept == real


@pytest.mark.parametrize("mixer", ["attention", "hgrn2", "gla", "gsa", "mamba2"])
def test_every_mixer_is_traced_by_its_operation_for_gpus(mixer, monkeypatch):
    for name in ("forgetting_attention.chunked_forward", "gated_recurrence.chunked_recurrence"):
        folder, function = name.split(".")
        monkeypatch.setattr(sys.modules[f"kernels.{folder}"], function, None)  # the ways of the processor
    parts = Network(config(mixers=mixer, forget_gate="none")).parts(setup())
    work = parts.blocks[0].forward.work, parts.blocks[0].backward.work
    assert [sum(x.mixing.values()) for x in work] == ([2, 2] if mixer == "gsa" else [1, 1])
    assert all(x.backward is backward for backward, one in zip((False, True), work, strict=True) for x in one.mixing)


def test_products_are_counted_exactly():
    given = config(forget_gate="none")
    network = Network(given)
    for compile in (False, True):
        block = network.parts(setup(compile=compile)).blocks[0]
        matrices = 4 * WIDTH * WIDTH + 3 * WIDTH * 48
        forward, backward = (
            sum(product.flops * number for product, number in one.work.products.items())
            for one in (block.forward, block.backward)
        )
        assert (forward, backward) == (2 * matrices * TOKENS, 4 * matrices * TOKENS)


@pytest.mark.parametrize("compile", [False, True])
def test_recomputation_keeps_less_and_computes_more(compile):
    network = Network(config(qk_norm=True, output_gate=True, kv_shift=True))
    found = {policy: network.parts(setup(compile=compile, recomputation=policy)).blocks[0] for policy in POLICIES}
    kept = [found[policy].kept - found[policy].casts for policy in POLICIES]
    assert kept[0] > kept[1] > kept[2] == TOKENS * WIDTH * 4

    def flops(policy):
        return sum(p.flops * n for p, n in found[policy].backward.work.products.items())

    assert flops("full") > flops("none") == flops("selective")
    assert sum(found["full"].backward.work.mixing.values()) == 2  # forward again, and backward


POLICIES = ("none", "selective", "full")


def test_every_nth_block_is_computed_again():
    network = Network(config(num_layers=4))
    kept = [block.kept for block in network.parts(setup(recomputation=2)).blocks]
    assert kept[0] == kept[2] > kept[1] == kept[3]


def test_compiled_blocks_move_less_and_keep_less():
    network = Network(config(qk_norm=True, output_gate=True, kv_shift=True))
    eager, compiled = (network.parts(setup(compile=compile)).blocks[0] for compile in (False, True))
    assert compiled.kept < eager.kept
    assert compiled.forward.work.traffic < eager.forward.work.traffic / 2
    assert compiled.backward.work.traffic < eager.backward.work.traffic / 2
