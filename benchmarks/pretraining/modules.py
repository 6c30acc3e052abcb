"""The module of `job=pretrain`, for benchmarks that train it for a few steps."""

from collections.abc import Sequence
from typing import Any

import hydra
import torch
from torch import Tensor

from benchmarks.measuring.configuration import compose
from common.gpus import peak_flops
from lit_modules.pretraining import Pretraining


def pretraining(
    model: str, device: torch.device, tokens: int, length: int, overrides: Sequence[str] = (), **settings: Any
) -> Pretraining:
    """Build a model of `conf/model` on `device`, not yet sharded or compiled.

    AdamW (fused on a GPU) has a learning rate that leaves the weights unchanged.

    Args:
        tokens: per optimizer step.
        length: tokens of a sequence.
        settings: further arguments of Pretraining.
    """
    fused = ["+optimizer.fused=true"] * torch.cuda.is_available()
    cfg = compose(f"model={model}", "optimizer.lr=1e-7", *fused, *overrides)
    with device:
        return Pretraining(
            hydra.utils.instantiate(cfg.model, _convert_="all"),
            optimizer=hydra.utils.instantiate(cfg.optimizer, _convert_="all"),
            schedule=lambda seen: 1.0,
            batch_tokens=tokens,
            sequence_length=length,
            **settings,
        )


def random_batch(
    module: Pretraining, tokens: int, length: int, device: torch.device | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """Draw a batch of documents of `length` tokens, the same in every process of one seed."""
    draw = torch.Generator().manual_seed(seed)
    drawn = torch.randint(module.model.config.vocab_size, (1, tokens + 1), generator=draw).to(device)
    bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
    return {"input_ids": drawn[:, :-1], "targets": drawn[:, 1:], "cu_seqlens": bounds}


def utilization(tokens_per_second: float, flops_per_token: float, gpus: int = 1) -> float | None:
    """Return the MFU at so many FLOPs a token; None if the GPU's peak is not known, or there is no GPU."""
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return tokens_per_second * flops_per_token / (peak * gpus) if peak else None
