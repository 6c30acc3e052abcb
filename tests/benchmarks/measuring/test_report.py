"""Without a GPU, benchmarks leave GPU results untouched."""

import importlib
import sys

import pytest
import torch

from benchmarks.measuring.report import RESULTS

ON_A_GPU = (
    "attention.forgetting_attention",
    "data.rewriting_rate",
    "linearization.linearization_training",
    "linearization.linearized_decoding",
    "pretraining.context_parallel",
    "pretraining.plan_against_measured",
    "pretraining.scaling",
    "pretraining.training_speed",
    "recurrence.first_call",
    "recurrence.gated_recurrence",
)


@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_benchmark_without_a_gpu_refuses_to_replace_a_gpus_results_before_it_measures(name, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, *(["text"] * (name == "data.rewriting_rate"))])
    main = importlib.import_module(f"benchmarks.{name}").main
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "give --output FOLDER" in said
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before
