"""Rewriting as a step of a datatrove pipeline, for the executors: one machine, SLURM, Ray."""

from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from data_pipeline.executors.phases import Phase
from data_pipeline.identity import EARLIER, SAMPLE
from data_pipeline.rewriting.backends import Backend
from data_pipeline.rewriting.folder import OutputFolder
from data_pipeline.rewriting.plan import Plan
from data_pipeline.rewriting.report import finish
from data_pipeline.rewriting.runner import Rewriting


def phase(plan: Plan, backend: Backend, backend_settings: dict) -> Phase:
    """Return the rewriting as an executor's phase."""
    return Phase("rewrite", [RewriteStep(plan, backend, backend_settings)], plan.tasks)


class RewriteStep(PipelineStep):
    """Step that rewrites a task's share of the input; the last task to finish writes summary and manifest.

    Paces and budgets of the backend apply to each task separately. The executor's `tasks` must equal the plan's.
    """

    type = "Model call"
    name = "rewriting"

    def __init__(self, plan: Plan, backend: Backend, backend_settings: dict) -> None:
        super().__init__()
        self.plan, self.backend, self.backend_settings = plan, backend, backend_settings

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        """Rewrite task `rank`; yield nothing; raise ValueError as the job does."""
        if world_size != self.plan.tasks:
            raise ValueError(
                f"rewrite.tasks={self.plan.tasks}, but the executor has {world_size}: give the same number"
            )
        folder = OutputFolder(self.plan.output)
        folder.begin(*(self.plan.identity(self.backend_settings, self.backend.model, by) for by in (SAMPLE, EARLIER)))
        if rank not in folder.ended_tasks():
            with self.track_time():
                Rewriting(self.plan, self.backend, rank).run()
        finish(self.plan, folder)
        return
        yield
