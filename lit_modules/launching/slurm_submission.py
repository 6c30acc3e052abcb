"""Submission of runs to SLURM through submitit, in place of hydra-submitit-launcher's own executor.

submitit writes the script, ships the run to its tasks and keeps their results. This module covers the user's side:
sbatch's errors, waiting and its output, and which rank failed.
"""

import contextlib
import copy
import io
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from submitit.core import plugins
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission, FailedJobError, JobPaths, pickle_load
from submitit.slurm.slurm import SlurmExecutor

from lit_modules.launching import rehearsal, run_folder, slurm_queue
from lit_modules.launching.failures import first_failure
from lit_modules.launching.launcher_settings import check_launcher
from lit_modules.launching.start import start_of_folder

STARTED_BY_SLURM = re.compile(r"slurm (?P<job>\d+)\..*")  # the format of ProcessInfo.job
OF_THE_LAUNCHER = ("_target_", "submitit_folder", "max_num_timeout")  # settings that are not submitit parameters


def replace_executor(config: DictConfig) -> None:
    """Make submitit use `Submission` with this configuration from now on."""
    Submission.config = config
    plugins.get_executors()[SlurmExecutor.name()] = Submission  # type: ignore[index]  # a dict that submitit shares


class Task:
    """Callable of each task: runs the launcher's function in a process set up as by the command."""

    def __init__(self, launch: Any) -> None:
        self.launch = launch

    def __call__(self, *arguments: Any) -> Any:
        from lit_modules.launching.start import register_resolvers
        from lit_modules.launching.supervision import fork_supervisor

        # submitit's handlers would requeue the job and swallow SIGTERM; training installs its own
        for number in (signal.SIGTERM, signal.SIGCONT, JobEnvironment._usr_sig()):
            signal.signal(number, signal.SIG_DFL)
        fork_supervisor()
        os.environ["HYDRA_FULL_ERROR"] = "1"
        register_resolvers()
        return self.launch(*arguments)


class Submission(SlurmExecutor):
    """submitit's SLURM executor that also waits for its jobs and reports their outcome.

    Attributes:
        config: the whole configuration of the command, including Hydra's part.
    """

    config: DictConfig

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        try:
            check_launcher(self.config, self.settings_known())
        except ValueError:
            self.discard()
            raise
        super().__init__(*arguments, **settings)

    @classmethod
    def settings_known(cls) -> set[str]:
        """Return the names of all settings that the launcher takes."""
        return {*OF_THE_LAUNCHER, *cls._equivalence_dict(), *cls._valid_parameters()}

    @classmethod
    def name(cls) -> str:
        return SlurmExecutor.name()

    @classmethod
    def affinity(cls) -> int:
        return 2  # also without SLURM, so that a script can be printed

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Any]:
        """Submit the runs of a sweep and wait for them; return submitit's jobs, all successful.

        Raises:
            ValueError: SLURM cannot accept a setting.
            run_folder.RunFailed: a job failed.
            KeyboardInterrupt: the user stopped waiting.
        """
        sweep = Path(self.config.hydra.sweep.dir).absolute()
        try:
            folders = [sweep / run_folder.sweep_run(str(sweep), delayed.args[2]) for delayed in delayed_submissions]
            for delayed, folder in zip(delayed_submissions, folders, strict=True):
                rehearsal.rehearse_run(delayed.function, delayed.args[0], folder)
                delayed.function = Task(delayed.function)
        except Exception:
            self.discard()
            raise
        if self.config.dry_run:
            self.print_script(len(delayed_submissions))
            self.discard()
            raise SystemExit(0)
        if shutil.which("sbatch") is None:
            self.discard()
            slurm_queue.run_slurm_command("sbatch")
        try:
            refuse_queued_runs(folders)
            with contextlib.redirect_stderr(io.StringIO()):  # submitit repeats sbatch's errors there
                jobs = super()._internal_process_submissions(delayed_submissions)
            numbers = [job.job_id for job in jobs]
            slurm_queue.cancel_unsatisfiable(numbers, self.config.hydra.launcher)
        except (FailedJobError, ValueError) as error:
            self.discard()
            if isinstance(error, ValueError):
                raise
            raise ValueError(slurm_queue.submission_error(str(error), self.config.hydra.launcher)) from error
        self.wait(jobs, {job.job_id: folder for job, folder in zip(jobs, folders, strict=True)})
        return jobs

    def discard(self) -> None:
        """Remove the folder of a sweep without started runs, and empty parents up to runs_dir.

        A folder with other contents remains.
        """
        sweep, runs_dir = Path(self.config.hydra.sweep.dir).absolute(), Path(self.config.runs_dir).absolute()
        if {path.name for path in sweep.iterdir()} <= {".submitit", "multirun.yaml"}:
            shutil.rmtree(sweep)
        for folder in sweep.parents:
            if folder == runs_dir or runs_dir in folder.parents:
                with contextlib.suppress(OSError):
                    folder.rmdir()

    def print_script(self, count: int) -> None:
        """Print the script that sbatch would get for `count` runs."""
        script = copy.copy(self)
        script.parameters = self.parameters | ({"map_count": count} if count > 1 else {})
        print(script._make_submission_file_text(self._submitit_command_str, ""), flush=True)

    def wait(self, jobs: list[Any], folders: dict[str, Path]) -> None:
        """Wait for the jobs and print their state changes.

        Raises:
            run_folder.RunFailed: jobs failed; the line names the rank that failed first and its log.
            KeyboardInterrupt: the user stopped waiting.
        """
        numbers = ",".join(dict.fromkeys(job.job_id.partition("_")[0] for job in jobs))
        print(f"submitted to SLURM: job {numbers}; follow with: squeue --jobs={numbers}", flush=True)
        for job in jobs:
            print(f"job {job.job_id}: run {folders[job.job_id]}; output of its tasks {job.paths.folder}", flush=True)
        paths = {job.job_id: JobPaths(self.folder, job_id=job.job_id, task_id=0) for job in jobs}
        try:
            ended = slurm_queue.wait_for_jobs(list(paths), print_state, lambda job: paths[job].result_pickle.exists())
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"; the jobs go on: follow them with squeue --jobs={numbers}, cancel them with scancel "
                f"{numbers.replace(',', ' ')}"
            ) from None
        failed = [job for job in jobs if ended[job.job_id].word != "COMPLETED" or not has_succeeded(job)]
        if failed:
            lines = [
                f"job {job.job_id}: {failure_reason(job, ended[job.job_id], folders[job.job_id])}" for job in failed
            ]
            many = f"{len(failed)} of {len(jobs)} runs failed: " if len(jobs) > 1 else ""
            raise run_folder.RunFailed(many + "; ".join(lines))


def refuse_queued_runs(folders: list[Path]) -> None:
    """Raise ValueError for a resumed run whose job is still queued or running: two jobs would share its folder."""
    for folder in folders:
        start = STARTED_BY_SLURM.fullmatch(start_of_folder(folder) or "")
        if start is None:
            continue
        job = start["job"]
        state = (slurm_queue.job_states([job]) or {}).get(job)
        if state is not None and state.word not in slurm_queue.ENDED:
            raise ValueError(
                f"resume: {folder} is that of SLURM job {job}, which is {state.word.lower()}: wait for it, or "
                f"cancel it first (scancel {job})"
            )


def print_state(job: str, state: slurm_queue.JobState) -> None:
    """Print a job's new state."""
    why = f" ({state.reason})" if state.reason not in ("", "None") else ""
    print(f"job {job}: {state.word.lower().replace('_', ' ')}{why}", flush=True)


def has_succeeded(job: Any, seconds: float = 10.0) -> bool:
    """Return whether every task of a job left a successful result; wait, since file systems can be slow."""
    deadline = time.monotonic() + seconds
    for rank in range(job.num_tasks):
        path = JobPaths(job.paths.folder, job_id=job.job_id, task_id=rank).result_pickle
        while not path.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        outcome, _ = pickle_load(path)
        if outcome != "success":
            return False
    return True


def failure_reason(job: Any, state: slurm_queue.JobState, folder: Path) -> str:
    """Return why a job failed: the first failed rank's line, else its tasks' last line, else SLURM's state."""
    said = first_failure(folder) or last_log_line(job)
    end = state.word.lower().replace("_", " ") + (f", {state.exit}" if state.exit else "")
    return said or f"{end}, without a word; see {job.paths.stderr.parent}"


def last_log_line(job: Any) -> str | None:
    """Return our own last line in the logs of a job's tasks, else their last line."""
    logs = sorted(job.paths.folder.glob(f"{job.job_id}_*_log.err"))
    lines = [line.strip() for log in logs for line in log.read_text(errors="replace").splitlines() if line.strip()]
    mine = [line.removeprefix("palimpsest: ") for line in lines if line.startswith("palimpsest: ")]
    return (mine or lines or [None])[-1]
