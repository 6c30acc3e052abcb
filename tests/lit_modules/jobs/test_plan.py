"""The command's answers, compared with measurements on a GPU."""

import csv
import functools
import json
from pathlib import Path

import hydra
import pytest

from lit_modules.planning import Estimate, Setup, eager, estimate

ROOT = Path(__file__).resolve().parents[3]
MEASURED = ROOT / "benchmarks" / "results" / "plan_against_measured.csv"


def rows() -> list[dict[str, str]]:
    if not MEASURED.is_file():
        return []
    with open(MEASURED, newline="") as handle:
        return [row for row in csv.DictReader(handle) if row["gpu"] and not row["note"]]


def name_of(row: dict[str, str]) -> str:
    return f"{row['model']}-{'compiled' if row['compile'] == 'True' else 'eager'}-{row['recomputation']}"


@functools.cache
def planned(index: int) -> Estimate:
    """Return the plan of a row, shared by its two tests."""
    row = rows()[index]
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra.compose("config", [f"model={row['model']}"])
    length, sequences, accumulation = (int(row[key]) for key in ("length", "sequences", "accumulation"))
    setup = Setup(
        gpu=row["gpu"],
        sequence_length=length,
        micro_batch_size=sequences,
        batch_tokens=length * sequences * accumulation,
        compile=row["compile"] == "True",
        recomputation=row["recomputation"],
        fused_optimizer=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        if row["torch"].startswith("2.11."):
            patch.setattr(eager, "NORMS_IN_FLOAT32", False)
        return estimate(hydra.utils.instantiate(cfg.model, _convert_="all"), setup)


NOT_MEASURED = pytest.mark.skipif(
    not rows(), reason="nothing was measured: benchmarks/pretraining/plan_against_measured.py"
)
EACH_ROW = pytest.mark.parametrize("index", [pytest.param(i, id=name_of(row)) for i, row in enumerate(rows())])


@NOT_MEASURED
@EACH_ROW
def test_what_was_measured_is_what_is_planned(index):
    assert planned(index).memory.peak == pytest.approx(int(rows()[index]["peak"]), rel=0.1)


@NOT_MEASURED
@EACH_ROW
def test_the_speed_that_was_measured_is_what_is_planned(index):
    measured = float(rows()[index]["tokens_per_second"])
    assert planned(index).speed.tokens_per_second == pytest.approx(measured, rel=0.15)


def test_an_experiment_is_planned_and_written_down(run, tmp_path):
    finished = run("job=plan", "experiment=fox/fox_pro_125m", f"output={tmp_path}/plan", tiny=False)
    assert finished.status == 0, finished.err
    for words in ("1 x H200, one device", "bfloat16 copies of weights", "tokens/s", "it fits", "compile=true"):
        assert words in finished.out
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert plan["parameters"] - 2 * 50257 * 768 == pytest.approx(85.3e6, rel=1e-3)  # in the blocks
    assert sum(plan["memory_bytes"].values()) == pytest.approx(plan["peak_bytes"], abs=8)
    assert plan["seconds"] == pytest.approx(plan["tokens"] / plan["tokens_per_second"])
    assert plan["fits"]
    assert (tmp_path / "plan" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_an_experiment_that_no_single_gpu_holds_is_told_what_to_change(run, tmp_path):
    output = tmp_path / "plan.json"
    finished = run("job=plan", "experiment=sigma/10b", f"output={output}", tiny=False)
    assert finished.status == 0, finished.err
    assert "does NOT fit" in finished.out
    changes = json.loads(output.read_text())["changes"]
    assert "strategy=fsdp trainer.devices=2" in changes[-1]["overrides"]
    assert changes[-1]["fits"]


def test_every_strategy_of_several_nodes_has_a_column(run):
    finished = run("job=plan", "trainer.devices=2", "trainer.num_nodes=2", "plan.gpu=a100", "data.batch_tokens=1024")
    assert finished.status == 0, finished.err
    header = next(line for line in finished.out.splitlines() if "HSDP" in line)
    assert header.split() == ["DDP", "HSDP", "FSDP"]
    assert "4 x A100 on 2 nodes, DDP" in finished.out  # what strategy=auto would take


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("plan.gpu=h300", "plan.gpu=h300 is not a card that is known: give one of GB200"),
        ("plan.network=0", "plan.network=0: give a number above 0"),
        ("plan.network=nan", "plan.network=nan: give a number above 0"),
        ("output=5", "output=5: give text or null"),
        ("compile=abc", "compile=abc: give true or false"),
        ("model.hidden_size=1000000000000", "one matrix takes 8 EiB or more"),
        ("activation_checkpointing=99", "activation_checkpointing=99 recomputes none of model.num_layers=2 blocks"),
        ("trainer.devices=3", "data.batch_tokens=512 is not a multiple of 768"),
        ("activation_checkpointing=some", "activation_checkpointing=some is not a policy"),
        ("output=/dev/null/plan.json", "output=/dev/null/plan.json cannot be written"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_key(run, override, words):
    finished = run("job=plan", override)
    assert finished.status == 2
    assert words in finished.err
    assert finished.err.count("\n") == 1
