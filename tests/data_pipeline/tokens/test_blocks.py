import itertools
import json
import pickle
from unittest import mock

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.documents import texts
from data_pipeline.sources.text_files import TextFiles
from data_pipeline.tokens import blocks as blocks_module
from data_pipeline.tokens.batches import IGNORED, BlockSequences, collate
from data_pipeline.tokens.blocks import Blocks, Packer
from data_pipeline.tokens.encoding import Encoded
from data_pipeline.tokens.tokenizer import Pretrained, add_document_start, document_start
from data_pipeline.tokens.yardsticks import target_counts

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def data(make_data):
    data = make_data()
    data.prepare()
    return data


def stream(data, split):
    """Return the whole token stream and its document starts, computed in the simplest way."""
    tokens, starts = [], []
    for text in texts(data._documents_folder, split):
        starts.append(len(tokens))
        tokens += [document_start(data.hf_tokenizer), *data.hf_tokenizer.encode(text, add_special_tokens=False)]
    return np.array(tokens), starts


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=12),
    st.integers(1, 7),
    st.booleans(),
    st.sampled_from([0, 10, 1000]),
)
def test_rows_hold_the_stream_however_it_comes(parts, length, keep_partial, batch_tokens):
    tokens = np.arange(sum(map(sum, parts)), dtype=np.uint16)
    packer, written, starts, position = Packer(length), [], [], 0
    with mock.patch.object(blocks_module, "BATCH_TOKENS", batch_tokens):
        for part in parts:  # the lengths of its documents
            ends = np.cumsum(part)
            starts += (position + ends - part).tolist()
            written.append(packer.add(Encoded(tokens[position : position + ends[-1]], ends - part)))
            position += int(ends[-1])
        written += packer.finish(keep_partial)
    rows = []
    for some in filter(None, written):
        cut = np.split(some.tokens, np.cumsum(some.lengths)[:-1])
        rows += zip(cut, np.split(some.starts, np.cumsum(some.start_counts)[:-1]), strict=True)
    full = (len(tokens) - 1) // length
    assert len(rows) == full + (keep_partial and len(tokens) - full * length > 1)
    for number, (row, row_starts) in enumerate(rows):
        begin = number * length
        assert row.tolist() == tokens[begin : begin + length + 1].tolist()
        assert row_starts.tolist() == [s - begin for s in starts if begin <= s < begin + len(row) - 1]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_stored_rows_hold_the_documents_tokens(data, split):
    blocks = Blocks(data._blocks_folder, split)
    tokens, starts = stream(data, split)
    length = data.block_length
    joined = np.concatenate([blocks[i][0][:-1] for i in range(len(blocks))])
    found = [i * length + s for i in range(len(blocks)) for s in blocks[i][1]]
    assert joined.tolist() == tokens[: len(joined)].tolist()
    assert found == [s for s in starts if s < len(joined)]
    assert data.manifest[split]["tokens"] == len(tokens)
    if split == "validation":
        assert len(joined) == len(tokens) - 1
    else:
        assert len(tokens) - len(joined) <= length


def test_the_number_of_processes_changes_nothing(make_data, data, tmp_path):
    parallel = make_data(data_dir=tmp_path, processes=3)
    parallel.prepare()
    assert parallel.fingerprint == data.fingerprint
    for path in sorted(data._blocks_folder.glob("*.arrow")):
        assert (parallel._blocks_folder / path.name).read_bytes() == path.read_bytes()


def test_rows_are_read_without_a_copy_and_by_datasets_too(data):
    blocks = Blocks(data._blocks_folder, "train")
    tokens, _ = blocks[3]
    assert not tokens.flags.owndata
    assert tokens.dtype == np.uint16
    stored = Dataset.from_file(str(next(data._blocks_folder.glob("train-*.arrow"))))
    assert stored[3]["tokens"] == tokens.tolist()
    assert pickle.loads(pickle.dumps(blocks))[3][0].tolist() == tokens.tolist()


def test_a_large_vocabulary_is_stored_in_32_bits(data, tmp_path, make_data):
    data.hf_tokenizer.save_pretrained(tmp_path / "wide")
    path = tmp_path / "wide" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary.update({f"unused{n}": n for n in range(len(vocabulary), 70_000)})
    vocabulary["e"], vocabulary["unused69999"] = 69_999, vocabulary["e"]
    path.write_text(json.dumps(content))
    wide = make_data(tokenizer=Pretrained(str(tmp_path / "wide")))
    wide.prepare()
    rows = Blocks(wide._blocks_folder, "train")
    assert wide.manifest["dtype"] == "uint32"
    assert max(rows[i][0].max() for i in range(len(rows))) == 69_999


def test_a_runs_own_tokenizer_does_not_add_the_start_token_twice(data, tmp_path, make_data):
    add_document_start(data.hf_tokenizer)
    data.hf_tokenizer.save_pretrained(tmp_path / "tokenizer")
    again = make_data(tokenizer=Pretrained(str(tmp_path / "tokenizer")))
    again.prepare()
    assert again.hf_tokenizer("the forget gate")["input_ids"][0] == document_start(data.hf_tokenizer)
    for split in ("train", "validation"):
        before, after = Blocks(data._blocks_folder, split), Blocks(again._blocks_folder, split)
        assert len(after) == len(before)
        assert all((after[i][0] == before[i][0]).all() for i in range(len(before)))


def test_text_that_quotes_the_end_of_text_spells_it(make_data, tmp_path):
    for n in range(40):
        (tmp_path / f"{n}.txt").write_text(f"{n} before <|endoftext|> after" * 5)
    quoting = make_data(source=TextFiles(str(tmp_path)), data_dir=tmp_path / "data")
    quoting.prepare()
    bos = document_start(quoting.hf_tokenizer)
    for split in ("train", "validation"):
        blocks = Blocks(quoting._blocks_folder, split)
        rows = [blocks[i] for i in range(len(blocks))]
        assert sum((row[:-1] == bos).sum() for row, _ in rows) == sum(len(starts) for _, starts in rows)


def test_documents_never_share_a_segment(data):
    bos = document_start(data.hf_tokenizer)
    sequences = BlockSequences(data._blocks_folder, "train", data.block_length, data.sequence_length)
    for index in range(len(sequences)):
        batch = collate([sequences[index]], data.sequence_length)
        tokens, bounds = batch["input_ids"][0], batch["cu_seqlens"].tolist()
        assert bounds[0] == 0
        assert bounds[-1] == len(tokens)
        for begin, end in itertools.pairwise(bounds):
            assert not (tokens[begin + 1 : end] == bos).any()


def test_validation_targets_every_token_but_the_first_once(data):
    tokens, _ = stream(data, "validation")
    for length in (8, 16, 64):
        sequences = BlockSequences(data._blocks_folder, "validation", data.block_length, length)
        batches = [collate([sequences[i]], length) for i in range(len(sequences))]
        targets = np.concatenate([b["targets"][0][b["targets"][0] != IGNORED].numpy() for b in batches])
        assert targets.tolist() == tokens[1:].tolist()
        assert all(b["input_ids"].shape == (1, length) for b in batches)


def test_padding_is_a_segment_of_its_own(data):
    sequences = BlockSequences(data._blocks_folder, "validation", data.block_length, 64)
    last = len(sequences) - 1
    batch = collate([sequences[last], sequences[-1]], 64)
    count = len(sequences[last].inputs)
    assert 0 < count < 64
    assert (batch["targets"][0][count:] == IGNORED).all()
    assert {count, 64, 128} <= set(batch["cu_seqlens"].tolist())


def test_target_counts_are_those_of_the_stream(data):
    tokens, _ = stream(data, "validation")
    counts = target_counts(Blocks(data._blocks_folder, "validation"), 400)
    assert counts.tolist() == np.bincount(tokens[1:], minlength=400).tolist()
