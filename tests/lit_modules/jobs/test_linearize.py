"""What `job=linearize` decides before training: strategies, which layers stay."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from lit_modules.jobs import linearize
from lit_modules.linearization import layer_setup
from lit_modules.linearization.stages import PlannedStage, TrainingStage
from lit_modules.networks.linearized import Linearization


@pytest.mark.parametrize("named", [False, True], ids=["chosen", "named"])
@pytest.mark.parametrize(
    ("stages", "unused"),
    [
        ([TrainingStage()], False),
        ([TrainingStage(train=("scalars",)), TrainingStage()], True),  # the first leaves LoRA without gradients
        ([TrainingStage(cross_entropy=0, attention_transfer=1)], True),  # which reaches no output projection
    ],
    ids=["one stage", "two groups", "transfer"],
)
def test_ddp_expects_no_gradients_of_what_a_stage_leaves_alone(named, stages, unused):
    strategy = {"_target_": "lit_modules.parallel.strategies.DataParallel" if named else None}
    trainer = {"accelerator": "cpu", "devices": 2, "num_nodes": 1}
    module = SimpleNamespace(stages=[PlannedStage(0, str(number), 1, stage) for number, stage in enumerate(stages)])
    built = linearize.build_strategy(OmegaConf.create({"strategy": strategy, "trainer": trainer}), module)
    assert built._ddp_kwargs["find_unused_parameters"] is unused


def test_an_experiments_choice_of_layers_is_taken_back_or_replaced_key_by_key():
    for ways in ({"most_sensitive": None, "every": None}, {"most_sensitive": None, "every": 2}):
        layer_setup.check_softmax_layers(OmegaConf.create(ways), Linearization(), 4)
    with pytest.raises(ValueError, match=r"set all but one to null, as softmax_layers\.every=null"):
        layer_setup.check_softmax_layers(OmegaConf.create({"most_sensitive": 1, "every": 2}), Linearization(), 4)


def test_a_file_of_the_layers_that_stay_that_is_cut_is_named(tmp_path):
    path = tmp_path / layer_setup.KEPT
    path.write_text('{"kept": [1')
    with pytest.raises(ValueError, match=f"^{path}: it does not say which layers stay"):
        layer_setup.read_choice(path)


def test_one_rank_measures_which_layers_stay_and_the_others_take_its_choice(tmp_path, monkeypatch):
    begun, measured = threading.Event(), []

    def keep(cfg, model, data, path):
        measured.append(path)
        begun.set()
        time.sleep(0.3)  # in which the other rank comes
        layer_setup.keep_choice(path, (1, 2), [0.0, 2.0, 1.0])
        return "measured"

    monkeypatch.setattr(layer_setup, "begin_maps", lambda *given: None)
    monkeypatch.setattr(layer_setup, "keep_most_sensitive", keep)
    monkeypatch.setattr(layer_setup, "with_softmax_layers", lambda model, kept: (model, *kept))
    cfg = OmegaConf.create({"softmax_layers": {"most_sensitive": 2}})
    with ThreadPoolExecutor() as pool:
        first = pool.submit(layer_setup.set_up_layers, cfg, "model", None, tmp_path)
        assert begun.wait(10)
        second = pool.submit(layer_setup.set_up_layers, cfg, "model", None, tmp_path)
    assert len(measured) == 1
    assert first.result() == "measured"
    assert second.result() == ("model", 1, 2)
    assert json.loads((tmp_path / layer_setup.KEPT).read_text())["kept"] == [1, 2]
