"""A program: two ranks over gloo, of which the second is slow in one way or another. Prints what rank 0 finds, as JSON.

Called with a port. The ranks are forks of one process, since what they import takes longer than what they do.
"""

import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from types import SimpleNamespace

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lit_modules.callbacks.device_stats import DeviceStats, RankTimer

STEPS = 8


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))
        self.seconds = 0.01

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x @ self.weight


class Rows(torch.utils.data.Dataset):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, _: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(4)


class Module(lightning.LightningModule):
    """The part of Pretraining that the callback uses."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.model = SimpleNamespace(model=SimpleNamespace(layers=self.layers))
        for block in self.layers:
            block.seconds = seconds

    def steps_for_tokens(self, tokens: int) -> int:
        return tokens

    def ends_step(self, batch_idx: int) -> bool:
        return True

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers[1](self.layers[0](batch)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Kept(Logger):
    """Records logged values."""

    name, version = "kept", ""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, float] = {}
        self.settings: dict[str, object] = {}

    def log_metrics(self, metrics, step=None) -> None:
        self.metrics |= metrics

    def log_hyperparams(self, params) -> None:
        self.settings |= params


def train(rank: int, computing: float, reading: float) -> dict[str, object]:
    """Fit with DDP where rank 1 takes `computing` seconds in a block and `reading` seconds for a row."""
    kept = Kept()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[DeviceStats(every_tokens=2)],
    )
    trainer.loggers = [kept] if rank == 0 else []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lit_modules.callbacks.device_stats").addHandler(handler)
    began = time.perf_counter()
    trainer.fit(Module(computing if rank else 0.01), torch.utils.data.DataLoader(Rows(reading if rank else 0.0)))
    logging.getLogger("lit_modules.callbacks.device_stats").removeHandler(handler)
    seconds = (time.perf_counter() - began) / STEPS
    return {"metrics": kept.metrics, "settings": kept.settings, "lines": lines, "step_seconds": seconds}


def sharded(rank: int) -> dict[str, float]:
    """Return the pace that rank 0 measures for a sharded block whose weights rank 1 sends late."""
    block = fully_shard(Block(), mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    pace = RankTimer([block], torch.device("cpu"), every=1)
    began = time.perf_counter()
    for _ in range(4):
        time.sleep(0.1 * rank)
        pace.start_batch()
        block(torch.ones(1, 4))
        pace.end_forward()
        pace.start_wait(ends_step=True)
    return {"forward_seconds": pace.take_times()[0], "step_seconds": (time.perf_counter() - began) / 4}


def main(rank: int, port: str) -> None:
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {"computing": train(rank, 0.03, 0.0), "reading": train(rank, 0.01, 0.1), "even": train(rank, 0.01, 0.0)}
    found["sharded"] = sharded(rank)
    if rank == 0:
        print("found", json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=main, args=(rank, sys.argv[1])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))
