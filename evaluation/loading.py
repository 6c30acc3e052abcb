"""The measured model on its device, and errors about the memory that a batch takes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from omegaconf import DictConfig

from common.settings import SettingError
from lit_modules.generation import job
from lit_modules.planning import out_of_memory

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


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
