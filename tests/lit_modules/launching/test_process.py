"""A process's rank and sizes, from the launchers' environment variables."""

import pytest

from lit_modules.launching.process import ProcessInfo, first_host, this_process

JOB = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
STEP = JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "seven",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
}


def test_a_task_of_srun_knows_its_place_and_keeps_its_name_when_the_job_is_requeued():
    found = this_process(STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
    assert found == ProcessInfo(3, 4, 1, 2, 1, 2, "srun", job="slurm 12.0", attempt=0, even=True)
    assert this_process(STEP | {"SLURM_RESTART_COUNT": "2"}).attempt == 2
    assert this_process(STEP | {"SLURM_RESTART_COUNT": "2"}).job == found.job


def test_nodes_with_different_numbers_of_tasks_are_seen():
    assert not this_process(STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}).even


@pytest.mark.parametrize(
    "environment",
    [
        JOB,  # the batch script
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_NAME": "bash"},  # srun --pty bash
    ],
)
def test_a_shell_and_a_batch_script_are_no_tasks(environment):
    found = this_process(environment)
    assert (found.launcher, found.rank, found.world_size) == (None, 0, 1)
    assert found.job is not None, "a requeued job goes on by itself all the same"


def test_tasks_that_srun_starts_from_an_interactive_allocation_are_tasks():
    assert this_process(STEP | {"SLURM_JOB_NAME": "interactive"}).launcher == "srun"


def test_torchrun_inside_a_task_of_srun_comes_first():
    found = this_process(STEP | TORCHRUN)
    assert found == ProcessInfo(3, 4, 1, 2, 1, 2, "torchrun", job="torchrun seven", attempt=1)


def test_a_process_that_lightning_started_has_a_log_of_its_own():
    found = this_process({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"})
    assert (found.launcher, found.rank, found.log) == ("lightning", 1, "logs/rank_00001.log")
    assert not found.from_outside
    assert this_process({"LOCAL_RANK": "1", "NODE_RANK": "0"}).rank == 1, "Lightning takes WORLD_SIZE away at the end"
    assert this_process({"LOCAL_RANK": "0", "NODE_RANK": "0"}).launcher is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("node[1-2]", "node1"), ("gpu[03,07-9]-ib,login1", "gpu03-ib"), ("a,b", "a")],
)
def test_the_first_node_of_a_list_is_where_rank_0_is(nodes, first):
    assert first_host(nodes) == first
