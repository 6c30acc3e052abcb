"""What several ranks of `job=linearize` have to agree on before they can speak to each other."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from omegaconf import OmegaConf

from lit_modules import linearize
from lit_modules.networks.linearized import Linearization


def test_one_rank_measures_which_layers_stay_and_the_others_take_its_choice(tmp_path, monkeypatch):
    begun, measured, loaded = threading.Event(), [], []

    def load(cfg, settings, data):
        loaded.append(settings.softmax_layers)
        return settings

    def keep(cfg, model, data, path):
        measured.append(path)
        begun.set()
        time.sleep(0.3)  # in which the other rank comes
        linearize.keep_choice(path, (1, 2), [0.0, 2.0, 1.0])
        return "measured"

    monkeypatch.setattr(linearize, "load_linearized", load)
    monkeypatch.setattr(linearize, "keep_most_sensitive", keep)
    cfg = OmegaConf.create({"softmax_layers": {"most_sensitive": 2}})
    arguments = (cfg, Linearization(), 3, None, tmp_path)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(linearize.load_base, *arguments)
        assert begun.wait(10)
        second = pool.submit(linearize.load_base, *arguments)
    assert len(measured) == 1
    assert first.result() == "measured"
    assert second.result().softmax_layers == (1, 2)
    assert loaded == [(), (1, 2)]
    assert json.loads((tmp_path / linearize.KEPT).read_text())["kept"] == [1, 2]
