"""The shipped settings, composed by a recipe."""

import pickle
from pathlib import Path

import dill
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from data_pipeline.rewriting.backends.endpoint import Endpoint
from data_pipeline.rewriting.backends.in_process import InProcess
from data_pipeline.rewriting.backends.served import Served
from tests.data_pipeline.labels.conftest import CONF

RECIPE = "+cleaning@corpus.cleaning.labels=labels"
PLACE = "corpus.cleaning.labels"
ADDRESS = (f"{PLACE}.backend.base_url=http://127.0.0.1:1/v1", f"{PLACE}.backend.model=m")


def stages(folder: Path, *overrides: str) -> list:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [RECIPE, f"data_dir={folder}/data", *overrides])
    OmegaConf.resolve(config.corpus)
    return instantiate(config.corpus.cleaning.labels)(folder=str(folder), tasks=3)


@pytest.mark.parametrize(
    ("choice", "backend", "overrides"),
    [
        ("endpoint", Endpoint, ADDRESS),
        ("served", Served, ADDRESS[1:]),
        ("in_process", InProcess, ADDRESS[1:]),
    ],
)
def test_a_recipe_chooses_the_labels_and_their_backend(
    tmp_path: Path, choice: str, backend: type, overrides: tuple[str, ...]
) -> None:
    made = stages(tmp_path, f"rewrite/backend@{PLACE}.backend={choice}", *overrides)
    assert [(stage.name, stage.tasks, stage.reads, stage.gives) for stage in made] == [
        ("sample", 3, True, False),
        ("label", 1, False, False),
        ("train", 1, False, False),
        ("filter", 3, True, True),
    ]
    step = made[1].steps[0]
    assert type(step.backend) is backend
    assert step.store == f"{tmp_path}/data/labels"
    assert set(step.rubric.categories) >= {"general_system", "design", "debug", "commands"}
    assert made[3].steps[0].thresholds == {"default": 2.0}


def test_steps_go_to_other_processes_as_executors_send_them(tmp_path: Path) -> None:
    for stage in stages(tmp_path, *ADDRESS):
        for step in stage.steps:
            assert type(dill.loads(dill.dumps(step))) is type(pickle.loads(pickle.dumps(step))) is type(step)


def test_single_settings_are_changed_on_the_command_line(tmp_path: Path) -> None:
    changes = (f"+{PLACE}.thresholds.debug=1", f"{PLACE}.documents=77", f"{PLACE}.rubric.max_tokens=9")
    made = stages(tmp_path, *ADDRESS, *changes, f"{PLACE}.set_category=true")
    assert made[3].steps[0].thresholds == {"default": 2.0, "debug": 1}
    assert made[0].steps[0].size == made[1].steps[0].size == 77
    assert made[1].steps[0].rubric.max_tokens == 9
