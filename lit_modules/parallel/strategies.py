"""Lightning strategies that know how many ranks read separate data, with interchangeable checkpoints."""

import inspect
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

from common.settings import SettingError, check_keys, check_whole
from lit_modules.checkpoints.strategy import CheckpointsTensors
from lit_modules.launching.children import WatchesRanks
from lit_modules.parallel.layout import RankLayout, make_layout

# Timeout of a collective. The watchdog reports a hanging rank much earlier; this is for runs without it.
COLLECTIVE_TIMEOUT = timedelta(hours=1)
# set by Lightning
LIGHTNING_ARGUMENTS = ("module", "device_ids", "output_device", "dim", "process_group", "device_mesh")


class RankStrategy(CheckpointsTensors):
    """Mixin: how a run's ranks share data, sequences and weights. As it is, for one device."""

    needs_all_ranks = False  # whether a forward pass communicates
    context_group: dist.ProcessGroup | None = None  # set up with the environment

    @property
    def layout(self) -> RankLayout:
        """The layout of the ranks.

        Raises:
            ValueError: if the sizes do not divide their number.
        """
        return RankLayout(1, 1, 1, 1)

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """The ranks that share each layer's heads with this one; None without tensor parallelism."""
        return None


class OneDevice(RankStrategy, SingleDeviceStrategy):
    """One process on one device. `device`: "cpu", "cuda:0", ..."""


class ManyRanks(RankStrategy, WatchesRanks, ParallelStrategy):
    """Mixin for a strategy of several processes."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The part of a global batch that this rank reads; ranks that share a sequence or its heads read the same."""
        layout = self.layout
        return {"num_replicas": layout.data, "rank": self.global_rank // (layout.context * layout.tensor)}


class DataParallel(ManyRanks, DDPStrategy):
    """DDP: every rank holds all weights. `settings` are arguments of torch's DistributedDataParallel.

    Args:
        context_parallel_size: ranks that share each sequence.
        gradient_as_bucket_view: gradients are views of the communication buckets, which saves one copy of them.

    Raises:
        ValueError: if a size is not a whole number above 0, or DDP has no such setting; the line names the key.
    """

    def __init__(self, context_parallel_size: int = 1, gradient_as_bucket_view: bool = False, **settings: Any) -> None:
        check_whole("strategy.context_parallel_size", context_parallel_size, 1)
        known = [
            name for name in inspect.signature(DistributedDataParallel).parameters if name not in LIGHTNING_ARGUMENTS
        ]
        check_keys("strategy", settings, [*known, "process_group_backend"])
        super().__init__(timeout=COLLECTIVE_TIMEOUT, gradient_as_bucket_view=gradient_as_bucket_view, **settings)
        self.context_parallel_size = context_parallel_size

    @property
    def layout(self) -> RankLayout:
        return make_layout(
            self.num_nodes * self.num_processes,
            shard=self.context_parallel_size,
            context=self.context_parallel_size,
            tensor=1,
        )

    def setup_environment(self) -> None:
        super().setup_environment()
        # Blocks are compiled separately, and DDP sends each block's gradients when they are ready. Dynamo's default
        # splits graphs at DDP's buckets, which would only undo fusion.
        torch._dynamo.config.optimize_ddp = False
        self.context_group = self.layout.context_group(self.root_device.type)


class Sharded(ManyRanks, ModelParallelStrategy):
    """FSDP2: weights, gradients and optimizer states of each block are sharded over ranks.

    Args:
        shard_size: ranks that one copy is sharded over; null for all ranks, "node" for those of a node (HSDP: the
            copies of different nodes exchange only gradients).
        context_parallel_size: ranks that share each sequence.
        tensor_parallel_size: ranks that share the heads of each layer.
        reshard_after_forward: free the gathered weights of a block after its forward pass, and gather them again in the
            backward pass; false keeps them, which is faster and takes memory.

    Raises:
        ValueError: if a size is not a whole number above 0; the line names the key.
    """

    needs_all_ranks = True

    def __init__(
        self,
        shard_size: int | str | None = None,
        context_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__(timeout=COLLECTIVE_TIMEOUT)
        check_whole("strategy.context_parallel_size", context_parallel_size, 1)
        check_whole("strategy.tensor_parallel_size", tensor_parallel_size, 1)
        if isinstance(shard_size, str) and shard_size != "node":
            fix = "give a number of ranks, node, or null"
            raise SettingError("strategy.shard_size", shard_size, fix, "is not known")
        self.shard_size, self.context_parallel_size = shard_size, context_parallel_size
        self.tensor_parallel_size, self.reshard_after_forward = tensor_parallel_size, reshard_after_forward

    @property
    def layout(self) -> RankLayout:
        size, of_node = self.shard_size, max(1, self.num_processes // self.tensor_parallel_size)
        return make_layout(
            self.num_nodes * self.num_processes,
            shard=of_node if isinstance(size, str) else size,  # the constructor allows no text but "node"
            context=self.context_parallel_size,
            tensor=self.tensor_parallel_size,
        )

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        return self.device_mesh["tensor"].get_group() if self.layout.tensor > 1 else None

    def setup_environment(self) -> None:
        self._setup_distributed()
        device = self.root_device.type
        self._device_mesh = self.layout.weights_mesh(device)
        self.rest_mesh = self.device_mesh if self.layout.tensor == 1 else self.layout.rest_mesh(device)
        self.context_group = self.layout.context_group(device)
