"""A run that trains nothing and records its inputs."""

import lightning
import torch


class Recorder(lightning.LightningModule):
    """Trains nothing; records its inputs."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, _):
        self.seen.append(batch["input_ids"].tolist())
        return self.weight * 0

    def validation_step(self, batch, _):
        torch.rand(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(data, folder, steps, accumulate=4, resume=None, **settings):
    """Train on `data`, write a checkpoint, and return the recorded inputs; `settings` are the trainer's."""
    module = Recorder()
    trainer = lightning.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
        **settings,
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    trainer.save_checkpoint(folder / f"{steps}.ckpt")
    return module.seen
