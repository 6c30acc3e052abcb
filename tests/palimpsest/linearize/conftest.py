"""A small pretrained model, and runs of the job on it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.conftest import ROOT, Finished

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
# Replaces the sizes in conftest.TINY, which belong to a model trained from scratch.
SMALL = (
    "trainer=cpu",
    "base_dtype=float32",
    "data.sequence_length=64",
    "data.validation_length=64",
    "data.batch_tokens=512",
    "data.micro_batch_size=4",
    "max_tokens=5120",  # 10 steps
    "log_every_tokens=512",
    "validate_every_tokens=2560",
    "checkpoint_every_tokens=1024",
    "linearization.window=8",
    "callbacks.samples=null",
    "callbacks.position_loss=null",
)
TEXT = ("data=text_files", "data.block_length=128", "data.validation_fraction=0.1", "data.processes=1")


@pytest.fixture(scope="session")
def base(workplace: Path) -> Path:
    """Return the folder of a Llama trained briefly on the text; its tokenizer has no pad token."""
    texts = [path.read_text() for path in sorted((workplace / "text").glob("*.txt"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=1))
    ids = torch.tensor(fast("".join(texts))["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        starts = torch.randint(len(ids) - 65, (8,)).tolist()
        batch = torch.stack([ids[start : start + 65] for start in starts])
        optimizer.zero_grad()
        logits = model(batch[:, :-1]).logits
        cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
    folder = workplace / "base"
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def records(workplace: Path) -> Path:
    path = workplace / "alpaca.json"
    found = [
        {"instruction": f"Count to {n % 7}.", "input": "", "output": " ".join(map(str, range(1, n % 7 + 1))) + " done"}
        for n in range(80)
    ]
    path.write_text(json.dumps(found))
    return path


@pytest.fixture
def linearize(run, command, base):
    """Run an experiment on the small text, or with `data=...` on other data, perhaps in processes of its own; gives how
    it ended."""

    def call(*overrides: str, experiment: str = "liger/gla", data: tuple[str, ...] = TEXT, alone: bool = False):
        given = {override.split("=")[0].lstrip("+") for override in overrides}
        places = (f"base={base}", f"data_dir={command.folder}/data", f"runs_dir={command.runs_dir}")
        if data is TEXT:
            places += (f"data.source.path={command.folder}/text/*.txt",)
        given |= {".".join(name.split(".")[:2]) for name in given if name.startswith("callbacks.")}
        settings = [o for o in (*data, *SMALL, *places) if o.split("=")[0] not in given]
        arguments = (f"experiment={experiment}", *settings, *overrides)
        return start(command.folder, arguments) if alone else run(*arguments, tiny=False)

    return call


def start(folder: Path, arguments: tuple[str, ...]) -> Finished:
    done = subprocess.run(
        [sys.executable, str(ROOT / "palimpsest.py"), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def folder_of(command):
    """Return the folder of an experiment's only run."""

    def found(experiment: str = "liger/gla") -> Path:
        (folder,) = command.runs(experiment)
        return folder

    return found


@pytest.fixture
def stopping(monkeypatch):
    """Stop later runs after an optimizer step, as if killed; 0 disables this."""
    at = [0]

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == at[0] and module.ends_step(batch_idx):
                raise KeyboardInterrupt

    original = lightning.Trainer.__init__

    def init(self, *args, callbacks=(), **kwargs):
        original(self, *args, callbacks=[*callbacks, Stop()] if at[0] else callbacks, **kwargs)

    monkeypatch.setattr(lightning.Trainer, "__init__", init)
    return lambda step: at.__setitem__(0, step)


def alpaca(path: Path) -> tuple[str, ...]:
    return ("data=alpaca", f"data.path={path}", "data.validation_records=10")
