"""Build a `Setup` from a configuration."""

from typing import Any

from omegaconf import DictConfig

from common.gpus import find_gpu
from common.settings import SettingError, check_number, check_whole
from lit_modules.parallel.layout import make_layout
from lit_modules.planning.setup import Setup

STRATEGIES = {"OneDevice": "one", "DataParallel": "ddp", "Sharded": "fsdp"}


def setup_of(cfg: DictConfig) -> Setup:
    """Return the settings of a configuration that determine memory and speed.

    Raises:
        ValueError: if a setting cannot work; the line names its key.
    """
    find_gpu(cfg.plan.gpu)
    for key in ("sequence_length", "micro_batch_size", "batch_tokens"):
        check_whole(f"data.{key}", cfg.data[key], 1)
    check_whole("trainer.num_nodes", cfg.trainer.num_nodes, 1)
    check_number("plan.network", cfg.plan.network, above=0)
    setup = Setup(
        gpu=str(cfg.plan.gpu),
        sequence_length=cfg.data.sequence_length,
        micro_batch_size=cfg.data.micro_batch_size,
        batch_tokens=cfg.data.batch_tokens,
        compile=cfg.compile,
        recomputation=cfg.activation_checkpointing,
        precision=cfg.trainer.precision,
        fused_optimizer=bool(cfg.optimizer.get("fused")),
        devices_per_node=devices(cfg),
        nodes=cfg.trainer.num_nodes,
        network=cfg.plan.network * 1e9,
        **strategy_of(cfg.strategy),
    )
    shards = setup.shards if setup.sharded else None
    make_layout(setup.ranks, shard=shards, context=setup.context, tensor=setup.tensor)
    return checked_batch(setup)


def devices(cfg: DictConfig) -> int:
    """Return the GPUs per node; 1 if the configuration leaves it to the machine."""
    given = cfg.trainer.devices
    if given in ("auto", -1, "-1"):
        return 1
    check_whole("trainer.devices", given, 1)
    return given


def strategy_of(strategy: DictConfig) -> dict[str, Any]:
    """Return the fields of `Setup` that the configured strategy determines.

    Raises:
        ValueError: if its class is not one of ours.
    """
    if strategy._target_ is None:
        return {}
    name = STRATEGIES.get(strategy._target_.rpartition(".")[2])
    if name is None:
        problem = "cannot be planned for"
        raise SettingError("strategy._target_", strategy._target_, f"give {', '.join(STRATEGIES)}", problem)
    sizes = {key: strategy.get(f"{key}_parallel_size", 1) for key in ("context", "tensor")}
    for key, size in sizes.items():
        check_whole(f"strategy.{key}_parallel_size", size, 1)
    size = strategy.get("shard_size")
    if size not in (None, "node"):
        check_whole("strategy.shard_size", size, 1)
    node = {"strategy": "hsdp"} if size == "node" else {"strategy": name, "shard_size": size}
    return node | sizes | {"reshard": strategy.get("reshard_after_forward", True)}


def checked_batch(setup: Setup) -> Setup:
    """Return the setup, after checking that its micro-batches make a global batch.

    Raises:
        ValueError: if they do not.
    """
    at_once = setup.micro_tokens * setup.readers
    if setup.batch_tokens % at_once:
        problem = (
            f"is not a multiple of {at_once} = data.micro_batch_size={setup.micro_batch_size} x "
            f"data.sequence_length={setup.sequence_length} x {setup.readers} readers (trainer.devices)"
        )
        raise SettingError("data.batch_tokens", setup.batch_tokens, "change one of them", problem)
    return setup
