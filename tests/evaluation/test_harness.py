"""Model arguments for lm-eval, the papers' numbers, and the run that receives the results."""

from types import SimpleNamespace

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation import result_folder, run_log
from evaluation.harness.model import CheckpointLM
from evaluation.harness.published import NO_SUITE, SUITES
from evaluation.harness.scoring import averages, rows
from lit_modules.launching import run_folder
from lit_modules.loggers import wandb


def as_lm_eval_sees(folder, batch_size=4, max_length=None):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return CheckpointLM(model, AutoTokenizer.from_pretrained(folder), batch_size, max_length)


LIGER = SUITES["liger"]


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_the_published_averages_are_those_of_the_published_values(suite):
    tasks = list(suite.columns)
    for row in suite.rows:
        values = dict(zip(tasks, row.values, strict=True))
        for (_, averaged), mean in zip(suite.means.values(), row.means, strict=True):
            found = sum(values[task] or 0 for task in averaged) / len(averaged)  # Sigma's count what is missing as 0
            assert found == pytest.approx(mean, abs=0.06), row.model
    assert {*suite.marked} <= {row.model for row in suite.rows}


def test_averages_wait_for_all_their_tasks():
    found = {task: {"value": 0.5, "standard_error": 0.01} for task in LIGER.columns if task != "mmlu"}
    assert set(averages(found, LIGER)) == {"average_without_mmlu"}
    assert averages(found, LIGER)["average_without_mmlu"]["standard_error"] == pytest.approx(0.01 / 5**0.5)
    found["mmlu"] = {"value": 0.2, "standard_error": None}
    assert averages(found, LIGER)["average"] == {"value": pytest.approx(0.45), "standard_error": None}
    assert averages(found, NO_SUITE) == {}


def test_a_task_has_the_papers_metric_and_one_that_is_not_in_the_paper_acc_norm_where_there_is_one():
    results = {"alias": "a task", "exact_match,none": 0.1, "acc,none": 0.2, "acc_norm,none": 0.3}
    record = {"results": results, "num_fewshot": 0, "documents": 5}
    asked = ["piqa", "arc_challenge", "winogrande", "tiny_choices"]

    def found(suite):
        values = rows(SimpleNamespace(rows=asked, groups={}), dict.fromkeys(asked, record), suite)
        return {name: (row["metric"], row["value"]) for name, row in values.items()}

    assert found(LIGER) == {
        "piqa": ("acc", 0.2),
        "arc_challenge": ("acc_norm", 0.3),
        "winogrande": ("acc", 0.2),
        "tiny_choices": ("acc_norm", 0.3),
    }
    assert found(SUITES["sigma_common_sense"])["piqa"] == ("acc_norm", 0.3)
    assert found(NO_SUITE)["winogrande"] == ("acc_norm", 0.3)


def test_a_request_that_just_fills_the_context_is_not_cut(ours):
    model = as_lm_eval_sees(ours, max_length=8)

    def score(first, context):
        return model._loglikelihood_tokens([(("a", "b"), [first, *range(6, 5 + context)], [7])], disable_tqdm=True)

    assert score(3, context=8) != score(4, context=8)  # 8 tokens are read, and the ninth is what is scored
    assert model.cut == 0
    assert score(3, context=9) == score(4, context=9)
    assert model.cut == 2


def test_a_model_of_ours_sees_each_text_begin_as_in_training_and_the_callers_tokenizer_stays(ours):
    tokenizer = AutoTokenizer.from_pretrained(ours)
    plain = tokenizer("the gate")["input_ids"]
    model = CheckpointLM(AutoModelForCausalLM.from_pretrained(ours), tokenizer, 1, None)
    assert model.tok_encode("the gate") == [0, *plain]
    assert model.tok_encode("the gate", add_special_tokens=False) == plain
    ids, mask = model.tok_batch_encode(["the gate", "a"])
    assert ids[0].tolist() == [0, *plain]
    assert int(mask[1].sum()) == len(model.tok_encode("a"))
    assert tokenizer("the gate")["input_ids"] == plain


def test_a_damaged_model_and_a_text_that_nothing_can_begin_are_told(llama):
    tokenizer, model = AutoTokenizer.from_pretrained(llama), AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"^checkpoint: its log-likelihoods are not numbers"):
        CheckpointLM(model, tokenizer, 1, None)._loglikelihood_tokens([(("a", "b"), [5, 6], [7])])
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"^checkpoint: its tokenizer names neither"):
        CheckpointLM(model, tokenizer, 1, None)


def test_a_batch_size_is_looked_for_once_for_requests_of_about_one_length(ours, monkeypatch):
    model, tried = as_lm_eval_sees(ours), []
    monkeypatch.setattr(
        HFLM, "_detect_batch_size", lambda self, requests, pos=0: tried.append(len(requests[0][1])) or 2
    )
    for length in (40, 33, 64, 12, 90, 500):
        model._detect_batch_size([(None, [1] * (length - 1), [2])])
    assert tried == [64, 16, 96]  # 96: what the model's configuration allows


def test_a_batch_that_memory_has_no_room_for_is_a_mistake_in_one_line(ours, monkeypatch):
    from evaluation.harness import scoring

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    class AnyTask:
        def set_fewshot_seed(self, seed): ...

    monkeypatch.setattr(scoring, "evaluate", full)
    with pytest.raises(ValueError, match="batch_size=4 does not fit"):
        scoring.score_task(as_lm_eval_sees(ours), "piqa", AnyTask(), None, 0)


def make_run(folder):
    (folder / "checkpoints" / "step_00000004").mkdir(parents=True)
    (folder / "export").mkdir()
    (folder / "export" / "model.safetensors").write_bytes(b"weights")
    (folder / "metrics.csv").write_text("step,loss\n2,3.0\n4,2.5\n")
    (folder / run_folder.CONFIG).write_text(
        "logger:\n  wandb:\n    _target_: x\n    project: liger\n    mode: offline\n"
    )
    return folder


def test_results_of_a_run_its_checkpoints_and_its_export_go_to_the_run(tmp_path):
    run = make_run(tmp_path / "run")
    for path in (run, run / "export", run / "checkpoints" / "step_00000004"):
        assert result_folder.result_folder(str(path), None).folder == run / "evaluation"
    assert result_folder.result_folder(str(run), str(tmp_path / "other")).folder == tmp_path / "other" / "evaluation"
    with pytest.raises(ValueError, match="output=FOLDER"):
        result_folder.result_folder(str(tmp_path), None)
    with pytest.raises(ValueError, match="output=FOLDER"):
        result_folder.result_folder("meta-llama/Llama-3.2-1B", None)


def test_weights_that_are_written_anew_have_another_name(tmp_path):
    run = make_run(tmp_path / "run")
    before = result_folder.weights_identity(str(run))
    (run / "metrics.csv").write_text("step,loss\n")
    assert result_folder.weights_identity(str(run)) == before
    (run / "export" / "model.safetensors").write_bytes(b"other weights")
    assert result_folder.weights_identity(str(run)) != before


def test_values_go_to_the_wandb_run_at_its_last_step_unless_it_is_going_on(tmp_path, monkeypatch):
    run, told = make_run(tmp_path / "run"), []

    class Recorder:
        def __init__(self, folder, settings, **given):
            told.append(("begin", folder, given))

        def log_metrics(self, values, step):
            told.append((values, step))

        def log_image(self, name, pictures, step):
            told.append((name, pictures, step))

        def close(self, code):
            told.append(("end", code))

    monkeypatch.setattr(wandb, "Wandb", Recorder)
    log = lambda: run_log.log_to_run(run, {"harness/piqa_acc": 0.5}, {"picture": run / "a.png"})  # noqa: E731
    log()
    assert told == []  # a run without wandb
    (run / "wandb").mkdir()
    (run / "wandb" / "run-id.txt").write_text("abc")
    with run_folder.lock_folder(run):
        log()
    assert told == []
    log()
    assert told == [
        ("begin", run, {"project": "liger", "mode": "offline"}),
        ({"harness/piqa_acc": 0.5}, 4),
        ("picture", [f"{run}/a.png"], 4),
        ("end", 0),
    ]
