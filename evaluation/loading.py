"""The measured model on its device, and errors about the memory that a batch takes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from omegaconf import DictConfig

from common.settings import SettingError, check_choice, check_whole
from data_pipeline.tokens.tokenizer import text_start
from lit_modules.generation import job
from lit_modules.planning import out_of_memory

LARGEST_BATCH, CPU_TOKENS, GPU_TOKENS = 64, 2**13, 2**17
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def check_loading(cfg: DictConfig) -> None:
    """Check `batch_size` (where there is one), `dtype`, and that `checkpoint` may be one.

    Raises:
        SettingError: one is invalid.
    """
    if cfg.get("batch_size", "auto") != "auto":
        check_whole("batch_size", cfg.batch_size, 1)
    check_choice("dtype", cfg.dtype, DTYPES)
    job.check_is_folder(str(cfg.checkpoint))


def load_checkpoint(cfg: DictConfig, device: torch.device) -> tuple[Any, Any]:
    """Return the model of `cfg.checkpoint` on the device in `cfg.dtype`, to evaluate, and its tokenizer.

    Raises:
        ValueError: it cannot be loaded, or does not fit the memory.
    """
    transformers.logging.disable_progress_bar()
    with out_of_memory.explain_out_of_memory(cfg, "give dtype=bfloat16, or device=cpu"):
        model, tokenizer = job.load(str(cfg.checkpoint))
        dtype = None if cfg.dtype == "auto" else getattr(torch, str(cfg.dtype))
        return model.to(device=device, dtype=dtype).eval(), tokenizer


@contextlib.contextmanager
def explain_batch_memory(batch_size: int | str, device: torch.device, work: str) -> Iterator[None]:
    """Turn an out-of-memory error of a batch at `work` into a SettingError about batch_size."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        problem = f"does not fit the memory of {device} at {work}"
        raise SettingError("batch_size", batch_size, "give a smaller one", problem) from error


def batch_of(batch_size: int | str, length: int, device: torch.device) -> int:
    """Return the batch size: the given one, or for "auto" texts of about 8,000 tokens in all on a CPU, 128,000 else."""
    if batch_size != "auto":
        return int(batch_size)
    return max(1, min(LARGEST_BATCH, (CPU_TOKENS if device.type == "cpu" else GPU_TOKENS) // length))


def cut_text(tokenizer: Any, text: str, length: int) -> torch.Tensor:
    """Return the text's sequences `[N, length]`, each begun as the tokenizer begins a text; what is left is left out.

    Raises:
        SettingError: the text has not enough tokens for one.
    """
    start = text_start(tokenizer)
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    own = length - len(start)
    number = len(tokens) // own
    if number == 0:
        problem = f"is longer than the text, which has {len(tokens):,} tokens"
        raise SettingError("benchmark.length", length, "give a smaller one, or a longer text", problem)
    return torch.tensor([start + tokens[own * row : own * (row + 1)] for row in range(number)])
