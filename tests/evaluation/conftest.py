"""Tiny checkpoints, tasks and data sets for lm-eval, all on disk."""

import json
import random
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lit_modules.networks import Linearization, PalimpsestConfig, PalimpsestForCausalLM, linearize

START = "<|start|>"
CHOICE_TASK = """
task: {name}
dataset_path: {dataset}
output_type: multiple_choice
validation_split: validation
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
metadata: {{version: 1.0}}
"""
TEXT_TASK = """
task: tiny_texts
dataset_path: tests/texts
output_type: loglikelihood_rolling
validation_split: validation
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
metadata: {version: 1.0}
"""
GROUP = """
group: tiny_group
task: [tiny_choices, tiny_other]
aggregate_metric_list:
  - metric: acc
    weight_by_size: true
metadata: {version: 1.0}
"""
TEXT = "the gate forgets a key and value that this head reads from every cache then writes state again"
WORDS = TEXT.split()


def sentence(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))


def questions(seed: int, number: int) -> list[dict]:
    """Return documents with contexts and answers of unequal lengths."""
    draw = random.Random(seed)
    return [
        {
            "question": sentence(draw, 1, 20),
            "choices": [sentence(draw, 1, 6) for _ in range(4)],
            "answer": draw.randrange(4),
        }
        for _ in range(number)
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with a BOS token that it does not add itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=START)


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export one of our networks, with an attention layer and a recurrent layer."""
    folder = tmp_path_factory.mktemp("ours")
    torch.manual_seed(0)
    config = PalimpsestConfig(
        vocab_size=300,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        intermediate_size=48,
        mixers=["attention", "gla"],
        initializer_range=0.3,
        max_position_embeddings=96,
    )
    PalimpsestForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        initializer_range=0.3,
        max_position_embeddings=96,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def make_starting_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that adds the BOS token itself, like Llama's."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, 0)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a stock Llama."""
    folder = tmp_path_factory.mktemp("llama")
    small_llama().save_pretrained(folder)
    make_starting_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def linearized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the same Llama with gated recurrences, and a window shorter than its texts."""
    folder = tmp_path_factory.mktemp("linearized")
    linearize(small_llama(), Linearization(window=16)).save_pretrained(folder)
    make_starting_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tasks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two multiple-choice tasks, a group of both, and a task on whole texts."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "choices.yaml").write_text(CHOICE_TASK.format(name="tiny_choices", dataset="tests/choices"))
    (folder / "other.yaml").write_text(CHOICE_TASK.format(name="tiny_other", dataset="tests/other"))
    (folder / "texts.yaml").write_text(TEXT_TASK)
    (folder / "group.yaml").write_text(GROUP)
    return folder


@pytest.fixture(scope="session")
def datasets_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write their data: JSON lines, Parquet in two pieces, and a saved data set."""
    folder = tmp_path_factory.mktemp("datasets")
    (folder / "tests" / "choices").mkdir(parents=True)
    lines = [json.dumps(document) for document in questions(0, 13)]
    (folder / "tests" / "choices" / "validation.jsonl").write_text("\n".join(lines) + "\n")
    for piece in (0, 1):
        path = folder / "tests" / "other" / "data" / f"validation-{piece:05d}-of-00002.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(questions(1, 6)[3 * piece :][:3]).to_parquet(path)
    draw = random.Random(2)
    texts = [{"text": sentence(draw, 1, 90)} for _ in range(7)]
    DatasetDict({"validation": Dataset.from_list(texts)}).save_to_disk(folder / "tests" / "texts")
    return folder
