import functools
import itertools
import json
import math
import shutil
from collections import Counter

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image

from data_pipeline.documents import texts
from data_pipeline.identity import EARLIER
from data_pipeline.tokens.batches import IGNORED
from data_pipeline.tokens.order import RunOrder
from tests.conftest import composed
from tests.data_pipeline import recording
from tests.data_pipeline.mixtures.conftest import write_corpus, write_parquet

# Borders inside a step of 8 sequences: after 52 and 129 of the 256.
PHASES = [
    {"name": "first", "tokens": 52 * 32, "weights": {"debug": 8, "design": 2}},
    {"name": "second", "tokens": 77 * 32, "weights": {"design": 1, "commands": 1}},
    {"name": "third", "weights": {"debug": 3, "commands": 1}},
]


@pytest.fixture
def phased(make_mixture):
    return lambda **settings: make_mixture(phases=PHASES, max_epochs=8, **settings)


def components_read(data) -> list[str]:
    """Return the component at each position, recognized by the words of its text."""
    names = list(data.manifest["components"])
    sequences = data.open("train", data.sequence_length)
    return [names[sequences[position].component] for position in range(len(sequences))]


def test_each_phase_reads_what_its_weights_say_and_the_manifest_tells(phased):
    data = phased()
    data.prepare()
    read = components_read(data)
    assert len(read) == 256
    edges = [0, 52, 129, 256]
    for phase, first, end in zip(data.manifest["phases"], edges, edges[1:], strict=False):
        assert (phase["first"], phase["end"], phase["tokens"]) == (first, end, (end - first) * 32)
        counted = Counter(read[first:end])
        for name, found in phase["components"].items():
            assert found["sequences"] == counted[name]
            assert abs(counted[name] - (end - first) * found["asked_share"]) < 1
            total = data.manifest["components"][name]["train"]["sequences"]
            assert found["epochs_at_end"] == pytest.approx(Counter(read[:end])[name] / total)
    assert data.manifest["reduced"] == []
    assert data.phase_starts == {0: "first", 6: "second", 16: "third"}


def test_another_seed_is_another_order_of_the_same_components(phased):
    one, two = phased(), phased(seed=1)
    one.prepare(), two.prepare()
    first, second = components_read(one), components_read(two)
    assert first != second
    assert Counter(first) == Counter(second)


def test_a_sequence_is_of_the_component_that_it_is_said_to_be_of(phased):
    data = phased()
    data.setup()
    names = list(data.manifest["components"])
    sequences = data.open("train", 32)
    for position in range(0, 256, 7):
        component, index = sequences.locate(position)
        found, part = sequences[position], data._part(names[component], "train", 32)
        assert found.component == component
        assert found.sequence.inputs.tolist() == part[index].inputs.tolist()


def test_every_sequence_of_a_component_is_read_once_before_any_is_read_again(make_mixture):
    data = make_mixture(max_tokens=131072, phases=[{"share": 1}, {"share": 2}], max_epochs=None)
    data.prepare()
    sequences = data.open("train", 32)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for position in range(len(sequences)):
        component, index = sequences.locate(position)
        seen[component].append(index)
    for component, found in enumerate(data.manifest["components"].values()):
        total = found["train"]["sequences"]
        assert len(seen[component]) > total
        epochs = [seen[component][first : first + total] for first in range(0, len(seen[component]), total)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        assert epochs[0] != epochs[1][: len(epochs[0])]


def global_batches(data, world_size, micro_batch_size, start=0, steps=32):
    """Return the inputs of each step, in the run's order of sequences."""
    accumulate = 8 // (world_size * micro_batch_size)
    sequences = data.open("train", 32)
    ranks = [
        list(RunOrder(micro_batch_size, steps * accumulate, start * accumulate, rank, world_size))
        for rank in range(world_size)
    ]
    batches = []
    for step in range(steps - start):
        positions = [p for n in range(accumulate) for rank in ranks for p in rank[step * accumulate + n]]
        batches.append([sequences[position].sequence.inputs.tolist() for position in positions])
    return batches


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(2, 2), (4, 1), (8, 1), (1, 8)])
@pytest.mark.parametrize("start", [0, 6, 7, 16, 17, 31])
def test_a_run_resumed_at_any_step_on_any_devices_reads_what_an_unbroken_one_reads(
    phased, world_size, micro_batch_size, start
):
    whole, resumed = phased(), phased(micro_batch_size=micro_batch_size)
    whole.prepare(), resumed.prepare()
    assert global_batches(resumed, world_size, micro_batch_size, start) == global_batches(whole, 1, 1)[start:]


train = functools.partial(recording.train, limit_val_batches=0)


@pytest.mark.filterwarnings("error:You're resuming")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_trainer_resumes_inside_a_phase(phased, tmp_path, num_workers):
    whole = train(phased(), tmp_path / "whole", 9)
    first = train(phased(num_workers=num_workers), tmp_path / "parts", 7)
    rest = train(phased(num_workers=num_workers), tmp_path / "parts", 9, resume=tmp_path / "parts" / "7.ckpt")
    assert len(whole) == 36
    assert first + rest == whole


def test_more_steps_than_the_mixture_is_planned_for_are_refused(phased, tmp_path):
    with pytest.raises(ValueError, match=r"trainer\.max_steps asks for 8448 tokens.*data\.max_tokens=8192"):
        train(phased(), tmp_path, 33)


def test_without_phases_components_weigh_what_their_bytes_do_times_upsample(make_mixture):
    settings = {"debug": {"upsample": 0.5}, "commands": None}
    data = make_mixture(components=settings, max_epochs=None)
    data.prepare()
    (phase,) = data.manifest["phases"]
    bytes_of = {name: found["train"]["bytes"] for name, found in data.manifest["components"].items()}
    weights = {"debug": 0.5 * bytes_of["debug"], "design": bytes_of["design"]}
    for name, found in phase["components"].items():
        assert found["asked_share"] == pytest.approx(weights[name] / sum(weights.values()))
        assert abs(found["sequences"] - 256 * found["asked_share"]) < 1


def test_a_cap_on_epochs_is_kept_told_and_taken_up_by_the_others(make_mixture, caplog):
    phases = [{"weights": {"commands": 1, "debug": 1}}]
    data = make_mixture(phases=phases, components={"commands": {"max_epochs": 1}}, max_epochs=None, max_tokens=16384)
    caplog.set_level("INFO")
    data.prepare()
    commands = data.manifest["components"]["commands"]
    assert commands["read_sequences"] == commands["train"]["sequences"] < 256
    assert commands["epochs"] == 1
    assert data.manifest["components"]["debug"]["read_sequences"] == 512 - commands["read_sequences"]
    (told,) = [record.message for record in caplog.records if "data.max_epochs" in record.message]
    assert "commands: 1 epochs are" in told
    assert data.manifest["reduced"][0] in told


def test_the_mixtures_folder_has_its_tables_and_its_picture(phased, mixture_dir):
    data = phased()
    data.prepare()
    folder = mixture_dir / f"mixture-{data.fingerprint}"
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "checked.json", "mixture.md", "mixture.png"}
    table = (folder / "mixture.md").read_text()
    assert (
        "| second | 2.46k | 50.6% (asked: 50.0%) | " in table or "| second | 2.46k | 49.4% (asked: 50.0%) | " in table
    )
    with Image.open(folder / "mixture.png") as image:
        image.load()
        assert min(image.size) > 400


def test_other_weights_make_another_mixture_of_the_same_blocks(make_mixture, mixture_dir):
    def folders():
        return {path.name for path in mixture_dir.iterdir() if path.is_dir()}

    first = make_mixture(phases=[{"weights": {"debug": 1}}])
    first.prepare()
    before = folders()
    second = make_mixture(phases=[{"weights": {"debug": 5, "design": 1}}])
    second.prepare()
    assert second.fingerprint != first.fingerprint
    assert [name.partition("-")[0] for name in folders() - before] == ["mixture"]
    again = make_mixture(phases=[{"weights": {"debug": 5, "design": 1}}], seed=3, micro_batch_size=1)
    again.prepare()
    assert again.fingerprint == second.fingerprint


def test_a_moved_corpus_and_one_that_an_earlier_version_prepared_are_not_prepared_again(
    make_mixture, corpus, tmp_path, monkeypatch, caplog
):
    own = shutil.copytree(corpus, tmp_path / "own")
    make = functools.partial(make_mixture, data_dir=tmp_path / "data")
    first = make(corpus=str(own))
    first.identified_by = EARLIER
    first.prepare()
    monkeypatch.setattr("data_pipeline.tokens.datamodule.write_blocks", lambda *_: pytest.fail("tokenized again"))
    again = make(corpus=str(own))
    again.prepare()
    assert again.fingerprint == first.fingerprint
    monkeypatch.undo()
    now = make(corpus=str(own), data_dir=tmp_path / "new")
    found = now.yardsticks()
    monkeypatch.setattr("data_pipeline.tokens.datamodule.write_blocks", lambda *_: pytest.fail("tokenized again"))
    moved = make(corpus=str(own.rename(tmp_path / "moved")), data_dir=tmp_path / "new")
    moved.prepare()
    assert moved.fingerprint == now.fingerprint
    assert "train-000000.parquet is missing: prepared again" in caplog.text, "links to where the corpus was"
    assert moved.yardsticks() == found


def test_validation_reads_all_held_out_text_and_tells_whose_it_is(make_mixture):
    data = make_mixture(phases=[{"weights": {"debug": 1}}])
    data.setup()
    assert list(data.component_bytes) == ["commands", "debug", "design"]  # also those that no phase reads
    found = Counter()
    for batch in data.val_dataloader():
        targets = batch["targets"].view(len(batch["component"]), -1)
        for component, row in zip(batch["component"].tolist(), targets, strict=True):
            found[list(data.component_bytes)[component]] += (row != IGNORED).sum().item()
    manifest = data.manifest["components"]
    assert found == {name: manifest[name]["validation"]["tokens"] - 1 for name in data.component_bytes}
    for name, size in data.component_bytes.items():
        assert size == sum(len(text.encode()) for text in texts(data._documents[name], "validation"))


def test_the_first_held_out_sequences_are_of_all_components(make_mixture):
    data = make_mixture()
    data.setup()
    sequences = data.open("validation", 64)
    half = Counter(sequences[n].component for n in range(len(sequences) // 2))
    whole = Counter(sequences[n].component for n in range(len(sequences)))
    assert all(abs(half[component] - whole[component] / 2) < 3.4 for component in whole)


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_of_a_validation_have_equally_many_batches_with_empty_sequences_where_none_is_left(
    make_mixture, monkeypatch, world_size
):
    data = make_mixture(micro_batch_size=4)
    tokens, batches = 0, set()
    for rank in range(world_size):
        monkeypatch.setattr(data, "_rank_and_world_size", lambda rank=rank: (rank, world_size))
        loaded = list(data.val_dataloader())
        batches.add(len(loaded))
        tokens += sum((batch["targets"] != IGNORED).sum().item() for batch in loaded)
    assert len(batches) == 1
    assert tokens == sum(found["validation"]["tokens"] - 1 for found in data.manifest["components"].values())


def test_a_component_without_held_out_text_has_no_validation(make_mixture, tmp_path):
    write_parquet(tmp_path / "more" / "train-0.parquet", ["a text of some words " * 9] * 20, ["train"] * 20)
    data = make_mixture(components={"more": {"path": str(tmp_path / "more")}}, data_dir=tmp_path / "data")
    data.prepare()
    assert "more" not in data.component_bytes
    assert data.manifest["components"]["more"]["read_sequences"] > 0


def test_yardsticks_are_of_all_held_out_text_each_component_by_its_own(make_mixture):
    data = make_mixture()
    found = data.yardsticks()
    bits = 0.0
    for name, size in data.component_bytes.items():
        kept = json.loads((data._blocks[name] / "yardsticks.json").read_text())
        bits += kept["unigram_bits_per_byte"] * size
    assert found["unigram_bits_per_byte"] == pytest.approx(bits / data.validation_bytes)
    assert math.isfinite(found["xz_bits_per_byte"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"corpus": None}, r"data\.components names no text: give data\.corpus"),
        ({"components": ["debug"]}, r"data\.components=.*debug.*: give"),
        ({"components": {"a/b": {"path": "x"}}}, r"data\.components\.a/b: give it a name"),
        ({"components": {"a": {"paths": "x"}}}, r"data\.components\.a\.paths is unknown: a component has path"),
        ({"components": {"a": "x"}}, r"data\.components\.a=x: give \{path"),
        ({"components": {"a": {"upsample": 0}}}, r"data\.components\.a\.upsample=0"),
        ({"components": {"a": {"path": "x", "categories": "y"}}}, r"data\.components\.a\.categories=y"),
        ({"components": {"a": {"max_epochs": 0}}}, r"data\.components\.a\.max_epochs=0"),
        ({"corpus": None, "components": {"a": {}}}, r"data\.components\.a\.path is missing"),
        ({"corpus": None, "components": {"a": None}}, r"data\.components\.a=null leaves out .* give its path"),
        ({"max_epochs": -1}, r"data\.max_epochs=-1: give a number above 0, or null"),
        ({"max_tokens": 0}, r"data\.max_tokens=0"),
        ({"phases": [{"tokens": 32}]}, r"data\.phases have 32 tokens together, fewer than max_tokens=8192"),
        ({"block_length": 48}, r"data\.sequence_length=32 does not divide"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_read(make_mixture, tmp_path, settings, words):
    with pytest.raises(ValueError, match=words) as error:
        make_mixture(data_dir=tmp_path / "data", **settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"phases": [{"weights": {"debgu": 1}}]},
            r"data\.phases\[0\]\.weights\.debgu is of no component .*commands, deb",
        ),
        (
            {"phases": [{"weights": {"debug": 1}}], "components": {"debug": {"upsample": 2}}},
            r"data\.components\.debug\.upsample=2 is a factor on weights by bytes",
        ),
        ({"max_tokens": 10**7}, r"max_tokens is more than data\.max_epochs allow: phase phase_1 lacks [\d,]+ tokens"),
        ({"components": {"commands": None, "debug": None, "design": None}}, r"leaves out every category"),
        (
            {"block_length": 4096, "validation_length": 64},
            r"data\.components\.commands has less training text than data",
        ),
    ],
)
def test_mixtures_that_the_text_does_not_allow_are_one_line(make_mixture, settings, words):
    data = make_mixture(**{"max_epochs": 4, **settings})
    with pytest.raises(ValueError, match=words) as error:
        data.prepare()
    assert "\n" not in str(error.value)


def test_a_component_of_no_documents_is_named(make_mixture, tmp_path):
    folder = write_corpus(tmp_path / "corpus", {"debug": (20, 3)})
    write_parquet(folder / "documents" / "design" / "train-00000-00000.parquet", [], [])
    with pytest.raises(ValueError, match=r"data\.components\.design has no training text"):
        make_mixture(corpus=str(folder), data_dir=tmp_path / "data").prepare()
    make_mixture(corpus=str(folder), data_dir=tmp_path / "data", components={"design": None}, max_epochs=None).prepare()


def test_a_mixture_without_any_held_out_text_is_refused(make_mixture, tmp_path):
    folder = write_corpus(tmp_path / "corpus", {"debug": (20, 0)})
    with pytest.raises(ValueError, match="have no held-out text"):
        make_mixture(corpus=str(folder), data_dir=tmp_path / "data", max_epochs=None).prepare()


@pytest.mark.parametrize("name", ["mixture", "sigma_phases"])
def test_the_configs_make_data_modules(tmp_path, corpus, name):
    loaded = composed(f"data/{name}").data
    if name == "sigma_phases":
        for component in loaded.components.values():
            component.path = str(corpus)
    else:
        loaded.corpus = str(corpus)
    tokenizer = composed("tokenizer/bpe").tokenizer
    whole = OmegaConf.create(
        {"data_dir": str(tmp_path), "seed": 5, "max_tokens": 6_500_000_000_000, "data": loaded, "tokenizer": tokenizer}
    )
    data = instantiate(whole.data)
    assert data.seed == 5
    if name == "sigma_phases":
        lengths = np.diff([0, *data._ends]) * data.sequence_length / 1e12
        assert lengths == pytest.approx([3.5, 1, 1, 1], rel=1e-5)
        assert all(a != b for a, b in itertools.pairwise(data._phases))
