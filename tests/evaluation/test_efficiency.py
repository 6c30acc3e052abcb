"""`job=measure benchmark=efficiency`: the bytes model, cells from steps, the report of invented times, user errors."""

import csv
import dataclasses
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evaluation.efficiency import job, measuring, report, subjects
from evaluation.efficiency.bytes_model import MODULES, LayerBytes, limit, saving
from evaluation.efficiency.cells import DecodedCell, Steps, measured_lengths
from evaluation.efficiency.job import Settings
from evaluation.efficiency.measuring import Measured
from evaluation.efficiency.models import NamedModel
from evaluation.efficiency.pictures import draw
from evaluation.efficiency.subjects import Pool, Subject
from kernels.forgetting_attention.decode import kernel
from lit_modules.generation import fused_blocks
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM, export_pretrained

SIGMA = {"hidden_size": 2048, "num_heads": 32, "num_key_heads": 4, "num_value_heads": 16, "augmented_query_dim": 3072}
SIZES = {
    "model": LayerBytes.of(PalimpsestConfig(**SIGMA)),
    "against": LayerBytes.of(PalimpsestConfig(**SIGMA | {"num_key_heads": 16, "augmented_query_dim": None})),
}
BATCHES, PREFIXES, OUTPUTS = (1, 32), (0, 2048, 65536), (2048, 65536)
NAMES = {"model": "sigma", "against": "std"}


def saved_reads(batch, prefix, output):
    """What the paper's layer saves of the bytes read for queries, keys and values: stores are left out."""
    read = {side: each.of_output(batch, prefix, output, folded=False) for side, each in SIZES.items()}
    return 100 * saving(*(read[side]["queries"] + read[side]["attention"] for side in ("model", "against")))


@pytest.mark.parametrize(
    ("batch", "prefix", "output", "right"),
    [(1, 65536, 65536, 27.6), (1, 16384, 2048, -14), (32, 65536, 65536, 37.2), (32, 0, 2048, 8.8)],
)
def test_the_bytes_that_sigma_reads_save_what_was_computed_by_hand(batch, prefix, output, right):
    assert saved_reads(batch, prefix, output) == pytest.approx(right, abs=0.5 if right == -14 else 0.05)


def test_the_sizes_of_a_layer_are_those_of_its_matrices():
    assert limit(SIZES["model"], SIZES["against"]) == 0.375
    augmented = 3 * 2048 * 3072 * 2
    assert augmented == pytest.approx(37.7e6, rel=2e-3)
    assert SIZES["model"].queries == augmented + 2 * 2048**2
    assert SIZES["model"].folded == augmented
    assert SIZES["against"].queries == SIZES["against"].folded == 2 * 2048**2
    assert SIZES["model"].others == 2 * (2048 * (4 + 16) * 64 + 2048**2)
    found = SIZES["model"].of_output(3, 10, 2, folded=True)
    assert found["attention"] == 3 * 2560 * (11 + 12)  # tokens 11 and 12 read themselves and all before
    assert found["cache"] == 3 * 2560 * 2
    assert found["total"] == sum(found[module] for module in MODULES)
    assert found["layer"] == found["total"] + 2 * SIZES["model"].others


def test_a_cell_is_the_sum_of_its_steps():
    lengths = measured_lengths(131072)
    assert (lengths[0], lengths[-1], len(lengths)) == (1, 131072, 20)
    assert np.diff(lengths).min() > 0
    straight = [2e-6 + 1e-9 * length for length in lengths]
    steps = Steps(lengths, straight, [2 * each for each in straight], queries=3e-6, cache=1e-6)
    found = steps.of_output(2048, 4096)
    exact = sum(2e-6 + 1e-9 * length for length in range(2049, 2048 + 4096 + 1))
    assert found["attention"] == pytest.approx(exact, rel=1e-12)
    assert found["layer"] == pytest.approx(2 * exact, rel=1e-12)
    assert (found["queries"], found["cache"]) == (4096 * 3e-6, 4096 * 1e-6)
    curved = [(length + 5e3) ** 0.5 for length in lengths]
    exact = sum((length + 5e3) ** 0.5 for length in range(1, 65537))
    assert Steps(lengths, curved, curved, 0, 0).of_output(0, 65536)["attention"] == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("longest", [1, 2, 200, 256, 257, 5000])
def test_measured_lengths_reach_from_one_to_the_longest(longest):
    lengths = measured_lengths(longest)
    assert lengths == sorted(set(lengths))
    assert (lengths[0], lengths[-1]) == (1, longest)


def invented(kernels=True):
    """Times of a GPU that moves 4 TB/s and takes 3 microseconds for each launch."""
    launch, rate, lengths = 3e-6, 4e12, measured_lengths(131072)
    steps, times = {}, {}
    for batch in BATCHES:
        steps[batch], times[batch] = {}, {}
        for side, size in SIZES.items():
            attention = [2 * launch + batch * length * size.per_token / rate for length in lengths]
            ways = {"as modules": 6 * launch, "in fused products": launch + size.queries / rate}
            if side == "model":
                ways["in fused products, folded"] = 2 * launch + size.folded / rate
            queries = list(ways.values())[-1]
            layer = [each + queries + 3 * launch for each in attention]
            found = Steps(lengths, attention, layer, queries, launch, ways)
            exact = found.of_output(2048, 2048)["layer"]
            steps[batch][side] = dataclasses.replace(found, decoded=DecodedCell(2048, 2048, exact / 1.01, exact))
            times[batch][side] = (
                {
                    prefix: {"split": launch + batch * (prefix + 5) * size.per_token / rate, "combine": launch}
                    for prefix in PREFIXES
                }
                if kernels
                else {}
            )
    errors = {side: {"queries": 4e-3, "attention": 2e-3} for side in SIZES}
    return Measured(4e12, errors, steps, times)


def make(measured):
    settings = dataclasses.asdict(Settings("sigma", "std", BATCHES, PREFIXES, OUTPUTS))
    conditions = {"device": "an invented GPU", "dtype": "bfloat16", "versions": {}, "commit": "none", "date": "today"}
    made = report.make_report(SIZES, BATCHES, PREFIXES, OUTPUTS, measured)
    return json.loads(json.dumps(made | {"names": NAMES, "settings": settings} | conditions))


def cell_of(made, batch, prefix, output):
    return report.cells_of(made, batch)[prefix, output]


def test_savings_of_invented_times_are_those_of_their_sums():
    made = make(invented())
    assert len(made["cells"]) == len(BATCHES) * len(PREFIXES) * len(OUTPUTS)
    for batch in BATCHES:
        mean, seconds = 65536 + 65537 / 2, {}
        for side, size in SIZES.items():
            queries = (2 if side == "model" else 1) * 3e-6 + size.folded / 4e12
            seconds[side] = 65536 * (queries + 3e-6 + 6e-6 + batch * mean * size.per_token / 4e12)
        found = report.saved(cell_of(made, batch, 65536, 65536), "seconds", "total")
        assert found == pytest.approx(1 - seconds["model"] / seconds["against"], rel=1e-9)
    assert report.saved(cell_of(made, 32, 65536, 65536), "seconds", "attention") == pytest.approx(0.375, abs=1e-3)
    assert report.logged_values(made)["batch_32/largest_saving"] == pytest.approx(found, rel=1e-9)


def test_the_tables_name_every_part():
    text = report.as_markdown(make(invented()))
    for part in (
        "# Decoding: sigma against std", "37.5% at most", "## Batch 32", "| 64k | ", "Kernels: microseconds",
        "| 64k/64k | attention |", "| sigma | in fused products, folded | 32 |", "| std | 32 | 2k/2k |", "| +1.0 |",
        "queries 4.0e-03", "4000 GB/s", "an invented GPU",
    ):  # fmt: skip
        assert part in text
    assert "an invented GPU" in text


def test_the_way_that_decoding_takes_saves_what_the_cell_says():
    made = make(invented())
    for batch in BATCHES:
        cell, steps = cell_of(made, batch, 2048, 2048), made["measured"]["steps"][str(batch)]["model"]
        *others, own = (report.saved_by_way(cell, seconds) for seconds in steps["ways"].values())
        assert own == pytest.approx(report.saved(cell, "seconds", "total"), rel=1e-9)
        assert others[0] < own


def test_without_kernels_the_report_says_so():
    text = report.as_markdown(make(invented(kernels=False)))
    assert "Kernels have no times: the profiler sees none" in text
    assert "Kernels: microseconds" not in text


def test_the_csv_file_has_a_line_for_each_cell_and_module():
    for measured in (invented(), None):
        made = make(measured)
        lines = list(csv.DictReader(io.StringIO(report.as_csv(made))))
        assert len(lines) == 5 * len(made["cells"])
        last = lines[-2]
        assert (last["batch"], last["prefix"], last["output"], last["module"]) == ("32", "65536", "65536", "total")
        assert float(last["bytes_saving"]) == pytest.approx(0.372, abs=1e-3)
        assert bool(last["saving"]) == (measured is not None)
    first = list(csv.DictReader(io.StringIO(report.as_csv(make(invented())))))[:3]
    assert sum(float(line["model_share"]) for line in first) == pytest.approx(1)


@pytest.mark.parametrize("timed", [True, False])
def test_pictures_are_drawn_for_each_figure_of_the_paper(tmp_path, timed):
    made = make(invented() if timed else None)
    made["settings"]["batches"] = [32]
    assert draw(made, tmp_path / "efficiency.png") == tmp_path / "efficiency.total.png"
    parts = ("kernels", "queries", "cache", "attention", "total") if timed else ("total",)
    assert {path.name for path in tmp_path.iterdir()} == {f"efficiency.{part}.png" for part in parts}


SMALL = {"vocab_size": 48, "hidden_size": 32, "num_layers": 3, "num_heads": 4, "forget_gate": "none", "rope": True}


@pytest.fixture
def small(monkeypatch):
    """Subjects of two small models on the CPU, and a pool for their caches."""
    monkeypatch.setattr(subjects, "UNCACHED", 2e4)
    augmented = SMALL | {"num_key_heads": 1, "num_value_heads": 2, "augmented_query_dim": 40}
    plain = SMALL | {"num_key_heads": 2, "num_value_heads": 2, "rope": False}
    with torch.no_grad():
        found = {
            side: Subject(NamedModel(side, PalimpsestConfig(**sizes)), torch.float32, torch.device("cpu"))
            for side, sizes in (("model", augmented), ("against", plain))
        }
        pool = Pool(subjects.pool_size(list(found.values()), [1, 3], 61), torch.float32, torch.device("cpu"))
    return found, pool


@torch.no_grad()
@pytest.mark.parametrize(("side", "copies"), [("model", 2), ("against", 5)])
def test_the_measured_step_is_that_of_the_layer(small, side, copies):
    subject, pool = small[0][side], small[1]
    assert len(subject.layers) == copies  # 15 and 4 kB of query matrices, of 20 kB
    norm, attention = subject.modules[1]
    rows, positions = subject.rows(3), subject.positions_of(3, 7)
    (cache,) = subject.caches(pool, 3, 9, 6, 1)
    right = rows[:, None] + attention(norm(rows[:, None]), positions, cache)
    (cache,) = subject.caches(pool, 3, 9, 7, 1)  # counts the new token, as decoding does
    torch.testing.assert_close(subject.layers[1].step(rows, positions, cache), right[:, 0], atol=1e-5, rtol=1e-5)
    queries, ways = attention.q_proj(norm(rows)), subject.query_ways()
    for way in ways.values():
        right = queries if side == "against" else attention.augmented_q(queries)
        torch.testing.assert_close(way[1](rows), right, atol=1e-5, rtol=1e-5)
    assert ("in fused products, folded" in ways) == (side == "model")


@torch.no_grad()
def test_caches_in_the_pool_are_apart(small):
    subject, pool = small[0]["model"], small[1]
    caches = subject.caches(pool, 2, 5, 5, 4)
    assert len(caches) == 4
    for number, cache in enumerate(caches):
        cache.keys.fill_(number)
        cache.values.fill_(-1 - number)
    for number, cache in enumerate(caches):
        assert bool((cache.keys == number).all() and (cache.values == -1 - number).all())
    assert caches[0].keys.shape == (2, 5, 1, 8)
    assert caches[0].values.shape == (2, 5, 2, 8)
    assert len(subject.caches(pool, 3, 61, 1, 10**6)) * 3 * 61 * 24 <= len(pool.numbers)


def replay_on_the_cpu(calls):
    """Run every call once, and say that it took a microsecond."""
    for call in calls:
        call()
    return 1e-6


@pytest.fixture
def without_graphs(monkeypatch):
    monkeypatch.setattr(measuring, "replay_seconds", replay_on_the_cpu)
    monkeypatch.setattr(measuring, "profiled", lambda run: run() or {"split": 3e-4, "combine": 1e-4})
    monkeypatch.setattr(measuring, "captured", lambda run: run() or SimpleNamespace(replay=run))
    monkeypatch.setattr(measuring, "elapsed", lambda run, times: [run() for _ in range(times)] and 1e-3 * times)


def test_everything_is_measured_for_both_models_and_each_batch(small, without_graphs):
    pair, pool = small
    found = measuring.measure(pair, [1, 3], measured_lengths(60), [0, 20], (20, 30), pool)
    assert found.copy_rate > 0
    for errors in found.errors.values():
        assert all(error < 1e-5 for error in errors.values())
    for batch in (1, 3):
        for side in pair:
            steps = found.steps[batch][side]
            assert (len(steps.attention), len(steps.layer)) == (len(steps.lengths),) * 2
            assert steps.queries == steps.cache == 1e-6
            layers = len(pair[side].caches(pool, batch, 51, 20, 3))
            assert steps.decoded == DecodedCell(20, 30, pytest.approx(0.03 / layers), pytest.approx(30e-6))
            assert set(found.kernels[batch][side]) == {0, 20}
    assert found.kernels[1]["model"][20]["split"] > 0


def test_nothing_is_timed_where_results_are_wrong(small, without_graphs, monkeypatch):
    pair, pool = small
    right = fused_blocks.forgetting_attention
    monkeypatch.setattr(fused_blocks, "forgetting_attention", lambda *q_k_v, **rows: 1.1 * right(*q_k_v, **rows))
    with pytest.raises(RuntimeError, match=r"model: relative errors against float32 are .* nothing is timed"):
        measuring.measure(pair, [1], measured_lengths(60), [0], (0, 30), pool)


def test_a_profiler_that_sees_no_kernels_leaves_them_out(small, without_graphs, monkeypatch):
    monkeypatch.setattr(measuring, "profiled", lambda run: {"split": 0.0, "combine": 0.0})
    pair, pool = small
    assert measuring.kernel_times(pair["model"], 1, [0, 20], pool) == {}


def test_the_kernels_are_named_as_they_are():
    assert all(hasattr(kernel, name) for name in measuring.KERNELS.values())


ASKED = ("job=measure", "benchmark=efficiency", "device=cpu")


def test_the_command_computes_the_bytes_model_without_a_gpu(run, tmp_path):
    given = (*ASKED, "benchmark.batches=[32]", f"output={tmp_path}")
    for least in ("2048", "4096"):
        found = run(*given, f"benchmark.outputs=[65536,{least}]", tiny=False)
        assert found.status == 0, found.err
    assert "the bytes model alone: times need a GPU, and this is a cpu" in found.err
    assert "Nothing was timed" in found.out
    made = json.loads((tmp_path / "evaluation" / "efficiency.json").read_text())
    assert made["limit"] == 0.375
    assert made["names"] == {"model": "sigma_1_5b", "against": "sigma_1_5b_std"}
    assert made["settings"]["outputs"] == [4096, 65536]
    assert report.saved(cell_of(made, 32, 65536, 65536), "bytes_as_defined", "total") == pytest.approx(0.372, abs=1e-3)
    kinds = sorted(path.suffix for path in (tmp_path / "evaluation").iterdir())
    assert kinds == sorted([".csv", ".json", ".md", ".png"] * 2)  # of the first command too, renamed


def test_folders_of_ones_own_are_compared(run, tmp_path):
    sizes = {"num_layers": 1, "intermediate_size": 48, "vocab_size": 48, "forget_gate": "none", "rope": True}
    for name, keys in (("few", 1), ("many", 4)):
        config = PalimpsestConfig(hidden_size=32, num_heads=4, num_key_heads=keys, num_value_heads=4, **sizes)
        export_pretrained(PalimpsestForCausalLM(config), tmp_path / name / "export")  # many: a stock Llama
    models = (f"benchmark.model={tmp_path}/few", f"benchmark.against={tmp_path}/many/export")
    found = run(*ASKED, *models, f"runs_dir={tmp_path}/runs", tiny=False)
    assert found.status == 0, found.err
    made = json.loads((tmp_path / "runs" / "efficiency" / "evaluation" / "efficiency.json").read_text())
    assert made["limit"] == 0.375
    assert made["names"] == {"model": "few", "against": "export"}
    llama = tmp_path / "many" / "export" / "config.json"
    llama.write_text(llama.read_text().replace('"attention_bias": false', '"attention_bias": true'))
    found = run(*ASKED, *models, f"runs_dir={tmp_path}/runs", tiny=False)
    assert found.status == 2
    assert "/many/export has biases in its attention" in found.err
    config = PalimpsestConfig(**SMALL)
    alike = {side: NamedModel(f"{side}/export", config) for side in ("model", "against")}
    assert job.names_of(alike) == {"model": "model/export", "against": "against/export"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("checkpoint=runs/x", "checkpoint=runs/x is not read by benchmark=efficiency: give benchmark.model=FOLDER"),
        ("benchmark.model=sigma_2b", "benchmark.model=sigma_2b is not known: give one of fox_llama_125m, "),
        ("benchmark.model=_sigma", "benchmark.model=_sigma is not known: give one of "),
        ("benchmark.model=fox_pro_125m", "=fox_pro_125m has kv_shift, qk_norm, output_norm, output_gate, forget_gate="),
        ("benchmark.model=gla_125m", "benchmark.model=gla_125m has layers of gla, which is not measured"),
        ("benchmark.against=sigma_1_5b", "benchmark.against is the same as benchmark.model: give another one"),
        ("benchmark.model=conf", "benchmark.model=conf has no config.json"),
        ("benchmark.model=[a]", "benchmark.model=['a']: give text"),
        ("benchmark.batches=[]", "benchmark.batches is empty: give one or more numbers"),
        ("benchmark.batches=[0]", "benchmark.batches=0: give a whole number, 1 or more"),
        ("benchmark.outputs=[a,2]", "benchmark.outputs=a: give a whole number, 1 or more"),
        ("benchmark.prefixes=-1", "benchmark.prefixes=-1: give a whole number, 0 or more"),
        ("dtype=float64", "dtype=float64: give one of auto, bfloat16, float16, float32"),
        ("device=gpu", "device=gpu cannot be used"),
    ],
)  # fmt: skip
def test_a_mistake_ends_in_one_line(run, given, line, command, tmp_path):
    (command.folder / "conf").mkdir(exist_ok=True)
    key = given.partition("=")[0]
    kept = [each for each in ASKED if each.partition("=")[0] != key]
    found = run(*kept, given, f"output={tmp_path}/out", tiny=False)
    assert found.status == 2
    assert line in found.err
    assert len(found.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_a_gpu_measures_what_it_decodes():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA: times are of its graphs and kernels")
    sizes = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "forget_gate": "none", "rope": True}
    augmented = sizes | {"num_key_heads": 1, "num_value_heads": 4, "augmented_query_dim": 768}
    device, batches, lengths = torch.device("cuda"), [1, 32], measured_lengths(8192)
    with torch.no_grad():
        pair = {
            side: Subject(NamedModel(side, PalimpsestConfig(**each)), torch.bfloat16, device)
            for side, each in (("model", augmented), ("against", sizes))
        }
        pool = Pool(subjects.pool_size(list(pair.values()), batches, 8193), torch.bfloat16, device)
    found = measuring.measure(pair, batches, lengths, [0, 2048], (1024, 512), pool)
    assert 1e11 < found.copy_rate < 1e13
    for batch in batches:
        for side, subject in pair.items():
            steps = found.steps[batch][side]
            assert steps.decoded.interpolated == pytest.approx(steps.decoded.decoded, rel=0.25)
            least = batch * 8192 * subject.sizes.per_token / (1.5 * found.copy_rate)
            assert steps.attention[-1] > least
            assert found.kernels[batch][side][2048]["split"] > found.kernels[batch][side][0]["split"] > 0
            assert found.kernels[batch][side][2048]["split"] < 2 * np.interp(2053, lengths, steps.attention)
