"""Samples of text at each validation, to show directly what a model has learned."""

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback

from common.atomic_files import write_atomic
from common.setting_types import check_type
from common.settings import check_whole
from lit_modules.callbacks.pictures import ignore_disk_errors
from lit_modules.generation.job import continue_prompts, sampling_arguments
from lit_modules.parallel.context import without_context_parallelism
from lit_modules.trainer_parts import data_module, rank_strategy


class Samples(Callback):
    """Callback that continues prompts after a validation, for `samples/step_<n>.txt` and loggers of text.

    Args:
        prompts: the texts to continue.
        max_new_tokens, temperature, top_p: as in generation.

    Raises:
        ValueError: one of them is out of range.
    """

    def __init__(self, prompts: list[str], max_new_tokens: int, temperature: float, top_p: float | None) -> None:
        check_type("callbacks.samples.prompts", prompts, list[str])  # a single text would be split into letters
        check_whole("callbacks.samples.max_new_tokens", max_new_tokens, 1)
        self.prompts = list(prompts)
        self.max_new_tokens = max_new_tokens
        self.settings = sampling_arguments(temperature, None, top_p)
        self.texts: list[str] = []

    @ignore_disk_errors()
    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        tokenizer = data_module(trainer).hf_tokenizer
        together = rank_strategy(trainer).needs_all_ranks  # each rank holds a part of the weights, so all generate
        if trainer.sanity_checking or not (trainer.is_global_zero or together) or tokenizer is None or not self.prompts:
            return
        with trainer.precision_plugin.forward_context(), without_context_parallelism(module.context):
            self.texts = self.write_continuations(module.model, tokenizer, together)
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        text = "\n\n".join(f"{prompt}▌{text}" for prompt, text in zip(self.prompts, self.texts, strict=True))
        write_atomic(Path(trainer.default_root_dir) / "samples" / f"step_{step:08d}.txt", text + "\n")
        for logger in trainer.loggers:
            if hasattr(logger, "log_text"):
                rows = [[step, prompt, text] for prompt, text in zip(self.prompts, self.texts, strict=True)]
                logger.log_text("samples", columns=["step", "prompt", "text"], data=rows, step=step)

    def write_continuations(self, model: Any, tokenizer: Any, together: bool) -> list[str]:
        """Return the continuations of the prompts, without changing training's random state.

        Args:
            together: all ranks generate; a rank whose texts are complete keeps taking part until the others' are.
        """
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(0)
            settings = {**self.settings, "synced_gpus": together}
            return continue_prompts(model, tokenizer, self.prompts, self.max_new_tokens, settings, trains=True)
