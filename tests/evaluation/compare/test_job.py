"""job=compare through the command: its files, its table, its one-line refusals, and what a real sweep gives."""

import csv
import json
import re
from pathlib import Path

import pytest

from evaluation.compare import job
from evaluation.compare.comparison import compare_runs
from evaluation.compare.reading import read_run
from tests.evaluation.compare.written_runs import write_run, write_sweep

FILES = ["compare.csv", "compare.html", "compare.md", "compare_final.png", "compare_held_out.png", "compare_hours.png",
         "compare_position.png", "compare_training.png"]  # fmt: skip


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write_sweep(tmp_path / "runs", {"true": [3.0, 3.1, 3.05], "false": [3.5, 3.62, 3.54]})


def compare(run, *overrides: str):
    return run("job=compare", *overrides, tiny=False)


def table(text: str) -> list[list[str]]:
    """Return the cells of a page's first Markdown table."""
    header = text.partition("\n| 1 |")[0].splitlines()[-2]
    rows = [header, *re.findall(r"^\| \d+ \|.*$", text, re.MULTILINE)]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_a_sweep_becomes_a_page_a_table_and_figures(run, sweep, tmp_path):
    out = tmp_path / "out"
    done = compare(run, f"runs={sweep}", f"output={out}", "baseline={output_gate: false}")
    assert (done.status, sorted(path.name for path in out.iterdir())) == (0, FILES)
    header, best, other = table((out / "compare.md").read_text())[:3]
    best, other = dict(zip(header, best, strict=True)), dict(zip(header, other, strict=True))
    assert best["model.output_gate"] == "true"
    assert best["held-out loss, nats per token"] == "3.0500 ± 0.0289"
    assert (best["minus baseline, nats per token"], best["verdict"], best["by"]) == (
        "-0.5033",
        "lower",
        "3 seeds, paired",
    )
    assert (best["seeds"], best["tokens"], best["parameters"]) == ("0, 1, 2", "4.00k", "47.8k")
    assert other["verdict"] == "baseline"
    assert "| lower |" in done.out
    rows = list(csv.DictReader((out / "compare.csv").open()))
    assert [(row["seed"], row["model.output_gate"]) for row in rows] == [
        ("0", "true"), ("1", "true"), ("2", "true"), ("0", "false"), ("1", "false"), ("2", "false")
    ]  # fmt: skip
    assert float(rows[1]["validation_loss"]) == 3.1
    # 4 x 1000 tokens at 500, 1000, 1000 and 1000 a second on each of two GPUs.
    assert float(rows[0]["gpu_hours"]) == pytest.approx(5 / 3600)
    markdown = (out / "compare.md").read_text()
    assert all((out / name).is_file() for name in re.findall(r"!\[.*\]\((.*)\)", markdown))


def test_a_later_comparison_replaces_an_earlier_one_and_nothing_else(run, sweep, tmp_path):
    out = tmp_path / "out"
    assert compare(run, f"runs={sweep}", f"output={out}").status == 0
    assert compare(run, f"runs={sweep}/0", f"output={out}").status == 0
    assert sorted(path.name for path in out.iterdir()) == [name for name in FILES if name != "compare_final.png"]
    (out / "mine.txt").write_text("kept")
    refused = compare(run, f"runs={sweep}", f"output={out}")
    assert refused.status == 2
    assert "holds other files (mine.txt): give a folder for the comparison alone" in refused.err
    assert (out / "mine.txt").read_text() == "kept"


def test_a_comparison_that_fails_leaves_the_earlier_one_whole(sweep, tmp_path, monkeypatch):
    out = tmp_path / "out"
    comparison = compare_runs([read_run(sweep / "0"), read_run(sweep / "3")])
    job.write(comparison, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(job, "as_csv", lambda comparison: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        job.write(comparison, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("runs=[]", "output=out"), "runs=[]: give a folder, or a list of folders, as [a,b]"),
        (("runs=[3]", "output=out"), "runs=[3]: give a folder"),
        (("runs=none", "output=out"), "runs=none does not exist: give the folder of a run, of a sweep"),
        (("runs={runs}", "output={runs}/0/config.yaml"), "is a file: give a folder"),
        (
            ("runs={runs}", "output=out", "baseline=[1]"),
            "baseline=[1]: give a run's folder, or settings as {{KEY: VALUE}}",
        ),
        (("runs={runs}", "output=out", "baselin=1"), "baselin is not known: did you mean baseline?"),
        (("output=out",), "runs is missing: give it a value"),
    ],
)
def test_a_mistake_is_one_line(run, sweep, overrides, message):
    done = compare(run, *(each.format(runs=sweep) for each in overrides))
    assert done.status == 2
    assert message.format() in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_runs_that_have_logged_nothing_are_named_and_left_out(run, sweep, tmp_path):
    waiting = write_run(tmp_path / "waiting", finished=False, rates=())
    broken = write_run(tmp_path / "broken")
    for path in (broken / "config.yaml", broken / ".hydra" / "config.yaml"):
        path.write_text("a: [")
    done = compare(run, f"runs=[{sweep},{waiting},{broken}]", f"output={tmp_path}/out")
    assert done.status == 0
    assert f"{waiting} is left out: it has logged nothing yet" in done.err
    assert f"{broken} is left out: its config.yaml holds no settings" in done.err
    none = compare(run, f"runs={waiting}", f"output={tmp_path}/none")
    assert none.status == 2
    assert "has no run with results: compare again once a run has logged something" in none.err
    assert not (tmp_path / "none").exists()


def test_runs_of_other_tokenizers_show_no_nats(run, sweep, tmp_path):
    other = write_run(tmp_path / "other", 2.0, tokenizer="two")
    done = compare(run, f"runs=[{sweep},{other}]", f"output={tmp_path}/out")
    assert done.status == 0
    for name in ("compare.md", "compare.html"):
        text = (tmp_path / "out" / name).read_text()
        assert "held-out loss, bits per byte" in text
        assert "held-out loss, nats" not in text
        assert "loss (nats" not in text
        assert "nats per token of different tokens cannot be compared" in text


def test_evaluations_of_runs_and_of_other_checkpoints_are_beside_each_other(run, sweep, tmp_path):
    for folder, share in ((sweep / "0", 0.5), (sweep / "1", 0.6), (sweep / "3", 0.9), (tmp_path / "alone", 0.7)):
        report = {
            "checkpoint": str(folder),
            "score": {"strict-match": {"full": {"value": share, "standard_error": 0.03}}},
        }
        (folder / "evaluation").mkdir(parents=True)
        (folder / "evaluation" / "gsm8k.json").write_text(json.dumps(report))
    done = compare(run, f"runs=[{sweep},{tmp_path}/alone]", f"output={tmp_path}/out")
    assert done.status == 0
    assert "| output_gate=true | 55.0 ± 5.0 |" in done.out  # over seeds; the first run's setting is the baseline
    assert "| output_gate=false | 90.0 ± 3.0 (+35 ± 5.8*) |" in done.out
    assert f"| {tmp_path}/alone | 70.0 ± 3.0 (+15 ± 5.8*) |" in done.out


def test_a_linearization_shows_its_teacher(run, tmp_path):
    write_run(tmp_path / "0", summary={"teacher_loss": 2.5, "recovery": 0.9})
    done = compare(run, f"runs={tmp_path}", f"output={tmp_path}/out")
    header, row = table(done.out)[:2]
    assert dict(zip(header, row, strict=True))["teacher_loss"] == "2.5000"
    assert dict(zip(header, row, strict=True))["recovery"] == "0.9000"


def test_a_real_sweep_is_compared(run, command, tmp_path):
    assert run("-m", "model.output_gate=true,false", "max_tokens=2048", "validate_every_tokens=1024",
               "callbacks.position_loss={_target_: lit_modules.callbacks.position_loss.PositionLoss, window: 5}"
               ).status == 0  # fmt: skip
    done = compare(run, f"runs={command.runs_dir}", f"output={tmp_path}/out")
    header, *rows = table(done.out)
    assert header[1] == "model.output_gate"
    assert sorted(row[1] for row in rows) == ["false", "true"]
    for folder in command.runs():
        for each in ("0", "1"):
            loss = json.loads((folder / each / "summary.json").read_text())["validation_loss"]
            assert f"| {loss:.4f} |" in done.out
    assert "compare_position.png" in (tmp_path / "out" / "compare.md").read_text()
