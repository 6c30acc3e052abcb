"""A small training whose every step can be compared: the same batch on every rank, so that ranks change nothing."""

from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader

from lit_modules import checkpoints
from lit_modules.networks import PalimpsestConfig
from lit_modules.pretraining import Pretraining

LENGTH, VOCABULARY = 16, 32


class SameBatch(lightning.LightningDataModule):
    """Repeats one batch, for training and for validation."""

    sequence_length = validation_length = LENGTH
    hf_tokenizer = None

    def train_dataloader(self) -> DataLoader:
        draw = torch.Generator().manual_seed(0)
        batch = {
            "input_ids": torch.randint(VOCABULARY, (1, LENGTH), generator=draw),
            "targets": torch.randint(VOCABULARY, (1, LENGTH), generator=draw),
            "cu_seqlens": torch.tensor([0, 5, LENGTH], dtype=torch.int32),
        }
        return DataLoader([batch] * 100, batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(list(self.train_dataloader())[:1], batch_size=None)


class Recorder(lightning.Callback):
    """By step: the loss, a random draw of this rank, and what `at` does."""

    def __init__(self, **at) -> None:
        self.losses: dict[int, float] = {}
        self.draws: dict[int, float] = {}
        self.at = {int(name.removeprefix("step_")): action for name, action in at.items()}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.losses[trainer.global_step] = float(outputs["loss"])
        self.draws[trainer.global_step] = torch.rand(1).item()
        self.at.get(trainer.global_step, lambda module: None)(module)


def make(**config) -> Pretraining:
    """Return a model of two blocks, with AdamW and a learning rate that decreases every step."""
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32}
    return Pretraining(
        PalimpsestConfig(**(settings | config)),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
        schedule=lambda tokens: 1 / (1 + tokens / 64),
        batch_tokens=LENGTH,
        sequence_length=LENGTH,
    )


def train(folder: Path, strategy, steps: int = 6, *, resume=None, every: int = 3, module=None, devices=1, **settings):
    """Train to `steps`, saving every `every` steps; return the recording and the module."""
    recorder = settings.pop("recorder", None) or Recorder()
    module = module or make()
    keep_last = settings.pop("keep_last", 10)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        max_epochs=-1,
        check_val_every_n_epoch=None,
        val_check_interval=settings.pop("validate_every", 100),
        default_root_dir=folder,
        logger=settings.pop("logger", False),
        callbacks=[checkpoints.Checkpoints(every * LENGTH, keep_last), checkpoints.RandomState(), recorder],
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        inference_mode=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **settings,
    )
    trainer.fit(module, datamodule=SameBatch(), ckpt_path=resume)
    return recorder, module


def weights(module: Pretraining) -> dict[str, torch.Tensor]:
    """Return copies of a module's weights on one device."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
