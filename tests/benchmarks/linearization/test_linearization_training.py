"""The training benchmark: verdicts, rows kept from earlier runs, and control flow."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.linearization import linearization_steps, linearization_training
from benchmarks.linearization.linearization_report import (
    COMPILED,
    LARGE,
    OFFICIAL,
    TRAINING,
    Row,
    Run,
    judged,
    speed_table,
)
from benchmarks.linearization.linearization_steps import SHAPES, first_passes, our_builders
from benchmarks.linearization.linearization_training import compare, compile_kernels, main
from benchmarks.measuring import compilation
from benchmarks.measuring.comparison_run import without_output
from benchmarks.measuring.tables import read_csv

CPU = torch.device("cpu")
SHORT = dataclasses.replace(SHAPES["tiny"], length=16, micro_batches=(1, 2), batch=2)


@pytest.fixture(autouse=True)
def triton_listener():
    """Restore Triton's listener after each test."""
    triton = pytest.importorskip("triton")
    before = triton.knobs.compilation.listener
    yield
    triton.knobs.compilation.listener = before


def row(implementation: str, micro_batch: int, rate: float | None, section: str = TRAINING, **others: object) -> Row:
    values = {
        "shape": SHAPES["1b"],
        "passes": "step",
        "milliseconds": None if rate is None else 8192e3 / rate,
        "tokens_per_second": rate,
        "first_seconds": None if rate is None else 20.0,
        "date": "2026-01-02 03:04:05",
        "machine": "a GPU, torch 2",
    }
    parameter = f"micro-batch {micro_batch}"
    return Row(section=section, implementation=implementation, parameter=parameter, **values | others)


def new_run(folder: Path, date: str = "2026-05-06 07:08:09") -> Run:
    return Run(device=CPU, folder=folder, date=date)


def test_a_report_does_not_name_the_folder_that_it_lies_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--sections", "training", "--output", str(tmp_path)])
    assert "--sections training`" in new_run(tmp_path).text()
    assert without_output(["--output=there", "--quick"]) == ["--quick"]


def test_ours_is_held_to_the_official_configuration_and_to_the_best_of_the_official_layers():
    rows = [
        row(OFFICIAL, 1, 100.0),
        row(OFFICIAL, 8, 300.0),
        row(COMPILED, 1, 150.0),
        row(COMPILED, 8, 400.0),
        row("fla, bfloat16 q, k, v, compiled", 8, 550.0),
        row("fla, with what the official trainer does", 1, 50.0),
        row("ours", 1, 200.0),
        row("ours, compiled", 1, 350.0),
        row("ours, compiled", 8, 700.0),
        row("ours, compiled", 4, 9000.0, section=LARGE),
    ]
    as_it_runs, at_best = judged(rows)
    assert as_it_runs.measured == pytest.approx(7)
    assert "(compiled, micro-batch 8)" in as_it_runs.what
    assert "not compiled, micro-batch 1" in as_it_runs.what
    assert at_best.measured == pytest.approx(700 / 400)
    assert at_best.what.count("(compiled, micro-batch 8)") == 2
    assert all(verdict.target == 1.5 and verdict.at_least for verdict in (as_it_runs, at_best))


def test_without_the_official_configuration_nothing_is_said_of_it():
    rows = [row(OFFICIAL, 1, None, note="failed: no memory"), row(OFFICIAL, 8, 300.0), row("ours", 1, 200.0)]
    (verdict,) = judged(rows)
    assert "at their best (not compiled, micro-batch 8)" in verdict.what
    assert judged([row("ours", 1, 200.0)]) == []


def test_the_table_has_each_ratio_at_the_same_micro_batch():
    rows = [row(OFFICIAL, 1, 100.0), row(COMPILED, 1, 160.0), row("ours", 1, 200.0), row("ours", 8, 900.0)]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in speed_table(rows).splitlines()]
    columns = [lines[0].index(name) for name in ("to not compiled", "to compiled")]
    assert [[line[column] for column in columns] for line in lines[2:]] == [
        ["1.00", "0.62"],
        ["1.60", "1.00"],
        ["2.00", "1.25"],
        ["", ""],
    ]
    assert len({len(line) for line in lines}) == 1


def test_what_could_not_be_measured_says_why_in_its_line():
    for rows in ([row("ours", 1, None, note="failed: no memory"), row(OFFICIAL, 1, 100.0)], [row("ours", 4, None)]):
        lines = speed_table(rows).splitlines()
        assert (rows[0].note or "") in lines[2]
        assert len({line.count("|") for line in lines}) == 1


def test_rows_are_read_as_they_were_written(tmp_path):
    run = new_run(tmp_path)
    run.add_rows([row("ours", 1, None, note="failed: x, y"), row(OFFICIAL, 8, 300.0, peak_gib=1.5, loss_error=1e-3)])
    found = read_csv(tmp_path / "linearization_training.csv", Row)
    assert found == [dataclasses.replace(kept, shape=str(kept.shape)) for kept in run.rows]


def test_a_section_that_is_not_run_keeps_its_rows_and_their_date(tmp_path):
    first = new_run(tmp_path)
    large = row("ours, compiled", 4, 5000.0, section=LARGE, shape=SHAPES["8b"], date=first.date)
    first.add_rows([row(OFFICIAL, 1, 100.0, date=first.date), row("ours", 1, 120.0, date=first.date)])
    first.add_rows([large])
    second = new_run(tmp_path, date="2026-06-07 08:09:10")
    # Until it has measured a section, all is as the earlier run left it.
    second.add_section("Correctness", "as it should be")
    assert len(read_csv(tmp_path / "linearization_training.csv", Row)) == 3
    assert [verdict.measured for verdict in second.verdicts] == pytest.approx([1.2, 1.2])
    second.add_rows([row(OFFICIAL, 1, 100.0, date=second.date)])
    second.add_rows([row("ours", 8, 200.0, date=second.date)])
    kept = read_csv(tmp_path / "linearization_training.csv", Row)
    assert [(x.section, x.tokens_per_second, x.date) for x in kept] == [
        (LARGE, 5000, first.date),
        (TRAINING, 100, second.date),
        (TRAINING, 200, second.date),
    ]
    assert [verdict.measured for verdict in second.verdicts] == pytest.approx([2, 2])
    report = (tmp_path / "linearization_training.md").read_text()
    small, large = report.index("## Llama-3.2-1B, 8 x 1024"), report.index("## Llama-3-8B, 8 x 1024")
    assert report.index("## Targets") < report.index("## Correctness") < small < large
    assert f"Measured {second.date}: a GPU, torch 2." in report[small:large]
    assert f"Measured {first.date}: a GPU, torch 2." in report[large:]
    assert "5,000" in report[large:]


def test_a_file_of_other_columns_is_named_and_left_alone(tmp_path, monkeypatch, capsys):
    path = tmp_path / "linearization_training.csv"
    path.write_text("section,tokens\ntraining,1\n")
    monkeypatch.setattr(sys, "argv", ["x", "--shape", "tiny", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert f"{path} has the columns section, tokens: expected section, implementation," in capsys.readouterr().err
    assert path.read_text() == "section,tokens\ntraining,1\n"


def test_a_trial_does_not_write_into_the_results(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--shape", "tiny"])
    monkeypatch.setattr(linearization_training, "Run", None)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "--output" in capsys.readouterr().err


def test_a_model_is_built_once_and_begins_each_micro_batch_with_the_same_weights(tmp_path, capsys):
    makes, begun = [], []
    make = our_builders()["ours"]

    def recording(shape, device):
        trained = make(shape, device)
        makes.append(trained)
        measured = trained.loss_and_gradients

        def remembering(tokens, *rest):
            begun.append((len(tokens), torch.cat([weight.detach().flatten() for weight in trained.weights.values()])))
            return measured(tokens, *rest)

        trained.loss_and_gradients = remembering
        return trained

    def broken(shape, device):
        raise RuntimeError("no memory")

    run = new_run(tmp_path)
    assert compare(run, LARGE, SHORT, {"ours, compiled": broken, "ours": recording}) == []
    assert len(makes) == 1
    (first_size, first), (second_size, second) = begun
    assert (first_size, second_size) == (1, 2)
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.cat([weight.detach().flatten() for weight in makes[0].weights.values()]))
    assert [(x.implementation, x.parameter, x.note) for x in run.rows] == [
        ("ours, compiled", "micro-batch 1", "failed: no memory"),
        ("ours", "micro-batch 1", ""),
        ("ours, compiled", "micro-batch 2", "failed: no memory"),
        ("ours", "micro-batch 2", ""),
    ]
    assert all(x.tokens_per_second > 0 for x in run.rows if x.implementation == "ours")
    said = capsys.readouterr().out
    places = [said.index(f"ours: {what}") for what in ("built in", "first forward", "first backward", "ready after")]
    assert places == sorted(places)


def test_kernels_are_compiled_ahead_for_every_micro_batch_on_one_layer(monkeypatch):
    seen = []
    measured = linearization_steps.Trained.loss_and_gradients

    def recording(self, tokens, *rest):
        seen.append((len(self.model.model.layers), tuple(tokens.shape)))
        loss, gradients = measured(self, tokens, *rest)
        assert loss.isfinite()
        assert gradients.abs().sum() > 0
        return loss, gradients

    monkeypatch.setattr(linearization_steps.Trained, "loss_and_gradients", recording)
    first_passes(SHORT, SHORT.micro_batches, CPU, torch.bfloat16)
    assert seen == [(1, (1, 16)), (1, (2, 16))]


def test_kernels_that_are_compiled_at_once_are_not_launched():
    mode = pytest.importorskip("triton.runtime._async_compile").active_mode
    interface = pytest.importorskip("triton.runtime.jit").KernelInterface
    calls = []

    class Kernel(interface):
        def run(self, *arguments, grid, warmup, **options):
            calls.append((arguments, options, grid, warmup, mode.get() is not None))

    kernel, x = Kernel(), torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: kernel[(7,)]("backward"))

    def step(size: int) -> None:
        kernel[(size,)]("forward", BLOCK=4)
        x.sum().backward()

    def broken() -> None:
        raise RuntimeError("refused")

    compilation.compile_at_once(step, 5)
    assert calls == [(("forward",), {"BLOCK": 4}, (5,), True, True), (("backward",), {}, (7,), True, True)]
    with pytest.raises(RuntimeError, match="refused"):
        compilation.compile_at_once(broken)
    kernel[(3,)]("launched")
    assert calls[2:] == [(("launched",), {}, (3,), False, False)]


def test_kernels_that_cannot_be_compiled_at_once_are_no_reason_to_stop(monkeypatch):
    said, asked = [], []
    run = SimpleNamespace(device=torch.device("cuda"), say=said.append)

    def without_triton(*arguments):
        asked.append(arguments)
        raise RuntimeError("PassManager::run failed\nand more")

    monkeypatch.setattr(compilation, "compile_at_once", without_triton)
    compile_kernels(run, SHORT, SHORT.micro_batches)
    assert asked == [(first_passes, SHORT, (1, 2), run.device, torch.bfloat16)]
    (line,) = said
    assert "tiny, bfloat16: kernels not compiled at once: failed: PassManager::run failed (" in line
    monkeypatch.setattr(compilation, "compile_at_once", lambda *arguments: None)
    compile_kernels(run, SHORT, SHORT.micro_batches)
    assert "kernels compiled at once" in said[1]


def test_what_was_compiled_is_told_once():
    times = compilation.CompilationTimes()
    listener = pytest.importorskip("triton").knobs.compilation.listener
    for name, seconds, cached in (("slow", 7, False), ("quick", 2, False), ("known", 50, True)):
        taken = SimpleNamespace(total=seconds * 1e6)
        about = {"metadata": {}, "metadata_group": {}, "times": taken, "cache_hit": cached}
        listener(src=SimpleNamespace(name=name), **about)
    assert "2 Triton kernels 9 s (slowest: slow 7 s, quick 2 s)" in times.since_asked()
    assert "Triton" not in times.since_asked()


def test_the_time_of_torch_compile_is_counted(monkeypatch):
    found = {"_compile.compile_inner": "30.0", "compile_fx.<locals>.bw_compiler": "10.0", "gc": "5.0"}
    monkeypatch.setattr(compilation, "compile_times", lambda form, aggregate: (list(found), list(found.values())))
    times = compilation.CompilationTimes()
    found["_compile.compile_inner"] = "42.0"
    assert times.since_asked() == "torch.compile 12 s"
    assert times.since_asked() == "torch.compile 0 s"
