"""The papers' suites: their files in conf/, their tasks in lm-eval, and a checkpoint above a paper's models."""

import json
from pathlib import Path

import lm_eval.tasks
import pytest
import yaml
from lm_eval.tasks import TaskManager

from evaluation.harness import report as reports
from evaluation.harness.published import SUITES
from tests.conftest import ROOT
from tests.evaluation.conftest import CHOICE_TASK

FILES = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "conf/benchmark").glob("harness*.yaml")}
FOLDERS = (  # of lm-eval, that have the suites' tasks: to list all takes ten seconds
    *("arc", "bbh", "gsm8k", "hellaswag", "hendrycks_math", "humaneval", "lambada", "logiqa", "mbpp", "mmlu"),
    *("mmlu_pro", "openbookqa", "piqa", "sciq", "super_glue/boolq", "winogrande"),
)


def suite_of(file: str) -> str:
    return FILES[file].get("published") or "sigma_problem_solving"  # from the part that its files share


@pytest.fixture(scope="module")
def manager():
    home = Path(lm_eval.tasks.__file__).parent
    return TaskManager(include_path=[home / folder for folder in FOLDERS], include_defaults=False)


def test_a_file_asks_for_tasks_of_its_suite_and_each_suite_has_a_file_with_all():
    for file, content in FILES.items():
        assert set(content["tasks"]) <= set(SUITES[suite_of(file)].columns), file
    whole = [suite_of(file) for file, content in FILES.items() if content["tasks"] == [*SUITES[suite_of(file)].columns]]
    assert sorted(whole) == sorted(SUITES)


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_lm_eval_has_every_task_with_the_metric_that_the_suite_names(manager, suite):
    for task, (_, metric) in suite.columns.items():
        settings = manager.task_index[task].cfg
        name, _, chosen = metric.partition(",")
        listed = settings.get("aggregate_metric_list") or settings["metric_list"]
        named = [str(each["metric"]) for each in listed]
        assert name in named or "pass_at" in named[0], task  # the code tasks' metrics are functions
        filters = [each.get("filter_list") for each in listed]
        filters += [each["name"] for each in settings.get("filter_list", [])]
        assert not chosen or chosen in filters, task


def test_examples_are_those_of_the_paper(manager):
    """MMLU, MMLU-Pro, MATH and GSM8K have 5, BBH 3, HumanEval none (appendix H.3)."""
    asked = FILES["harness_sigma_problem_solving"]["num_fewshot"]
    members = {"mmlu": "mmlu_anatomy", "mmlu_pro": "mmlu_pro_law", "bbh": "bbh_cot_fewshot_navigate"}
    members |= {"hendrycks_math": "hendrycks_math_algebra", "gsm8k": "gsm8k", "humaneval": "humaneval"}
    found = {
        task: asked.get(task, manager.task_index[member].cfg.get("num_fewshot")) for task, member in members.items()
    }
    assert found == {"mmlu": 5, "mmlu_pro": 5, "bbh": 3, "hendrycks_math": 5, "gsm8k": 5, "humaneval": 0}


@pytest.fixture
def sigma(run, ours, datasets_folder, tmp_path):
    """Run the suite's command on tasks of its names with tiny data."""
    tasks = tmp_path / "tasks"
    tasks.mkdir()

    def call(*names):
        for name in names:
            (tasks / f"{name}.yaml").write_text(CHOICE_TASK.format(name=name, dataset="tests/choices"))
        return run(
            *("job=evaluate", "benchmark=harness_sigma_common_sense", f"benchmark.tasks=[{','.join(names)}]"),
            *(f"checkpoint={ours}", f"output={tmp_path}", "device=cpu", "benchmark.limit=4"),
            *(f"benchmark.tasks_folder={tasks}", f"benchmark.datasets_folder={datasets_folder}"),
            tiny=False,
        )

    return call


def test_a_checkpoint_stands_above_the_papers_models_in_files_of_the_suite(sigma, tmp_path):
    tasks = list(SUITES["sigma_common_sense"].columns)
    done = sigma(*tasks)
    assert done.status == 0, done.err
    folder = tmp_path / "evaluation"
    assert (folder / "harness_sigma_common_sense.png").stat().st_size > 1000
    assert not (folder / "harness.json").exists()
    found = json.loads((folder / "harness_sigma_common_sense.json").read_text())
    assert {name: row["metric"] for name, row in found["tasks"].items()} == {
        task: metric for task, (_, metric) in SUITES["sigma_common_sense"].columns.items()
    }
    lines = done.out.splitlines()
    header = next(line for line in lines if line.startswith("| model"))
    assert header.startswith("| model | HellaSwag acc_norm | OBQA acc_norm | WinoGrande acc |")
    average = 100 * sum(row["value"] for row in found["tasks"].values()) / len(tasks)
    assert f"| {average:.1f}" in next(line for line in lines if "this checkpoint" in line)
    assert "| Sigma-1.5B | 67.3 | 40.4 | 67.5 | 72.3 | 43.9 | 77.8 | 94.0 | 63.0 | 28.4 | 61.6 |" in lines
    assert any("arXiv 2501.13629 v2, table 7" in line for line in lines)


def test_a_value_that_the_paper_does_not_have_is_a_dash(tmp_path):
    row = {"metric": "exact_match", "value": 0.25, "standard_error": 0.01, "num_fewshot": 5, "documents": 8}
    report = {"settings": {"published": "sigma_problem_solving"}, "tasks": {"hendrycks_math": row}, "averages": {}}
    lines = reports.paper_table(report, SUITES["sigma_problem_solving"])
    assert lines[2] == "| **this checkpoint** | - | - | - | - | - | 25.0 ± 1.0 | - | - |"
    assert "| TinyLlama-1.1B | 26.7 | 11.3 | 25.4 | - | 10.8 | 1.9 | 1.8 | 11.1 |" in lines
    report["checkpoint"] = "a checkpoint"
    assert reports.draw(report, tmp_path / "harness.png").stat().st_size > 1000
