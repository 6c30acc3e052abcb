"""What is read of a run: curves of damaged and resumed metrics, results of job=evaluate, runs of earlier versions."""

import csv
import json
from pathlib import Path

import pytest

from evaluation.compare.metrics import read_curves
from evaluation.compare.reading import EVALUATED, FINISHED, RUNNING, UNFINISHED, read_run
from lit_modules.launching.run_folder import lock_folder
from tests.evaluation.compare.written_runs import write_run


def metrics(path: Path, *rows: tuple, header: str = "step,tokens,train/loss,tokens_per_second") -> Path:
    with open(path, "w", newline="") as handle:
        csv.writer(handle).writerows([header.split(","), *rows])
    return path


def test_hours_are_the_tokens_of_each_line_by_its_speed_times_gpus(tmp_path):
    run = read_run(write_run(tmp_path / "run", rates=(1000.0, 2000.0, 4000.0, 4000.0), gpus=2))
    seconds = [2 * s for s in (1.0, 1.5, 1.75, 2.0)]  # of two GPUs
    assert list(run.curves.hours.values()) == pytest.approx([s / 3600 for s in seconds])
    assert run.devices == "2 x NVIDIA H200"
    alone = read_run(write_run(tmp_path / "cpu", rates=(1000.0,), gpus=0))
    assert alone.hours == pytest.approx(1 / 3600)
    assert alone.devices == "1 x CPU"


def test_a_validations_line_adds_no_time_and_a_loss_that_is_no_number_no_point(tmp_path):
    header = "step,tokens,train/loss,tokens_per_second,validation/loss"
    path = metrics(tmp_path / "m.csv", (1, 10, 5.0, 10.0, ""), (1, 10, "", "", 4.0), (2, 20, "nan", 10.0, ""),
                   (2, "", "", "", ""), header=header)  # fmt: skip
    curves = read_curves(path)
    assert curves.train == {10: 5.0}
    assert curves.held_out == {10: 4.0}
    assert list(curves.hours.items())[-1] == (20, pytest.approx(2 / 3600))
    assert curves.notes == []


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path):
    rows = [(1, 10, 5.0, 10.0), (2, 20, 4.9, 1.0), (3, 30, 4.8, 1.0), (2, 20, 4.7, 10.0), (3, 30, 4.6, 10.0)]
    curves = read_curves(metrics(tmp_path / "m.csv", *rows))
    assert curves.train == {10: 5.0, 20: 4.7, 30: 4.6}
    assert curves.hours[30] == pytest.approx(3 / 3600)


def test_a_line_that_a_kill_cut_off_is_left_out_without_a_word(tmp_path):
    path = metrics(tmp_path / "m.csv", (1, 10, 5.0, 10.0))
    with open(path, "a") as handle:
        handle.write("2,20,4")
    curves = read_curves(path)
    assert curves.train == {10: 5.0}
    assert curves.notes == []


@pytest.mark.parametrize(
    ("damage", "word"),
    [("2,20\r\n3,30,4.8,10.0\r\n", "line 3 is cut off"), ("2,20,x,10.0\r\n", "line 3: could not convert"),
     ("2,20,\0,10.0\r\n", "line 3: ")],
)  # fmt: skip
def test_a_damaged_line_ends_the_curves_and_is_named_with_what_to_do(tmp_path, damage, word):
    path = metrics(tmp_path / "m.csv", (1, 10, 5.0, 10.0))
    with open(path, "a", newline="") as handle:
        handle.write(damage)
    curves = read_curves(path)
    assert curves.train == {10: 5.0}
    (note,) = curves.notes
    assert note.startswith(f"{path}, {word}")
    assert "resume the run" in note
    assert "\n" not in note


def test_a_file_that_is_no_table_of_metrics_is_named(tmp_path):
    (tmp_path / "m.csv").write_text("<html>\n")
    (note,) = read_curves(tmp_path / "m.csv").notes
    assert "its first line has no column step" in note
    assert read_curves(tmp_path / "none.csv").notes == []


def test_a_run_is_finished_running_or_unfinished(tmp_path):
    assert read_run(write_run(tmp_path / "finished")).state == FINISHED
    folder = write_run(tmp_path / "begun", finished=False)
    assert read_run(folder).state == UNFINISHED
    with lock_folder(folder):
        assert read_run(folder).state == RUNNING


@pytest.mark.parametrize(("text", "word"), [("{", "is damaged"), ('{"tokens": 1}', "has no validation_loss")])
def test_a_summary_that_cannot_be_used_is_named_with_what_to_do(tmp_path, text, word):
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").write_text(text)
    found = read_run(folder)
    assert found.state == UNFINISHED
    (note,) = found.notes
    assert note.startswith(f"{folder}/summary.json {word}")


def test_a_run_of_an_earlier_version_is_read_as_far_as_it_goes(tmp_path):
    folder = write_run(tmp_path / "run", 3.0)
    for name in ("starts.jsonl", "tokenizer/tokenizer.json", "figures/position_loss.csv", ".hydra/hydra.yaml"):
        (folder / name).unlink()
    (folder / "summary.json").write_text(json.dumps({"validation_loss": 3.0}))
    found = read_run(folder)
    assert (found.state, found.loss("nats per token"), found.loss("bits per byte")) == (FINISHED, 3.0, None)
    assert (found.devices, found.choices, found.positions) == ("", {}, [])
    assert "384" in found.tokenizer  # by its settings
    assert found.notes == ()


def test_a_linearized_models_loss_before_training_is_the_curves_first_point(tmp_path):
    header = (
        "step,tokens,train/loss,tokens_per_second,validation/loss,validation/student_before,validation/teacher_before"
    )
    path = metrics(tmp_path / "m.csv", (0, 0, "", "", "", 7.0, 2.0), (1, 10, 5.0, 10.0, 4.0, "", ""), header=header)
    assert read_curves(path).held_out == {0: 7.0, 10: 4.0}


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "standard_error": 0.01}


REPORTS = {
    "recall": {
        "checkpoint": "there", "caches": {"full": {}, "kivi": {}},
        "score": {"pairs": {"full": estimate(0.5), "kivi": estimate(0.25)}},
        "cells": [
            {"kind": "pairs", "cache": cache, "length": length, "depth": depth, "share": share}
            for cache, depth, length, share in [("full", 0, 64, 1.0), ("full", 1, 64, 0.5), ("full", 0, 128, 0.25),
                                                ("kivi", 0, 64, 0.0)]
        ],
    },
    "harness": {"checkpoint": "there", "tasks": {
        "piqa": {"metric": "acc", "value": 0.7, "standard_error": 0.02},
        "wikitext": {"metric": "word_perplexity", "value": 12.0, "standard_error": None},
    }},
    "longbench": {"checkpoint": "there", "groups": {"score": {"Synthetic Tasks": {"full": estimate(0.1)}}},
                  "overall": {"score": {"All sets": {"full": estimate(0.2)}}}},
    "gsm8k": {"checkpoint": "there", "score": {"strict-match": {"full": estimate(0.3)}}},
    "perplexity_by_position": {"checkpoint": "there", "text": "a/text.txt", "length": 64,
                               "loss": {"full": {"value": 0.0, "standard_error": 0.5}}},
}  # fmt: skip


def test_results_of_every_benchmark_are_read(tmp_path):
    (tmp_path / "evaluation").mkdir()
    for name, report in REPORTS.items():
        (tmp_path / "evaluation" / f"{name}.json").write_text(json.dumps(report))
    found = read_run(tmp_path)
    assert (found.state, found.settings) == (EVALUATED, {"checkpoint": "there"})
    values = {name: value.value for name, value in found.results.values.items()}
    assert values == {
        "perplexity of text.txt, 64 tokens, full": 1.0, "recall pairs, full": 0.5, "recall pairs, kivi": 0.25,
        "gsm8k strict-match, full": 0.3, "longbench Synthetic Tasks, full": 0.1, "longbench All sets, full": 0.2,
        "piqa, acc": 0.7, "wikitext, word_perplexity": 12.0,
    }  # fmt: skip
    assert set(found.results.numbers) == {"perplexity of text.txt, 64 tokens, full", "wikitext, word_perplexity"}
    assert found.results.recall == {"pairs": {64: 0.75, 128: 0.25}}  # of the first cache, over depths


def test_a_damaged_result_is_left_out_and_named(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "recall.json").write_text("{")
    (folder / "evaluation" / "gsm8k.json").write_text('{"checkpoint": "x"}')
    notes = read_run(folder).notes
    assert [note.partition(": repeat")[2] for note in notes] == [
        " job=evaluate benchmark=recall", " job=evaluate benchmark=gsm8k"
    ]  # fmt: skip
