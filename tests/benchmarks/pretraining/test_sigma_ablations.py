"""Sigma's ablations at small scale: the sweeps, the runner, the results and their report."""

import json
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
import torch
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from benchmarks.measuring.tables import read_csv
from benchmarks.pretraining.sigma_ablations import report, runs
from benchmarks.pretraining.sigma_ablations.cases import CASES, SELECTED, Pair, pairs, published
from benchmarks.pretraining.sigma_ablations.records import FILE, Result
from benchmarks.pretraining.sigma_ablations.runs import Runner, Training, gather, unrecorded, wanted
from lit_modules.launching import start
from lit_modules.networks import PalimpsestForCausalLM, count_parameters
from tests.conftest import ROOT
from tests.evaluation.compare.written_runs import write_run, write_yaml

EXPERIMENT = ROOT / "conf/experiment/sigma/ablation_small.yaml"
SIZE = {
    "num_key_heads": 8, "num_value_heads": 8, "key_head_dim": None, "augmented_query_dim": None,
    "intermediate_size": 1408,
}  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def commands() -> dict[int, list[str]]:
    """Return the arguments of each table's command in the experiment's comment, as a shell reads them."""
    lines = [line.removeprefix("#   ") for line in EXPERIMENT.read_text().splitlines() if line.startswith("#   ")]
    shell = 'palimpsest() { printf "%s\\0" "$@"; printf "\\n"; }\n' + "\n".join(lines)
    out = subprocess.run(["bash", "-euc", shell], capture_output=True, text=True, check=True).stdout
    tables = [int(line.rpartition("# table ")[2]) for line in lines if "# table " in line]
    return dict(zip(tables, [line.split("\0")[:-1] for line in out.splitlines()], strict=True))


def swept(arguments: list[str]) -> list[list[str]]:
    """Return the overrides of each run of a sweep."""
    return BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(arguments[1:]), None)[0]


def size_of(overrides: list[str]) -> dict[str, int | None]:
    """Compose a run; return the settings that tables change, checked against the network's parameters."""
    cfg = hydra.compose("config", ["data.source.path=/data", *overrides])
    with torch.device("meta"):
        model = PalimpsestForCausalLM(hydra.utils.instantiate(cfg.model, _convert_="all"))
    size = {key: cfg.model[key] for key in SIZE}
    key_dim = size["key_head_dim"] or 32
    keys = size["num_key_heads"] * key_dim
    matrices = 512 * (2 * 512 + keys + 32 * size["num_value_heads"]) + (32 * keys if key_dim != 32 else 0)
    matrices += 3 * 512 * ((size["augmented_query_dim"] or 0) + size["intermediate_size"])
    assert count_parameters(model).blocks == 8 * (matrices + 2 * 512) + 512, overrides
    return size


@pytest.fixture(scope="module", autouse=True)
def resolvers() -> None:
    start.register_resolvers()


@pytest.mark.parametrize("table", [1, 2, 4, 5, 6])
def test_one_command_is_one_table_of_the_paper(table):
    arguments = commands()[table]
    assert arguments[0] == "-m"
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        found = Counter(tuple(size_of(overrides).items()) for overrides in swept(arguments))
    own = {row.case for row in published() if row.table == table}
    if table == 6:  # the paper leaves out what its other tables have: each change alone
        own |= {"GQA-8, AugQ 768", "GQA-8, a quarter of the K heads", "GQA-8, half the K width"}
    assert found == Counter(tuple((SIZE | BY_NAME[name].settings).items()) for name in own)


def test_every_row_of_the_paper_is_a_case_and_every_case_a_row():
    rows = published()
    assert [sum(row.table == table for row in rows) for table in range(1, 7)] == [9, 6, 6, 8, 9, 5]
    assert {row.case for row in rows if not row.case.endswith(SELECTED)} == set(BY_NAME)
    assert len({tuple((SIZE | case.settings).items()) for case in CASES}) == len(CASES)
    for row in rows:  # a digit misread in a task shows in the mean
        tasks = [row.hellaswag, row.openbookqa, row.winogrande, row.arc, row.piqa, row.sciq, row.boolq, row.logiqa]
        assert sum([*tasks, row.lambada]) / 9 == pytest.approx(row.overall, abs=0.06), row
        same = [other.overall for other in rows if other.case == row.case]
        assert set(same) == {row.overall}


def test_equal_savings_are_equal_sizes():
    for pair in report.pairs()[:6]:
        first, second = (SIZE | BY_NAME[name].settings for name in (pair.first, pair.second))
        assert first["num_key_heads"] + first["num_value_heads"] == second["num_key_heads"] + second["num_value_heads"]
        extra = [each["intermediate_size"] + (each["augmented_query_dim"] or 0) for each in (first, second)]
        assert extra[0] == extra[1]


def options(folder: Path, **changes: object) -> Namespace:
    given = {"folder": folder, "output": folder, "text": "text", "processes": 2, "minutes": 1.0, "seeds": [0, 1],
             "tiers": 1, "cases": None, "overrides": []}  # fmt: skip
    return Namespace(**given | changes)


def finish(training: Training, loss: float = 3.0, overrides: tuple[str, ...] = ()) -> None:
    """Write the run of a training as it is once it has finished."""
    run = write_run(training.folder, loss, changes={"seed": training.seed}, gpus=1)
    given = ["experiment=sigma/ablation_small", *overrides, *training.case.overrides, f"seed={training.seed}"]
    write_yaml(run / ".hydra" / "overrides.yaml", given)


def test_the_most_important_runs_come_first_and_a_seed_of_all_before_the_next(tmp_path):
    ordered = wanted(options(tmp_path, tiers=3))
    assert len(ordered) == 2 * len(CASES)
    assert [each.case.tier for each in ordered] == sorted(each.case.tier for each in ordered)
    first = [(each.case.name, each.seed) for each in ordered[:7]]
    assert first[0] == ("GQA-8, a quarter of the K heads", 0)
    assert [seed for _, seed in first] == [0] * 6 + [1]
    with pytest.raises(ValueError, match=r"^--cases GQA8 is not known: did you mean GQA-8\?$"):
        wanted(options(tmp_path, cases=["GQA8"]))


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that lets runs be a line of Python, told the run's folder and log, instead of a training."""

    def simulate(code: str) -> None:
        def command(self: Training, options: Namespace) -> list[str]:
            return [sys.executable, "-c", f"import pathlib, sys, time\nrun = pathlib.Path(sys.argv[1])\n{code}",
                    str(self.folder)]  # fmt: skip

        monkeypatch.setattr(Training, "command", command)
        monkeypatch.setattr(runs, "PAUSE", 0.01)

    return simulate


START = "run.mkdir(parents=True); (run / 'starts.jsonl').touch(); "


def test_as_many_runs_as_processes_are_side_by_side_after_the_first_has_the_text(tmp_path, simulated):
    simulated(f"{START}(run / 'began').write_text(str(time.time())); time.sleep(.3); "
              "(run / 'ended').write_text(str(time.time()))")  # fmt: skip
    trainings = wanted(options(tmp_path))[:5]
    runner = Runner(options(tmp_path))
    runner.run(trainings)
    spans = [tuple(float((each.folder / name).read_text()) for name in ("began", "ended")) for each in trainings]
    at_once = [sum(begin <= moment < end for begin, end in spans) for moment, _ in spans]
    assert max(at_once) == 2
    assert spans == sorted(spans)
    assert runner.environment()["TRITON_CACHE_DIR"] == str(tmp_path / "compiled" / "triton")


def test_nothing_starts_that_would_end_after_the_time(tmp_path, simulated, capsys):
    simulated(f"{START}time.sleep(.5)")
    began = time.perf_counter()
    Runner(options(tmp_path, minutes=1.2 / 60, processes=1)).run(wanted(options(tmp_path)))
    assert time.perf_counter() - began < 5
    started = len(list(tmp_path.glob("runs/*/*/starts.jsonl")))
    assert 1 <= started <= 3
    assert f"the time is over: {12 - started} runs are left" in capsys.readouterr().out


def test_a_first_run_that_fails_ends_all_with_its_last_lines_and_a_later_one_only_itself(tmp_path, simulated, capsys):
    simulated("print('no such text'); sys.exit(2)")
    runner = Runner(options(tmp_path))
    runner.run(wanted(options(tmp_path)))
    assert len(runner.failed) == 1
    assert "no such text" in capsys.readouterr().out
    simulated(f"{START}sys.exit(int('one_v' in str(run)))")
    runner = Runner(options(tmp_path))
    runner.run(wanted(options(tmp_path)))
    assert [each.name for each in runner.failed] == ["GQA-4, one V head, seed 0", "GQA-4, one V head, seed 1"]


def test_finished_runs_are_lines_of_the_file_once_and_are_not_run_again(tmp_path):
    given = options(tmp_path)
    trainings = wanted(given)
    finish(trainings[0], 3.25)
    (line,) = gather(given, trainings)
    assert gather(given, trainings) == []
    assert read_csv(tmp_path / FILE, Result) == [line]
    assert (line.table, line.case, line.seed, line.held_out_loss) == ("1", "GQA-8, a quarter of the K heads", 0, 3.25)
    assert (line.overrides, line.gpu, line.tokens) == ("model.num_key_heads=2", "1 x NVIDIA H200", 4000)
    assert line.seconds == pytest.approx(2.5)
    assert len(unrecorded(given, trainings)) == len(trainings) - 1
    lost = wanted(options(tmp_path / "another machine"))
    assert len(unrecorded(options(tmp_path / "another machine", output=tmp_path), lost)) == len(trainings) - 1
    changed = options(tmp_path / "another machine", output=tmp_path, overrides=["optimizer.lr=1"])
    assert len(unrecorded(changed, lost)) == len(trainings)
    with pytest.raises(ValueError, match=r"had the overrides model.num_key_heads=2: give them, or another --folder"):
        unrecorded(options(tmp_path, overrides=["optimizer.lr=1"]), trainings)


def test_selected_values_are_the_runs_loss_and_what_the_cache_adds(tmp_path):
    given = options(tmp_path, tiers=2, cases=["GQA-8"], seeds=[3])
    trainings = wanted(given)
    finish(trainings[0], 3.0)
    gather(given, trainings)
    folder = trainings[0].folder / "evaluation"
    folder.mkdir()
    found = {"selective_v": {"value": 0.125, "standard_error": 0.01}, "kivi": {"value": 1.0, "standard_error": 0.1}}
    (folder / "perplexity_by_position.json").write_text(json.dumps(
        {"checkpoint": "x", "text": "t", "length": 4, "loss": {}, "difference": found}
    ))  # fmt: skip
    (line,) = gather(given, trainings)
    assert (line.table, line.case, line.held_out_loss) == ("3", "GQA-8, Sel.V", 3.125)
    assert line.setup == read_csv(tmp_path / FILE, Result)[0].setup


def line(case: str, loss: float, seed: int = 0, **changes: object) -> Result:
    settings = BY_NAME[case.removesuffix(f", {SELECTED}")].overrides
    own = {"table": "1", "case": case, "overrides": " ".join(settings), "seed": seed, "parameters": 28_000_000,
           "tokens": 60_000_000, "held_out_bytes": 4_000_000, "held_out_loss": loss, "bits_per_byte": loss / 3,
           "seconds": 60.0, "gpu": "1 x NVIDIA H200", "commit": "abc", "date": "2026-01-01T00:00:00"}  # fmt: skip
    return Result(**own | changes)


K, V = "GQA-8, a quarter of the K heads", "GQA-8, a quarter of the V heads"


@pytest.mark.parametrize(
    ("key", "verdict"),
    [
        ((3.00, 3.10, 3.05), "agrees"),
        ((3.30, 3.40, 3.35), "disagrees"),
        ((3.2, 3.31, 3.24), "undecided"),
        ((), "not run"),
    ],
)
def test_a_direction_agrees_disagrees_or_is_undecided(key, verdict):
    values = {V: (3.20, 3.30, 3.251), K: key}
    study = report.Study(
        [line(case, loss, seed) for case, losses in values.items() for seed, loss in enumerate(losses)]
    )
    pair = next(pair for pair in pairs() if (pair.first, pair.second) == (V, K))
    assert report.gain(pair) == pytest.approx(51.97 - 51.76)
    assert report.verdict(report.gain(pair), study.compared(pair)) == verdict


def test_the_paper_s_losses_turn_the_direction_round():
    study = report.Study(
        [line(case, loss, seed) for case, loss in (("MHA", 3.0), ("MHA, half the V heads", 3.5)) for seed in range(3)]
    )
    pair = Pair(1, "", "MHA", "MHA, half the V heads")
    assert report.gain(pair) == pytest.approx(-0.66)
    assert report.verdict(report.gain(pair), study.compared(pair)) == "agrees"  # worse there, a higher loss here


def test_the_page_has_every_table_and_says_what_was_not_run(tmp_path):
    with pytest.raises(ValueError, match="has no results: run benchmarks"):
        report.write(tmp_path)
    results = [line(case, loss + seed / 100, seed) for case, loss in ((K, 3.0), (V, 3.2)) for seed in range(3)]
    other = replace(results[0], tokens=1000)
    runs.append(tmp_path / FILE, [*results, other])
    page = report.write(tmp_path).read_text()
    assert "| a quarter of the K heads, not of the V heads | 1 | +0.21 | -0.2000 | 0.0000 | 3 paired | agrees |" in page
    assert page.count("## Table") == 2 * 6  # of two numbers of tokens, which are not compared
    row = "| -75% K heads (K = 4) | 51.97 | GQA-8, a quarter of the K heads (`model.num_key_heads=2`) "
    assert f"{row}| 3.0100 ± 0.0100 | 1.0033 | 0, 1, 2 | 28.0M |" in page
    assert "| GQA (K = V = 16), Sel.V-top100 | 52.08 | GQA-8, Sel.V | not measured |" in page
    assert "benchmark.chunk=1 'benchmark.caches=[full,selective_v]'" in page
    assert {path.name for path in tmp_path.glob("*.png")} == {"sigma_ablations.png", "sigma_ablations_2.png"}
