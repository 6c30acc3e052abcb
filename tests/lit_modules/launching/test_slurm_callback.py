"""The launcher's settings, without a cluster."""

import contextlib
import importlib.metadata
import re

import pytest
from omegaconf import OmegaConf

from lit_modules.launching import slurm_queue
from lit_modules.launching.launcher_settings import TIME, check_launcher
from tests.conftest import ROOT

DRY = ("-m", "hydra/launcher=slurm", "dry_run=true")


def test_without_its_package_the_launcher_names_the_extra(run, command, monkeypatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "hydra-submitit-launcher":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = run(*DRY)
    assert found.status == 2
    assert "run `pip install 'palimpsest-lm[slurm]'`" in found.err
    assert found.err.count("\n") == 1
    assert command.runs() == []


def test_the_launcher_without_m_is_refused_before_anything_runs(run, command):
    found = run("hydra/launcher=slurm")
    assert found.status == 2
    assert found.err.startswith("palimpsest: hydra/launcher=slurm: it needs -m: ")
    assert found.err.count("\n") == 1
    assert not command.runs_dir.exists()


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("mem_gb", -1, "hydra.launcher.mem_gb=-1: give a number above 0"),
        ("array_parallelism", 0, "hydra.launcher.array_parallelism=0: give a whole number, 1 or more"),
        ("signal_delay_s", "abc", "hydra.launcher.signal_delay_s=abc: give a whole number, from 1 to "),
        ("setup", "module load", "hydra.launcher.setup=module load: give a list of texts"),
        ("srun_args", [1], "hydra.launcher.srun_args=[1]: give a list of texts"),
        ("partition", ["a", "b"], "hydra.launcher.partition=['a', 'b']: give one name"),
        ("additional_parameters", "x", "hydra.launcher.additional_parameters=x: give sbatch's options by name"),
        ("tasks_per_node", 4, "hydra.launcher.tasks_per_node=4 is not trainer.devices=1: leave "),
        ("time", "1:2:3:4", "hydra.launcher.time=1:2:3:4 is not a time: give hours:minutes:seconds"),
    ],
)
def test_values_that_no_job_can_have_are_refused(name, value, line):
    launcher = OmegaConf.load(ROOT / "conf" / "hydra" / "launcher" / "slurm.yaml")
    known = set(launcher)
    for key, given in {"gpus_per_node": None, "tasks_per_node": 1, name: value}.items():
        launcher[key] = given
    config = OmegaConf.create({"hydra": {"launcher": launcher}, "trainer": {"devices": 1, "num_nodes": 1}})
    with pytest.raises(ValueError, match=f"^{re.escape(line)}"):
        check_launcher(config, known)


@pytest.mark.parametrize("time", ["30", "1:30", "24:00:00", "2-12", "2-12:30:00", "UNLIMITED"])
def test_every_form_of_a_time_that_sbatch_takes_is_taken(time):
    assert TIME.fullmatch(time)


def test_a_cluster_says_once_in_conf_local_what_its_jobs_need(run, command, tmp_path):
    pytest.importorskip("submitit")
    (tmp_path / "conf" / "local").mkdir(parents=True)
    (tmp_path / "conf" / "local" / "launcher.yaml").write_text(
        "account: physics\nsetup: [source /shared/venv/bin/activate]\nadditional_parameters: {comment: ours}\n"
    )
    settings = ("trainer=default", "trainer.devices=8", "hydra.launcher.nodes=4", "data.batch_tokens=8192")
    found = run(*DRY, *settings, f"--config-dir={tmp_path}/conf")
    assert found.status == 0, found.err
    for words in ("account=physics", "comment=ours", "requeue", "nodes=4", "ntasks-per-node=8", "gpus-per-node=8"):
        assert f"#SBATCH --{words}\n" in found.out
    assert "\nsource /shared/venv/bin/activate\n" in found.out
    assert not command.runs_dir.exists()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("hydra.launcher.time=60", 'hydra.launcher.time=60: give it in quotes, such as "24:00:00"'),
        ("hydra.launcher.time=abc", "hydra.launcher.time=abc is not a time: give hours:minutes:seconds, such as "),
        ("hydra.launcher.mem_gb=much", "hydra.launcher.mem_gb=much: give a number above 0"),
        ("+hydra.launcher.qeue=long", "hydra.launcher.qeue is not known: give "),
        (
            "+hydra.launcher.partion=long",
            "hydra.launcher.partion is not known: did you mean hydra.launcher.",
        ),
        ("trainer.devices=auto", "hydra.launcher.tasks_per_node=auto: give a whole number, 1 or more"),
    ],
)
def test_settings_that_no_script_can_have_are_refused_in_one_line_and_leave_nothing(run, command, override, line):
    pytest.importorskip("submitit")
    found = run(*DRY, override)
    assert found.status == 2
    assert found.err.startswith(f"palimpsest: {line}")
    assert found.err.count("\n") == 1
    assert not command.runs_dir.exists()


def test_a_refused_sweep_leaves_a_folder_alone_that_holds_anything_else(run, tmp_path):
    pytest.importorskip("submitit")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    found = run(*DRY, f"hydra.sweep.dir={tmp_path}/mine", "trainer.devices=auto")
    assert found.status == 2
    assert (tmp_path / "mine" / "notes.txt").read_text() == "kept"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("data.source.path=???",), "data.source.path is missing: give it a value"),
        (("model.hidden_size=33",), "model.num_heads=2 does not divide hidden_size=33"),
        (("trainer.devices=3",), "data.batch_tokens=512 is not a multiple of 768 "),
        (("seed=1,-1",), "seed=-1: give a whole number"),
        (("job=evaluate",), "checkpoint is missing: give it a value"),
        (("debug=abc",), "debug=abc: give true or false"),
    ],
)
def test_what_the_job_would_refuse_is_refused_before_it_is_submitted(run, command, overrides, line):
    pytest.importorskip("submitit")
    found = run(*DRY, *overrides)
    assert (found.status, found.out) == (2, "")
    assert found.err.startswith(f"palimpsest: {line}")
    assert found.err.count("\n") == 1
    assert not command.runs_dir.exists()


@pytest.mark.parametrize("word", ["PENDING", "RUNNING", "FAILED", "CANCELLED", "OUT_OF_MEMORY", None])
def test_a_run_whose_job_is_still_queued_is_not_resumed_in_a_second_one(tmp_path, monkeypatch, word):
    pytest.importorskip("submitit")
    from lit_modules.launching import slurm_submission

    (tmp_path / "started.json").write_text('{"job": "slurm 1234.0", "attempt": 0}')
    asked = []
    states = {} if word is None else {"1234": slurm_queue.JobState(word)}
    monkeypatch.setattr(slurm_queue, "job_states", lambda jobs: asked.extend(jobs) or states)
    refused = pytest.raises(
        ValueError, match=r"is that of SLURM job 1234, which is \w+: wait for it, or cancel it first"
    )
    with refused if word in ("PENDING", "RUNNING") else contextlib.nullcontext():
        slurm_submission.refuse_queued_runs([tmp_path / "new", tmp_path])
    assert asked == ["1234"]
