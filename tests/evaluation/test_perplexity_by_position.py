"""`job=evaluate benchmark=perplexity_by_position`: losses, positions, paired differences and user errors."""

import json
import math

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from data_pipeline.tokens.tokenizer import text_start
from evaluation.loading import batch_of, cut_text
from evaluation.perplexity_by_position import job
from evaluation.perplexity_by_position.report import as_markdown, compared
from evaluation.perplexity_by_position.scoring import buckets, curve_ranges, mean_losses, token_losses
from tests.evaluation.conftest import TEXT


def fresh(model):
    """Return an empty cache that compresses nothing."""
    return model.new_cache() if hasattr(model, "new_cache") else DynamicCache(config=model.config)


@pytest.mark.parametrize("folder", ["ours", "llama", "linearized"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_any_size_give_the_losses_of_one_pass(request, folder, chunk):
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(folder)).double().eval()
    tokens = torch.randint(300, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(tokens[:, :-1], use_cache=False).logits
    whole = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    found = token_losses(model, fresh(model), tokens, chunk)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5 if folder == "linearized" else 1e-10)


def test_a_sequence_of_two_tokens_has_one_loss(llama):
    model = AutoModelForCausalLM.from_pretrained(llama)
    assert token_losses(model, fresh(model), torch.tensor([[5, 6]]), 64).shape == (1, 1)


def test_losses_that_are_not_numbers_are_told(llama):
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"^checkpoint: its losses are not numbers"):
        token_losses(model, fresh(model), torch.tensor([[5, 6, 7]]), 2)


def test_buckets_are_powers_of_two_of_tokens_before():
    assert buckets(2) == [(1, 2)]
    assert buckets(9) == [(1, 2), (2, 4), (4, 8), (8, 9)]


@pytest.mark.parametrize("length", [2, 3, 17, 64, 65, 66, 2048])
@pytest.mark.parametrize("ranges", [buckets, curve_ranges])
def test_ranges_hold_every_token_but_the_first_once(length, ranges):
    found = ranges(length)
    assert [place for start, stop in found for place in range(start, stop)] == list(range(1, length))


def test_mean_losses_are_those_of_the_tokens_of_each_range():
    losses = torch.tensor([1.0, 2.0, 4.0, 9.0])  # of the tokens with 1, 2, 3 and 4 before them
    assert mean_losses(losses, buckets(5)) == [1.0, 3.0, 9.0]


def test_the_loss_is_that_of_all_tokens_and_differences_are_paired():
    easy, hard = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([11.0, 12.0, 15.0])

    def rows(extra):
        losses = (easy + extra, hard + extra)
        parts = {"buckets": buckets(4), "curve": curve_ranges(4)}
        return [{part: mean_losses(x, ranges) for part, ranges in parts.items()} | {"bits": 2.0} for x in losses]

    report = compared({"full": rows(0), "worse": rows(0.5)}, 4)
    assert report["loss"]["full"]["value"] == pytest.approx((7 / 3 + 38 / 3) / 2)
    assert report["loss"]["full"]["standard_error"] == pytest.approx((38 / 3 - 7 / 3) / 2)
    assert report["difference"] == {"worse": {"value": pytest.approx(0.5), "standard_error": pytest.approx(0)}}
    assert [(row["from"], row["to"]) for row in report["buckets"]] == [(1, 2), (2, 4)]
    assert report["buckets"][1]["loss"]["worse"]["value"] == pytest.approx((3.5 + 14) / 2)


def test_the_text_is_cut_into_sequences_that_begin_as_the_tokenizer_begins_a_text(llama):
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert text_start(tokenizer) == [0]
    rows = cut_text(tokenizer, TEXT, 6).tolist()
    assert [row[0] for row in rows] == [0] * len(rows)
    assert [token for row in rows for token in row[1:]] == tokens[: 5 * (len(tokens) // 5)]


def test_batches_hold_about_equally_many_tokens():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert (batch_of("auto", 2048, cpu), batch_of("auto", 2048, gpu)) == (4, 64)
    assert (batch_of("auto", 10**6, cpu), batch_of("auto", 10, gpu), batch_of(3, 10**6, cpu)) == (1, 64, 3)


@pytest.fixture
def measure(run, llama, tmp_path):
    """Run the command on a text of 700 tokens or so; return how it ended."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join([TEXT] * 30))

    def call(*changes, checkpoint=llama):
        return run(
            *("job=evaluate", "benchmark=perplexity_by_position", "device=cpu", "dtype=float64"),
            *(f"checkpoint={checkpoint}", f"output={tmp_path}/out", f"benchmark.text={text}", "benchmark.length=32"),
            *changes,
            tiny=False,
        )

    return call


def test_the_command_leaves_report_table_and_picture_and_a_second_one_reads_them(measure, tmp_path, monkeypatch):
    folder = tmp_path / "out" / "evaluation"
    done = measure("benchmark.sequences=5", "batch_size=2")
    assert done.status == 0, done.err
    report = json.loads((folder / "perplexity_by_position.json").read_text())
    assert report["sequences"] == 5
    assert done.out.strip() == (folder / "perplexity_by_position.md").read_text().strip()
    assert f"| full | 64.00 | {math.exp(report['loss']['full']['value']):.2f} ± " in done.out
    assert (folder / "perplexity_by_position.png").stat().st_size > 1000

    scored = []
    whole = job.token_losses
    monkeypatch.setattr(job, "token_losses", lambda *given: scored.append(len(given[2])) or whole(*given))
    assert measure("benchmark.sequences=7", "batch_size=4").status == 0
    assert scored == [2]  # the sequences that were not there
    assert len(list(folder.glob("perplexity_by_position_*.json"))) == 1  # the earlier report is kept


def test_a_cache_that_keeps_all_tokens_loses_nothing_and_one_that_evicts_them_does(measure, tmp_path):
    caches = "[full,{kivi:{window:32,values:{group:16}}},{streaming_llm:{window:2}}]"
    done = measure(f"benchmark.caches={caches}", "benchmark.sequences=6", "benchmark.chunk=4")
    assert done.status == 0, done.err
    report = json.loads((tmp_path / "out" / "evaluation" / "perplexity_by_position.json").read_text())
    whole, evicted = report["difference"].values()
    assert list(report["difference"]) == ["kivi window=32 values.group=16", "streaming_llm window=2"]
    assert whole["value"] == pytest.approx(0, abs=1e-6)
    assert abs(evicted["value"]) > 1e-3
    assert report["bits"]["streaming_llm window=2"] < report["bits"]["full"] == 64


def test_values_that_are_selected_cost_something_and_a_number_beyond_the_text_costs_nothing(measure, tmp_path):
    caches = "[full,{selective_v:{top_values:31}},{selective_v:{top_values:2}}]"
    done = measure(f"benchmark.caches={caches}", "benchmark.sequences=6", "benchmark.chunk=1")
    assert done.status == 0, done.err
    report = json.loads((tmp_path / "out" / "evaluation" / "perplexity_by_position.json").read_text())
    every, two = report["difference"].values()
    assert every["value"] == pytest.approx(0, abs=1e-9)
    assert abs(two["value"]) > 1e-3
    # The first two tokens have no more keys than that.
    assert report["buckets"][0]["difference"]["selective_v top_values=2"]["value"] == pytest.approx(0, abs=1e-9)


def test_a_table_of_one_sequence_has_no_errors(measure):
    done = measure("benchmark.sequences=1")
    assert done.status == 0, done.err
    assert "±" not in done.out.partition("- ")[0].replace("± standard error", "")


def test_a_table_tells_decided_differences(tmp_path):
    rows = [{"buckets": [3.0], "curve": [3.0], "bits": 16.0}, {"buckets": [5.0], "curve": [5.0], "bits": 16.0}]
    worse = [{"buckets": [3.5], "curve": [3.5], "bits": 2.0}, {"buckets": [5.6], "curve": [5.6], "bits": 3.0}]
    made = {"checkpoint": "c", "text": "t", "length": 2, "chunk": 1, "sequences": 2, "dtype": "float32"}
    made |= {"device": "cpu", "versions": {}, "commit": "0", "date": "today"}
    text = as_markdown(compared({"full": rows, "bad": worse, "same": rows}, 2) | made)
    assert "| bad | 2.50 |" in text
    assert "2 sequences: too few" in text
    assert "+0.55 ± 0.05*" in text
    assert "+0 ± 0 |" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("benchmark.length=1", "benchmark.length=1"),
        ("benchmark.length=100000", "benchmark.length=100000 is longer than the text"),
        ("benchmark.chunk=0", "benchmark.chunk=0"),
        ("benchmark.sequences=0", "benchmark.sequences=0"),
        ("benchmark.text=/no/such/file", "benchmark.text=/no/such/file cannot be read"),
        ("benchmark.caches=[]", "benchmark.caches=[]"),
        ("benchmark.caches=[full,fulll]", "benchmark.caches=fulll is not known"),
        ("benchmark.caches=[full,full]", "benchmark.caches=full is there twice"),
        ("benchmark.caches=[3]", "benchmark.caches=3 is no cache"),
        (
            "benchmark.caches=[full,selective_v]",
            "benchmark.chunk=64 would measure selective_v as if it read all values: give 1",
        ),
        ("dtype=int8", "dtype=int8"),
        ("batch_size=many", "batch_size=many"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(measure, change, said):
    done = measure(change)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert said in done.err
