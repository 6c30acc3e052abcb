import json
import shutil

import numpy as np
import pytest
import zarr
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data_pipeline.fingerprint import fingerprint
from data_pipeline.identity import EARLIER
from data_pipeline.tokens.batches import IGNORED
from data_pipeline.tokens.datamodule import LongCrawl64Data
from data_pipeline.tokens.longcrawl64 import END_OF_TEXT, VOCABULARY, LongCrawl64
from data_pipeline.tokens.tokenizer import ByteLevelBPE, Pretrained
from data_pipeline.tokens.yardsticks import NAMES

LENGTH = 256


@pytest.fixture(scope="module", params=[2, 3], ids=["zarr2", "zarr3"])
def arrays(request, tmp_path_factory):
    """Write small arrays in the public layout: [documents, LENGTH] uint16."""
    folder = tmp_path_factory.mktemp("longcrawl64")
    rng = np.random.default_rng(0)
    for name, documents in (("train.zarr", 6), ("heldout.zarr", 3)):
        shape = {"shape": (documents, LENGTH), "chunks": (1, LENGTH), "dtype": "uint16"}
        array = zarr.create_array(str(folder / name), **shape, zarr_format=request.param)
        array[:] = rng.integers(0, VOCABULARY, (documents, LENGTH))
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Return a tokenizer of GPT-2's size."""
    folder = tmp_path_factory.mktemp("gpt2")
    vocabulary = {f"t{n}": n for n in range(END_OF_TEXT)} | {"<|endoftext|>": END_OF_TEXT}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    ends = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)
    return Pretrained(str(folder))


@pytest.fixture
def make(arrays, gpt2, tmp_path):
    def make(**settings):
        lengths = {"sequence_length": 64, "validation_length": 128, "batch_tokens": 256, "micro_batch_size": 2}
        defaults = {"source": LongCrawl64(str(arrays)), "tokenizer": gpt2, "data_dir": tmp_path, "num_workers": 0}
        return LongCrawl64Data(**{**defaults, **lengths, **settings})

    return make


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_token_is_a_target_once_and_sequences_are_independent(make, arrays, num_workers):
    data = make(num_workers=num_workers)
    data.prepare()
    assert data.train_sequences == 6 * LENGTH // 64
    batches = list(data.train_dataloader())
    targets = np.concatenate([b["targets"].numpy().reshape(-1, 64) for b in batches])
    inputs = np.concatenate([b["input_ids"].numpy().reshape(-1, 64) for b in batches])
    stored = zarr.open_array(str(arrays / "train.zarr"), mode="r")[:].reshape(-1, 64)
    assert sorted(map(tuple, targets)) == sorted(map(tuple, stored.tolist()))
    assert (inputs[:, 0] == END_OF_TEXT).all()
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    assert all(b["cu_seqlens"].tolist() == [0, 64, 128] for b in batches)


def test_validation_reads_the_held_out_array_in_order(make, arrays):
    data = make(micro_batch_size=8, batch_tokens=512)
    targets = np.concatenate([b["targets"][0].numpy() for b in data.val_dataloader()])
    stored = zarr.open_array(str(arrays / "heldout.zarr"), mode="r")[:].reshape(-1)
    assert targets[: len(stored)].tolist() == stored.tolist()
    assert (targets[len(stored) :] == IGNORED).all()


def test_there_is_no_text_to_measure_against(make):
    data = make()
    data.prepare()
    assert data.validation_bytes is None
    assert data.yardsticks() == dict.fromkeys(NAMES)
    assert data.manifest["train"] == {"documents": 6, "tokens": 6 * LENGTH}
    json.dumps(data.manifest)


def test_the_fingerprint_follows_the_arrays(make):
    first, second = make(), make(sequence_length=32, seed=3)
    first.prepare()
    second.prepare()
    assert first.fingerprint == second.fingerprint


def test_arrays_are_told_apart_by_their_tokens_not_by_place_or_time(make, arrays, tmp_path):
    """A run that an earlier version began, which went by path and time, keeps its fingerprint."""
    first = make()
    first.prepare()
    copied = shutil.copytree(arrays, tmp_path / "copy")
    again = make(source=LongCrawl64(str(copied)))
    again.prepare()
    assert again.fingerprint == first.fingerprint
    earlier = fingerprint(LongCrawl64(str(arrays)).identity(EARLIER))
    resumed = make()
    resumed.resumed = earlier
    resumed.prepare()
    assert resumed.fingerprint == earlier != first.fingerprint
    tokens = zarr.open_array(str(copied / "train.zarr"), mode="r+")
    tokens[-1, 0] = (int(tokens[-1, 0]) + 1) % 1000
    changed = make(source=LongCrawl64(str(copied)))
    changed.prepare()
    assert changed.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sequence_length": 96, "batch_tokens": 192}, r"data\.sequence_length=96 does not divide .* 256 tokens"),
        ({"validation_length": 96}, r"data\.validation_length=96 does not divide .* 256 tokens"),
        ({"source": LongCrawl64("/nowhere")}, r"data\.source\.path=/nowhere has no folder train\.zarr"),
        ({"tokenizer": ByteLevelBPE(300)}, "tokenizer=bpe needs text .* tokenizer=gpt2"),
    ],
)
def test_what_cannot_work_names_the_key(make, settings, words):
    with pytest.raises(ValueError, match=words):
        make(**settings).prepare()


def test_a_folder_that_is_no_array_is_named(tmp_path, make):
    (tmp_path / "train.zarr").mkdir()
    with pytest.raises(ValueError, match=r"data\.source\.path=.*train\.zarr that is not a zarr array"):
        make(source=LongCrawl64(str(tmp_path))).prepare()
    zarr.create_array(str(tmp_path / "heldout.zarr"), shape=(3,), dtype="float32")
    with pytest.raises(ValueError, match=r"heldout\.zarr of \[3\] float32: give integers, \[documents"):
        LongCrawl64(str(tmp_path)).open("validation")
