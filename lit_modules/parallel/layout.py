"""How the ranks of a run are laid out: copies of the model, its shards, and the parts of a sequence and of its heads.

The rank number counts, from the slowest to the fastest: replicate, shard, context, tensor. So the ranks that talk most
are neighbours, on one node where a node has as many. The ranks that share a sequence hold different shards of the
weights, too: `Layout.shard` counts them.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.settings import check_whole


@dataclass(frozen=True)
class Layout:
    """Sizes whose product is the number of ranks.

    Attributes:
        replicate: copies of the weights.
        shard: ranks over which one copy is spread, those of a sequence included.
        context: ranks that share each sequence; it divides shard.
        tensor: ranks that share each layer's heads.
    """

    replicate: int
    shard: int
    context: int
    tensor: int

    @property
    def data(self) -> int:
        """Ranks, or groups of them, that read batches of their own."""
        return self.replicate * self.shard // self.context

    def weights_mesh(self, device: str) -> DeviceMesh:
        """The mesh over which the blocks' weights are spread, with dimensions replicate, shard and tensor."""
        return init_device_mesh(
            device, (self.replicate, self.shard, self.tensor), mesh_dim_names=("replicate", "shard", "tensor")
        )

    def rest_mesh(self, device: str) -> DeviceMesh:
        """The mesh of embedding, final norm and head, with dimensions replicate and shard: heads split none of them, so
        that they are spread over the ranks that share heads, too."""
        return init_device_mesh(
            device, (self.replicate, self.shard * self.tensor), mesh_dim_names=("replicate", "shard")
        )

    def context_group(self, device: str) -> dist.ProcessGroup | None:
        """The ranks that share a sequence with this one; None where none do."""
        if self.context == 1:
            return None
        names = ("data", "context", "tensor")
        return init_device_mesh(device, (self.data, self.context, self.tensor), mesh_dim_names=names).get_group(
            "context"
        )


def lay_out(world_size: int, *, shard: int | None, context: int, tensor: int) -> Layout:
    """The layout of `world_size` ranks. `shard`: ranks that one copy of the weights is spread over; None for all.

    Raises:
        ValueError: the sizes do not divide the ranks; the line names the key.
    """
    # shard_size last: DDP takes it from context_parallel_size
    for key, size in (("context_parallel_size", context), ("tensor_parallel_size", tensor), ("shard_size", shard)):
        if size is not None or key != "shard_size":
            check_whole(f"strategy.{key}", size, 1)
    if world_size % tensor:
        raise ValueError(
            f"strategy.tensor_parallel_size={tensor} does not divide the {world_size} ranks (trainer.devices times "
            "trainer.num_nodes): give a size that does"
        )
    whole = world_size // tensor
    if whole % context:
        raise ValueError(
            f"strategy.context_parallel_size={context} does not divide the {whole} ranks (trainer.devices times "
            "trainer.num_nodes, without those of tensor parallelism): give a size that does"
        )
    shard = whole if shard is None else shard
    if whole % shard or shard % context:
        raise ValueError(
            f"strategy.shard_size={shard} must divide the {whole} ranks and be a multiple of "
            f"strategy.context_parallel_size={context}: give such a size, or null for all ranks"
        )
    return Layout(whole // shard, shard, context, tensor)
