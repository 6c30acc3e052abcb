"""Tasks that execute what a model writes: refused before anything of them runs, unless the user allows it."""

import json
import os
import sys
from pathlib import Path

import lm_eval.tasks
import pytest
from evaluate import config

from evaluation.harness.generated_code import SWITCH, allow_generated_code
from evaluation.harness.tasks import load_suite

TASK = """
task: tiny_code
dataset_path: tests/code
unsafe_code: true
output_type: generate_until
test_split: test
doc_to_text: "{{prompt}}"
doc_to_target: "{{test}}"
metric_list:
  - metric: !function utils.pass_at_k
    aggregation: mean
    higher_is_better: true
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
filter_list:
  - name: create_test
    filter: [{function: custom, filter_fn: !function utils.build_predictions}]
metadata: {version: 1.0}
"""
GROUP = "group: code_group\ntask: [tiny_code]\naggregate_metric_list: [{metric: pass@1}]\n"
UTILS = """
import pathlib
import evaluate

pathlib.Path(__file__).with_name("imported").touch()
metric = evaluate.load("code_eval")
metric.compute(references=["assert one() == 1"], predictions=[["def one(): return 1"]])

def pass_at_k(references, predictions):
    return metric.compute(references=references, predictions=predictions)[0]

def build_predictions(resps, docs):
    return [[doc["prompt"] + text for text in texts] for texts, doc in zip(resps, docs)]
"""
# In place of the Hub's metric: it refuses as that does, and counts the predictions that begin as a function does.
CODE_EVAL = """
import os
import datasets
import evaluate

class CodeEval(evaluate.Metric):
    def _info(self):
        code = datasets.Value("string")
        features = datasets.Features({"predictions": datasets.Sequence(code), "references": code})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, k=(1,)):
        if os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
            raise ValueError("not allowed")
        passed = [text.startswith("def ") for texts in predictions for text in texts]
        return {"pass@1": sum(passed) / len(passed)}, {}
"""
PROBLEM = {"prompt": "def one():", "test": "assert one() == 1", "entry_point": "one"}


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory):
    """Keep the stand-in for the metric out of the user's caches, from where a real evaluation could take it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_MODULES_CACHE", "HF_METRICS_CACHE"):
            patch.setattr(config, name, tmp_path_factory.mktemp("cache"))
        patch.setattr(sys, "path", [*sys.path])
        yield
    for name in [name for name in sys.modules if name.startswith("evaluate_modules")]:
        del sys.modules[name]


@pytest.fixture
def place(tmp_path):
    """A folder with tasks/, which execute code, and copies/ of their data and metric."""
    tasks, copies = tmp_path / "tasks", tmp_path / "copies"
    for folder in ("tests/code", "openai/openai_humaneval/openai_humaneval", "evaluate-metric/code_eval"):
        (copies / folder).mkdir(parents=True)
    tasks.mkdir()
    (tasks / "code.yaml").write_text(TASK)
    (tasks / "group.yaml").write_text(GROUP)
    (tasks / "utils.py").write_text(UTILS)
    lines = json.dumps(PROBLEM) + "\n" + json.dumps(PROBLEM | {"prompt": "one = 1"}) + "\n"
    for name in ("tests/code", "openai/openai_humaneval/openai_humaneval"):
        (copies / name / "test.jsonl").write_text(lines)
    (copies / "evaluate-metric/code_eval/code_eval.py").write_text(CODE_EVAL)
    return tmp_path


@pytest.fixture
def evaluate(run, ours, place):
    def call(*overrides, tasks="[tiny_code]", folder=place / "tasks"):
        return run(
            *("job=evaluate", "benchmark=harness_sigma_code", f"benchmark.tasks={tasks}", "device=cpu"),
            *(f"checkpoint={ours}", f"output={place}/out", f"benchmark.tasks_folder={folder}"),
            *(f"benchmark.datasets_folder={place}/copies", *overrides),
            tiny=False,
        )

    return call


@pytest.mark.parametrize("tasks", ["[tiny_code]", "[code_group]"])
def test_code_is_not_executed_unless_the_user_allows_it_whatever_the_environment_says(
    evaluate, place, tasks, monkeypatch
):
    monkeypatch.setenv(SWITCH, "1")
    done = evaluate(tasks=tasks)
    assert done.status == 2
    assert done.err.count("\n") == 1
    said = f"benchmark.run_generated_code=false does not allow {tasks[1:-1]}, which execute code that the model writes:"
    assert f"{said} give true inside a sandbox (evaluation/README.md)" in done.err
    assert not (place / "tasks" / "imported").exists()
    assert not (place / "out").exists()


def test_lm_evals_own_code_task_is_refused_too_and_what_is_left_is_named(evaluate, place):
    folder = Path(lm_eval.tasks.__file__).parent / "humaneval"
    done = evaluate(tasks="[humaneval]", folder=folder)
    assert "does not allow humaneval" in done.err
    (place / "tasks" / "choices.yaml").write_text(TASK.replace("unsafe_code: true", "").replace("tiny_code", "safe"))
    done = evaluate(tasks="[safe,tiny_code]")
    assert "does not allow tiny_code" in done.err
    assert "or leave them out: benchmark.tasks=[safe]" in done.err


def test_allowed_code_is_executed_by_a_copy_of_the_metric(evaluate, place):
    done = evaluate("benchmark.run_generated_code=true", "dtype=float32")
    assert done.status == 0, done.err
    assert SWITCH not in os.environ
    report = json.loads((place / "out/evaluation/harness_sigma_problem_solving.json").read_text())
    assert report["tasks"]["tiny_code"]["value"] == 0.5
    assert report["settings"]["run_generated_code"] is True
    assert "| tiny_code | pass@1,create_test | 50.0" in done.out


def test_lm_evals_own_code_task_is_set_up_from_copies(place):
    folder = Path(lm_eval.tasks.__file__).parent / "humaneval"
    with allow_generated_code(True):
        suite = load_suite(["humaneval"], {}, folder, place / "copies", run_generated_code=True)
    assert list(suite.tasks) == ["humaneval"]
    assert suite.tasks["humaneval"].get_config("num_fewshot") == 0


def test_a_metric_that_is_not_there_is_one_line_with_its_place(evaluate, place):
    (place / "copies/evaluate-metric/code_eval/code_eval.py").unlink()
    done = evaluate("benchmark.run_generated_code=true")
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert "tiny_code needs the metric code_eval, which could not be downloaded" in done.err
    assert f"{place}/copies/evaluate-metric/code_eval" in done.err


def test_the_environment_is_given_back(monkeypatch):
    for before in (None, "0", "1"):
        monkeypatch.delenv(SWITCH, raising=False) if before is None else monkeypatch.setenv(SWITCH, before)
        for allowed, inside in ((True, "1"), (False, None)):
            with allow_generated_code(allowed):
                assert os.environ.get(SWITCH) == inside
            assert os.environ.get(SWITCH) == before
