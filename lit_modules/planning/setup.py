"""The training settings that determine memory and speed."""

import math
from dataclasses import dataclass

from common.gpus import Gpu

STRATEGIES = ("one", "ddp", "hsdp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of one run: a rank takes `micro_batch_size` sequences of `sequence_length` tokens at a time.

    Attributes:
        gpu: a name that `find_gpu` knows, or the card.
        batch_tokens: tokens of a global batch.
        recomputation: "none", "full", "selective", or n: every n-th block.
        precision: the trainer's precision; with "bf16-mixed" weights are float32 and products bfloat16.
        fused_optimizer: AdamW's steps in one kernel, without temporaries.
        strategy: "one" device, "ddp" (all ranks hold all), "fsdp" (weights over all ranks), "hsdp" (over a node's).
        shard_size: ranks per copy of the weights, if it differs from the strategy's default.
        reshard: free a block's gathered weights after its forward pass.
        tensor, context: ranks that share the heads of a layer, and ranks that share a sequence.
        network: bytes per second that a GPU sends to other nodes.
    """

    gpu: str | Gpu
    sequence_length: int
    micro_batch_size: int
    batch_tokens: int
    compile: bool = False
    recomputation: str | int = "none"
    precision: str = "bf16-mixed"
    fused_optimizer: bool = False
    strategy: str = "one"
    devices_per_node: int = 1
    nodes: int = 1
    shard_size: int | None = None
    reshard: bool = True
    tensor: int = 1
    context: int = 1
    network: float = 50e9

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.devices_per_node * self.nodes

    @property
    def shards(self) -> int:
        """Ranks that one copy of the weights is sharded over, without those of tensor parallelism."""
        if not self.sharded:
            return 1
        whole = self.ranks if self.strategy == "fsdp" else self.devices_per_node
        return self.shard_size or max(1, whole // self.tensor)

    @property
    def autocast(self) -> bool:
        """True if products are bfloat16 and weights float32."""
        return self.precision == "bf16-mixed"

    @property
    def weight_bytes(self) -> int:
        """Bytes of one parameter."""
        return 2 if self.precision == "bf16-true" else 4

    @property
    def sharded(self) -> bool:
        """True if weights are sharded."""
        return self.strategy in ("fsdp", "hsdp")

    def policy(self, block: int) -> str:
        """Return the recomputation policy of a block, counted from 0: "none", "selective" or "full"."""
        if isinstance(self.recomputation, int):
            return "none" if (block + 1) % self.recomputation else "full"
        return self.recomputation

    @property
    def readers(self) -> int:
        """Number of rank groups that read separate sequences."""
        return max(1, self.ranks // (self.tensor * self.context))

    @property
    def micro_tokens(self) -> int:
        """Tokens of a micro-batch, over all ranks that share its sequences."""
        return self.micro_batch_size * self.sequence_length

    @property
    def rank_tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return math.ceil(self.micro_tokens / self.context)

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step of each rank."""
        return max(1, math.ceil(self.batch_tokens / (self.micro_tokens * self.readers)))
