"""Score a suite one task at a time, save each result, and derive groups and averages."""

import contextlib
import json
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate

from common.atomic_files import write_atomic
from data_pipeline.fingerprint import fingerprint
from evaluation.harness.model import CheckpointLM
from evaluation.harness.published import PublishedSuite
from evaluation.harness.tasks import Suite, documents, silence_loggers
from evaluation.loading import explain_batch_memory
from evaluation.uncertainty import pooled

log = logging.getLogger(__name__)

REPEATED = 8  # requests of a task that are repeated, each in a separate batch
BOOTSTRAPS = 1000  # bootstrap draws for the standard error of metrics that are not means


def score(
    suite: Suite, load: Callable[[], CheckpointLM], settings: Mapping[str, Any], limit: int | None, folder: Path
) -> dict[str, dict]:
    """Return a record per task, by name: read from `folder` if its settings match, else computed.

    Args:
        load: returns the model; called only if a task is left to run.
        settings: JSON values, besides the tasks, that determine the results.
        limit: documents per task; None means all.
        folder: holds one file per finished task.

    Raises:
        ValueError: if the batch does not fit the device's memory.
    """
    files = {}
    for name, task in suite.tasks.items():
        identity = {
            **settings,
            "task": name,
            "num_fewshot": task.get_config("num_fewshot"),
            "documents": documents(task, limit),
        }
        files[name] = folder / f"{name.replace('/', '_')}-{fingerprint(identity)}.json", identity
    found = {name: json.loads(path.read_text()) for name, (path, _) in files.items() if path.is_file()}
    if found:
        log.info("%s of %s tasks were done before", len(found), len(files))
    model: CheckpointLM | None = None
    for name, (path, identity) in files.items():
        if name in found:
            continue
        model = load() if model is None else model
        found[name] = {**score_task(model, name, suite.tasks[name], limit, settings["seed"]), "identity": identity}
        write_atomic(path, json.dumps(found[name], indent=2) + "\n")
        first, (value, error) = next(iter(metrics(found[name]["results"]).items()))
        near = "" if error is None else f" ± {error:.4f}"
        log.info(
            "%s of %s tasks: %s %s %.4f%s (%s documents in %.0f s)",
            len(found),
            len(files),
            name,
            first,
            value,
            near,
            f"{found[name]['documents']:,}",
            found[name]["seconds"],
        )
    return {name: found[name] for name in files}


def score_task(model: CheckpointLM, name: str, task: Task, limit: int | None, seed: int) -> dict[str, Any]:
    """Run lm-eval on one task, and measure how well the model reproduces its answers."""
    start, cut = time.perf_counter(), model.cut
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    task.set_fewshot_seed(seed)
    lower = explain_batch_memory(model.batch_size, model.device, name)
    with lower, silence_loggers(), contextlib.redirect_stdout(sys.stderr):  # lm-eval prints its batch size search
        out = evaluate(
            model,
            {"tasks": {name: task}},
            limit=limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=False,
            confirm_run_unsafe_code=True,  # load_suite has refused what the user does not allow
        )
        cut = model.cut - cut
        repeated = repeat(model, task, seed)
    return {
        "results": out["results"][name],
        "version": out["versions"][name],
        "num_fewshot": task.get_config("num_fewshot"),
        "documents": out["n-samples"][name]["effective"],
        "documents_in_all": out["n-samples"][name]["original"],
        "max_length": model.max_length,
        "dtype": str(model.model.dtype).removeprefix("torch."),
        "cut_requests": cut,
        "repeated": repeated,
        "seconds": time.perf_counter() - start,
    }


def repeat(model: CheckpointLM, task: Task, seed: int) -> dict[str, float]:
    """Repeat a few requests, each alone, and compare.

    Returns:
        `requests`, their number; `largest_difference` of log-likelihoods in nats, or 1 if texts differ.
    """
    sample = random.Random(seed).sample(task.instances, min(REPEATED, len(task.instances)))
    again = [getattr(model, request.request_type)([request], disable_tqdm=True)[0] for request in sample]
    pairs = [(first_of(request.resps[0]), first_of(answer)) for request, answer in zip(sample, again, strict=True)]
    differences = [float(a != b) if isinstance(a, str) else abs(a - b) for a, b in pairs]
    return {"requests": len(sample), "largest_difference": max(differences)}


def first_of(answer: Any) -> Any:
    """Return the log-likelihood of (log-likelihood, is greedy)."""
    return answer[0] if isinstance(answer, tuple | list) else answer


def metrics(results: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Return value and standard error (or None) of each metric in lm-eval's results of a task or group."""
    found = {}
    for key, value in results.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        error = results.get(f"{metric}_stderr,{filtered}")
        found[metric if filtered == "none" else key] = (value, error if isinstance(error, float | int) else None)
    return found


def rows(suite: Suite, records: Mapping[str, dict], published: PublishedSuite) -> dict[str, dict[str, Any]]:
    """Return for each requested task or group its main metric, value, standard error, documents, and all metrics.

    The main metric is the paper's, else length-normalized accuracy, else the first.
    """
    found = {}
    for name in suite.rows:
        members = [name]
        results = records[name]["results"] if name in records else None
        if results is None:
            members = [task.task_name for task in suite.groups[name].get_all_tasks()]
            results = suite.groups[name].aggregate({task: records[task]["results"] for task in members})
        values = metrics(results)
        wanted = (metric for metric in (published.metric(name), "acc_norm") if metric in values)
        metric = next(wanted, next(iter(values)))
        found[name] = {
            "metric": metric,
            "value": values[metric][0],
            "standard_error": values[metric][1],
            "num_fewshot": records[members[0]]["num_fewshot"],
            "documents": sum(records[task]["documents"] for task in members),
            "metrics": {key: {"value": value, "standard_error": error} for key, (value, error) in values.items()},
        }
    return found


def averages(found: Mapping[str, dict], published: PublishedSuite) -> dict[str, dict[str, float | None]]:
    """Return the paper's averages whose tasks are all there."""
    return {
        name: {
            "value": math.fsum(found[task]["value"] for task in tasks) / len(tasks),
            "standard_error": pooled([found[task]["standard_error"] for task in tasks]),
        }
        for name, (_, tasks) in published.means.items()
        if all(task in found for task in tasks)
    }
