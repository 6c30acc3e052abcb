import copy
import json
import os
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, GPT2Tokenizer, PreTrainedTokenizerFast

from data_pipeline.tokens.tokenizer import END_OF_TEXT, ByteLevelBPE, Pretrained, add_document_start

pytestmark = pytest.mark.core


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


def test_identity_does_not_ask_for_what_else_a_models_folder_has(folder):
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    before = Pretrained(str(folder)).identity(None)
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    (folder / "model.safetensors").write_bytes(b"other weights")
    (folder / "README.md").write_text("what it is")
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    (folder / "original").mkdir()
    assert Pretrained(str(folder)).identity(None) == before


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "sentencepiece.bpe.model",
        "qwen.tiktoken",
        "tekken.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ],
)
def test_identity_is_the_content_of_each_file_that_makes_the_tokenizer(folder, name):
    found = [Pretrained(str(folder)).identity(None)]
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    for content in ("{ }", "{1}"):  # as long as each other, and as old
        path.write_text(content)
        os.utime(path, (0, 0))
        found.append(Pretrained(str(folder)).identity(None))
    assert len({json.dumps(identity) for identity in found}) == 3


def test_identity_changes_with_what_the_models_config_says_of_its_tokenizer(folder):
    found = [Pretrained(str(folder)).identity(None)]
    for config in ({"model_type": "qwen2"}, {"model_type": "llama"}, {"tokenizer_class": "LlamaTokenizer"}):
        (folder / "config.json").write_text(json.dumps(config))
        found.append(Pretrained(str(folder)).identity(None))
    assert len({json.dumps(identity) for identity in found}) == 4


@pytest.mark.parametrize("config", ["[1]", "{", "", "\udc80"])
def test_a_config_that_cannot_be_read_says_nothing_of_the_tokenizer(folder, config):
    before = Pretrained(str(folder)).identity(None)
    (folder / "config.json").write_bytes(config.encode(errors="surrogateescape"))
    assert Pretrained(str(folder)).identity(None) == before


def test_a_tokenizer_of_the_hub_is_its_name_and_revision():
    assert Pretrained("a/b").identity(None) == Pretrained("a/b").identity(None)
    assert len({json.dumps(Pretrained(*of).identity(None)) for of in (("a/b",), ("a/c",), ("a/b", "v1"))}) == 3


def gpt2(trained: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    model = json.loads(trained.backend_tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return GPT2Tokenizer(vocab=model["vocab"], merges=merges, unk_token=None)


def adding(single: str):
    """Return a tokenizer whose post-processor wraps a text as `single` says."""

    def change(trained: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
        changed = copy.deepcopy(trained)
        changed.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(END_OF_TEXT, trained.bos_token_id)]
        )
        return changed

    return change


def test_a_tokenizer_without_a_token_that_begins_a_text_is_named(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    bare = AutoTokenizer.from_pretrained(tmp_path)
    bare.bos_token = bare.eos_token = None
    with pytest.raises(ValueError, match=f"{tmp_path}: the tokenizer names neither a bos_token nor an eos_token"):
        add_document_start(bare)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(copy.deepcopy, id="trained here"),
        pytest.param(gpt2, id="GPT-2"),
        pytest.param(adding(f"{END_OF_TEXT} $A"), id="adds it already"),
        pytest.param(adding(f"$A {END_OF_TEXT}"), id="adds an end"),
    ],
)
def test_the_start_token_is_added_once_and_stays_when_saved(trained, tmp_path, kind):
    tokenizer = kind(trained)
    start, text = tokenizer.bos_token_id, "the gate é forgets"
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    for _ in range(2):
        add_document_start(tokenizer)
        assert tokenizer(text)["input_ids"] == [start, *bare]
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == [start, *bare]
    assert loaded(text, add_special_tokens=False)["input_ids"] == bare
    assert loaded.decode(loaded(text)["input_ids"], skip_special_tokens=True) == text
    chat = loaded.apply_chat_template([{"role": "user", "content": text}], return_dict=True)
    assert chat["input_ids"] == [start, *bare]
    assert Pretrained(str(tmp_path)).build(None)(text)["input_ids"] == [start, *bare]
