"""Sigma's models through the command: toy sizes train and write, and the paper's ablations build."""

import itertools
import json

import pytest

from tests.conftest import ROOT

TOY = (
    "model=sigma_1_5b",
    "model.num_heads=4",
    "model.num_key_heads=1",
    "model.num_value_heads=2",
    "model.augmented_query_dim=48",
    "model.initializer_range=0.1",
    "optimizer.lr=1e-2",
    "callbacks.samples.prompts=[]",
)


@pytest.mark.parametrize("switches", [(), ("model.key_head_dim=4", "model.forget_gate=data_dependent")])
def test_a_toy_sigma_trains_saves_writes_and_is_exported_again(run, command, tmp_path, switches):
    assert run(*TOY, *switches).status == 0
    (folder,) = command.runs()
    rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    losses = [float(value) for row in rows[1:] if (value := row[rows[0].index("train/loss")])]
    assert losses[-1] < losses[0] - 0.5
    config = json.loads((folder / "export" / "config.json").read_text())
    assert (config["num_key_heads"], config["num_value_heads"], config["augmented_query_dim"]) == (1, 2, 48)
    asked = ("job=generate", "prompt='the kernel'", "temperature=0", "max_new_tokens=12", "device=cpu")
    written = [run(*asked, f"checkpoint={place}", tiny=False) for place in (folder, folder / "export")]
    assert written[0].status == 0, written[0].err
    assert written[0].out.startswith("the kernel")
    assert written[0].out == written[1].out
    newest = max((folder / "checkpoints").glob("step_*"))
    assert run("job=export", f"checkpoint={newest}", f"output={tmp_path}/again", tiny=False).status == 0
    for name in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / "export" / name).read_bytes(), name


def heads(keys: int, values: int) -> dict[str, int]:
    return {"num_key_heads": keys, "num_value_heads": values}


TABLES = {
    1: [heads(*kv) for kv in [(32, 32), (32, 16), (16, 32), (16, 16), (16, 4), (4, 16), (4, 4), (4, 1), (1, 4)]],
    2: [heads(h, h) | {"key_head_dim": dim} for h in (32, 16, 4) for dim in (None, 32)],
    4: [
        heads(32, 32) | {"augmented_query_dim": 5632},
        *(heads(16, 16) | {"augmented_query_dim": dim} for dim in (None, 3072, 4096, 5632)),
        heads(4, 4) | {"augmented_query_dim": 5632},
    ],
    5: [
        *({"intermediate_size": 5632 + 3072 * more} for more in (0, 1, 2, 3, 5)),
        *({"intermediate_size": 5632 + 3072 * more, "augmented_query_dim": 3072} for more in (0, 1, 2, 3)),
    ],
    6: [
        {"augmented_query_dim": dim, "num_key_heads": keys, "key_head_dim": key_dim}
        for dim, keys, key_dim in itertools.product((None, 3072), (16, 4), (None, 32))
    ],
}


@pytest.mark.parametrize("table", TABLES)
def test_every_ablation_of_the_paper_is_an_override_of_one_experiment(table):
    import hydra
    import torch

    from lit_modules.launching import start
    from lit_modules.networks import PalimpsestForCausalLM, count_parameters

    start.register_resolvers()
    for row in TABLES[table]:
        overrides = [f"model.{key}={'null' if value is None else value}" for key, value in row.items()]
        with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            cfg = hydra.compose("config", ["experiment=sigma/ablation_1b", "data.source.path=/data", *overrides])
        with torch.device("meta"):
            model = PalimpsestForCausalLM(hydra.utils.instantiate(cfg.model, _convert_="all"))
        size = heads(16, 16) | {"key_head_dim": None, "augmented_query_dim": None, "intermediate_size": 5632} | row
        key_dim = size["key_head_dim"] or 64
        keys = size["num_key_heads"] * key_dim
        matrices = 2048 * (2 * 2048 + keys + 64 * size["num_value_heads"])
        matrices += (64 * keys if key_dim != 64 else 0) + 3 * 2048 * (size["augmented_query_dim"] or 0)
        matrices += 3 * 2048 * size["intermediate_size"]
        assert count_parameters(model).blocks == 22 * (matrices + 2 * 2048) + 2048, row
