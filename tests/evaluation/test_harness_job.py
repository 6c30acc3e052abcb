"""`job=evaluate benchmark=harness` on tiny checkpoints and tasks: values, resuming, and user errors."""

import json
import math
import re
import shutil
from pathlib import Path

import hydra
import pytest
import torch
from datasets import Dataset, load_from_disk
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

import palimpsest
from evaluation.harness import copies, job, scoring, tasks
from evaluation.harness.model import CheckpointLM
from lit_modules.launching import run_folder, start
from tests.evaluation.conftest import questions

START_ID = 0


@pytest.fixture(scope="session")
def composed():
    """Compose the job's configuration once, as it is slow."""
    start.register_resolvers()
    with hydra.initialize_config_dir(str(Path(palimpsest.__file__).parent / "conf"), version_base="1.3"):
        return hydra.compose("config", ["job=evaluate", "benchmark=harness", "checkpoint=?", "device=cpu"])


@pytest.fixture
def evaluate(composed, tasks_folder, datasets_folder, tmp_path, monkeypatch):
    """Run the job with the tiny tasks and data in float64; return what it wrote to the test's folder."""
    monkeypatch.setattr(run_folder, "code_commit", lambda: "0" * 40)

    def call(checkpoint, *tasks, **changes):
        cfg = composed.copy()
        settings = {
            "output": str(tmp_path / "out"),
            "dtype": "float64",
            "benchmark.tasks": list(tasks),
            "benchmark.tasks_folder": str(tasks_folder),
            "benchmark.datasets_folder": str(datasets_folder),
        }
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        for key, value in {**settings, **changes, "checkpoint": str(checkpoint)}.items():
            OmegaConf.update(cfg, key, value, force_add=True)
        job.run(cfg)
        return json.loads((Path(cfg.output) / "evaluation" / "harness.json").read_text())

    return call


def loaded(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    return model, AutoTokenizer.from_pretrained(folder)


def log_probability(model, context, continuation):
    """Return the log-probability of a continuation, computed alone and unpadded in float64."""
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        log_probs = model(ids, use_cache=False).logits[0].log_softmax(-1)
    rows = torch.arange(len(context) - 1, ids.shape[1] - 1)
    return float(log_probs[rows, ids[0, len(context) :]].sum())


def accuracies_by_hand(folder, documents):
    """Return acc and acc_norm (per character of the answer), with one BOS token before each document."""
    model, tokenizer = loaded(folder)
    right, right_normalized = 0, 0
    for document in documents:
        prompt = f"Question: {document['question']}\nAnswer:"
        scores = []
        for choice in document["choices"]:
            whole = tokenizer(f"{prompt} {choice}", add_special_tokens=False)["input_ids"]
            context = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            assert whole[: len(context)] == context
            scores.append(log_probability(model, [START_ID, *context], whole[len(context) :]))
        normalized = [score / len(choice) for score, choice in zip(scores, document["choices"], strict=True)]
        right += max(range(4), key=scores.__getitem__) == document["answer"]
        right_normalized += max(range(4), key=normalized.__getitem__) == document["answer"]
    return right / len(documents), right_normalized / len(documents)


def perplexity_by_hand(folder, texts, window):
    """Return the perplexity per word; longer texts are read in pieces of `window` tokens that share only one token."""
    model, tokenizer = loaded(folder)
    total = 0.0
    for text in texts:
        tokens = [START_ID, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        for begin in range(0, len(tokens) - 1, window):
            last = min(begin + window, len(tokens) - 1)
            # the last piece is filled up with tokens before it, which it sees
            first = max(0, last - window) if begin else 0
            total += log_probability(model, tokens[first : begin + 1], tokens[begin + 1 : last + 1])
    return math.exp(-total / sum(len(text.split()) for text in texts))


@pytest.mark.parametrize("folder", ["ours", "llama", "linearized"])
def test_values_equal_those_computed_alone_in_float64_at_any_batch_size(
    evaluate, request, folder, datasets_folder, tmp_path
):
    checkpoint = request.getfixturevalue(folder)
    acc, acc_norm = accuracies_by_hand(checkpoint, questions(0, 13))
    texts = load_from_disk(str(datasets_folder / "tests" / "texts"))["validation"]["text"]
    perplexity = perplexity_by_hand(checkpoint, texts, window=96)
    near = 1e-5 if folder == "linearized" else 1e-9  # its recurrence is in float32
    for batch_size in (1, 8):
        output = str(tmp_path / str(batch_size))
        report = evaluate(checkpoint, "tiny_choices", "tiny_texts", batch_size=batch_size, output=output)
        assert report["tasks"]["tiny_choices"]["metrics"]["acc"]["value"] == pytest.approx(acc)
        assert report["tasks"]["tiny_choices"]["metrics"]["acc_norm"]["value"] == pytest.approx(acc_norm)
        assert report["tasks"]["tiny_choices"]["documents"] == 13
        assert report["tasks"]["tiny_texts"]["value"] == pytest.approx(perplexity, rel=near)
        for record in report["subtasks"].values():
            assert record["repeated"]["requests"] > 0
            assert record["repeated"]["largest_difference"] < 10 * near
    assert max(len(AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"]) for text in texts) > 96


def test_a_group_has_the_accuracy_of_all_its_documents(run, tasks_folder, datasets_folder, ours, tmp_path):
    done = run(
        *("job=evaluate", "benchmark=harness", "benchmark.tasks=tiny_group", "device=cpu"),
        *(f"checkpoint={ours}", f"output={tmp_path}"),
        *(f"benchmark.tasks_folder={tasks_folder}", f"benchmark.datasets_folder={datasets_folder}"),
        tiny=False,
    )
    assert done.status == 0, done.err
    acc, _ = accuracies_by_hand(ours, questions(0, 13) + questions(1, 6))
    row = json.loads((tmp_path / "evaluation" / "harness.json").read_text())["tasks"]["tiny_group"]
    assert row["value"] == pytest.approx(acc)
    assert row["documents"] == 19
    assert f"| tiny_group | acc | {100 * acc:.1f}" in done.out
    assert done.out.strip() == (tmp_path / "evaluation" / "harness.md").read_text().strip()
    assert (tmp_path / "evaluation" / "harness.png").stat().st_size > 1000


def test_a_limit_counts_documents_and_the_table_says_so(evaluate, ours, capfd):
    report = evaluate(ours, "tiny_choices", benchmark__limit=5)
    assert report["tasks"]["tiny_choices"]["documents"] == 5
    assert "only the first 5 documents" in capfd.readouterr().out


def test_perplexities_alone_have_a_table_and_no_picture(evaluate, ours, tmp_path, capfd):
    report = evaluate(ours, "tiny_texts", benchmark__limit=2)
    assert f"| tiny_texts | word_perplexity | {report['tasks']['tiny_texts']['value']:.4g} |" in capfd.readouterr().out
    assert not (tmp_path / "out" / "evaluation" / "harness.png").exists()


def test_an_earlier_evaluation_keeps_its_report_table_and_picture(evaluate, ours, tmp_path):
    folder = tmp_path / "out" / "evaluation"

    def kept():
        return sorted(
            re.sub(r"_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", "_TIME", path.name) for path in folder.glob("harness_*")
        )

    first = evaluate(ours, "tiny_choices", benchmark__limit=2)
    evaluate(ours, "tiny_choices", benchmark__limit=2)
    assert kept() == []  # the same again
    evaluate(ours, "tiny_texts", benchmark__limit=2)
    assert kept() == ["harness_TIME.json", "harness_TIME.md", "harness_TIME.png"]
    assert json.loads(next(folder.glob("harness_*.json")).read_text())["tasks"] == first["tasks"]
    assert not (folder / "harness.png").exists()  # which would be of the first


def test_requests_that_are_cut_are_counted(evaluate, ours, capfd):
    report = evaluate(ours, "tiny_choices", benchmark__max_length=24)
    assert 0 < report["subtasks"]["tiny_choices"]["cut_requests"] < 13 * 4
    assert "longer than 24 tokens" in capfd.readouterr().out


def test_examples_come_before_each_question(evaluate, ours, monkeypatch):
    seen, score_task = [], scoring.score_task

    def watched(model, name, task, *rest):
        record = score_task(model, name, task, *rest)
        seen.append(task.instances[0].args[0].count("Question:"))
        return record

    monkeypatch.setattr(scoring, "score_task", watched)
    for examples in ({}, {"tiny_choices": 2}, {"tiny_group": 3}):
        tasks = ["tiny_group" if "tiny_group" in examples else "tiny_choices"]
        evaluate(ours, *tasks, benchmark__num_fewshot=examples, benchmark__limit=2)
    assert seen == [1, 3, 4, 4]


def test_a_model_that_does_not_repeat_itself_is_told(evaluate, ours, monkeypatch):
    call = CheckpointLM._model_call
    monkeypatch.setattr(CheckpointLM, "_model_call", lambda *given: torch.rand(1) * call(*given))
    report = evaluate(ours, "tiny_choices")
    assert report["subtasks"]["tiny_choices"]["repeated"]["largest_difference"] > 0.1


@pytest.fixture
def scored(monkeypatch):
    """Return the names of the tasks that are scored instead of read from disk."""
    names, score_task = [], scoring.score_task

    def watched(model, name, *rest):
        names.append(name)
        return score_task(model, name, *rest)

    monkeypatch.setattr(scoring, "score_task", watched)
    return names


def test_a_killed_evaluation_goes_on_with_the_tasks_that_are_left(evaluate, ours, tmp_path, monkeypatch, scored):
    with monkeypatch.context() as killing:

        def killed(model, name, *rest, score_task=scoring.score_task):
            if name == "tiny_other":
                raise KeyboardInterrupt
            return score_task(model, name, *rest)

        killing.setattr(scoring, "score_task", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate(ours, "tiny_choices", "tiny_other")
    assert not (tmp_path / "out" / "evaluation" / "harness.json").exists()
    assert list(evaluate(ours, "tiny_choices", "tiny_other")["tasks"]) == ["tiny_choices", "tiny_other"]
    assert scored == ["tiny_choices", "tiny_other"]


def test_other_weights_settings_and_documents_are_scored_anew(evaluate, ours, tmp_path, datasets_folder, scored):
    checkpoint, data = tmp_path / "checkpoint", tmp_path / "data"
    shutil.copytree(ours, checkpoint)
    shutil.copytree(datasets_folder, data)

    def times(**changes):
        before = len(scored)
        for _ in range(2):
            evaluate(
                checkpoint,
                "tiny_choices",
                **{"benchmark__datasets_folder": str(data), "benchmark__limit": 2, **changes},
            )
        return len(scored) - before

    assert times() == 1
    assert times(benchmark__limit=3) == 1
    assert times(dtype="float32") == 1
    assert times() == 0
    (checkpoint / "more.bin").write_bytes(b"weights")
    assert times() == 1
    changed = "\n".join(json.dumps(document) for document in questions(5, 4))
    (data / "tests" / "choices" / "validation.jsonl").write_text(changed)
    assert times() == 1


def test_missing_data_is_one_line_with_tasks_data_sets_and_places(run, tasks_folder, tmp_path, monkeypatch):
    asked = []

    def no_network(*args, **kwargs):
        asked.append(args)
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(copies.datasets, "load_dataset", no_network)
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run(
        *("job=evaluate", "benchmark=harness", "benchmark.tasks=[tiny_choices,tiny_texts]"),
        *(f"checkpoint={empty}", f"output={tmp_path}/out"),  # the data are looked for before the model
        *(f"benchmark.tasks_folder={tasks_folder}", f"benchmark.datasets_folder={empty}"),
        tiny=False,
    )
    assert done.status == 2
    assert done.err.count("\n") == 1
    needs = ("tiny_choices needs tests/choices", "tiny_texts needs tests/texts")
    for said in (*needs, "Couldn't reach", f"{empty}/tests/choices"):
        assert said in done.err
    assert len(asked) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"benchmark.tasks": []}, "benchmark.tasks is empty"),
        ({"benchmark.tasks_folder": "/nonexistent"}, "benchmark.tasks_folder=/nonexistent"),
        ({"benchmark.datasets_folder": "/nonexistent"}, "benchmark.datasets_folder=/nonexistent"),
        ({"benchmark.limit": 0}, "benchmark.limit=0"),
        ({"batch_size": "many"}, "batch_size=many"),
        ({"dtype": "int8"}, "dtype=int8"),
        ({"output": None}, "output=FOLDER"),
        ({"benchmark.tasks": None}, "benchmark.tasks is empty"),
        ({"benchmark.num_fewshot.piqua": 3}, "benchmark.num_fewshot.piqua"),
        ({"benchmark.num_fewshot": 3}, "benchmark.num_fewshot=3"),
        ({"benchmark.num_fewshot": {"tiny_choices": 99}}, "tiny_choices=99: give at most 13"),
        ({"benchmark.max_length": 1}, "benchmark.max_length=1 is below an answer's"),
        ({"benchmark.published": "sigma"}, "benchmark.published=sigma: give one of liger, sigma_common_sense, "),
        ({"benchmark.run_generated_code": "yes"}, "benchmark.run_generated_code=yes: give true or false"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(evaluate, ours, changes, said):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole line is looked at)
        evaluate(ours, "tiny_choices", **changes)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_checkpoint_that_is_no_folder_is_told_before_the_tasks_are_looked_for(evaluate):
    with pytest.raises(ValueError, match=r"^checkpoint=/no/such/run is not a folder"):
        evaluate("/no/such/run", "no_such_task")


def test_data_are_read_from_folders_of_splits_as_the_hub_converts_scripts(evaluate, ours, tmp_path):
    folder = tmp_path / "tests" / "choices" / "validation"
    folder.mkdir(parents=True)
    for piece in (0, 1):
        Dataset.from_list(questions(0, 13)[7 * piece :][:7]).to_parquet(folder / f"{piece:04d}.parquet")
    report = evaluate(ours, "tiny_choices", benchmark__datasets_folder=str(tmp_path))
    assert report["tasks"]["tiny_choices"]["documents"] == 13
    assert report["tasks"]["tiny_choices"]["metrics"]["acc"]["value"] == accuracies_by_hand(ours, questions(0, 13))[0]


def test_an_unknown_task_is_told_with_those_like_it(evaluate, ours, monkeypatch):
    real = tasks.TaskManager  # lm-eval's own tasks take ten seconds to list
    monkeypatch.setattr(tasks, "TaskManager", lambda include_path, **_: real(None, include_path, False))
    with pytest.raises(ValueError, match=r"tiny_choises is not among.*did you mean tiny_choices"):
        evaluate(ours, "tiny_choises")


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("train.jsonl", json.dumps(questions(0, 1)[0]), "tiny_choices cannot be set up: its data has no 'validation'"),
        ("validation.jsonl", "{not json", "validation.jsonl cannot be read"),
        ("validation.parquet", "no parquet", "validation.parquet cannot be read"),
    ],
)
def test_data_that_are_not_what_a_task_needs_are_named(evaluate, ours, tmp_path, file, text, said):
    folder = tmp_path / "tests" / "choices"
    folder.mkdir(parents=True)
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=said):
        evaluate(ours, "tiny_choices", benchmark__datasets_folder=str(tmp_path))
