"""Steps that record their runs, and fail in typical ways. Run in other processes."""

import errno
import logging
import os
import signal
import sys
import time
from pathlib import Path

import loguru
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from data_pipeline.executors.phases import Phase


class Trace(PipelineStep):
    """Appends a line to `folder/<name>-<task>` when a task starts, and another when it ends."""

    def __init__(self, folder: Path, name: str, fail: tuple[int, ...] = (), how: str = "", seconds: float = 0) -> None:
        super().__init__()
        self.folder, self.trace, self.fail, self.how, self.seconds = folder, name, fail, how, seconds

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        trace = Path(self.folder, f"{self.trace}-{rank}")
        node = os.environ.get("SLURMD_NODENAME", "none")
        with trace.open("a") as file:
            file.write(f"began {os.getpid()} {time.time()} {node}\n")
        mended = Path(self.folder, "mended").exists()
        if rank in self.fail and not mended:
            getattr(self, self.how)()
        time.sleep(self.seconds)
        with trace.open("a") as file:
            file.write(f"ended {os.getpid()} {time.time()} {node}\n")
        self.stat_update("traces")
        return
        yield

    def mistake(self) -> None:
        raise ValueError("corpus.sources.papers.metadata=nowhere.jsonl: no such file; give one")

    def bug(self) -> None:
        raise KeyError("no such column")

    def unpicklable(self) -> None:
        raise Unpicklable(1, 2)

    def full_disk(self) -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "part.parquet")
        except OSError as error:
            raise RuntimeError("the writer has failed") from error

    def killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def crash(self) -> None:
        os.write(2, b"a library in C has failed a check\n")
        os.abort()

    def meet(self) -> None:
        """Wait until another task has also started."""
        for _ in range(600):
            if len(list(Path(self.folder).glob(f"{self.trace}-*"))) > 1:
                return
            time.sleep(0.05)
        raise TimeoutError("no other task has begun")

    def hang(self) -> None:
        time.sleep(600)

    def talk(self) -> None:
        logging.getLogger("a.library").warning("a library has %s", "spoken")
        loguru.logger.info("datatrove has spoken")
        print("a library has printed", file=sys.stderr)

    def eat(self) -> None:
        self.eaten = bytearray(os.urandom(1) * 200_000_000)
        del self.eaten


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def phase(folder: Path, name: str, tasks: int = 2, **settings: object) -> Phase:
    """Return a phase of one `Trace`."""
    folder.mkdir(parents=True, exist_ok=True)
    return Phase(name, [Trace(folder, name, **settings)], tasks)


def times(folder: Path, name: str, task: int) -> dict[str, list[float]]:
    """Return the start and end times of each run of a task."""
    lines = [line.split() for line in Path(folder, f"{name}-{task}").read_text().splitlines()]
    return {word: [float(line[2]) for line in lines if line[0] == word] for word in ("began", "ended")}


def nodes(folder: Path, name: str, tasks: int) -> set[str]:
    """Return the SLURM nodes that tasks ran on."""
    return {Path(folder, f"{name}-{task}").read_text().split()[3] for task in range(tasks)}
