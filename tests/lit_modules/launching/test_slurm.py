"""The launcher's settings, without a cluster."""

import importlib.metadata

import pytest

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


def test_a_cluster_says_once_in_conf_local_what_its_jobs_need(run, command, tmp_path):
    pytest.importorskip("submitit")
    (tmp_path / "conf" / "local").mkdir(parents=True)
    (tmp_path / "conf" / "local" / "launcher.yaml").write_text(
        "account: physics\nsetup: [source /shared/venv/bin/activate]\nadditional_parameters: {comment: ours}\n"
    )
    settings = ("trainer=default", "trainer.devices=8", "hydra.launcher.nodes=4")
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
        ("hydra.launcher.mem_gb=much", "hydra.launcher.mem_gb=much: give a number of gigabytes"),
        ("+hydra.launcher.qeue=long", "hydra.launcher.qeue: there is no such setting; give "),
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
