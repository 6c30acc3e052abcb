"""Plans: the estimate of one setup, and the setups that could replace it."""

from dataclasses import dataclass, replace

from common.gpus import Gpu, find_gpu
from lit_modules.networks import PalimpsestConfig, flops_per_token
from lit_modules.parallel.choosing import simplest_strategy
from lit_modules.planning.memory import USABLE, Memory, peak_memory
from lit_modules.planning.network import Network
from lit_modules.planning.setup import Setup
from lit_modules.planning.speed import Speed, speed_of

NODE, MOST_NODES = 8, 64
STEP_COUNT = 4  # bytes of AdamW's step counter per tensor
LEAST_SPEEDUP = 1.01  # minimum speedup of a proposed change
# Configuration key of each setting that a plan may propose to change, in display order.
OVERRIDES = {
    "fused_optimizer": "+optimizer.fused",
    "micro_batch_size": "data.micro_batch_size",
    "recomputation": "activation_checkpointing",
    "compile": "compile",
    "strategy": "strategy",
    "devices_per_node": "trainer.devices",
    "nodes": "trainer.num_nodes",
    "context": "strategy.context_parallel_size",
}


@dataclass(frozen=True)
class Estimate:
    """Memory and speed of a setup on a card."""

    setup: Setup
    gpu: Gpu
    memory: Memory
    speed: Speed

    @property
    def fits(self) -> bool:
        """True if the peak leaves enough of the card's memory free."""
        return self.memory.peak <= USABLE * self.gpu.memory


@dataclass(frozen=True)
class Change:
    """Command-line overrides, and the estimate with them."""

    overrides: str
    estimate: Estimate


@dataclass(frozen=True)
class RunPlan:
    """The result of `job=plan`.

    Attributes:
        parameters, ends: all parameters, and those outside the blocks.
        flops_per_token: forward and backward, without recomputation.
        tokens: tokens of the whole run.
        checkpoint, export: bytes of a checkpoint (weights and AdamW's state), and of an export (weights only).
        estimate: of the configured setup.
        strategies: the same setup under each strategy.
        changes: cumulative changes that make it fit, or faster if it already fits.
    """

    parameters: int
    ends: int
    flops_per_token: int
    tokens: int
    checkpoint: int
    export: int
    estimate: Estimate
    strategies: list[Estimate]
    changes: list[Change]

    @property
    def seconds(self) -> float:
        """Seconds of the whole run."""
        return self.tokens / self.estimate.speed.tokens_per_second


class Planner:
    """Estimates for one network; shared parts are traced once."""

    def __init__(self, config: PalimpsestConfig) -> None:
        self.config, self.network = config, Network(config)

    def estimate(self, setup: Setup) -> Estimate:
        """Estimate memory and speed of a setup.

        Raises:
            ValueError: if the card is unknown.
        """
        gpu = find_gpu(setup.gpu)
        parts = self.network.parts(setup)
        flops = flops_per_token(self.config, setup.sequence_length)
        memory = peak_memory(self.network, parts, setup)
        return Estimate(setup, gpu, memory, speed_of(self.network, parts, setup, gpu, flops))

    def plan(self, setup: Setup, tokens: int) -> RunPlan:
        """Make the whole plan for a run over `tokens` tokens."""
        found = self.estimate(setup)
        export = self.network.parameters * setup.weight_bytes
        return RunPlan(
            parameters=self.network.parameters,
            ends=self.network.others,
            flops_per_token=flops_per_token(self.config, setup.sequence_length),
            tokens=tokens,
            checkpoint=3 * export + STEP_COUNT * self.network.tensors,
            export=export,
            estimate=found,
            strategies=self.strategies(setup),
            changes=self.changes_to_speed_up(setup) if found.fits else self.changes_to_fit(setup),
        )

    def with_default_strategy(self, setup: Setup) -> Setup:
        """Return the setup with the strategy that training chooses if none is configured."""
        gpu = find_gpu(setup.gpu)
        name = simplest_strategy(self.network.parameters, setup.devices_per_node, setup.nodes, gpu.memory)
        return replace(setup, strategy=name)

    def changes_to_fit(self, setup: Setup) -> list[Change]:
        """Return cumulative changes until the setup fits, the cheapest first.

        If the last one does not fit, no change does.
        """
        made: list[Change] = []
        now = self.estimate(setup)
        for step in (
            with_fused_optimizer,
            with_fewer_sequences,
            with_more_recomputation,
            with_sharded_weights,
            with_more_gpus,
            self.shared_sequences,
            with_more_nodes,
        ):
            while not now.fits and (changed := step(now.setup)) is not None:
                found = self.estimate(changed)
                if found.memory.peak >= now.memory.peak:
                    break
                now = found
                made.append(Change(changed_overrides(setup, changed), found))
        return made

    def shared_sequences(self, setup: Setup) -> Setup | None:
        """Return the setup with twice the GPUs per sequence, if each keeps at least 16k tokens of it."""
        more = 2 * setup.context
        if not setup.sharded or setup.ranks % (more * setup.tensor) or setup.sequence_length < 16384 * more:
            return None
        return replace(setup, context=more)

    def changes_to_speed_up(self, setup: Setup) -> list[Change]:
        """Return cumulative changes that make the setup faster and still fit."""
        made: list[Change] = []
        now = self.estimate(setup)
        for step in (with_compilation, with_fused_optimizer, without_recomputation, with_less_recomputation):
            changed = step(now.setup)
            if changed is None:
                continue
            found = self.estimate(changed)
            if found.fits and found.speed.tokens_per_second > LEAST_SPEEDUP * now.speed.tokens_per_second:
                now = found
                made.append(Change(changed_overrides(setup, changed), found))
        return made

    def strategies(self, setup: Setup) -> list[Estimate]:
        """Estimate the same run under each strategy that its GPUs allow."""
        names = ["one"] if setup.ranks == 1 else ["ddp", "hsdp", "fsdp"] if setup.nodes > 1 else ["ddp", "fsdp"]
        found = []
        for name in names:
            as_it_is = name == setup.strategy
            changed = setup if as_it_is else replace(setup, strategy=name, shard_size=None, tensor=1, context=1)
            found.append(self.estimate(changed))
        return found


def with_fused_optimizer(setup: Setup) -> Setup | None:
    """Return the setup with a fused optimizer step, which needs no temporaries; None if it has one."""
    return None if setup.fused_optimizer else replace(setup, fused_optimizer=True)


def with_compilation(setup: Setup) -> Setup | None:
    """Return the setup with compiled blocks; None if they are compiled."""
    return None if setup.compile else replace(setup, compile=True)


def without_recomputation(setup: Setup) -> Setup | None:
    """Return the setup without recomputation; None if there is none."""
    return None if setup.recomputation == "none" else replace(setup, recomputation="none")


def with_less_recomputation(setup: Setup) -> Setup | None:
    """Return the setup that does not recompute products and attention; None if it does not already."""
    return None if setup.recomputation in ("none", "selective") else replace(setup, recomputation="selective")


def with_fewer_sequences(setup: Setup) -> Setup | None:
    """Return the setup with half the micro-batch; None for a single sequence."""
    return replace(setup, micro_batch_size=setup.micro_batch_size // 2) if setup.micro_batch_size > 1 else None


def with_more_recomputation(setup: Setup) -> Setup | None:
    """Return the setup with the next policy, which keeps less; None if there is none."""
    following: dict[str | int, str | None] = {"selective": "full", "full": None}
    after = following.get(setup.recomputation, "selective")
    return None if after is None else replace(setup, recomputation=after)


def with_sharded_weights(setup: Setup) -> Setup | None:
    """Return the setup with weights sharded over all GPUs; None if they are."""
    if setup.ranks == 1 or setup.shards * setup.tensor == setup.ranks:
        return None
    return replace(setup, strategy="fsdp", shard_size=None)


def with_more_gpus(setup: Setup) -> Setup | None:
    """Return the setup with twice the GPUs per node, up to 8, and weights sharded over all."""
    if setup.devices_per_node >= NODE:
        return None
    return replace(setup, devices_per_node=2 * setup.devices_per_node, strategy="fsdp", shard_size=None)


def with_more_nodes(setup: Setup) -> Setup | None:
    """Return the setup with twice the nodes and weights sharded over all."""
    if setup.nodes >= MOST_NODES:
        return None
    return replace(setup, nodes=2 * setup.nodes, strategy="fsdp", shard_size=None)


def changed_overrides(setup: Setup, changed: Setup) -> str:
    """Return the overrides that turn one setup into another."""
    keys = {name: key for name, key in OVERRIDES.items() if getattr(setup, name) != getattr(changed, name)}
    given = [(key, getattr(changed, name)) for name, key in keys.items()]
    return " ".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given)


def estimate(config: PalimpsestConfig, setup: Setup) -> Estimate:
    """Estimate memory and speed of one setup.

    Raises:
        ValueError: if the card is unknown.
    """
    return Planner(config).estimate(setup)
