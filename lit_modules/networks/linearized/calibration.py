"""Initialize the cluster maps of a linearized model by clustering its layers' keys on text."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.settings import SettingError
from lit_modules.networks.linearized.clusters import ClusterKeys, ClusterQueries
from lit_modules.networks.linearized.lolcats import LolcatsAttention
from lit_modules.networks.linearized.models import LinearizedForCausalLM

ROUNDS = 10
KEYS_PER_LAYER = 8192
SHIFTS = (-8.0, 4.0, 25)
"""Least, largest and number of the log factors to try for the weight of each head's state."""


@torch.no_grad()
def fit_clusters(model: LinearizedForCausalLM, batches: Sequence[dict[str, Tensor]]) -> None:
    """Fit `linearization.feature_map=clusters` to the teacher's keys and outputs on some text.

    K-means finds the centers. Then each head's state gets the weight that brings the output nearest to the teacher's.

    Args:
        model: the model whose clusters are fitted, in place.
        batches: one or more, with `input_ids` `[B, T]` and, if packed, `cu_seqlens`, on the model's device.

    Raises:
        ValueError: if the model has no clusters, or no document is longer than window and sinks.
    """
    settings = model.linearization
    if settings.feature_map != "clusters":
        raise SettingError("linearization.feature_map", settings.feature_map, "give clusters", "has no clusters")
    attentions = [attention for attention in model.attentions() if isinstance(attention, LolcatsAttention)]
    keys: dict[LolcatsAttention, list[Tensor]] = {attention: [] for attention in attentions}
    share = KEYS_PER_LAYER // len(batches)

    def keep(attention: LolcatsAttention, args: tuple, inputs: dict) -> None:
        keys[attention].append(
            _some(attention.keys_of_state(inputs["hidden_states"], inputs["position_embeddings"]), share)
        )

    _watch(model, attentions, batches, keep)
    for attention in attentions:
        maps_q, maps_k = _maps(attention)
        centers, variance = k_means(torch.cat(keys.pop(attention)).transpose(0, 1), settings.num_slots)
        maps_q.fit(centers)
        maps_k.fit(centers, variance)
    errors: dict[LolcatsAttention, list[Tensor]] = {attention: [] for attention in attentions}
    shifts = torch.linspace(*SHIFTS, device=model.device)

    def try_out(attention: LolcatsAttention, args: tuple, inputs: dict) -> None:
        hidden, positions, tables = (inputs[name] for name in ("hidden_states", "positions", "position_embeddings"))
        errors[attention].append(attention.errors(hidden, positions, tables, shifts))

    _watch(model, attentions, batches, try_out)
    for attention in attentions:
        first, *others = errors[attention]
        tried = sum(others, first)
        if torch.equal(tried[0], tried[-1]):
            problem = "with its sinks is as long as every document, and clusters cannot be fitted"
            fix = "give longer documents, or a shorter window"
            raise SettingError("linearization.window", settings.window, fix, problem)
        _maps(attention)[0].bias.add_(shifts[tried.argmin(0)][:, None])


def _maps(attention: LolcatsAttention) -> tuple[ClusterQueries, ClusterKeys]:
    """Return the maps of queries and keys."""
    assert isinstance(attention.q_feature_map, ClusterQueries)
    assert isinstance(attention.k_feature_map, ClusterKeys)
    return attention.q_feature_map, attention.k_feature_map


def k_means(points: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """Return centers `[H, clusters, D]` of points `[H, N, D]` float32, and the mean variance per channel `[H]`."""
    heads, count, _ = points.shape
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    centers = points[:, drawn[torch.arange(clusters) % count].to(points.device)]
    for _ in range(ROUNDS):
        nearest = _nearest(points, centers)
        sums = torch.zeros_like(centers).scatter_add_(1, nearest[..., None].expand_as(points), points)
        sizes = points.new_zeros(heads, clusters).scatter_add_(1, nearest, torch.ones_like(points[..., 0]))[..., None]
        centers = torch.where(sizes > 0, sums / sizes.clamp(min=1), centers)
    around = points - centers.gather(1, _nearest(points, centers)[..., None].expand_as(points))
    return centers, around.square().mean((1, 2)).clamp(min=1e-6)


def _nearest(points: Tensor, centers: Tensor) -> Tensor:
    return (points @ centers.mT - centers.square().sum(-1)[:, None] / 2).argmax(-1)


def _some(keys: Tensor, count: int) -> Tensor:
    """Select about `count` of the keys `[B, T, H, D]`, evenly spaced: `[N, H, D]` float32."""
    keys = keys.flatten(0, 1)
    return keys[:: max(1, -(-len(keys) // max(1, count)))].float()


def _watch(
    model: LinearizedForCausalLM,
    attentions: Sequence[LolcatsAttention],
    batches: Sequence[dict[str, Tensor]],
    see: Callable[[LolcatsAttention, tuple, dict], None],
) -> None:
    """Call `see` with the inputs of each attention while the teacher reads the batches."""
    handles = [attention.register_forward_pre_hook(see, with_kwargs=True) for attention in attentions]
    try:
        for batch in batches:
            model.features(batch["input_ids"], cu_seqlens=batch.get("cu_seqlens"), mode="teacher")
    finally:
        for handle in handles:
            handle.remove()
