"""What is compared: runs that are found, grouped by seed, ordered and judged, in one unit."""

import json
import math
import shutil
from pathlib import Path

import pytest
from scipy.stats import t as student

from common.settings import SettingError
from evaluation.compare.comparison import Comparison, compare_runs
from evaluation.compare.finding import find_runs, runs_below
from evaluation.compare.reading import BITS, NATS, read_run
from tests.evaluation.compare.written_runs import BYTES, TOKENS, write_run, write_sweep

DECIDED = {"false": [3.50, 3.62, 3.54], "true": [3.40, 3.51, 3.45]}  # apart by 0.10, 0.11, 0.09


def compared(*folders: Path, baseline: object = None) -> Comparison:
    return compare_runs([read_run(each) for each in find_runs([str(folder) for folder in folders])], baseline)


def names(comparison: Comparison) -> list[str]:
    return [group.name for group in comparison.groups]


def test_runs_are_found_below_a_folder_in_the_order_of_their_numbers(tmp_path):
    for name in ("b/10", "b/9", "a/2026-01-01"):
        write_run(tmp_path / name)
    (tmp_path / "conf").mkdir()
    shutil.copy(tmp_path / "b/9/config.yaml", tmp_path / "conf/config.yaml")  # settings alone are no run
    (tmp_path / "b/back").symlink_to(tmp_path)
    found = [str(folder.relative_to(tmp_path)) for folder in find_runs([str(tmp_path)])]
    assert found == ["a/2026-01-01", "b/9", "b/10"]
    assert len(list(runs_below(tmp_path, set()))) == 3  # a link back is followed once
    (tmp_path / "b/back").unlink()
    twice = find_runs([str(tmp_path / "b/9"), str(tmp_path / "b")])
    assert [folder.name for folder in twice] == ["9", "10"]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is a file"),
        (lambda path: path.mkdir(), "is empty"),
        (lambda path: (path / "sub").mkdir(parents=True), "holds no run and no evaluation"),
    ],
)
def test_a_folder_without_runs_is_refused_with_what_to_give(tmp_path, make, problem):
    make(tmp_path / "given")
    with pytest.raises(SettingError, match=f"^runs=.*given {problem}: give the folder of a run") as refused:
        find_runs([str(tmp_path / "given")])
    assert "\n" not in str(refused.value)


def test_runs_that_differ_by_their_seed_alone_are_one_row(tmp_path):
    found = compared(write_sweep(tmp_path, DECIDED))
    assert names(found) == ["output_gate=true", "output_gate=false"]  # the lowest loss first
    assert found.columns == ["model.output_gate"]  # and not data.seed, which follows from the seed
    assert [len(group.runs) for group in found.groups] == [3, 3]
    assert found.baseline.name == "output_gate=false"  # the first run's


def test_a_seed_of_the_data_alone_is_a_setting(tmp_path):
    write_run(tmp_path / "0")
    write_run(tmp_path / "1", changes={"seed": 1})
    write_run(tmp_path / "2", changes={"data.seed": 7})
    found = compared(tmp_path)
    assert found.columns == ["data.seed"]
    assert sorted(len(group.runs) for group in found.groups) == [1, 2]
    for number in (0, 1):
        shutil.rmtree(tmp_path / f"{number}/.hydra")  # what a copy may lack
    assert len(compared(tmp_path / "0", tmp_path / "1").groups) == 1


def test_settings_that_say_nothing_of_the_training_divide_no_group(tmp_path):
    write_run(tmp_path / "0")
    write_run(tmp_path / "1", changes={"seed": 1, "log_every_tokens": 7, "data.num_workers": 3, "resume": "auto"})
    write_run(tmp_path / "2", changes={"seed": 2, "model.qk_norm": False})  # off, and not known to the others
    assert len(compared(tmp_path).groups) == 1
    write_run(tmp_path / "3", changes={"seed": 3, "compile": True})
    assert compared(tmp_path).columns == ["compile"]


def test_what_a_choice_explains_is_no_column_and_what_varies_with_it_is(tmp_path):
    sizes = {"small": 32, "large": 64}
    for number, (name, heads) in enumerate([("small", 4), ("small", 2), ("large", 4)]):
        changes = {"model.hidden_size": sizes[name], "model.num_key_heads": heads, "model.num_value_heads": heads}
        write_run(tmp_path / str(number), changes=changes, choices={"model": name})
    found = compared(tmp_path)
    assert found.columns == ["model=", "model.num_key_heads", "model.num_value_heads"]
    assert "model.hidden_size" in found.differing
    assert "model=large, num_key_heads=4, num_value_heads=4" in names(found)


def test_seeds_decide_by_students_t_and_less_than_the_noise_is_undecided(tmp_path):
    found = compared(write_sweep(tmp_path, DECIDED | {"null": [3.51, 3.58, 3.57]}))
    decided = found.differences["output_gate=true"]
    assert decided.value == pytest.approx(-0.10)
    assert decided.margin == pytest.approx(student.ppf(0.975, 2) * 0.01 / math.sqrt(3))
    assert (decided.verdict, decided.how) == ("lower", "3 seeds, paired")
    undecided = found.differences["output_gate=null"]
    assert undecided.margin > abs(undecided.value) > 0
    assert undecided.verdict == "undecided"


def test_a_single_seed_has_the_noise_of_the_others_or_is_undecided(tmp_path):
    alone = compared(write_sweep(tmp_path / "alone", {"false": [3.5], "true": [2.5]}))
    assert alone.differences["output_gate=true"].margin is None
    assert alone.differences["output_gate=true"].verdict == "undecided"
    beside = compared(write_sweep(tmp_path / "beside", {"false": [3.50, 3.52], "true": [3.0]}))
    found = beside.differences["output_gate=true"]
    assert (found.verdict, found.how) == ("lower", "spread over all seeds")


def write_sequences(run: Path, losses: list[float], text: str = "t") -> None:
    """Write what job=evaluate benchmark=perplexity_by_position keeps of each sequence of 4 tokens."""
    folder = run / "evaluation" / "perplexity_by_position"
    folder.mkdir(parents=True, exist_ok=True)
    identity = {"text": text, "length": 4, "chunk": 2, "cache": {}, "weights": str(run)}
    results = {str(number): {"buckets": [loss, loss], "curve": [], "bits": 16} for number, loss in enumerate(losses)}
    (folder / "full-abc.json").write_text(json.dumps({"identity": identity, "results": results}))


def test_single_seeds_are_compared_on_the_sequences_that_both_have_read(tmp_path):
    write_sweep(tmp_path, {"false": [3.5], "true": [3.4]})
    # Sequences lie far apart, and each differs by 0.1 or so.
    write_sequences(tmp_path / "0", [2.0, 3.0, 4.0])
    write_sequences(tmp_path / "1", [1.9, 2.89, 3.91])
    found = compared(tmp_path).differences["output_gate=true"]
    assert found.value == pytest.approx(-0.1)
    assert (found.verdict, found.how) == ("lower", "one seed, 3 sequences of a text")
    write_sequences(tmp_path / "1", [1.9, 2.89, 3.91], text="another")
    assert compared(tmp_path).differences["output_gate=true"].verdict == "undecided"


def test_other_tokenizers_are_compared_in_bits_per_byte(tmp_path):
    write_run(tmp_path / "0", 3.0)
    half = {"validation_tokens": TOKENS // 2, "bits_per_byte": 3.9 * TOKENS / 2 / BYTES / math.log(2)}
    write_run(tmp_path / "1", 3.9, changes={"tokenizer.vocab_size": 999}, tokenizer="two", summary=half)
    found = compared(tmp_path)
    assert found.unit == BITS
    # More nats for each token, of which there are half as many: fewer bits for each byte.
    assert names(found) == ["vocab_size=999", "vocab_size=384"]
    assert found.differences["vocab_size=999"].value == pytest.approx(-1.05 * TOKENS / BYTES / math.log(2))
    assert compared(tmp_path / "0").unit == NATS


def test_losses_of_other_held_out_texts_are_not_subtracted(tmp_path):
    write_run(tmp_path / "0", 3.0)
    write_run(tmp_path / "1", 3.9, changes={"max_tokens": 1}, summary={"validation_bytes": BYTES + 1})
    found = compared(tmp_path)
    assert found.differences == {}
    assert any("held-out texts differ" in note for note in found.notes)


def test_an_unfinished_run_is_listed_last_without_a_difference(tmp_path):
    write_run(tmp_path / "0", 3.0)
    write_run(tmp_path / "1", 1.0, changes={"model.output_gate": True}, finished=False)
    found = compared(tmp_path)
    assert names(found) == ["output_gate=false", "output_gate=true"]
    assert found.differences == {}
    assert found.groups[1].runs[0].tokens == 4000


def test_a_repeated_seed_counts_once_and_is_named(tmp_path):
    write_run(tmp_path / "0", 3.0)
    write_run(tmp_path / "1", 2.0)
    found = compared(tmp_path)
    assert found.groups[0].sample(NATS).values == {0: 2.0}
    assert any("a later run has the same settings and seed" in note for note in found.notes)


@pytest.mark.parametrize("given", [{"output_gate": True}, {"model": {"output_gate": True}}, "4"])
def test_the_baseline_is_a_run_or_settings(tmp_path, given, monkeypatch):
    monkeypatch.chdir(write_sweep(tmp_path, DECIDED))
    found = compared(tmp_path, baseline=given)
    assert found.baseline.name == "output_gate=true"
    assert found.differences["output_gate=false"].verdict == "higher"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden_size": 3}, "baseline.hidden_size=3 is no setting in which the runs differ: they differ in model.out"),
        ({"output_gate": None}, "fits none of the runs: give what tells one of these from the others: output_gate="),
        ("elsewhere", "baseline=elsewhere fits none of the runs: give the folder of a run that is compared"),
    ],
)
def test_a_baseline_that_is_none_of_the_runs_is_refused(tmp_path, given, message):
    with pytest.raises(SettingError) as refused:
        compared(write_sweep(tmp_path, DECIDED), baseline=given)
    assert message in str(refused.value)


def test_a_baseline_that_fits_several_is_refused(tmp_path):
    for number, (gate, rate) in enumerate([(True, 1), (True, 2), (False, 1)]):
        write_run(tmp_path / str(number), changes={"model.output_gate": gate, "optimizer.lr": rate})
    with pytest.raises(SettingError, match="fits several"):
        compared(tmp_path, baseline={"output_gate": True})
    assert compared(tmp_path, baseline={"output_gate": True, "lr": 2}).baseline.name == "output_gate=true, lr=2"
