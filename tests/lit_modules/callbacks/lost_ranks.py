"""Two ranks of which one is lost: `python -m tests.lit_modules.callbacks.lost_ranks <folder> <case> ...`.

For each case a folder with `out` (what the ranks said on the terminal) and `ended.json` (their exit statuses, and the
seconds that it took). All cases run at once, in processes forked from this one: the imports are the slow part.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf

from lit_modules.callbacks.watchdog import Watchdog, report_culprit
from lit_modules.jobs.training_job import failure_recorder
from lit_modules.launching import failures
from lit_modules.launching.run_folder import SilentExit

SECONDS = 6
AT = 5  # the micro-batch at which rank 1 is lost; the first ones are given more time


class Text(torch.utils.data.Dataset):
    """Samples for which rank 1 can wait forever."""

    def __init__(self, case: str, rank: int) -> None:
        self.case, self.rank, self.read = case, rank, 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read += 1
        if self.rank == 1 and self.read == AT:
            self.lose()
        return torch.ones(4)

    def lose(self) -> None:
        if self.case == "hangs":
            time.sleep(600)
        if self.case == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.case == "fails":
            raise ArithmeticError("no mean of no tokens")


class Network(lightning.LightningModule):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.layer = case, torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.case == "leader killed" and self.global_rank == 0 and batch_idx == AT:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.case == "slow" and self.global_rank == 0 and batch_idx == AT:
            time.sleep(0.75 * SECONDS)  # longer than a rank may be silent, and no hang yet
        if self.case == "leader stopped" and self.global_rank == 0 and batch_idx == AT:
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def be(rank: int, case: str, folder: Path, port: int) -> None:
    """Run one rank."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    out = os.open(folder / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 2)
    try:
        with failures.report_first_failure(folder, debug=False):
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=2,
                strategy=DDPStrategy(process_group_backend="gloo"),
                max_steps=500 if case != "slow" else 2 * AT,
                callbacks=[Watchdog(SECONDS), failure_recorder(OmegaConf.create(), folder)],
                default_root_dir=folder,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
            with report_culprit(trainer):
                trainer.fit(Network(case), torch.utils.data.DataLoader(Text(case, rank), batch_size=2))
    except SilentExit as said:
        os._exit(said.status)
    os._exit(0)


def start(case: str, folder: Path) -> list[int]:
    """Start the processes of a case."""
    (folder / "logs").mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        process = os.fork()
        if process == 0:
            be(rank, case, folder, port)
        processes.append(process)
    return processes


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    running = {process: (case, rank) for case in cases for rank, process in enumerate(start(case, folder / case))}
    ended: dict[str, dict[str, int]] = {case: {} for case in cases}
    while running and time.monotonic() < began + 120:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            case, rank = running.pop(process)
            ended[case] |= {f"{rank}": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - began}
        # a stopped process that nobody is left to end is ended here
        for left, (case, _) in running.items():
            if "stopped" in case and ended[case]:
                os.kill(left, signal.SIGKILL)
        time.sleep(0.05)
    for left in running:
        os.kill(left, signal.SIGKILL)
    for case in cases:
        (folder / case / "ended.json").write_text(json.dumps(ended[case]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
