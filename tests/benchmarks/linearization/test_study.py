"""The study's arithmetic: recovery, noise, the order of the paper's variants, reading and writing."""

import json
import math
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from benchmarks.linearization.study import variants
from benchmarks.linearization.study.memory import HEAD_DIM, cache_bytes, settings_of
from benchmarks.linearization.study.records import CURVES, RUNS, TEACHER, UNIGRAM, Point, Result
from benchmarks.linearization.study.report import (
    AVERAGES,
    CONTROLS,
    main,
    memory_table,
    order_table,
    paper_pairs,
    studies,
    write,
)
from benchmarks.linearization.study.variants import RECIPES
from benchmarks.measuring.records import append, latest
from benchmarks.measuring.tables import read_csv
from evaluation.significance import Noise, Sample, compare, pooled
from lit_modules.linearization.layer_setup import chosen_ways

LIGER, HGRN2, GSA = "Liger-GLA", "Liger-HGRN2", "Liger-GSA"


def result(variant: str, nats: float, seed: int = 0, **others: object) -> Result:
    adapted = 0 if variant in (TEACHER, UNIGRAM) else 1000
    line = {
        "date": "2026-01-01T00:00:00",
        "commit": "abc",
        "gpu": "none",
        "teacher_parameters": 2_000_000,
        "teacher_tokens": 5_000_000,
        "variant": variant,
        "settings": "[]",
        "seed": seed,
        "adaptation_tokens": adapted,
        "held_out_nats": nats,
        "perplexity": math.exp(nats),
    }
    return Result(**line | others)


def seeds(*values: float) -> Sample:
    return Sample(dict(enumerate(values)))


def test_recovery_is_the_part_of_the_teachers_advantage_that_is_left():
    (study,) = studies(
        [
            result(TEACHER, 3.0),
            result(UNIGRAM, 7.0),
            *(result(LIGER, nats, s) for s, nats in enumerate((3.1, 3.2, 3.3))),
        ]
    )
    recovery = study.recovery(LIGER)
    assert recovery.mean == pytest.approx(0.95)
    assert recovery.deviation == pytest.approx(0.1 / 4)
    assert study.recovery(TEACHER).mean == 1
    assert study.recovery(UNIGRAM).mean == 0


def test_seeds_in_common_decide_what_their_spread_alone_would_not():
    # Each seed shifts both alike: apart by 0.10, 0.11 and 0.12, while seeds lie 0.5 apart.
    first, second = seeds(3.0, 3.5, 4.0), seeds(3.10, 3.61, 4.12)
    found = compare(first, second, pooled([first, second]))
    assert found.seeds == 3
    assert found.difference == pytest.approx(0.11)
    # Student's t for two degrees of freedom, 4.303, times 0.01 / sqrt(3).
    assert found.margin == pytest.approx(4.30265 * 0.01 / math.sqrt(3), rel=1e-4)
    assert found.decided
    shuffled = Sample({0: 3.61, 1: 4.12, 2: 3.10})
    assert not compare(first, shuffled, pooled([first, shuffled])).decided


def test_three_seeds_that_disagree_are_undecided():
    first, second = seeds(3.0, 3.0, 3.0), seeds(3.01, 3.04, 2.99)
    assert not compare(first, second, pooled([first, second])).decided


def test_single_seeds_are_held_to_the_noise_of_all_variants():
    noise = pooled([seeds(3.0, 3.1), seeds(5.0, 5.1, 5.2), seeds(4.0)])
    assert noise.freedom == 3
    assert noise.deviation == pytest.approx(math.sqrt((0.005 + 2 * 0.01) / 3))
    margin = 3.18245 * noise.deviation * math.sqrt(2)
    near, far = (compare(seeds(3.0), seeds(3.0 + factor * margin), noise) for factor in (0.99, 1.01))
    assert (near.decided, far.decided) == (False, True)
    assert near.margin == pytest.approx(margin, rel=1e-4)


def test_a_variant_that_scatters_more_than_the_others_is_held_to_its_own_noise():
    wild, calm = seeds(3.0, 4.0), [seeds(3.0, 3.001) for _ in range(20)]
    found = compare(seeds(2.9), wild, pooled([wild, *calm]))
    assert found.margin > wild.deviation


def test_without_any_repeated_seed_nothing_is_decided():
    found = compare(seeds(1.0), seeds(9.0), pooled([seeds(1.0), seeds(9.0)]))
    assert (found.margin, found.decided) == (None, False)


def test_what_no_seed_changes_has_no_noise_of_its_own():
    exact, drawn = Sample({0: 3.0}, exact=True), seeds(3.1, 3.11, 3.12)
    found = compare(exact, drawn, Noise(None, 0))
    assert (found.seeds, found.decided) == (3, True)
    assert compare(exact, Sample({0: 3.0001}, exact=True), Noise(None, 0)).decided


def test_the_papers_order_is_checked_pair_by_pair():
    runs = [result("no SWA", 4.0 + 0.001 * s, s) for s in range(3)]
    runs += [result(LIGER, 3.5 + 0.001 * s, s) for s in range(3)]
    runs += [result("learned feature map", 3.8 + 0.002 * s, s) for s in range(3)]
    runs += [result("random gate projection", nats, s) for s, nats in enumerate((3.501, 3.499, 3.503))]
    (study,) = studies(runs)
    verdicts = {
        line.split("|")[1].strip(): line.split("|")[-2].strip() for line in order_table(study).splitlines()[2:8]
    }
    assert verdicts == {
        "Liger-GLA before random gate projection": "undecided",
        "Liger-GLA before no SWA": "as in the paper",
        "Liger-GLA before learned feature map": "as in the paper",
        "random gate projection before no SWA": "as in the paper",
        "random gate projection before learned feature map": "as in the paper",
        "no SWA before learned feature map": "reversed",
    }
    assert "Of 6 pairs: 4 as in the paper, 1 reversed, 1 undecided." in order_table(study)


def test_the_paper_orders_its_gates_by_accuracy():
    assert (LIGER, GSA, "accuracy") in paper_pairs()
    assert (GSA, HGRN2, "accuracy") in paper_pairs()
    assert not any(TEACHER in pair for pair in paper_pairs())
    assert AVERAGES["Liger-HGRN2-Llama-3-8B"] == 64.0


def test_a_run_that_is_repeated_replaces_the_first(tmp_path):
    path = tmp_path / RUNS
    append(path, [result(LIGER, 3.5), result(LIGER, 3.6, seed=1)])
    append(path, [result(LIGER, 3.4, date="2026-01-02T00:00:00")])
    records = read_csv(path, Result)
    assert len(records) == 3
    (study,) = studies(records)
    assert study.samples[LIGER].values == {0: 3.4, 1: 3.6}


def test_only_the_last_runs_curve_is_kept():
    point = Point(
        date="1", teacher_parameters=1, teacher_tokens=1, variant=LIGER, seed=0, tokens=100, held_out_nats=4.0
    )
    again = replace(point, date="2", tokens=200)
    assert latest([point, again, replace(point, seed=1)]) == [again, replace(point, seed=1)]


def test_seeds_of_other_settings_are_not_averaged():
    with pytest.raises(ValueError, match=r"Liger-GLA: seed 0 .* seed 1 .*window.* run the older"):
        studies([result(LIGER, 3.5), result(LIGER, 3.4, seed=1, settings='["linearization.window=128"]')])


def test_a_run_that_diverged_is_named_and_left_out(tmp_path):
    append(
        tmp_path / RUNS,
        [result(LIGER, 3.5), result(LIGER, math.nan, seed=1, adaptation_tokens=7), result(HGRN2, math.inf)],
    )
    text = write(tmp_path).read_text()
    assert "Diverged, and left out: Liger-GLA (seed 1), Liger-HGRN2 (seed 0)." in text
    assert "| Liger-GLA | 1 | 1,000 | 32,768 | 3.5000 |" in text


def test_a_file_with_other_columns_is_refused_and_stays(tmp_path):
    path = tmp_path / RUNS
    path.write_text("variant,nats\na,1\n")
    with pytest.raises(ValueError, match="has the columns variant, nats: expected date"):
        append(path, [result(LIGER, 3.5)])
    assert path.read_text() == "variant,nats\na,1\n"


def test_a_value_that_cannot_be_read_is_named_with_its_line(tmp_path):
    path = tmp_path / RUNS
    append(path, [result(LIGER, 3.5), result(HGRN2, 3.6)])
    path.write_text(path.read_text().replace("3.6,", "three,"))
    with pytest.raises(ValueError, match=r"linearization_study\.csv, line 3: .*three"):
        read_csv(path, Result)


def test_the_page_has_each_teachers_table_and_pictures(tmp_path):
    runs = [result(TEACHER, 3.0), result(UNIGRAM, 7.0), *(result(LIGER, 3.2 + s * 0.008, s) for s in range(3))]
    append(tmp_path / RUNS, [*runs, *(replace(run, teacher_parameters=9_000_000) for run in runs)])
    point = Point(
        date="1",
        teacher_parameters=2_000_000,
        teacher_tokens=5_000_000,
        variant=LIGER,
        seed=0,
        tokens=0,
        held_out_nats=4,
    )
    append(tmp_path / CURVES, [point, replace(point, tokens=1000, held_out_nats=3.2)])
    text = write(tmp_path).read_text()
    assert text.count("## Teacher: ") == 2
    assert "| Liger-GLA | 3 | 1,000 | 32,768 | 3.2080 ± 0.0080 | 24.73 |  | 94.8% ± 0.2% | 2.96 | 67.0 |" in text
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {
        "linearization_study_2m_5m_curves.png",
        "linearization_study_2m_5m_recovery.png",
        "linearization_study_9m_5m_recovery.png",
    }
    assert all(f"]({name})" in text for name in pictures)


def test_a_folder_without_runs_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["report", "--output", str(tmp_path)])
    assert main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_best_experiment_is_the_variant_that_was_measured():
    def composed(*overrides: str) -> dict:
        cfg = hydra.compose("config", [*overrides, "base=base"])
        tokens, stages = cfg.max_tokens, OmegaConf.to_container(cfg.stages, resolve=True)
        stages["alignment"]["tokens"] /= tokens
        return {
            "linearization": cfg.linearization,
            "layers": list(chosen_ways(cfg.softmax_layers)),  # how they are chosen: a model of more layers keeps more
            "lora": cfg.lora,
            "optimizer": cfg.optimizer,
            "stages": stages,
            "schedule": cfg.schedule._target_,
            "warm-up": pytest.approx(cfg.schedule.warmup_tokens / tokens),
        }

    conf = Path(__file__).resolve().parents[3] / "conf"
    with hydra.initialize_config_dir(str(conf), version_base="1.3"):
        variant = RECIPES["recipe, window of 124, most sensitive layer kept"]
        assert composed("experiment=liger/best") == composed("experiment=liger/study", *variant)


TOKEN = 2 * 2 * HEAD_DIM  # bytes: key and value in bfloat16
STATE = 4 * HEAD_DIM**2  # in float32
CACHED = {
    variants.UNTRAINED: 128 * TOKEN,
    "Liger-GLA": 64 * TOKEN + STATE,
    "no SWA": STATE,
    "window of 64 and sinks, LoRA": 68 * TOKEN,
    "window of 124 and sinks, all of the recipe": 128 * TOKEN,
    "window of 250 and sinks, all of the recipe": 254 * TOKEN,
    "from the window": 68 * TOKEN + STATE,
    # A state that comes late keeps the keys, as they are projected, of the window and one token more.
    "recipe": 68 * TOKEN + STATE + 65 * TOKEN // 2,
    "recipe, window of 124": 128 * TOKEN + STATE + 125 * TOKEN // 2,
}


@pytest.mark.parametrize(("variant", "expected"), CACHED.items(), ids=CACHED)
def test_a_variant_caches_as_many_bytes_as_its_window_and_its_state_take(variant, expected):
    chosen = variants.UNTRAINED_VARIANTS | variants.PAPER | RECIPES
    assert cache_bytes(settings_of(chosen[variant])) == expected


def test_a_state_is_held_to_the_window_alone_of_the_same_memory():
    for variant, (control, *_) in list(CONTROLS.items())[:2]:
        cached = [cache_bytes(settings_of(RECIPES[name])) for name in (variant, control)]
        assert cached == [65_152, 65_024]
    runs = [
        result(name, nats + 0.001 * seed, seed, settings=json.dumps(RECIPES[name]))
        for name, nats in ((variant, 2.7), (control, 2.6))
        for seed in range(3)
    ]
    (study,) = studies(runs)
    assert f"| {variant} | 65,152 | {control} | 65,024 | -0.1000 | 0.0000 | the window |" in memory_table(study)
