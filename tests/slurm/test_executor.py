"""Phases on a real SLURM cluster: arrays that wait for each other, failures, and what a second command does."""

import json
from pathlib import Path

import pytest

from data_pipeline.executors import Local, Slurm
from tests.conftest import ROOT
from tests.data_pipeline.executors.steps import nodes, phase, times
from tests.slurm.cluster import Cluster, until


def executor(**settings: object) -> Slurm:
    """Return an executor whose jobs find the tests' steps, which are not part of the installed package."""
    return Slurm(**{"partition": "cpu", "time": "0:10:00", "setup": [f"export PYTHONPATH={ROOT}"], **settings})


def submitted(logs: Path) -> list[str]:
    return [job["job"] for job in json.loads((logs / "submitted.json").read_text())["jobs"]]


def test_three_phases_run_to_their_end_on_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    traces, logs = tmp_path / "traces", tmp_path / "logs"
    phases = [
        phase(traces, "read", tasks=4, seconds=0.5),
        phase(traces, "find", tasks=1),
        phase(traces, "write", tasks=4),
    ]
    assert not executor().run(phases, logs)
    assert [job["tasks"] for job in json.loads((logs / "submitted.json").read_text())["jobs"]] == [4, 1, 4]
    for second in (executor(), Local(1)):
        with pytest.raises(
            ValueError, match=r"submitted\.json: SLURM jobs .* queued or running: wait for them, or cancel"
        ):
            second.run(phases, logs)
    slurm.wait(*submitted(logs))
    first, second, third = (
        [times(traces, name, task) for task in range(tasks)] for name, tasks in (("read", 4), ("find", 1), ("write", 4))
    )
    assert max(task["ended"][0] for task in first) <= second[0]["began"][0]
    assert second[0]["ended"][0] <= min(task["began"][0] for task in third)
    assert nodes(traces, "read", 4) == {"node1", "node2"}
    assert len(list((logs / "00-read" / "resources").iterdir())) == 4
    assert executor().run(phases, logs), "nothing is left to submit"


def test_a_failed_task_ends_the_run_and_the_next_one_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    traces, logs = tmp_path / "traces", tmp_path / "logs"
    phases = [
        phase(traces, "read", tasks=4, fail=(2,), how="mistake"),
        phase(traces, "find", tasks=1),
        phase(traces, "write", tasks=2),
    ]
    executor().run(phases, logs)
    jobs = submitted(logs)
    slurm.wait(*jobs)
    assert sorted(slurm.states(jobs[0])) == ["COMPLETED", "COMPLETED", "COMPLETED", "FAILED"]
    assert [set(slurm.states(job)) for job in jobs[1:]] == [{"CANCELLED"}, {"CANCELLED"}]
    assert (logs / "00-read" / "errors" / "00002.txt").read_text() == (
        "task 2 of phase read: ValueError: corpus.sources.papers.metadata=nowhere.jsonl: no such file; give one\n"
    )
    (traces / "mended").touch()
    assert not executor().run(phases, logs)
    slurm.wait(*submitted(logs))
    assert [len(times(traces, "read", task)["began"]) for task in range(4)] == [1, 1, 2, 1]
    assert all(times(traces, "write", task)["ended"] for task in range(2))
    assert executor().run(phases, logs)


def test_more_tasks_than_an_array_may_have_share_jobs(slurm: Cluster, tmp_path: Path) -> None:
    phases = [phase(tmp_path / "traces", "read", tasks=5)]
    executor(max_array_size=2, workers=1).run(phases, tmp_path / "logs")
    (job,) = submitted(tmp_path / "logs")
    assert len(slurm.states(job)) <= 2
    slurm.wait(job)
    assert all(times(tmp_path / "traces", "read", task)["ended"] for task in range(5))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"partition": "nowhere"}, r"^executor\.partition: sbatch refuses the job: .*nvalid partition.*nowhere"),
        ({"time": "soon"}, r"^executor\.time: sbatch refuses the job: .*nvalid --time"),
        ({"mem_per_cpu_gb": 4096}, r"^executor\.mem_per_cpu_gb: sbatch refuses the job: Memory specification"),
        (
            {"sbatch_args": {"exclude": "nowhere"}},
            r"^executor\.sbatch_args: sbatch refuses the job: .*nvalid node name",
        ),
        ({"sbatch_args": {"no-such": "1"}}, r"^executor\.sbatch_args: sbatch refuses the job: .*no-such"),
    ],
)
def test_what_sbatch_refuses_is_one_line_with_its_words(slurm: Cluster, tmp_path: Path, settings, words) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        executor(**settings).run([phase(tmp_path / "traces", "read")], tmp_path / "logs")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("settings", [{"time": "2:00:00"}, {"cpus_per_task": 512}])
def test_what_slurm_accepts_and_would_never_begin_is_refused(slurm: Cluster, tmp_path: Path, settings) -> None:
    with pytest.raises(ValueError, match=r"^executor\.time, .*: SLURM would never start the jobs \(Partition"):
        executor(**settings).run([phase(tmp_path / "traces", name) for name in ("read", "write")], tmp_path / "logs")
    jobs = submitted(tmp_path / "logs")
    slurm.wait(*jobs)
    assert {state for job in jobs for state in slurm.states(job)} == {"CANCELLED"}


def test_a_phase_that_is_refused_takes_those_before_it_back(slurm: Cluster, tmp_path: Path) -> None:
    phases = [
        phase(tmp_path / "traces", "read", tasks=1, fail=(0,), how="hang"),
        phase(tmp_path / "traces", "write", tasks=1500),
    ]
    with pytest.raises(ValueError, match=r"^executor\.max_array_size: sbatch refuses the job: .*array"):
        executor(max_array_size=5000).run(phases, tmp_path / "logs")
    (job,) = submitted(tmp_path / "logs")
    slurm.wait(job)
    assert set(slurm.states(job)) == {"CANCELLED"}


def test_a_job_that_is_requeued_does_its_task_anew(slurm: Cluster, tmp_path: Path) -> None:
    traces, logs = tmp_path / "traces", tmp_path / "logs"
    executor().run([phase(traces, "read", tasks=1, fail=(0,), how="hang")], logs)
    (job,) = submitted(logs)
    until(lambda: (traces / "read-0").exists())
    (traces / "mended").touch()
    slurm.ask("scontrol", "requeue", f"{job}_0")
    slurm.wait(job)
    assert slurm.states(job) == ["COMPLETED"]
    assert [len(seen) for seen in times(traces, "read", 0).values()] == [2, 1]
