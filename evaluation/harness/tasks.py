"""The requested tasks, set up with their documents before any model is loaded."""

import contextlib
import difflib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from common.settings import SettingError
from data_pipeline.fingerprint import fingerprint
from evaluation.harness.copies import DataCopies, DataNotFound, first_line
from evaluation.harness.generated_code import check_allowed, check_loaded

NOISY_LOGGERS = ("lm_eval", "datasets", "huggingface_hub", "httpx")


@dataclass
class Suite:
    """The tasks of an evaluation.

    Attributes:
        tasks: every task to run, by name.
        groups: requested groups with an aggregate value, by name.
        rows: names of the requested tasks and such groups, in order.
    """

    tasks: dict[str, Task] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)


@contextlib.contextmanager
def silence_loggers() -> Iterator[None]:
    """Let the libraries log only errors."""
    levels = {name: logging.getLogger(name).level for name in NOISY_LOGGERS}
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def load_suite(
    names: Sequence[str],
    num_fewshot: Mapping[str, int],
    tasks_folder: Path | None,
    datasets_folder: Path | None,
    run_generated_code: bool = False,
) -> Suite:
    """Set up the named tasks, groups and tags.

    Args:
        num_fewshot: examples before each question, for a task or for all of a group; else the task's default.
        tasks_folder: YAML files of additional tasks.
        datasets_folder: copies of data sets, see `copies`.
        run_generated_code: whether tasks may execute what the model writes.

    Raises:
        ValueError: if a name is unknown, a task cannot be set up, executes generated code without permission, or its
            data set is not available.
    """
    manager = manager_for(names, tasks_folder)
    check_allowed(names, manager, run_generated_code)
    copies, suite, missing = DataCopies(datasets_folder), Suite(), {}
    for name in names:
        try:
            with copies.in_place():
                loaded = manager.load([name])
        except DataNotFound as error:
            missing[name] = error
            continue
        except Exception as error:  # a task may run arbitrary code
            raise ValueError(f"benchmark.tasks: {name} cannot be set up: {describe_error(error)}") from error
        for task_name, task in loaded["tasks"].items():
            set_fewshot(task, task_name, num_fewshot.get(task_name, num_fewshot.get(name)))
        suite.tasks |= loaded["tasks"]
        group = loaded.get("groups", {}).get(name)
        if group is not None and group.has_aggregation:
            suite.groups[name] = group
        suite.rows += [name] if name in suite.groups else list(loaded["tasks"])
    if missing:
        raise ValueError(no_data(missing, datasets_folder))
    check_loaded(suite.tasks, run_generated_code)
    suite.rows = list(dict.fromkeys(suite.rows))
    return suite


def manager_for(names: Sequence[str], tasks_folder: Path | None) -> TaskManager:
    """Return lm-eval's task index.

    It covers only `tasks_folder` if that has all named tasks, because lm-eval's own tasks take ten seconds to list.

    Raises:
        ValueError: if the folder or a task does not exist.
    """
    if tasks_folder is not None:
        if not tasks_folder.is_dir():
            fix = "give one with YAML files of tasks"
            raise SettingError("benchmark.tasks_folder", tasks_folder, fix, "is not a folder")
        own = TaskManager(include_path=str(tasks_folder), include_defaults=False)
        if all(is_known_task(own, name) for name in names):
            return own
    manager = TaskManager(include_path=None if tasks_folder is None else str(tasks_folder))
    for name in names:
        if name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, 3)
            beside = "" if tasks_folder is None else f" and in benchmark.tasks_folder={tasks_folder}"
            fix = f"did you mean {', '.join(near)}?" if near else "`lm_eval ls tasks` lists them"
            problem = f"is not among the {len(manager.all_tasks):,} tasks of lm-eval{beside}"
            raise SettingError("benchmark.tasks", name, fix, problem)
    return manager


def is_known_task(manager: TaskManager, name: str) -> bool:
    """Return whether an index has a task, or a group with all its members."""
    entry = manager.task_index.get(name)
    if entry is None:
        return False
    members = (entry.cfg or {}).get("task") if name in manager.all_groups else None
    return not isinstance(members, list) or all(isinstance(m, str) and is_known_task(manager, m) for m in members)


def set_fewshot(task: Task, name: str, asked: int | None) -> None:
    """Set the task's number of examples: the requested one, else its default, else 0.

    Raises:
        ValueError: if the task allows no examples, or has too few.
    """
    own = task.get_config("num_fewshot")
    if asked is not None and own == 0 and asked != 0:
        raise SettingError(f"benchmark.num_fewshot.{name}", asked, "leave it out", "is for a task of 0 examples")
    if asked:
        there = len(list(task.fewshot_docs()))
        if asked > there:
            raise SettingError(f"benchmark.num_fewshot.{name}", asked, f"give at most {there}, the task has no more")
    task.set_config(key="num_fewshot", value=asked if asked is not None else own or 0)


def no_data(missing: Mapping[str, DataNotFound], datasets_folder: Path | None) -> str:
    """Format the error line for tasks whose data sets are not available."""
    tasks = ", ".join(f"{name} needs {error.dataset}" for name, error in missing.items())
    first = next(iter(missing.values()))
    if datasets_folder is None:
        copy = "give benchmark.datasets_folder=FOLDER with copies"
    elif first.looked:
        copy = f"a copy would be in {' or '.join(map(str, first.looked))}"
    else:
        copy = f"benchmark.datasets_folder={datasets_folder} is not asked for files that a task names itself"
    return f"benchmark.tasks: {tasks}, which could not be downloaded ({first.reason}); {copy} (evaluation/README.md)"


def describe_error(error: Exception) -> str:
    """Format an error on one line; a KeyError is usually a split that the data set does not have."""
    return f"its data has no {error}" if isinstance(error, KeyError) else first_line(error)


def documents(task: Task, limit: int | None) -> str:
    """Return a digest of a task's content: its documents up to the limit, its examples and its configuration."""
    asked = task.task_docs if hasattr(task, "task_docs") else task.eval_docs
    rows = [asked[number] for number in range(len(asked) if limit is None else min(limit, len(asked)))]
    examples = list(task.fewshot_docs()) if task.get_config("num_fewshot") else []
    config = {k: v for k, v in task.dump_config().items() if k != "metadata"}
    told = json.dumps([rows, examples, config], default=str, sort_keys=True)
    return fingerprint(re.sub(r" at 0x[0-9a-f]+", "", told))  # drop the addresses of functions
