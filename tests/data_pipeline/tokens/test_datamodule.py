import functools
import json
import lzma
import math

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from data_pipeline.documents import SPLITS, texts
from data_pipeline.sources.text_files import TextFiles
from data_pipeline.tokens.batches import IGNORED
from tests.conftest import composed
from tests.data_pipeline import recording

train = functools.partial(recording.train, val_check_interval=4, check_val_every_n_epoch=None)


@pytest.mark.filterwarnings("error:You're resuming")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_reads_what_an_unbroken_one_reads(make_data, tmp_path, num_workers):
    make = functools.partial(make_data, num_workers=num_workers)
    whole = train(make(), tmp_path / "whole", 7)
    first = train(make(), tmp_path / "parts", 3)
    rest = train(make(), tmp_path / "parts", 7, resume=tmp_path / "parts" / "3.ckpt")
    assert len(whole) == 28
    assert first + rest == whole


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sequence_length": 128}, r"data\.sequence_length=128 is longer than data\.block_length=64"),
        ({"validation_length": 128}, r"data\.validation_length=128 is longer than data\.block_length=64"),
        ({"sequence_length": 48}, r"data\.sequence_length=48 does not divide data\.block_length=64"),
        ({"validation_length": 48}, r"data\.validation_length=48 does not divide data\.block_length=64"),
        ({"batch_tokens": 100}, r"data\.batch_tokens=100 .* data\.micro_batch_size=2"),
        ({"micro_batch_size": 0}, r"data\.micro_batch_size=0"),
        ({"block_length": -1}, r"data\.block_length=-1"),
        ({"batch_tokens": 1e6}, r"data\.batch_tokens=1000000\.0: give a whole number"),
        ({"num_workers": -1}, r"data\.num_workers=-1"),
        ({"processes": 0}, r"data\.processes=0"),
        ({"validation_fraction": 0.0}, r"data\.validation_fraction=0\.0"),
        ({"validation_fraction": 1}, r"data\.validation_fraction=1"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_read(make_data, tmp_path, settings, words):
    with pytest.raises(ValueError, match=words) as error:
        make_data(data_dir=tmp_path / "data", source=None, **settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "data").exists()


def test_accumulation_makes_up_the_global_batch(make_data):
    data = make_data()
    assert [data.accumulation(world_size) for world_size in (1, 2, 4)] == [4, 2, 1]
    with pytest.raises(ValueError, match=r"data\.batch_tokens.*data\.micro_batch_size.*trainer\.devices"):
        data.accumulation(3)


def test_every_training_token_is_used_once_an_epoch(make_data):
    data = make_data(batch_tokens=64)
    data.prepare()
    loader = data.train_dataloader()
    order = [i for batch in loader.batch_sampler for i in batch]
    assert len(order) >= data.train_sequences - 1
    assert len(set(order)) == len(order)
    batch = next(iter(loader))
    assert batch["input_ids"].shape == batch["targets"].shape == (1, 64)
    assert batch["input_ids"].dtype == batch["targets"].dtype == torch.int64
    assert batch["cu_seqlens"].dtype == torch.int32
    assert (batch["targets"] != IGNORED).all()


def test_validation_is_whole_in_batches_of_one_shape(make_data):
    data = make_data(micro_batch_size=6, batch_tokens=192)
    batches = list(data.val_dataloader())
    assert {b["input_ids"].shape for b in batches} == {(1, 6 * 32)}
    targets = sum((b["targets"] != IGNORED).sum().item() for b in batches)
    assert targets == data.manifest["validation"]["tokens"] - 1


def test_loaders_draw_nothing_from_the_global_generator(make_data):
    data = make_data()
    data.setup()
    state = torch.get_rng_state()
    next(iter(data.train_dataloader()))
    next(iter(data.val_dataloader()))
    assert torch.equal(state, torch.get_rng_state())


def test_yardsticks_code_the_whole_held_out_text(make_data):
    data = make_data()
    found = data.yardsticks()
    trained_on, held_out = ("".join(texts(data._documents_folder, split)).encode() for split in SPLITS)
    assert data.validation_bytes == len(held_out)
    assert found["xz_bits_per_byte"] == pytest.approx(8 * len(lzma.compress(held_out, preset=9)) / len(held_out))
    after = [8 * len(lzma.compress(text, preset=9)) for text in (trained_on + held_out, trained_on)]
    assert found["xz_after_training_bits_per_byte"] == pytest.approx((after[0] - after[1]) / len(held_out))
    assert found["xz_after_training_bits_per_byte"] < found["xz_bits_per_byte"]
    train, validation = (
        np.concatenate([b["targets"][0].numpy() for b in loader])
        for loader in (make_data(batch_tokens=64).train_dataloader(), data.val_dataloader())
    )
    # Those of train may lack the sequence that fills no batch of two.
    counts = np.bincount(train, minlength=400) + 1
    bits = -np.log2(counts / counts.sum())[validation[validation != IGNORED]].sum() / len(held_out)
    assert found["unigram_bits_per_byte"] == pytest.approx(bits, rel=1e-3)
    assert math.isfinite(bits)
    assert make_data().yardsticks() == found
    kept = data._blocks_folder / "yardsticks.json"
    of_earlier_versions = json.dumps({"unigram_bits_per_byte": 1.0, "xz_bits_per_byte": 1.0})
    for written in (of_earlier_versions, "[]", '{"unigram_bits_per_byte": 1.', ""):
        kept.write_text(written)
        assert make_data().yardsticks() == found, f"{written} is not all of them"


@pytest.mark.parametrize("name", ["local_docs", "text_files"])
@pytest.mark.parametrize("tokenizer", ["bpe", "pretrained", "gpt2"])
def test_the_configs_make_data_modules(tmp_path, name, tokenizer):
    config = OmegaConf.create(
        {
            "data_dir": str(tmp_path),
            "seed": 5,
            "data": composed(f"data/{name}").data,
            "tokenizer": composed(f"tokenizer/{tokenizer}").tokenizer,
        }
    )
    if name == "text_files":
        config.data.source.path = ["a.txt", "b.txt"]
    if tokenizer == "pretrained":
        config.tokenizer.path = "x"
    data = instantiate(config.data)
    assert data.seed == 5
    assert data.data_dir == tmp_path
    if name == "text_files":
        assert isinstance(data.source, TextFiles)
        assert data.source.path == ["a.txt", "b.txt"]
