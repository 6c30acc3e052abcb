"""SLURM's answers, parsed in one place for the launcher and the executor."""

import pytest

from common.slurm import never_starts, refusal


@pytest.mark.parametrize("reason", ["PartitionDown", "AccountNotAllowed", "QOSMaxCpuPerJobLimit"])
def test_a_job_that_only_an_administrator_can_start_is_known(reason):
    assert never_starts(reason)


@pytest.mark.parametrize("reason", ["Priority", "Resources", "Dependency", "None"])
def test_a_job_that_waits_for_its_turn_is_left_alone(reason):
    assert not never_starts(reason)


def test_a_refusal_names_the_first_setting_that_fits_or_the_group():
    words = "sbatch: error: Batch job submission failed: Invalid qos specification\n"
    assert refusal(words, {"qos": "executor.sbatch_args.qos"}, "executor") == (
        "executor.sbatch_args.qos: sbatch refuses the job: Batch job submission failed: Invalid qos specification"
    )
    assert (
        refusal("no prefix\n at all", {"qos": "x"}, "executor") == "executor: sbatch refuses the job: no prefix at all"
    )
