"""Forget gates: statistics for each layer, and pictures of the gate matrix and the attention."""

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from common.settings import check_whole
from lit_modules.callbacks.pictures import ignore_disk_errors, log_picture
from lit_modules.loggers.figures import draw_gates
from lit_modules.parallel.context import without_context_parallelism
from lit_modules.trainer_parts import rank_strategy


class LayerInputs(NamedTuple):
    """What one attention layer computes from a document: [1, T, heads, ...]; log_forget is None without a gate."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_forget: torch.Tensor | None


class ForgetGates(Callback):
    """Callback that logs every layer's gates and draws F and A of some heads (FoX, figure 3) on held-out text.

    Logged for layer n after each validation: `forget_gate/layer_n_mean`, the mean gate;
    `forget_gate/layer_n_memory_shortest` and `..._longest`, over the heads, the tokens after which the mean gate has
    decayed to 1/e: -1 / mean(log f). Recurrent layers are left out; a model without attention shows nothing.

    Args:
        heads: number of heads drawn, evenly spaced from the fastest to the slowest to forget.
        tokens: most tokens used of one held-out document.

    Raises:
        ValueError: either is under 1.
    """

    def __init__(self, heads: int = 4, tokens: int = 256) -> None:
        for key, value in (("heads", heads), ("tokens", tokens)):
            check_whole(f"callbacks.forget_gates.{key}", value, 1)
        self.heads, self.tokens = heads, tokens
        self.document: torch.Tensor | None = None

    def on_validation_batch_start(
        self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:
            starts = batch["cu_seqlens"].tolist()
            length, first = max((end - start, start) for start, end in itertools.pairwise(starts))
            self.document = batch["input_ids"][:, first : first + min(length, self.tokens)]

    @ignore_disk_errors()
    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        strategy = rank_strategy(trainer)
        if trainer.sanity_checking or not (trainer.is_global_zero or strategy.needs_all_ranks):
            return
        document = self.document
        if strategy.needs_all_ranks:  # each rank holds a part of the weights, so all run rank 0's document
            tokens = strategy.broadcast(None if document is None else document.tolist())
            document = None if tokens is None else torch.tensor(tokens, device=module.device)
        if document is None:
            return
        with torch.no_grad(), trainer.precision_plugin.forward_context(), without_context_parallelism(module.context):
            layers = all_heads(projections(module.model, document), strategy.tensor_group)
        if not layers or not trainer.is_global_zero:
            return
        metrics = gate_statistics(layers)
        for logger in trainer.loggers:
            if metrics:
                logger.log_metrics(metrics, trainer.global_step)
        path = Path(trainer.default_root_dir) / "figures" / "forget_gates.png"
        draw_gates([head_maps(layers, *head) for head in choose_heads(layers, self.heads)], path)
        log_picture(trainer, "forget_gates", path)


def projections(model: Any, input_ids: torch.Tensor) -> list[LayerInputs]:
    """Return the inputs of each attention layer for one document, input_ids [1, T]."""
    found: list[LayerInputs] = []

    def keep(layer: int, mixer: Any) -> Any:
        return mixer.register_forward_pre_hook(
            lambda _, inputs: found.append(LayerInputs(layer, *mixer.project(*inputs)))
        )

    mixers = [(layer, block.self_attn) for layer, block in enumerate(model.model.layers)]
    hooks = [keep(layer, mixer) for layer, mixer in mixers if hasattr(mixer, "project")]
    try:
        with torch.compiler.set_stance("force_eager"):  # a compiled block does not call the hooks
            model(input_ids=input_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def all_heads(layers: list[LayerInputs], group: dist.ProcessGroup | None) -> list[LayerInputs]:
    """Return the same with the heads of all ranks of `group`, which tensor parallelism splits them over."""
    if group is None:
        return layers

    def gather(own: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    return [
        LayerInputs(layer, gather(q), gather(k), gather(v), gate if gate is None else gather(gate))
        for layer, q, k, v, gate in layers
    ]


def gate_statistics(layers: list[LayerInputs]) -> dict[str, float]:
    """Return the metrics of each layer, as described in ForgetGates."""
    metrics = {}
    for layer, *_, gate in layers:
        if gate is None:
            continue
        memory = -1 / gate[0].double().mean(0).clamp(max=-1e-12)
        name = f"forget_gate/layer_{layer:02d}"
        metrics[f"{name}_mean"] = gate.exp().mean().item()
        metrics[f"{name}_memory_shortest"] = memory.min().item()
        metrics[f"{name}_memory_longest"] = memory.max().item()
    return metrics


def choose_heads(layers: list[LayerInputs], heads: int) -> list[tuple[int, int]]:
    """Return (index into layers, head), evenly spaced from the fastest to the slowest to forget, or over the layers."""
    gates = [(i, each.log_forget) for i, each in enumerate(layers) if each.log_forget is not None]
    if gates:
        means = ((i, gate[0].float().mean(0).tolist()) for i, gate in gates)
        every = [(i, h) for _, i, h in sorted((mean, i, h) for i, ms in means for h, mean in enumerate(ms))]
    else:
        every = [(i, h) for i, each in enumerate(layers) for h in range(each.q.shape[2])]
    picks = np.unique(np.linspace(0, len(every) - 1, min(heads, len(every))).round().astype(int))
    return [every[p] for p in picks]


def head_maps(layers: list[LayerInputs], index: int, head: int) -> tuple[str, np.ndarray | None, np.ndarray]:
    """Return title, F and A [T, T] of one head: F_ij = exp(c_i - c_j), A = softmax(q k^T / sqrt(d) + log F)."""
    layer, q, k, _, gate = layers[index]
    group = q.shape[2] // k.shape[2]
    scores = q[0, :, head].float() @ k[0, :, head // group].float().T / math.sqrt(q.shape[-1])
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    forget, title = None, f"layer {layer}, head {head}"
    if gate is not None:
        total = gate[0, :, head].double().cumsum(0)
        bias = (total[:, None] - total[None, :]).float().masked_fill(future, -math.inf)
        scores = scores + bias
        forget = bias.exp().cpu().numpy()
        title += f"\nmean gate {gate[0, :, head].exp().mean():.3f}"
    attention = scores.masked_fill(future, -math.inf).softmax(-1)
    return title, forget, attention.cpu().numpy()
