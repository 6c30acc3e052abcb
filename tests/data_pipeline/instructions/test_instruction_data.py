import functools
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from data_pipeline.instructions.rendering import WITH_INPUT, WITHOUT_INPUT
from data_pipeline.tokens.batches import IGNORED
from data_pipeline.tokens.tokenizer import ByteLevelBPE, Pretrained
from data_pipeline.tokens.yardsticks import NAMES
from tests.conftest import composed
from tests.data_pipeline import recording
from tests.data_pipeline.instructions.conftest import alpaca_records, make_tokenizer

train = functools.partial(recording.train, accumulate=2, val_check_interval=2, check_val_every_n_epoch=None)


def rows_of(data, split):
    data.setup()
    sequences = data.open(split, data.sequence_length)
    return [sequences[index] for index in range(len(sequences))]


def learned_text(data, rows):
    targets = np.concatenate([row.targets for row in rows])
    return data.hf_tokenizer.decode(targets[targets != IGNORED].tolist())


def test_concatenated_records_are_in_the_file_s_order_token_for_token(make_data):
    data, rows = make_data(packing="concatenate"), alpaca_records(60)
    tokenizer, expected, answers = make_tokenizer(), [], []
    for row in rows[8:]:
        expected += tokenizer((WITH_INPUT if row["input"] else WITHOUT_INPUT).format(**row))["input_ids"]
        answers += tokenizer(row["output"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        expected += tokenizer(row["output"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
    found = rows_of(data, "train")
    tokens = np.concatenate([row.inputs for row in found])
    assert tokens[: len(expected)].tolist() == expected
    assert (tokens[len(expected) :] == tokenizer.eos_token_id).all()
    targets = np.concatenate([row.targets for row in found])
    assert targets[targets != IGNORED].tolist() == answers
    counts = data.manifest["train"]
    assert (counts["examples"], counts["tokens"], counts["target_tokens"]) == (52, len(expected), len(answers))
    assert counts["pass_tokens"] == len(tokens) == data.train_sequences * 128


@pytest.mark.parametrize("packing", ["concatenate", "whole"])
def test_held_out_bytes_are_those_of_the_answers(make_data, packing):
    data = make_data(packing=packing)
    data.prepare()
    first = alpaca_records(8)
    assert data.validation_bytes == sum(len(row["output"].encode()) for row in first)
    assert learned_text(data, rows_of(data, "validation")).count("<|im_end|>") == 8
    everything = make_data(packing=packing, loss_on="all")
    everything.prepare()
    prompts = sum(len((WITH_INPUT if row["input"] else WITHOUT_INPUT).format(**row).encode()) for row in first)
    first_token = len(everything.hf_tokenizer.decode(everything.open("validation", 128)[0].inputs[:1].tolist()))
    assert everything.validation_bytes == data.validation_bytes + prompts - 8 * first_token


def test_the_unigram_yardstick_is_of_the_answers_tokens(make_data):
    data = make_data()
    data.prepare()
    counts, held_out = (
        Counter(token for row in rows_of(data, split) for token in row.targets.tolist() if token != IGNORED)
        for split in ("train", "validation")
    )
    total = counts.total() + len(data.hf_tokenizer)
    bits = sum(-math.log2((counts[token] + 1) / total) * times for token, times in held_out.items())
    expected = dict.fromkeys(NAMES) | {"unigram_bits_per_byte": pytest.approx(bits / data.validation_bytes)}
    assert data.yardsticks() == expected


def test_batches_have_the_form_of_all_token_data(make_data):
    data = make_data(packing="whole", sequence_length=256)
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["targets"].shape == (1, 512)
    assert batch["input_ids"].dtype == batch["targets"].dtype == torch.int64
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"][[0, -1]].tolist() == [0, 512]
    assert 256 in batch["cu_seqlens"]
    begins = batch["input_ids"][0, batch["cu_seqlens"][:-1].long()]
    first = data.hf_tokenizer("Below is")["input_ids"][0]
    assert (begins == first).sum() == (batch["input_ids"] == first).sum() > 2
    assert set(begins.tolist()) == {first, data.hf_tokenizer.eos_token_id}  # an example, or what fills a sequence up


def test_held_out_sequences_have_a_length_of_their_own(make_data):
    data = make_data(validation_length=64)
    assert {len(row.inputs) for row in rows_of(data, "validation")} == {64}
    assert {len(row.inputs) for row in rows_of(data, "train")} == {128}
    assert {batch["input_ids"].shape for batch in data.val_dataloader()} == {(1, 256)}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_reads_what_an_unbroken_one_reads(make_data, tmp_path, num_workers):
    make = functools.partial(make_data, num_workers=num_workers)
    whole = train(make(), tmp_path / "whole", 7)
    first = train(make(), tmp_path / "parts", 3)
    rest = train(make(), tmp_path / "parts", 7, resume=tmp_path / "parts" / "3.ckpt")
    assert len(whole) == 14
    assert first + rest == whole


def test_what_is_prepared_is_used_again_and_settings_make_another(make_data, alpaca_file, monkeypatch):
    data = make_data()
    data.prepare()
    monkeypatch.setattr("data_pipeline.instructions.datamodule._groups", lambda _: pytest.fail("read again"))
    again = make_data(seed=3)
    again.prepare()
    assert again.fingerprint == data.fingerprint
    monkeypatch.undo()
    others = [
        {"packing": "concatenate"},
        {"loss_on": "all"},
        {"cross_documents": True},
        {"validation_length": 64},
        {"template": "chat"},
        {"validation_records": 9},
    ]
    found = set()
    for settings in others:
        other = make_data(**settings)
        other.prepare()
        found.add(other.fingerprint)
    assert len(found | {data.fingerprint}) == len(others) + 1


def test_an_example_longer_than_a_sequence_is_cut_and_counted(make_data, write_records, caplog):
    caplog.set_level("INFO")
    rows = [*alpaca_records(3), {"instruction": "ask", "output": "the key " * 300}]
    rows.append({"instruction": "ask " * 300, "output": "lost"})
    data = make_data(path=write_records(rows), packing="whole", validation_records=1, sequence_length=64)
    found = rows_of(data, "train")
    counts = data.manifest["train"]
    assert (counts["examples"], counts["truncated"], counts["without_target"]) == (4, 2, 1)
    assert len(found) == counts["sequences"] == 3
    assert "the key the key" in learned_text(data, found)
    whole = make_data(path=write_records(rows), packing="concatenate", validation_records=1, sequence_length=64)
    text = learned_text(whole, rows_of(whole, "train"))
    assert text.count("the key ") >= 300
    assert text.endswith("lost<|im_end|>")
    left_out = whole.manifest["train"]["left_out"]  # sequences within the long question
    assert left_out > 0
    assert f"{left_out} sequences left out, without a target" in caplog.text
    assert whole.manifest["train"]["truncated"] == 0


@pytest.mark.parametrize("packing", ["concatenate", "whole"])
def test_one_record_to_train_on_is_enough(make_data, write_records, packing):
    data = make_data(path=write_records(alpaca_records(2)), packing=packing, validation_records=1, batch_tokens=256)
    batches = list(data.train_dataloader())
    assert len(batches) == 1
    assert batches[0]["input_ids"].shape == (1, 256)
    assert (batches[0]["targets"] != IGNORED).any()
    assert len(list(data.val_dataloader())) == 1


def test_records_are_held_out_by_their_hash_wherever_they_stand(make_data, write_records):
    rows = alpaca_records(60)
    settings = {"validation_records": None, "validation_fraction": 0.2}
    texts = []
    for name, order in (("a.json", rows), ("b.json", rows[::-1])):
        data = make_data(path=write_records(order, name), packing="concatenate", **settings)
        texts.append(sorted(learned_text(data, rows_of(data, "validation")).split("<|im_end|>")))
        assert 3 < data.manifest["validation"]["examples"] < 25
    assert texts[0] == texts[1]


def test_conversations_are_read_and_renamed(make_data, tmp_path):
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "the key"}] * 2
    path.write_text("".join(json.dumps({"id": n, "turns": turns}) + "\n" for n in range(12)))
    data = make_data(path=path, template="chat", columns={"messages": "turns"}, packing="whole")
    assert learned_text(data, rows_of(data, "train")) == "the key<|im_end|>" * 8
    assert data.validation_bytes == len("the key") * 2 * 8


def test_what_is_left_out_is_counted(make_data, write_records, tmp_path):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    make_tokenizer(chat_template=template).save_pretrained(tmp_path / "tokenizer")
    rows = [{"instruction": "why?", "output": "the key"}] * 10 + [{"instruction": "describ", "output": "es"}]
    data = make_data(
        path=write_records(rows), template="chat", tokenizer=Pretrained(str(tmp_path / "tokenizer")), packing="whole"
    )
    assert learned_text(data, rows_of(data, "train")) == "the key<|im_end|>" * 2
    assert (data.manifest["train"]["examples"], data.manifest["train"]["joined"]) == (3, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"template": "vicuna"}, r"^data\.template=vicuna: give one of alpaca, chat"),
        ({"loss_on": "prompts"}, r"^data\.loss_on=prompts: give one of answers, all"),
        ({"packing": "none"}, r"^data\.packing=none: give one of concatenate, whole"),
        ({"cross_documents": "no"}, r"^data\.cross_documents=no: give true or false"),
        ({"validation_records": 0}, r"^data\.validation_records=0"),
        ({"validation_records": None}, r"^data\.validation_records=null and data\.validation_fraction=null: give one"),
        ({"validation_fraction": 0.1}, r"^data\.validation_records=8 and data\.validation_fraction=0\.1: give one"),
        ({"validation_records": None, "validation_fraction": 1.0}, r"^data\.validation_fraction=1\.0"),
        ({"tokenizer": ByteLevelBPE()}, r"^tokenizer=bpe .*tokenizer\.path"),
        ({"columns": {"question": "x"}}, r"^data\.columns\.question"),
        ({"columns": 3}, r"^data\.columns=3: give names"),
        ({"path": None}, r"^data\.path=null: give a file"),
        ({"validation_records": None, "validation_fraction": "some"}, r"^data\.validation_fraction=some"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_read(make_data, tmp_path, settings, words):
    with pytest.raises(ValueError, match=words) as error:
        make_data(**settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "nothing.json"}, r"^data\.path=nothing\.json does not exist"),
        ({"validation_records": 60}, r"^data\.validation_records=60 leaves no train record among 60: lower it"),
        (
            {"validation_records": None, "validation_fraction": 1e-9},
            r"^data\.validation_fraction=1e-09 leaves no validation record among 60: raise it",
        ),
        (
            {"sequence_length": 16, "packing": "whole"},
            r"^data\.sequence_length=16 leaves no target in any of 52 train examples",
        ),
        ({"columns": {"output": "answer"}}, r"record 1 has no field 'answer' \(it has instruction, input, output\)"),
    ],
)
def test_data_that_cannot_work_is_told_and_leaves_nothing(make_data, tmp_path, settings, words):
    with pytest.raises(ValueError, match=words) as error:
        make_data(**settings).prepare()
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "data").glob("instructions-*"))


@pytest.mark.parametrize(
    ("names", "template", "words"),
    [
        ({"eos_token": None}, "alpaca", r"^tokenizer\.path=.* has no eos_token"),
        (
            {"chat_template": None},
            "chat",
            r"^data\.template=chat needs a chat template, and tokenizer\.path=.* has none",
        ),
    ],
)
def test_a_tokenizer_that_lacks_what_is_needed_is_told(make_data, tmp_path, names, template, words):
    make_tokenizer(**names).save_pretrained(tmp_path / "tokenizer")
    data = make_data(tokenizer=Pretrained(str(tmp_path / "tokenizer")), template=template)
    with pytest.raises(ValueError, match=words):
        data.prepare()


@pytest.mark.parametrize("name", ["alpaca", "instructions"])
def test_the_configs_make_data_modules(tmp_path, name):
    config = OmegaConf.create({"data_dir": str(tmp_path), "seed": 5, "tokenizer": {"path": "x"}})
    config.tokenizer = OmegaConf.merge(composed("tokenizer/pretrained").tokenizer, config.tokenizer)
    config.data = composed(f"data/{name}").data
    if name == "instructions":
        config.data.path = "chats.jsonl"
    data = instantiate(config.data)
    assert data.records.path == ("yahma/alpaca-cleaned" if name == "alpaca" else "chats.jsonl")
    assert data.template == ("alpaca" if name == "alpaca" else "chat")
    assert (data.sequence_length, data.validation_records, data.loss_on) == (1024, 200, "answers")
    assert data.tokenizer == Pretrained("x")
    assert data.records.columns == {}


def test_a_field_with_another_name_is_an_override_of_its_own():
    config = composed("data/instructions", "data.columns.messages=turns")
    assert instantiate(config.data.columns) == {"instruction": None, "input": None, "output": None, "messages": "turns"}
