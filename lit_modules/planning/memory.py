"""The memory of a GPU in training, by part, at its peak."""

from dataclasses import dataclass
from typing import NamedTuple

from lit_modules.planning.network import Network, Parts
from lit_modules.planning.setup import Setup
from lit_modules.planning.work import Traced

# Workspaces of cuBLAS in torch's memory: one for the forward thread, one for the backward thread.
WORKSPACE = 2 * 2**25
# The driver's context and the kernels' code: nvidia-smi counts them, torch does not.
CONTEXT = 0.7 * 2**30
# Usable share of a card's memory; fragmentation and cached free blocks take the rest.
USABLE = 0.92
# A block's tensors that tensor parallelism does not split, in bytes per token and channel: its input in float32, and
# the outputs of the two norms and the mixer in bfloat16.
UNSPLIT = 10
# Blocks with gathered weights at a time: the running one, the next one, and its receive buffer.
GATHERED = 3


class Memory(NamedTuple):
    """Bytes of each part at the peak, in the order of `PARTS`; `at` names the moment."""

    weights: float
    optimizer: float
    gradients: float
    copies: float
    activations: float
    loss: float
    gathered: float
    workspace: float
    at: str

    @property
    def peak(self) -> float:
        """Maximum bytes that torch allocates."""
        return sum(self[:-1])

    @property
    def shown(self) -> float:
        """Minimum bytes that nvidia-smi shows."""
        return self.peak + CONTEXT


PARTS = {
    "weights": "weights",
    "optimizer": "optimizer's state",
    "gradients": "gradients",
    "copies": "bfloat16 copies of weights",
    "activations": "activations",
    "loss": "logits and loss",
    "gathered": "gathered weights and their gradients",
    "workspace": "workspace",
}


@dataclass(frozen=True)
class _Block:
    """Bytes of a block: saved for backward (without weight copies), copies of weights, and the peak of each pass."""

    kept: float
    copies: float
    forward: float
    backward: float


def peak_memory(network: Network, parts: Parts, setup: Setup) -> Memory:
    """Return the moment of a step, after the first step, with the most memory."""
    return max(Timeline(network, parts, setup).moments(), key=lambda memory: memory.peak)


class Timeline:
    """A rank's memory through a step: the moments that can be its peak."""

    def __init__(self, network: Network, parts: Parts, setup: Setup) -> None:
        self.setup, self.parts = setup, parts
        item = setup.weight_bytes
        split = [p * item / setup.tensor for p in network.block_parameters]  # per block, this rank's heads
        self.of_blocks = [size / setup.shards for size in split]
        # Tensor parallelism does not split embedding and head; FSDP shards them over the ranks of both.
        self.others = network.others * item / setup.shards / (setup.tensor if setup.sharded else 1)
        self.all = sum(self.of_blocks) + self.others
        self.blocks = [self._block(traced, network.config.hidden_size) for traced in parts.blocks]
        self.stream = setup.rank_tokens * network.config.hidden_size * setup.weight_bytes
        self.reused = setup.accumulation > 1 or setup.strategy == "ddp"  # gradients are always allocated
        self.gathered_forward, self.gathered_backward = self._gathered(split, network.others * item)
        steady = dict.fromkeys(Memory._fields, 0.0) | {"weights": self.all, "optimizer": 2 * self.all}
        self.steady = Memory(**steady)._replace(workspace=WORKSPACE)

    def _block(self, traced: Traced, width: int) -> _Block:
        """Return a block's bytes on a rank with its share of the heads."""
        kept, tensor = traced.kept - traced.casts, self.setup.tensor
        unsplit = min(UNSPLIT * self.setup.rank_tokens * width, kept)
        ratio = (unsplit + (kept - unsplit) / tensor) / max(kept, 1)
        forward, backward = traced.forward.transient * ratio, traced.backward.transient * ratio
        return _Block(kept * ratio, traced.casts / tensor, forward, backward)

    def _gathered(self, split: list[float], others: float) -> tuple[float, float]:
        """Return bytes of gathered weights in each pass; backward includes gradients to be reduced."""
        if not self.setup.sharded:
            return 0.0, 0.0
        lower = (
            0.5 if self.setup.autocast else 1.0
        )  # blocks are gathered in bfloat16, their gradients summed in float32
        blocks = lower * (GATHERED * max(split) if self.setup.reshard else sum(split))
        return blocks + others, blocks + (1 + lower) * max(split) + 2 * others

    def moments(self) -> list[Memory]:
        """List the candidate moments: last block's forward, the loss, backward of each block, embedding, optimizer."""
        copies = sum(block.copies for block in self.blocks)
        kept = sum(block.kept for block in self.blocks)
        last, loss = self.blocks[-1], self.parts.loss
        # Gradients of the previous step or micro-batch are allocated until the loss is known.
        forward = self.steady._replace(gradients=self.all, copies=copies, gathered=self.gathered_forward)
        backward = self.steady._replace(gradients=self.all * self.reused, gathered=self.gathered_backward)
        found = [
            forward._replace(activations=kept - last.kept + last.forward, at="the last block's forward pass"),
            forward._replace(activations=kept, loss=loss.forward.transient, at="the loss"),
            backward._replace(
                copies=copies,
                activations=kept,
                loss=loss.kept + loss.backward.transient,
                at="the loss's backward pass",
            ),
        ]
        made = self.others / 2  # the head's gradient
        for number in reversed(range(len(self.blocks))):
            block, of_block = self.blocks[number], self.of_blocks[number]
            moment = backward._replace(
                gradients=self.all if self.reused else made,  # the block's gradients are allocated in its pass
                copies=copies,
                activations=kept + block.backward + self.stream,
                at=f"block {number + 1}'s backward pass",
            )
            found.append(moment)
            kept, copies, made = kept - block.kept, copies - block.copies, made + of_block
        rise = self.stream + self.parts.embedding.backward.transient
        embedding = backward._replace(gradients=self.all, activations=rise, at="the embedding's backward pass")
        temporary = WORKSPACE + (0.0 if self.setup.fused_optimizer else self.all)
        step = self.steady._replace(gradients=self.all, workspace=temporary, at="the optimizer's step")
        return [*found, embedding, step]
