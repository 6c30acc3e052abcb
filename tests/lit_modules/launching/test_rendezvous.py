"""The rendezvous of ranks; here threads around one store replace processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torch.distributed import HashStore

from lit_modules.launching import consistency, rendezvous, run_folder
from lit_modules.launching.process import ProcessInfo
from lit_modules.launching.rendezvous import Rendezvous

HERE = ProcessInfo(world_size=2, local_size=1, nodes=2, launcher="srun", job="slurm 12.0")


def config(**trainer: object):
    settings = {"devices": 1, "num_nodes": 1, "accelerator": "cpu"} | trainer
    return OmegaConf.create({"trainer": settings, "runs_dir": "runs"})


@pytest.fixture
def met(monkeypatch):
    """Call a function on two ranks that meet; return what each returned or raised."""
    monkeypatch.setattr(rendezvous, "ERROR_READ_SECONDS", 5.0)
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 5.0)
    own = threading.local()
    monkeypatch.setattr(rendezvous, "current_rendezvous", lambda: own.meeting)

    def call(function, ranks: int = 2):
        store = HashStore()

        def as_rank(rank: int):
            own.meeting = Rendezvous(replace(HERE, rank=rank, node=rank), store)
            try:
                return function(own.meeting.here)
            except (ValueError, run_folder.RunFailed, run_folder.SilentExit) as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(as_rank, range(ranks)))

    return call


def test_all_ranks_take_the_folder_that_rank_0_chose(met, tmp_path):
    found = met(lambda here: rendezvous.agree_on_folder(lambda: str(tmp_path / f"chosen-by-{here.rank}")))
    assert found == [str(tmp_path / "chosen-by-0")] * 2


def test_what_rank_0_refuses_ends_the_others_without_a_word(met):
    def refuse() -> str:
        raise ValueError("resume=nowhere is not a run's folder")

    first, second = met(lambda here: rendezvous.agree_on_folder(refuse))
    assert str(first) == "resume=nowhere is not a run's folder"
    assert isinstance(second, run_folder.SilentExit)
    assert second.status == 2


def test_a_rank_that_does_not_come_is_named(met, monkeypatch, tmp_path):
    monkeypatch.setattr(rendezvous, "JOIN_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous, "ERROR_READ_SECONDS", 0.1)
    (found,) = met(lambda here: consistency.check_consistency(config(), tmp_path), ranks=1)
    assert isinstance(found, run_folder.RunFailed)
    assert str(found).startswith("rank 1 of 2 (on node 1 of this job, counted from 0) did not come within")


def test_ranks_that_agree_have_the_launchers_numbers_and_leave_no_token(met, tmp_path):
    configs = [config(), config(devices="auto")]
    assert met(lambda here: consistency.check_consistency(configs[here.rank], tmp_path)) == [None, None]
    assert [each.trainer.num_nodes for each in configs] == [2, 2]
    assert configs[1].trainer.devices == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_shared_is_refused_with_the_host_that_does_not_see_it(met, tmp_path, monkeypatch):
    real, folders = rendezvous.is_token_visible, [tmp_path / "of-one", tmp_path / "of-the-other"]
    monkeypatch.setattr(rendezvous, "is_token_visible", lambda folder, token: real(folder, token, seconds=0.1))
    monkeypatch.setattr(consistency, "host_name", lambda: threading.current_thread().name)
    first, second = met(lambda here: consistency.check_consistency(config(), folders[here.rank]))
    assert "runs_dir=runs is not shared: " in str(first)
    assert f"does not see {folders[0]}, which " in str(first)
    assert isinstance(second, run_folder.SilentExit)
    assert not folders[1].exists(), "what was made on the wrong disk is gone"


def report(**values: object) -> dict:
    usual = {"rank": 0, "host": "node1", "sees": True, "code": "aa", "commit": "c1", "torch": "2.11", "python": "3.12"}
    return usual | {"gpus": 0, "time": 1000.0} | values


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"code": "bb", "commit": "c2"}, r"different versions of the code: c1 \(aa\) on node1, c2 \(bb\) on node2"),
        ({"code": "bb", "commit": None}, r"different versions of the code: c1 \(aa\) on node1, bb on node2"),
        ({"torch": "2.13"}, r"different torch: 2.11 on node1, 2.13 on node2"),
        ({"sees": False}, r"runs_dir=runs is not shared: node2 does not see"),
    ],
)
def test_nodes_that_differ_are_named_with_what_differs(other, line):
    with pytest.raises(ValueError, match=line):
        consistency.check_ranks_agree([report(), report(rank=1, host="node2", **other)], config(), Path("runs/1"))


def test_a_node_with_fewer_gpus_than_asked_is_named_with_both_numbers():
    reports = [report(gpus=4), report(rank=4, host="node2", gpus=3)]
    with pytest.raises(ValueError, match=r"trainer.devices=4 is more than the 3 GPUs that rank 4 on node2 finds"):
        consistency.check_ranks_agree(reports, config(devices=4, accelerator="auto"), Path("runs/1"))
    consistency.check_ranks_agree(reports, config(devices=4, accelerator="cpu"), Path("runs/1"))
    consistency.check_ranks_agree(reports, config(devices=3, accelerator="gpu"), Path("runs/1"))


def test_clocks_that_differ_are_a_warning_and_no_more(caplog):
    consistency.warn_of_clock_skew([report(), report(time=1010.0)], 999.0, 1001.0)
    assert caplog.text == ""
    consistency.warn_of_clock_skew([report(), report(host="node2", time=900.0)], 999.0, 1001.0)
    assert "the clock of node2 is 99 s behind that of node1" in caplog.text
    caplog.clear()
    consistency.warn_of_clock_skew([report(), report(host="node2", time=1101.0)], 999.0, 1001.0)
    assert "the clock of node2 is 100 s before that of node1" in caplog.text


@pytest.mark.parametrize(
    ("here", "trainer", "line"),
    [
        (HERE, {"devices": 4}, r"devices=4 on trainer.num_nodes=2 are 8 .* srun --nodes=2 --ntasks-per-node=4, or"),
        (HERE, {"num_nodes": 4}, r"are 4 processes, and srun started 2 on 2 nodes: .*trainer.num_nodes=2"),
        (replace(HERE, launcher="torchrun"), {"devices": 4}, r"torchrun --nnodes=2 --nproc-per-node=4"),
        (replace(HERE, even=False), {}, r"not as many on each: give --ntasks-per-node"),
        (ProcessInfo(), {"num_nodes": 2}, r"trainer.num_nodes=2 needs a process on each node, and one was started"),
    ],
)
def test_other_numbers_than_the_launchers_are_refused_with_the_options_to_give(here, trainer, line):
    with pytest.raises(ValueError, match=line):
        consistency.apply_launcher_sizes(config(**trainer).trainer, here)


def test_another_start_or_attempt_meets_elsewhere():
    ports = {rendezvous.derive_port(replace(HERE, job=f"slurm {job}.0", attempt=n)) for job in (1, 2) for n in (0, 1)}
    assert len(ports) == 4
    assert all(25000 <= port < 32000 for port in ports)
