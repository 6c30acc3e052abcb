"""Tasks that execute what the model writes, such as HumanEval and MBPP: only if the user allows it.

The generated code is hostile input. lm-eval hands it to the metric `code_eval`, which runs it in child processes of
this job, on this machine, as this user. The metric blocks some functions and stops after seconds: that is no sandbox.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

from common.settings import SettingError

SWITCH = "HF_ALLOW_CODE_EVAL"  # code_eval's own


@contextlib.contextmanager
def allow_generated_code(allowed: bool) -> Iterator[None]:
    """Let `code_eval` execute code within the block if it is allowed, and not at all if it is not."""
    before = os.environ.pop(SWITCH, None)
    if allowed:
        os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before


def check_allowed(names: Sequence[str], manager: TaskManager, allowed: bool) -> None:
    """Refuse tasks that execute generated code, before they are imported: their modules execute a test at once.

    Args:
        names: tasks, groups and tags.
        manager: lm-eval's index of tasks.
        allowed: whether the user allows it.

    Raises:
        SettingError: one executes generated code, and that is not allowed.
    """
    found = [name for name in names if executes_code(name, manager)]
    if found and not allowed:
        raise refusal(found, [name for name in names if name not in found])


def check_loaded(tasks: Mapping[str, Task], allowed: bool) -> None:
    """Refuse loaded tasks that execute generated code and that no index tells of.

    Raises:
        SettingError: one does, and that is not allowed.
    """
    found = [name for name, task in tasks.items() if getattr(task, "UNSAFE_CODE", False)]
    if found and not allowed:
        raise refusal(found, [name for name in tasks if name not in found])


def executes_code(name: str, manager: TaskManager) -> bool:
    """Return whether a task, or one of a group or tag, is marked as `unsafe_code`."""
    entry = manager.task_index.get(name)
    if entry is None:
        return False
    settings = entry.cfg or {}
    if settings.get("unsafe_code"):
        return True
    members = entry.tags if name in manager.all_tags else settings.get("task")
    if not isinstance(members, set | list):
        return False  # a task names itself
    named = [member.get("task") if isinstance(member, dict) else member for member in members]
    return any(executes_code(member, manager) for member in named if isinstance(member, str))


def refusal(found: Sequence[str], others: Sequence[str]) -> SettingError:
    problem = f"does not allow {', '.join(found)}, which execute code that the model writes"
    leave_out = f", or leave them out: benchmark.tasks=[{','.join(others)}]" if others else ""
    fix = f"give true inside a sandbox (evaluation/README.md){leave_out}"
    return SettingError("benchmark.run_generated_code", False, fix, problem)
