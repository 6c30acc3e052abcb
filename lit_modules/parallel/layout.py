"""The layout of a run's ranks: replicas of the model, shards, parts of a sequence and groups of heads.

The rank number counts, from slowest to fastest: replicate, shard, context, tensor. Ranks that communicate most are
therefore neighbours, on one node if it has enough ranks. Ranks that share a sequence hold different shards of the
weights; `RankLayout.shard` includes them.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.settings import SettingError, check_whole


@dataclass(frozen=True)
class RankLayout:
    """Sizes whose product is the number of ranks.

    Attributes:
        replicate: copies of the weights.
        shard: ranks per copy, those that share a sequence included.
        context: ranks that share each sequence; it divides shard.
        tensor: ranks that share each layer's heads.
    """

    replicate: int
    shard: int
    context: int
    tensor: int

    @property
    def data(self) -> int:
        """Number of ranks, or groups of ranks, that read separate batches."""
        return self.replicate * self.shard // self.context

    def weights_mesh(self, device: str) -> DeviceMesh:
        """Create the mesh of the blocks' weights, with dimensions replicate, shard and tensor."""
        return init_device_mesh(
            device, (self.replicate, self.shard, self.tensor), mesh_dim_names=("replicate", "shard", "tensor")
        )

    def rest_mesh(self, device: str) -> DeviceMesh:
        """Create the mesh of embedding, final norm and head, with dimensions replicate and shard.

        Tensor parallelism does not split these, so the ranks that share heads shard them too.
        """
        return init_device_mesh(
            device, (self.replicate, self.shard * self.tensor), mesh_dim_names=("replicate", "shard")
        )

    def context_group(self, device: str) -> dist.ProcessGroup | None:
        """Return the group of ranks that share a sequence with this one; None without context parallelism."""
        if self.context == 1:
            return None
        names = ("data", "context", "tensor")
        return init_device_mesh(device, (self.data, self.context, self.tensor), mesh_dim_names=names).get_group(
            "context"
        )


def make_layout(world_size: int, *, shard: int | None, context: int, tensor: int) -> RankLayout:
    """Return the layout of `world_size` ranks.

    Args:
        shard: ranks per copy of the weights; None means all.

    Raises:
        ValueError: if the sizes do not divide the ranks; the line names the key.
    """
    # shard_size last, because DDP sets it to context_parallel_size
    for key, size in (("context_parallel_size", context), ("tensor_parallel_size", tensor), ("shard_size", shard)):
        if size is not None or key != "shard_size":
            check_whole(f"strategy.{key}", size, 1)
    if world_size % tensor:
        problem = f"does not divide the {world_size} ranks (trainer.devices times trainer.num_nodes)"
        raise SettingError("strategy.tensor_parallel_size", tensor, "give a size that does", problem)
    whole = world_size // tensor
    if whole % context:
        problem = (
            f"does not divide the {whole} ranks (trainer.devices times trainer.num_nodes, without those of "
            "tensor parallelism)"
        )
        raise SettingError("strategy.context_parallel_size", context, "give a size that does", problem)
    shard = whole if shard is None else shard
    if whole % shard or shard % context:
        problem = f"must divide the {whole} ranks and be a multiple of strategy.context_parallel_size={context}"
        raise SettingError("strategy.shard_size", shard, "give such a size, or null for all ranks", problem)
    return RankLayout(whole // shard, shard, context, tensor)
