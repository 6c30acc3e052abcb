"""Order of training sequences: a pure function of (seed, total, position), so a resume needs no saved state."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler


def sequences_at(position: int, count: int, total: int, seed: int) -> np.ndarray:
    """Return the sequences, int64 [count], read at positions `position ... position + count - 1` of a run.

    Each epoch (position // total) is a different permutation of the `total` sequences: every sequence is used once
    before any is repeated.
    """
    parts = []
    while count > 0:
        epoch, offset = divmod(position, total)
        part = _permutation(seed, epoch, total)[offset : offset + count]
        parts.append(part)
        position, count = position + len(part), count - len(part)
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, total: int) -> np.ndarray:
    permutation = np.random.default_rng([seed, epoch]).permutation(total)
    return permutation.astype(np.uint32) if total <= 2**32 else permutation


class RunOrder(Sampler[list[int]]):
    """Micro-batches of one rank, as lists of positions in the run, from micro-batch `start` to the end of the run.

    Global batch s holds positions s*G to (s+1)*G - 1, with G = micro_batch_size * accumulation * world_size, for any
    three with the same product; world_size counts the ranks that read data of their own. The length is always
    `micro_batches`, the whole run: Lightning counts the batches of a resumed run from the beginning of the run.
    """

    def __init__(self, micro_batch_size: int, micro_batches: int, start: int, rank: int, world_size: int) -> None:
        self.micro_batch_size, self.micro_batches, self.start = micro_batch_size, micro_batches, start
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return self.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        return map(self.micro_batch, range(self.start, self.micro_batches))

    def micro_batch(self, number: int) -> list[int]:
        """Return what this rank reads in micro-batch `number` of the run."""
        return self._read_from((number * self.world_size + self.rank) * self.micro_batch_size)

    def _read_from(self, position: int) -> list[int]:
        return list(range(position, position + self.micro_batch_size))


class TrainOrder(RunOrder):
    """`RunOrder` as indices of `total` sequences, permuted in each epoch."""

    def __init__(
        self, total: int, seed: int, micro_batch_size: int, micro_batches: int, start: int, rank: int, world_size: int
    ) -> None:
        super().__init__(micro_batch_size, micro_batches, start, rank, world_size)
        self.total, self.seed = total, seed

    def _read_from(self, position: int) -> list[int]:
        return sequences_at(position, self.micro_batch_size, self.total, self.seed).tolist()


class ValidationOrder(Sampler[list[int]]):
    """All sequences once, in order, dealt to the ranks in turn; every rank has the same number of full batches.

    Index -1 pads the last batches with ignored sequences: ranks that leave a loop at different times would wait for
    each other forever.
    """

    def __init__(self, total: int, batch_size: int, rank: int, world_size: int) -> None:
        self.total, self.batch_size = total, batch_size
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return -(-self.total // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            start = (number * self.world_size + self.rank) * self.batch_size
            yield [index if index < self.total else -1 for index in range(start, start + self.batch_size)]
