"""`job=rewrite`: have a model rewrite the documents of a corpus, in the chosen styles."""

import json
import logging
from typing import TYPE_CHECKING, Any

from common.settings import SettingError
from data_pipeline.identity import EARLIER, SAMPLE
from data_pipeline.rewriting.backends import Backend
from data_pipeline.rewriting.folder import OutputFolder
from data_pipeline.rewriting.inputs import Corpus
from data_pipeline.rewriting.plan import Plan, read_plan
from data_pipeline.rewriting.report import SAMPLES, SUMMARY, finish, summary_lines
from data_pipeline.rewriting.runner import Rewriting

if TYPE_CHECKING:
    from data_pipeline.executors.phases import Executor

log = logging.getLogger(__name__)


def run(cfg: Any) -> None:
    """Rewrite `rewrite.input` into `rewrite.output`. The same command continues a killed run.

    Raises:
        ValueError: a setting is wrong, or the run must stop early; in one line.
    """
    from hydra.utils import instantiate

    from common.setting_nodes import plain_dict

    settings = plain_dict(cfg.rewrite, throw_on_missing=True)
    plan = read_plan(settings)
    backend = instantiate(cfg.rewrite.backend, _convert_="all")
    executor = instantiate(cfg.executor, _convert_="all") if cfg.get("executor") else None
    rewrite(plan, backend, settings["backend"], executor)


def rewrite(plan: Plan, backend: Backend, backend_settings: dict, executor: "Executor | None" = None) -> dict | None:
    """Rewrite all tasks of a plan; return the summary, or None if they were submitted and finish later.

    executor: one of `data_pipeline.executors`; None: in this process, one task after the other.
    """
    folder = OutputFolder(plan.output)
    source = Corpus(plan.input).path.resolve()  # first, so that a wrong input leaves no output
    if folder.path.resolve().is_relative_to(source):
        problem = f"is in rewrite.input={plan.input}"
        raise SettingError("rewrite.output", plan.output, "give a folder beside it", problem)
    with folder.held("run"):
        folder.begin(*(plan.identity(backend_settings, backend.model, by) for by in (SAMPLE, EARLIER)))
        if folder.manifest.exists():
            log.info("rewrite.output=%s is finished: nothing is left to do", plan.output)
            return json.loads((folder.path / SUMMARY).read_text(encoding="utf-8"))
        if executor is not None:
            from data_pipeline.rewriting.step import phase  # datatrove is only needed with an executor

            if not executor.run([phase(plan, backend, backend_settings)], folder.path / "logs", folder.key):
                log.info("%s is complete when it has a %s", folder.key, folder.manifest.name)
                return None
        else:
            ended = folder.ended_tasks()
            for task in range(plan.tasks):
                if task not in ended:
                    Rewriting(plan, backend, task).run()
        summary = finish(plan, folder)
        assert summary is not None  # every task has ended
    for line in summary_lines(summary):
        log.info("%s", line)
    log.info("shards, %s and %s are in %s", SUMMARY, SAMPLES, folder.path)
    return summary
