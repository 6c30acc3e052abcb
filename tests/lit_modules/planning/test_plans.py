"""Memory, speed, and what a plan proposes."""

import pytest
import torch

from common.gpus import DATA_SHEETS, peak_flops
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM, export_pretrained
from lit_modules.planning import Planner, Setup, find_gpu
from lit_modules.planning.speed import OperationTimer
from lit_modules.planning.work import Product, product_of

CONFIG = {"vocab_size": 4096, "hidden_size": 512, "num_layers": 4, "num_heads": 8, "intermediate_size": 1408}
LENGTH = 4096


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(PalimpsestConfig(**CONFIG, qk_norm=True, output_gate=True))


def setup(**others) -> Setup:
    given = {"gpu": "h200", "sequence_length": LENGTH, "micro_batch_size": 4, "batch_tokens": 64 * LENGTH}
    return Setup(**given | {"fused_optimizer": True} | others)


def test_a_checkpoint_is_as_large_as_a_real_one(tmp_path):
    config = PalimpsestConfig(vocab_size=128, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=48)
    model = PalimpsestForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [x for values in optimizer.state_dict()["state"].values() for x in values.values()]
    real = sum(x.numel() * x.element_size() for x in (*model.state_dict().values(), *state))
    plan = Planner(config).plan(setup(sequence_length=64), 10**6)
    assert plan.parameters == sum(p.numel() for p in model.parameters())
    assert plan.checkpoint == real
    weights = next(export_pretrained(model, tmp_path / "export").glob("*.safetensors")).stat().st_size
    assert plan.export == pytest.approx(weights, abs=8192)  # the file has a header
    assert weights >= plan.export


def test_more_tokens_take_more_memory_and_no_strategy_takes_more_than_ddp(planner):
    peaks = [planner.estimate(setup(micro_batch_size=size)).memory.peak for size in (1, 2, 4)]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]
    peaks = [
        planner.estimate(setup(strategy=name, devices_per_node=8, nodes=2)).memory.peak
        for name in ("ddp", "hsdp", "fsdp")
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_parts_of_the_steady_memory_are_exact(planner):
    weights = 4 * planner.network.parameters
    memory = planner.estimate(setup()).memory
    assert (memory.weights, memory.optimizer, memory.gradients) == (weights, 2 * weights, weights)
    spread = planner.estimate(setup(strategy="fsdp", devices_per_node=8)).memory
    assert (spread.weights, spread.optimizer) == (weights / 8, 2 * weights / 8)


def test_an_optimizer_that_is_not_fused_needs_room_for_another_copy():
    planner = Planner(PalimpsestConfig(**CONFIG | {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 1024}))
    few = setup(micro_batch_size=1, sequence_length=64, batch_tokens=64, fused_optimizer=False)
    memory = planner.estimate(few).memory
    assert memory.at == "the optimizer's step"
    assert memory.peak == pytest.approx(5 * memory.weights, rel=0.1)


def test_splitting_sequences_or_heads_takes_less_memory_of_each_gpu(planner):
    whole = planner.estimate(setup(strategy="fsdp", devices_per_node=4)).memory.activations
    for shared in ({"context": 4}, {"tensor": 4}):
        assert planner.estimate(setup(strategy="fsdp", devices_per_node=4, **shared)).memory.activations < whole


def test_more_gpus_are_faster_but_never_more_than_that(planner):
    one = planner.estimate(setup(batch_tokens=4 * LENGTH)).speed.tokens_per_second
    for name in ("ddp", "fsdp"):
        rate = planner.estimate(setup(strategy=name, devices_per_node=4)).speed.tokens_per_second
        assert one < rate < 4.6 * one  # gathered weights need no cast; gradients are clipped less often
    near, far = (
        planner.estimate(setup(strategy="fsdp", devices_per_node=8, nodes=2, network=network)).speed.tokens_per_second
        for network in (50e9, 1e9)
    )
    assert far < near


def test_a_faster_card_is_faster_and_recomputation_slower(planner):
    rates = [planner.estimate(setup(gpu=gpu)).speed.tokens_per_second for gpu in ("l4", "a100", "h100", "b200")]
    assert rates == sorted(rates)
    rates = [planner.estimate(setup(recomputation=x)).speed.tokens_per_second for x in ("full", "selective", "none")]
    assert rates == sorted(rates)


def test_products_of_rows_that_are_not_aligned_are_slower():
    aligned, not_aligned = (Product(1, 4096, 1024, 50000, 2, aligned) for aligned in (True, False))
    clock = OperationTimer(find_gpu("h200"), setup())
    assert clock.product(not_aligned) > 3 * clock.product(aligned)
    left = torch.empty(64, 32, dtype=torch.bfloat16)
    for columns, expected in ((48, True), (49, False)):
        right = torch.empty(columns, 32, dtype=torch.bfloat16).T
        assert product_of([left, right], left @ right).aligned is expected


def test_what_does_not_fit_is_mended_by_the_changes_named(planner):
    large = setup(gpu="l4", micro_batch_size=64, fused_optimizer=False)
    changes = planner.plan(large, 10**9).changes
    assert not planner.estimate(large).fits
    assert [change.estimate.fits for change in changes] == [False] * (len(changes) - 1) + [True]
    assert changes[-1].overrides.startswith("data.micro_batch_size=")
    assert planner.estimate(changes[-1].estimate.setup).fits
    peaks = [change.estimate.memory.peak for change in changes]
    assert peaks == sorted(peaks, reverse=True)


def test_a_model_too_large_for_one_gpu_is_spread_over_more():
    planner = Planner(PalimpsestConfig(**CONFIG | {"hidden_size": 8192, "num_heads": 64, "intermediate_size": 22016}))
    changes = planner.plan(setup(gpu="l4", micro_batch_size=1), 10**9).changes
    assert "strategy=fsdp trainer.devices=" in changes[-1].overrides
    assert changes[-1].estimate.fits


def test_long_sequences_are_shared_when_nothing_else_helps():
    planner = Planner(PalimpsestConfig(**CONFIG | {"vocab_size": 1024}))
    long = setup(gpu="l4", sequence_length=2**19, micro_batch_size=1, batch_tokens=2**22, recomputation="full")
    assert "strategy.context_parallel_size=" in planner.plan(long, 10**9).changes[-1].overrides


def test_what_fits_is_told_what_would_be_faster(planner):
    plan = planner.plan(setup(micro_batch_size=1, recomputation="full", fused_optimizer=False), 10**9)
    assert plan.estimate.fits
    assert "compile=true" in plan.changes[0].overrides
    assert "activation_checkpointing=none" in plan.changes[-1].overrides
    rates = [change.estimate.speed.tokens_per_second for change in plan.changes]
    assert rates == sorted(rates)
    assert rates[0] > plan.estimate.speed.tokens_per_second


def test_without_a_strategy_the_plan_is_of_the_one_that_training_takes():
    given = {"sequence_length": 512, "micro_batch_size": 1, "batch_tokens": 2**20, "gpu": "l4"}
    small, large = (Planner(PalimpsestConfig(**CONFIG | {"vocab_size": size})) for size in (1024, 2_000_000))
    assert small.with_default_strategy(setup(**given)).strategy == "one"
    assert small.with_default_strategy(setup(**given, devices_per_node=8, nodes=2)).strategy == "ddp"
    assert large.with_default_strategy(setup(**given, devices_per_node=8, nodes=2)).strategy == "hsdp"
    assert large.with_default_strategy(setup(**given, devices_per_node=1, nodes=8)).strategy == "fsdp"


def test_every_card_whose_peak_is_known_can_be_planned_for():
    assert all(find_gpu(name).name == name and find_gpu(name).flops == peak_flops(name) for name in DATA_SHEETS)
    assert find_gpu("NVIDIA H200").name == find_gpu("h200").name == "H200"
    assert find_gpu("rtx_4090").name == "RTX 4090"
    assert find_gpu("NVIDIA H100 80GB HBM3").name == "H100"
    assert find_gpu("NVIDIA H100 NVL").name == "H100 NVL"
    assert find_gpu("NVIDIA GH200 480GB").memory == find_gpu("gh200").memory


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("a100", 79.2),
        ("a100-80gb", 79.2),
        ("a100-40gb", 39.4),
        ("A100 40 GB", 39.4),
        ("NVIDIA A100-PCIE-40GB", 39.4),
        ("NVIDIA A100-SXM4-80GB", 79.2),
        ("h200 141gb", 139.8),
        ("rtx 4090 24gb", 23.5),
    ],
)
def test_a_card_that_comes_with_more_or_less_memory_is_planned_with_its_own(name, gib):
    assert find_gpu(name).memory == gib * 2**30


@pytest.mark.parametrize(
    "name", ["a100-20gb", "h100 64gb", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "rtx 4090 laptop", "rtx 3090 ti"]
)
def test_a_part_of_a_card_and_memory_that_no_such_card_has_are_refused(name):
    with pytest.raises(ValueError, match=f"plan.gpu={name} is not "):
        find_gpu(name)


def test_a_card_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"plan\.gpu=h300 is not a card .* GB200, B200, .*RTX 3090$"):
        find_gpu("h300")
