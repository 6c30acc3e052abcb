"""`job=evaluate benchmark=gsm8k`: lm-eval's prompts and filters on a local copy, and the command."""

import json

import pytest

from evaluation.gsm8k.task import CachedLM, load_task, scores_of

QUESTION = "Ann has {} pens and buys {}. How many has she?"
ANSWER = "She has {} + {} = <<{}+{}={}>>{} pens.\n#### {}"


def lines(first, number):
    """Questions like those of the data set."""
    for a in range(first, first + number):
        total = 1000 + a
        yield {
            "question": QUESTION.format(1000, a),
            "answer": ANSWER.format(1000, a, 1000, a, total, total, f"{total:,}"),
        }


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "gsm8k"
    made.mkdir()
    for split, first, number in (("train", 100, 8), ("test", 1, 3)):
        (made / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(first, number)))
    return made


def test_prompts_have_so_many_examples_and_end_where_the_answer_begins(folder):
    task = load_task(folder, 5, 16, 0, None)
    prompts = [request.args[0] for request in task.instances]
    assert len(prompts) == 3
    for prompt, line in zip(prompts, lines(1, 3), strict=True):
        assert prompt.endswith(f"Question: {line['question']}\nAnswer:")
        assert prompt.count("Question:") == 6
        assert prompt.count("####") == 5
        assert prompt.startswith("Question: Ann has 1000 pens and buys 10")  # an example of the train split
    assert task.instances[0].args[1]["max_gen_toks"] == 16


def test_examples_are_the_same_under_a_seed_whatever_the_limit(folder):
    prompts = [request.args[0] for request in load_task(folder, 2, 16, 7, None).instances]
    assert [request.args[0] for request in load_task(folder, 2, 16, 7, 2).instances] == prompts[:2]
    assert [request.args[0] for request in load_task(folder, 2, 16, 8, None).instances] != prompts


def test_the_final_number_counts_and_commas_do_not(folder):
    task = load_task(folder, 0, 16, 0, None)
    texts = [" so it is 1001.\n#### 1001", " That makes $1,002.", " ..."]
    assert scores_of(task, texts) == {"strict-match": [1.0, 0.0, 0.0], "flexible-extract": [1.0, 1.0, 0.0]}
    assert scores_of(task, ["#### 1001.5", "#### 2\n#### 1002", ""])["strict-match"] == [0.0, 0.0, 0.0]


@pytest.fixture
def measure(run, llama, folder, tmp_path):
    def call(*changes):
        return run(
            *("job=evaluate", "benchmark=gsm8k", "device=cpu", f"checkpoint={llama}", f"output={tmp_path}/out"),
            *(f"benchmark.folder={folder}", "benchmark.num_fewshot=0", "benchmark.max_new_tokens=4", *changes),
            tiny=False,
        )

    return call


def test_the_command_leaves_report_table_and_picture_and_more_questions_use_what_is_there(
    measure, tmp_path, monkeypatch
):
    out, asked, whole = tmp_path / "out" / "evaluation", [], CachedLM.generate_until

    def watched(self, requests, **settings):
        asked.append(len(requests))
        return whole(self, requests, **settings)

    monkeypatch.setattr(CachedLM, "generate_until", watched)
    done = measure("benchmark.limit=1")
    assert done.status == 0, done.err
    assert "only the first 1 questions" in done.out
    done = measure("batch_size=2")
    assert done.status == 0, done.err
    assert asked == [1, 2]
    report = json.loads((out / "gsm8k.json").read_text())
    assert report["questions"] == 3
    assert report["score"]["strict-match"]["full"]["value"] == 0.0
    assert done.out.strip() == (out / "gsm8k.md").read_text().strip()
    assert (out / "gsm8k.png").stat().st_size > 1000


def test_a_compressed_cache_that_keeps_all_tokens_answers_as_the_full_one(measure, tmp_path):
    caches = "[full,{kivi:{window:256,keys:{group:16},values:{group:16}}}]"
    done = measure(f"benchmark.caches={caches}", "benchmark.max_new_tokens=8", "batch_size=2")
    assert done.status == 0, done.err
    folder = tmp_path / "out" / "evaluation" / "gsm8k"
    texts = [json.loads(file.read_text())["results"] for file in folder.iterdir()]
    assert len(texts) == 2
    assert texts[0] == texts[1]


def test_prompts_beyond_the_context_are_told(measure):
    done = measure("benchmark.num_fewshot=5")
    assert done.status == 0, done.err
    assert "lost their beginning: the model's context is 96" in done.out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("benchmark.folder=/no/such/folder", "benchmark.folder=/no/such/folder has no train.jsonl and no test.jsonl"),
        ("benchmark.num_fewshot=-1", "benchmark.num_fewshot=-1"),
        ("benchmark.num_fewshot=9", "benchmark.num_fewshot=9: give at most 8"),
        ("benchmark.limit=0", "benchmark.limit=0"),
        ("benchmark.max_new_tokens=0", "benchmark.max_new_tokens=0"),
        ("benchmark.chunk=0", "benchmark.chunk=0"),
        ("seed=-1", "seed=-1"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(measure, change, said):
    done = measure(change)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert said in done.err


def test_a_damaged_copy_is_named(measure, folder):
    (folder / "test.jsonl").write_text("{not json")
    done = measure()
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert f"{folder}/test.jsonl cannot be read" in done.err
