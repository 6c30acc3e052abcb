"""Parsing of SLURM's answers, without a cluster."""

import subprocess

import pytest

from lit_modules.launching import slurm_queue
from lit_modules.launching.slurm_queue import JobState


@pytest.fixture
def slurm(monkeypatch):
    """Commands of SLURM that give prepared answers: {"squeue": (status, stdout, stderr), ...}"""
    answers: dict[str, tuple[int, str, str]] = {"squeue": (0, "", ""), "scontrol": (1, "", "")}

    def ask(name: str, *_: str) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(name, *answers[name])

    monkeypatch.setattr(slurm_queue, "run_slurm_command", ask)
    monkeypatch.setattr(slurm_queue.time, "sleep", lambda _: None)
    return answers


def follow(jobs: list[str], finished: bool) -> tuple[dict[str, JobState], list[str]]:
    words: list[str] = []
    ended = slurm_queue.wait_for_jobs(
        jobs, lambda job, state: words.append(f"{job} {state.word}"), lambda job: finished
    )
    return ended, words


def test_a_job_that_slurm_has_forgotten_has_failed_unless_it_left_its_result(slurm):
    slurm["squeue"] = (1, "", "slurm_load_jobs error: Invalid job id specified")
    assert follow(["7"], finished=False)[0]["7"].word == "FAILED"
    assert follow(["7"], finished=True)[0]["7"].word == "COMPLETED"


def test_a_controller_that_does_not_answer_is_waited_for(slurm, monkeypatch):
    answers = iter([None, {"7": JobState("RUNNING")}, None, {"7": JobState("COMPLETED")}])
    monkeypatch.setattr(slurm_queue, "job_states", lambda jobs: next(answers))
    assert follow(["7"], finished=False)[1] == ["7 RUNNING", "7 COMPLETED"]


def test_a_requeued_job_is_followed_to_its_end(slurm, monkeypatch):
    words = ["RUNNING", "REQUEUED", "PENDING", "RUNNING", "RUNNING", "COMPLETED"]
    answers = iter([{"7": JobState(word)} for word in words])
    monkeypatch.setattr(slurm_queue, "job_states", lambda jobs: next(answers))
    seen = follow(["7"], finished=True)[1]
    assert seen == ["7 RUNNING", "7 REQUEUED", "7 PENDING", "7 RUNNING", "7 COMPLETED"]


def test_how_a_job_ended_is_asked_of_the_controller(slurm):
    slurm["scontrol"] = (0, "JobId=7 JobName=x JobState=FAILED Reason=None ExitCode=3:0", "")
    assert slurm_queue.job_states(["7"]) == {"7": JobState("FAILED", exit="exit status 3")}
    slurm["scontrol"] = (0, "JobId=7 JobState=OUT_OF_MEMORY ExitCode=0:125", "")
    assert slurm_queue.job_states(["7"])["7"].exit == "signal 125"


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ("invalid partition specified: x", "partition=x"),
        ("Invalid account or account/partition combination specified", "account=None"),
        ("Invalid --time specification", "time=soon"),
        ("Invalid qos specification", "qos=None"),
        ("Requested node configuration is not available", "tasks_per_node=None"),
    ],
)
def test_what_sbatch_says_names_the_setting(words, setting):
    line = slurm_queue.submission_error(f"sbatch: error: {words}\n", {"partition": "x", "time": "soon"})
    assert line == f"hydra.launcher.{setting}: sbatch refuses the job: {words}"


def test_what_sbatch_says_that_nobody_foresaw_is_one_line_all_the_same():
    line = slurm_queue.submission_error("sbatch: error: something new\nsbatch: error: and more\n", {})
    assert line == "hydra.launcher: sbatch refuses the job: something new; and more"


def test_a_machine_without_slurm_is_told_so_in_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ValueError, match=r"^hydra/launcher=slurm: there is no squeue on this machine: start the command where"
    ):
        slurm_queue.job_states(["7"])
