"""Stored teacher predictions, recomputed if any of their inputs changed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from transformers import MistralConfig, MistralForCausalLM

from data_pipeline.tokens.batches import Sequence, collate
from lit_modules.launching.run_folder import RunFailed
from lit_modules.linearization.teacher_store import TeacherStore
from lit_modules.networks.linearized import Linearization, LinearizedForCausalLM, linearize

LENGTH = 8


def teacher(rope_theta: float = 10000.0, sliding_window: int | None = None, **settings) -> LinearizedForCausalLM:
    """A Mistral whose weights are the same whatever is asked for."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        sliding_window=sliding_window,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
    )
    return linearize(MistralForCausalLM(config).eval(), Linearization(window=2, **settings))


@pytest.fixture
def data(tmp_path):
    """Six sequences, of which every pass reads those of even number."""
    ids = np.random.default_rng(0).integers(31, size=(6, LENGTH + 1))
    dataset = [Sequence(row[:-1], row[1:], np.zeros(1, np.int64)) for row in ids]
    loader = SimpleNamespace(
        dataset=dataset,
        batch_sampler=[[4, 0], [2]],
        collate_fn=lambda sequences: collate(sequences, LENGTH),
    )
    return SimpleNamespace(
        train_dataloader=lambda: loader,
        sequence_length=LENGTH,
        fingerprint="of the data",
        data_dir=tmp_path / "data",
        micro_batch_size=2,
    )


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return str(folder)


def prepared(data, model, base, precision="32-true") -> TeacherStore:
    store = TeacherStore(data, sequences=3, k=4)
    store.prepare(model, base, precision, torch.device("cpu"))
    return store


def stored(data) -> int:
    """Return the number of teachers on disk."""
    return len(list(data.data_dir.glob("teacher-*")))


def test_a_base_that_differs_in_its_configuration_alone_is_asked_itself(data, base):
    models = [teacher(), teacher(rope_theta=10.0), teacher(sliding_window=2)]
    found = [prepared(data, model, base).of([0, 2], torch.device("cpu"))[0] for model in models]
    assert stored(data) == 3
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_one_base_is_asked_once_however_it_is_linearized(data, base):
    prepared(data, teacher(), base)
    prepared(data, teacher(gate="slots", num_slots=4, learned_weights="head", softmax_layers=(1,)), base)
    renamed = teacher()
    renamed.config.name_or_path = "elsewhere"
    prepared(data, renamed, base)
    assert stored(data) == 1


def test_a_commit_on_the_hub_is_asked_itself(data, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--model"
    (repository / "refs").mkdir(parents=True)
    model = teacher()
    for count, commit in enumerate(("a" * 40, "b" * 40), start=1):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        (repository / "refs" / "main").write_text(commit)
        for _ in range(2):
            prepared(data, model, "owner/model")
            assert stored(data) == count


@pytest.mark.parametrize("sequence", [1, 3, 5])
def test_a_sequence_of_which_the_teacher_was_not_asked_has_no_neighbours_tokens(data, base, sequence):
    store = prepared(data, teacher(), base)
    assert store.of([4, 0], torch.device("cpu"))[1].shape == (1, 2 * LENGTH, 4)
    with pytest.raises(RunFailed, match=f"reads sequence {sequence} of the train text"):
        store.of([0, sequence], torch.device("cpu"))


def test_a_teacher_of_another_dtype_or_precision_is_asked_itself_and_answers_in_it(data, base):
    found = []
    for dtype, precision in ((torch.float32, "32-true"), (torch.bfloat16, "32-true"), (torch.float32, "bf16-mixed")):
        found.append(prepared(data, teacher().to(dtype), base, precision).of([0, 2], torch.device("cpu"))[0])
        assert stored(data) == len(found)
    exact, rounded, mixed = found
    for coarse in (rounded, mixed):
        assert 0 < (coarse - exact).abs().max() < 0.5
