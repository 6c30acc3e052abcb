import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from data_pipeline.tokenizer import END_OF_TEXT, ByteLevelBPE, Pretrained


@pytest.fixture(scope="module")
def trained(make_data):
    data = make_data()
    data.prepare()
    return data.hf_tokenizer


@pytest.fixture
def folder(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    return tmp_path


def test_a_trained_tokenizer_is_hugging_faces_own_kind(trained):
    assert isinstance(trained, PreTrainedTokenizerFast)
    assert trained.bos_token == trained.eos_token == END_OF_TEXT
    assert len(trained) == 400


@given(text=st.text())
def test_every_text_decodes_to_itself(trained, text):
    assert trained.decode(trained.encode(text)) == text


@pytest.mark.parametrize("text", ["", " lead", "a  b\r\n\t", "�", "don 't , x .", f"<s>{END_OF_TEXT}", "日本 🜁é\x00"])
def test_awkward_texts_decode_to_themselves(trained, text):
    assert trained.decode(trained.encode(text)) == text


def test_training_twice_gives_the_same_vocabulary(trained, make_data, tmp_path):
    again = make_data(data_dir=tmp_path)
    again.prepare()
    assert again.hf_tokenizer.get_vocab() == trained.get_vocab()


def test_the_training_sample_is_about_as_large_as_asked(make_data, tmp_path, caplog):
    data = make_data(data_dir=tmp_path, tokenizer=ByteLevelBPE(300, train_bytes=20_000))
    with caplog.at_level("INFO"):
        data.prepare()
    (line,) = [m for m in caplog.messages if m.startswith("training the tokenizer:")]
    assert 12_000 < int(line.split()[3].replace(",", "")) < 28_000


def test_a_sample_far_smaller_than_the_documents_is_not_an_empty_one(make_data, tmp_path):
    data = make_data(data_dir=tmp_path, tokenizer=ByteLevelBPE(300, train_bytes=1))
    data.prepare()
    assert len(data.hf_tokenizer) > 257  # bytes, end of text, and something learned


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size=256: .* 257"):
        ByteLevelBPE(vocab_size=256)


def test_a_folder_loads_and_reads_no_network(folder, trained):
    assert Pretrained(str(folder)).build(None).get_vocab() == trained.get_vocab()


def test_a_folder_without_its_file_says_which(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json") as error:
        Pretrained(str(folder)).build(None)
    assert str(folder) in str(error.value)
    (folder / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no merges\.txt"):
        Pretrained(str(folder)).build(None)


def test_a_truncated_tokenizer_file_is_one_line(folder):
    content = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"tokenizer\.path=.*cannot be read") as error:
        Pretrained(str(folder)).build(None)
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_a_document_token_is_refused(folder):
    shutil.rmtree(folder)
    Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(folder.with_suffix(".json")))
    folder.mkdir()
    folder.with_suffix(".json").rename(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ValueError, match="bos_token"):
        Pretrained(str(folder)).build(None)


@pytest.mark.parametrize("path", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_path_that_is_no_folder_is_not_asked_of_the_hub(path):
    with pytest.raises(ValueError, match=r"tokenizer\.path=.* is not a folder"):
        Pretrained(path).identity(None)


def test_identity_changes_with_the_folders_files(folder):
    before = Pretrained(str(folder)).identity(None)
    (folder / "tokenizer.json").write_text("{}")
    assert Pretrained(str(folder)).identity(None) != before
