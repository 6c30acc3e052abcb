import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from data_pipeline.instructions.datamodule import InstructionData
from data_pipeline.tokens.tokenizer import Pretrained

# In the manner of ChatML: nothing marked, and a line end behind every turn.
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request. "
    "### Instruction: ### Input: ### Response: user assistant system é 日本 🜁 what does the gate forget? the key it "
    "wrote."
)


def make_tokenizer(bos: bool = False, lines: bool = False, **settings) -> PreTrainedTokenizerFast:
    """A byte-level BPE; with `bos` it puts <|endoftext|> before a text, with `lines` it joins a line end to the word
    before it. `settings`: of the tokenizer's class."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if lines:
        words = pre_tokenizers.Split(Regex(r" ?[^\s]+\n*|\s+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT.replace("key", "key\n") if lines else TEXT] * 3, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": CHAT}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**names, **settings})


def alpaca_records(count: int) -> list[dict]:
    """Return records of growing length, every third with an input."""
    return [
        {
            "instruction": f"what does gate {n} forget?",
            "input": f"the key it wrote {n} é" if n % 3 == 0 else "",
            "output": f"日本 {n} " + "the key it wrote. " * (n % 9) + "🜁",
        }
        for n in range(count)
    ]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """Write a tokenizer with a chat template and without a pad token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def alpaca_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("alpaca") / "alpaca.json"
    path.write_text(json.dumps(alpaca_records(60)), encoding="utf-8")
    return path


@pytest.fixture
def make_data(alpaca_file, tokenizer_folder, tmp_path):
    """Return small InstructionData; keyword arguments override its settings."""

    def make(**settings):
        defaults = {
            "path": alpaca_file,
            "tokenizer": Pretrained(str(tokenizer_folder)),
            "data_dir": tmp_path / "data",
            "template": "alpaca",
            "sequence_length": 128,
            "validation_length": 128,
            "batch_tokens": 512,
            "micro_batch_size": 2,
            "validation_records": 8,
        }
        return InstructionData(**{**defaults, **settings})

    return make


@pytest.fixture
def write_records(tmp_path):
    """Write records as a JSON list and return its path."""

    def write(records, name: str = "records.json"):
        path = tmp_path / name
        path.write_text(json.dumps(records), encoding="utf-8")
        return path

    return write
