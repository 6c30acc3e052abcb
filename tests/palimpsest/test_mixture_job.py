"""`job=pretrain` on a mixture of components in phases: stopped inside a phase and resumed, measured by component."""

import csv
import json
import math
from pathlib import Path

import lightning
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.conftest import TINY
from tests.data_pipeline.mixtures.conftest import write_corpus

PHASES = "[{name: broad, share: 1, weights: {debug: 3, design: 1}}, {name: narrow, share: 1, weights: {design: 1}}]"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    write_corpus(folder / "corpus", {"commands": (20, 3), "debug": (60, 8), "design": (40, 5)})
    return folder


@pytest.fixture
def mixture(place):
    """Return the settings of a tiny run, in a folder of runs."""
    kept = [setting for setting in TINY if setting.split("=")[0] not in ("data", "data.validation_fraction")]

    def settings(runs: str, *overrides: str) -> list[str]:
        places = (f"data.corpus={place}/corpus", f"data_dir={place}/data", f"runs_dir={place}/{runs}")
        phases = (f"data.phases={PHASES}", "data.max_epochs=null")
        shorter = [setting for setting in kept if setting.split("=")[0] not in [o.split("=")[0] for o in overrides]]
        return ["data=mixture", *shorter, *places, *phases, "callbacks.samples.prompts=[]", *overrides]

    return settings


@pytest.fixture(scope="module")
def stop_at():
    """Stop the training of the next run at a step, as by an interrupt."""

    def at(step: int, monkeypatch) -> None:
        class Stop(lightning.Callback):
            def on_train_batch_end(self, trainer, module, *_):
                if trainer.global_step == step:
                    raise KeyboardInterrupt

        original = lightning.Trainer.__init__

        def init(self, *args, callbacks=(), **kwargs):
            original(self, *args, callbacks=[*callbacks, Stop()], **kwargs)

        monkeypatch.setattr(lightning.Trainer, "__init__", init)

    return at


def the_run(place: Path, runs: str) -> Path:
    (folder,) = (place / runs / "default").iterdir()
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def test_a_mixture_is_trained_measured_by_component_and_resumed_inside_a_phase(
    run, mixture, place, monkeypatch, stop_at
):
    found = run(*mixture("whole"), tiny=False)
    assert found.status == 0, found.err
    whole = the_run(place, "whole")
    assert "phase 2 of 2 begins: narrow" in found.out
    assert "of this model, by component:" in found.out
    check_summary(json.loads((whole / "summary.json").read_text()))
    check_metrics(whole)
    with Image.open(whole / "figures" / "validation_by_component.png") as image:
        assert min(image.size) > 150

    with monkeypatch.context() as patch:
        stop_at(15, patch)
        assert run(*mixture("parts"), tiny=False).status == 130
    found = run(*mixture("parts", "resume=auto"), tiny=False)
    assert found.status == 0, found.err
    assert "resumed from step_00000012\n" in found.out
    assert "begins" not in found.out, "the second phase had begun before"
    mine, theirs = weights(the_run(place, "parts")), weights(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def check_summary(summary: dict) -> None:
    components = summary["validation_by_component"]
    assert list(components) == ["commands", "debug", "design"]  # commands has no weight in any phase
    assert sum(found["tokens"] for found in components.values()) == summary["validation_tokens"]
    assert sum(found["bytes"] for found in components.values()) == summary["validation_bytes"]
    whole = sum(found["loss"] * found["tokens"] for found in components.values()) / summary["validation_tokens"]
    assert whole == pytest.approx(summary["validation_loss"])
    for found in components.values():
        bits = found["loss"] * found["tokens"] / math.log(2) / found["bytes"]
        assert found["bits_per_byte"] == pytest.approx(bits)
    # the model has seen only words of these
    assert components["design"]["loss"] < components["commands"]["loss"]


def check_metrics(folder: Path) -> None:
    with open(folder / "metrics.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert [(row["step"], row["train/phase"]) for row in rows if row["train/phase"]] == [("0", "1"), ("10", "2")]
    for name in ("commands", "debug", "design"):
        assert len([row for row in rows if row[f"validation/loss/{name}"]]) == 2


def test_a_part_of_the_held_out_text_still_measures_components(run, mixture, place):
    settings = ("validation_tokens=1024", "max_tokens=1024", "validate_every_tokens=512", "schedule.warmup_tokens=0")
    found = run(*mixture("part", *settings), tiny=False)
    assert found.status == 0, found.err
    folder = the_run(place, "part")
    with open(folder / "metrics.csv", newline="") as handle:
        rows = [row for row in csv.DictReader(handle) if row["validation/loss"]]
    assert rows
    assert all(float(row["validation/loss/debug"]) > 0 for row in rows)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation_tokens"] > 1024, "the one at the end reads all"


def test_a_resume_with_other_weights_is_refused_by_name(run, mixture, place, monkeypatch, stop_at):
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        assert run(*mixture("changed"), tiny=False).status == 130
    found = run(*mixture("changed", "resume=auto", "data.max_epochs=90"), tiny=False)
    assert found.status == 2
    assert "data.max_epochs=90 differs from the run that is resumed" in found.err


def test_a_weight_for_no_component_ends_in_one_line_and_leaves_no_run(run, mixture, place):
    found = run(*mixture("wrong", "data.phases=[{weights: {debgu: 1}}]"), tiny=False)
    assert found.status == 2
    assert found.err.count("\n") == 1
    assert "data.phases[0].weights.debgu is of no component" in found.err
    assert not list((place / "wrong" / "default").iterdir())
