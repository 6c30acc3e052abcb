"""The arithmetic of ranks: which share weights, sequences, heads, and which read data of their own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_modules.parallel import choosing
from lit_modules.parallel.layout import make_layout
from lit_modules.parallel.strategies import DataParallel, OneDevice, Sharded

SIZES = st.sampled_from([1, 2, 3, 4, 8])


@given(copies=SIZES, shards=SIZES, context=SIZES, tensor=SIZES)
def test_sizes_that_divide_the_ranks_account_for_every_rank(copies, shards, context, tensor):
    layout = make_layout(copies * shards * context * tensor, shard=shards * context, context=context, tensor=tensor)
    assert (layout.replicate, layout.shard) == (copies, shards * context)
    assert layout.data * layout.context * layout.tensor == copies * shards * context * tensor
    assert layout.data == copies * shards


def test_without_a_size_the_weights_are_spread_over_all_ranks_that_tensor_parallelism_leaves():
    assert make_layout(16, shard=None, context=2, tensor=4).shard == 4
    assert make_layout(16, shard=None, context=1, tensor=1).replicate == 1


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor": 3}, r"strategy\.tensor_parallel_size=3 does not divide the 8 ranks"),
        ({"context": 3}, r"strategy\.context_parallel_size=3 does not divide the 8 ranks"),
        ({"tensor": 4, "context": 4}, r"strategy\.context_parallel_size=4 does not divide the 2 ranks"),
        ({"shard": 3}, r"strategy\.shard_size=3 must divide the 8 ranks"),
        ({"shard": 2, "context": 4}, r"strategy\.shard_size=2 must divide .* multiple of .*context_parallel_size=4"),
        ({"shard": 0}, r"strategy\.shard_size=0: give a whole number, 1 or more"),
        ({"tensor": True}, r"strategy\.tensor_parallel_size=true: give a whole number"),
        ({"context": 1.5}, r"strategy\.context_parallel_size=1\.5: give a whole number"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_their_key(sizes, words):
    with pytest.raises(ValueError, match=words) as raised:
        make_layout(8, **{"shard": None, "context": 1, "tensor": 1, **sizes})
    assert "\n" not in str(raised.value)


def on(strategy, devices, nodes, rank):
    """A strategy as if it ran there."""
    strategy.parallel_devices = [torch.device("cpu")] * devices
    strategy.num_nodes = nodes
    strategy.cluster_environment = type("Environment", (), {"global_rank": lambda self: rank})()
    return strategy


def test_ranks_that_share_a_sequence_or_its_heads_read_the_same_batches():
    for size, readers in ((1, range(8)), (2, [0, 0, 1, 1, 2, 2, 3, 3]), (4, [0] * 4 + [1] * 4)):
        shared = [on(DataParallel(context_parallel_size=size), 4, 2, r).distributed_sampler_kwargs for r in range(8)]
        assert [part["rank"] for part in shared] == list(readers)
        assert {part["num_replicas"] for part in shared} == {8 // size}
    both = [
        on(Sharded(context_parallel_size=2, tensor_parallel_size=2), 4, 2, r).distributed_sampler_kwargs
        for r in range(8)
    ]
    assert [part["rank"] for part in both] == [0] * 4 + [1] * 4


def test_hsdp_spreads_the_weights_within_a_node():
    layout = on(Sharded(shard_size="node"), 4, 2, 0).layout
    assert (layout.replicate, layout.shard, layout.data) == (2, 4, 8)
    layout = on(Sharded(shard_size="node", tensor_parallel_size=2), 4, 2, 0).layout
    assert (layout.replicate, layout.shard, layout.tensor) == (2, 2, 2)


def test_a_word_for_the_shards_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"strategy\.shard_size=nodes is not known: give a number of ranks, node, or"):
        Sharded(shard_size="nodes")


def test_a_setting_that_ddp_does_not_have_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"strategy\.static_grph is not known: did you mean strategy\.static_graph\?"):
        DataParallel(static_grph=True)


@pytest.mark.parametrize(
    ("devices", "nodes", "parameters", "expected"),
    [
        (1, 1, 10e9, "one"),
        (8, 1, 760e6, "ddp"),
        (8, 4, 1.5e9, "ddp"),
        (8, 1, 10e9, "fsdp"),
        (8, 4, 10e9, "hsdp"),
        (8, 8, 100e9, "fsdp"),
    ],
)
def test_the_default_is_the_simplest_that_the_devices_hold(monkeypatch, devices, nodes, parameters, expected):
    monkeypatch.setattr(choosing, "device_memory", lambda accelerator: 80 * 2**30)
    strategy = choosing.choose_strategy("cpu", devices, nodes, int(parameters))
    if isinstance(strategy, Sharded):
        name = "hsdp" if strategy.shard_size == "node" else "fsdp"
    else:
        name = {OneDevice: "one", DataParallel: "ddp"}[type(strategy)]
    assert name == expected
