"""A checkpoint of one strategy and number of ranks resumes under any other."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_modules import checkpoints
from lit_modules.checkpoints import tensors
from lit_modules.parallel.strategies import OneDevice
from tests.conftest import ROOT
from tests.lit_modules.checkpoints import training


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The undisturbed run of one device in `one/`, then all that two ranks do (two_ranks.py)."""
    folder = tmp_path_factory.mktemp("ranks")
    recorder, _ = training.train(folder / "one", OneDevice("cpu"))
    (folder / "one.json").write_text(json.dumps({"losses": recorder.losses, "draws": recorder.draws}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    program = [sys.executable, str(Path(__file__).with_name("two_ranks.py")), str(folder)]
    started = [
        subprocess.Popen(
            [*program, str(rank)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    return folder


def recorded(place: Path, case: str, rank: int = 0, what: str = "losses") -> dict[int, float]:
    if case == "one":
        found = json.loads((place / "one.json").read_text())
    else:
        found = json.loads((place / f"rank_{rank}.json").read_text())[case]
    return {int(step): value for step, value in found[what].items()}


@pytest.mark.parametrize("case", ["sharded", "replicated", "copies_of_shards"])
def test_ranks_train_as_one_device_does(place, case):
    assert recorded(place, case) == pytest.approx(recorded(place, "one"), rel=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        "sharded_from_replicated",
        "replicated_from_sharded",
        "sharded_from_copies",
        "sharded_from_one",
        "sharded_again",
    ],
)
def test_two_ranks_go_on_from_any_checkpoint(place, case):
    expected = {step: loss for step, loss in recorded(place, "one").items() if step > 3}
    assert recorded(place, case) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("case", ["sharded", "replicated", "copies_of_shards"])
def test_one_device_goes_on_from_a_checkpoint_of_two(place, case, tmp_path):
    path = place / case / "checkpoints" / "step_00000003"
    assert {"__0_0.distcp", "__1_0.distcp"} <= {file.name for file in path.iterdir()}, "each rank wrote a part"
    expected = {step: loss for step, loss in recorded(place, "one").items() if step > 3}
    assert training.train(tmp_path, OneDevice("cpu"), resume=path)[0].losses == pytest.approx(expected, rel=1e-5)


def test_ranks_that_hold_the_same_write_half_of_it_each(place):
    sizes = [
        (place / "replicated" / "checkpoints" / "step_00000003" / f"__{rank}_0.distcp").stat().st_size
        for rank in (0, 1)
    ]
    assert max(sizes) < 1.2 * min(sizes)


def test_each_rank_draws_on_as_it_would_have(place):
    assert recorded(place, "sharded", 0, "draws") != recorded(place, "sharded", 1, "draws")
    for rank in (0, 1):
        draws = recorded(place, "sharded", rank, "draws")
        again = recorded(place, "sharded_again", rank, "draws")
        assert again == {step: draws[step] for step in (4, 5, 6)}


def test_a_full_disk_of_one_rank_costs_all_ranks_that_checkpoint_and_no_more(place):
    names = [file.name for file in sorted((place / "full_disk" / "checkpoints").iterdir())]
    assert names == ["step_00000006"]
    assert recorded(place, "full_disk", 1).keys() == {1, 2, 3, 4, 5, 6}
    said = (place / "rank_0.log").read_text()
    path = place / "full_disk" / "checkpoints" / "step_00000003"
    assert f"{path} could not be written (rank 1: No space left on device); the checkpoints before it are" in said


def test_a_folder_that_is_not_shared_is_named_with_rank_and_host(place):
    assert list((place / "not_shared" / "checkpoints").iterdir()) == []
    assert list((place / "disk_of_another_node" / "checkpoints").iterdir()) == []
    host = socket.gethostname()
    line = f"rank 1 on {host} wrote __1_0.distcp, which rank 0 on {host} does not see: {place}/not_shared/checkpoints"
    assert line in (place / "rank_0.log").read_text()
    assert (place / "rank_1.log").read_text() == "", "one rank speaks"


def test_a_resumed_training_is_bit_for_bit_the_one_that_was_not_stopped(tmp_path):
    whole, unbroken = training.train(tmp_path / "whole", OneDevice("cpu"))
    path = tmp_path / "whole" / "checkpoints" / "step_00000003"
    rest, resumed = training.train(tmp_path / "rest", OneDevice("cpu"), resume=path)
    assert rest.losses == {step: whole.losses[step] for step in (4, 5, 6)}
    assert rest.draws == {step: whole.draws[step] for step in (4, 5, 6)}
    expected = training.weights(unbroken)
    assert all(torch.equal(weight, expected[name]) for name, weight in training.weights(resumed).items())


def test_parameter_groups_may_be_split_otherwise_when_a_run_is_resumed(tmp_path):
    whole, _ = training.train(tmp_path / "whole", OneDevice("cpu"))
    module = training.make()
    make_optimizer = module.make_optimizer

    def each_alone(groups):
        return make_optimizer([{**group, "params": [p]} for group in groups for p in group["params"]])

    module.make_optimizer = each_alone
    path = tmp_path / "whole" / "checkpoints" / "step_00000003"
    rest, _ = training.train(tmp_path / "rest", OneDevice("cpu"), resume=path, module=module)
    assert rest.losses == pytest.approx({step: whole.losses[step] for step in (4, 5, 6)}, rel=1e-6)


def test_compiled_modules_have_the_names_of_those_that_are_not():
    plain, compiled = training.make(), training.make()
    for number, block in enumerate(compiled.model.model.layers):
        compiled.model.model.layers[number] = torch.compile(block, backend="eager")
    names = [
        (
            tensors.model_tensors(module).keys(),
            tensors.optimizer_tensors(module, optimizer, make=True).keys(),
            tensors.learning_rates(module, [optimizer]).keys(),
        )
        for module in (plain, compiled)
        for optimizer in [torch.optim.AdamW(module.parameters())]
    ]
    assert names[0] == names[1]
    assert "_orig_mod" not in str(names)


def test_an_optimizer_that_has_not_stepped_is_saved_without_making_it_step():
    module = training.make()
    optimizer = torch.optim.AdamW(module.parameters())
    assert tensors.optimizer_tensors(module, optimizer) == {}
    assert not optimizer.state


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_a_tensor(tmp_path):
    training.train(tmp_path / "small", OneDevice("cpu"), 3)
    path = tmp_path / "small" / "checkpoints" / "step_00000003"
    with pytest.raises(ValueError, match=r"has weights\..* of shape \[.*\], and this model \["):
        training.train(tmp_path / "wide", OneDevice("cpu"), resume=path, module=training.make(hidden_size=32))
    with pytest.raises(ValueError, match=r"has no weights\.model\.model\.layers\.2\..*: it is of another model"):
        training.train(tmp_path / "deep", OneDevice("cpu"), resume=path, module=training.make(num_layers=3))


def test_weights_are_consolidated_from_any_number_of_ranks(place):
    one = checkpoints.read_unsharded_weights(place / "one" / "checkpoints" / "step_00000003")
    assert one.keys() == training.make().state_dict().keys()
    for case in ("sharded", "replicated", "copies_of_shards"):
        weights = checkpoints.read_unsharded_weights(place / case / "checkpoints" / "step_00000003")
        for name, weight in weights.items():
            torch.testing.assert_close(weight, one[name], rtol=1e-4, atol=1e-5)
