"""Fit the transforms of a model's cache to text, and measure on other text what they gain.

OSCAR (arXiv 2605.17757) chooses a layer's rotations by what attention does with the rounding errors. An error e of a
key changes the scores by `q . e`, so keys are rotated by the covariance of the queries that read them. An error of a
value matters as much as its token is read; OSCAR weights the values' covariance by `w_t = k_t (Q^T Q) k_t^T`, the
energy of the token's scores. Heads are averaged, each with weights of mean 1.

`balanced.py` has a better map than any rotation: it knows the covariance of the cached keys and values beside that of
the queries. Errors of values count alike in all channels there.

Only covariances are held. OSCAR's weights need the covariance of all queries first, so the text is read
twice.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels.packed_kv import Format, dequantize, quantize
from lit_modules.networks.attention_inputs import AttentionInputs, See, watched_attention
from lit_modules.networks.caches.balanced import balanced_transform
from lit_modules.networks.caches.rotations import (
    LayerRotations,
    Rotations,
    Transform,
    covariance_rotation,
    hadamard,
    model_identity,
)

LARGEST_GROUP = 128
"""Channels that share a scale in the measured format: a whole head, or parts of 128 of a wider one, as in OSCAR."""

CLIPS = {"key": 0.96, "value": 0.92}
"""OSCAR's quantiles of a token's absolute values in a head, to which it clips before rounding."""

TREATMENTS = ("plain", "hadamard", "rotated", "rotated and clipped", "balanced and clipped")

TINY = torch.finfo(torch.float64).tiny

Progress = Callable[[int], None]


def silent(tokens: int) -> None:
    """Report no progress."""


def fit_rotations(model: PreTrainedModel, sequences: Sequence[Tensor], progress: Progress = silent) -> Rotations:
    """Fit OSCAR's rotations and the balanced maps to token sequences; each is read twice.

    The covariance of the keys is that of the queries, `mean(q^T q)` over tokens and heads, and that of the values
    `mean(w_t v_t^T v_t)`, as in OSCAR. Where a map, norm and rotation follow the cache (DiffQKV's half-width keys), an
    error e of a cached key changes the scores by `q . J_t e`, J_t the Jacobian of what follows at key t; the covariance
    is that of `J_t^T q`, over each key and a random query of its sequence.

    Balanced maps come with the mean of each head, except that of keys whose logits are capped: these are not the same
    when all keys change alike.

    Args:
        model: any causal language model whose attention `watched_attention` can watch.
        sequences: token ids `[B, T]` int64, on the model's device.
        progress: called with the number of tokens of each sequence read.

    Raises:
        ValueError: if no layer caches keys and values, their sizes differ from what the configuration says, or
            covariances are not finite.
    """
    identity = model_identity(model)
    queries: dict[int, Tensor] = {}  # [Hq, D, D] sums of q^T q
    read_keys: dict[int, Tensor] = {}  # [Hk, Dc, Dc] sums over sequences, weighted by their tokens
    values: dict[int, Tensor] = {}  # [Hv, Dv, Dv] sums of w v^T v
    weights: dict[int, Tensor] = {}  # [Hv] sums of w
    moments: dict[str, dict[int, Moments]] = {"key": {}, "value": {}}
    capped: set[int] = set()

    def see_queries(layer: int, inputs: AttentionInputs) -> None:
        _add(queries, layer, _products(inputs.queries.float()))
        _add(read_keys, layer, key_metric(inputs) * inputs.queries[:, 0, :, 0].numel())
        moments["key"].setdefault(layer, Moments()).add(inputs.cached_keys.double())
        moments["value"].setdefault(layer, Moments()).add(inputs.values.double())
        if inputs.softcap is not None:
            capped.add(layer)

    def see_values(layer: int, inputs: AttentionInputs) -> None:
        weight = score_energy(inputs, queries[layer]).unflatten(1, (inputs.values.shape[1], -1)).sum(2)
        _add(values, layer, _products(inputs.values.float(), weight))
        _add(weights, layer, weight.double().sum((0, 2)))

    _check_layers(model, sequences[0][:, :1], identity)
    _read(model, sequences, see_queries, progress)
    _read(model, sequences, see_values, progress)
    layers = {
        number: LayerRotations(
            covariance_rotation(read_keys[number].mean(0)),
            covariance_rotation((values[number] / weights[number].clamp(min=TINY)[:, None, None]).mean(0)),
            moments["key"][number].balanced(read_keys[number].mean(0), has_mean=number not in capped),
            moments["value"][number].balanced(None),
        )
        for number in sorted(queries)
    }
    return Rotations(layers, identity, sum(ids.numel() for ids in sequences))


class Moments:
    """Sums of the vectors of each head, and of their products with themselves."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: Tensor | float = 0.0  # [H, D] float64
        self.products: Tensor | float = 0.0  # [H, D, D] float64

    def add(self, x: Tensor) -> None:
        """Count vectors `[B, H, T, D]` float64, because a mean is much larger than what varies in some channels."""
        self.count += x[:, 0, :, 0].numel()
        self.sums = self.sums + x.sum((0, 2))
        self.products = self.products + _products(x)

    def balanced(self, metric: Tensor | None, *, has_mean: bool = True) -> Transform:
        """Return the balanced map for a metric `[D, D]`, None for the identity, about the heads' means or about 0."""
        mean, products = torch.as_tensor(self.sums) / self.count, torch.as_tensor(self.products) / self.count
        covariance = (products - mean[:, :, None] * mean[:, None] if has_mean else products).mean(0)
        metric = torch.eye(len(covariance)) if metric is None else metric
        return balanced_transform(metric, covariance, mean if has_mean else None)


class LayerErrors(NamedTuple):
    """Relative errors of one layer at 2 bits by treatment, in the order of `TREATMENTS`.

    Args:
        scores: root mean square of the error of `q . k`, over that of `q . k`, for all queries and keys of a sequence;
            in both, what all its keys have in common is left out, because softmax ignores it.
        values: root mean square of the error of the values' numbers, over that of the numbers.
    """

    scores: tuple[float, ...]
    values: tuple[float, ...]


def measure_rotations(
    model: PreTrainedModel,
    rotations: Rotations,
    sequences: Sequence[Tensor],
    progress: Progress = silent,
) -> dict[int, LayerErrors]:
    """Return the errors of each layer, with its rotations, with a Hadamard matrix and without, on other text.

    Groups run along a head's channels. Where a map follows the cached keys, errors of scores are to first order.
    """
    sums: dict[int, Tensor] = {}  # [2, 1 + treatments]: squares of scores and values, and of their errors

    def see(layer: int, inputs: AttentionInputs) -> None:
        fitted, metric = rotations.of_layer(layer), key_metric(inputs).float()
        of_keys = _errors(inputs.cached_keys.float(), fitted, "key")
        of_values = _errors(inputs.values.float(), fitted, "value")
        queries = _products(inputs.queries.float()).unflatten(0, (len(metric), -1)).mean(1)
        scores = _energy(inputs.keys.float(), queries.float() / inputs.queries[:, 0, :, 0].numel())
        squares = [
            [scores, *(_energy(error, metric) for error in of_keys)],
            [x.square().sum() for x in (inputs.values.float(), *of_values)],
        ]
        _add(sums, layer, torch.stack([torch.stack(row) for row in squares]))

    _read(model, sequences, see, progress)
    found = {}
    for layer, squares in sums.items():
        relative = (squares[:, 1:] / squares[:, :1].clamp(min=TINY)).sqrt().tolist()
        found[layer] = LayerErrors(*map(tuple, relative))
    return found


def key_metric(inputs: AttentionInputs) -> Tensor:
    """Return `[Hk, Dc, Dc]` float64 with `e M e^T` the mean squared change of scores by an error e of a cached key."""
    if inputs.finish is None:
        per_head = _products(inputs.queries.float()).unflatten(0, (inputs.keys.shape[1], -1)).mean(1)
        return per_head / inputs.queries[:, 0, :, 0].numel()
    # The gradient of q . finish(k) to k is J^T q. Random pairs, because a fixed distance would have a fixed rotation.
    tokens = inputs.keys.shape[2]
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens)).to(inputs.keys.device)
    paired = inputs.queries[:, :, order].unflatten(1, (inputs.keys.shape[1], -1))
    found = torch.zeros((), dtype=torch.float64, device=paired.device)
    with torch.enable_grad():
        cached = inputs.cached_keys.detach().requires_grad_()
        keys = inputs.finish(cached)
        for query in paired.unbind(2):
            (gradient,) = torch.autograd.grad(keys, cached, query.to(keys.dtype), retain_graph=True)
            found = found + _products(gradient.float())
    return found / (paired.shape[2] * inputs.keys[:, 0, :, 0].numel())


def score_energy(inputs: AttentionInputs, query_products: Tensor) -> Tensor:
    """Return `k (Q^T Q) k^T` `[B, Hq, S]` float32 of the key that each query head reads, for `[Hq, D, D]`."""
    shared = inputs.queries.shape[1] // inputs.keys.shape[1]
    keys = inputs.keys.float().repeat_interleave(shared, 1)
    return ((keys @ query_products.float()) * keys).sum(-1)


def measured_format(head_dim: int, clip: float = 1.0) -> Format:
    """Return the 2-bit format in which errors are measured.

    Raises:
        ValueError: if heads of this width cannot be packed.
    """
    group = LARGEST_GROUP if head_dim % LARGEST_GROUP == 0 else head_dim
    format = Format(2, "channels", group, clip=clip)
    format.check_head_dim(head_dim)
    return format


def _errors(x: Tensor, fitted: LayerRotations, name: str) -> list[Tensor]:
    """Return what quantization adds to `x` `[B, H, T, D]`, keys or values, under each treatment."""
    width, clip = x.shape[-1], CLIPS[name]
    rotation, balanced = (fitted.transform(name, way) for way in ("rotation", "balanced"))
    plain, spread = (None, 1.0), (Transform.rotation(hadamard(width)), 1.0)
    ways = (plain, spread, (rotation, 1.0), (rotation, clip), (balanced, clip))
    return [rounding_error(x, transform, measured_format(width, quantile)) for transform, quantile in ways]


def rounding_error(x: Tensor, transform: Transform | None, format: Format) -> Tensor:
    """Return what quantization and back adds to `x` `[B, H, T, D]`, transformed meanwhile."""
    if transform is None:
        return dequantize(*quantize(x, format), format) - x
    matrix, inverse, mean = transform.like(x)
    centred = x if mean is None else x - mean[:, None]
    return dequantize(*quantize(centred @ matrix, format), format) @ inverse.mT - centred


def _energy(x: Tensor, metric: Tensor) -> Tensor:
    """Return the sum of `x M x^T` over rows `[B, H, T, D]`, less their mean over time, for M `[H, D, D]`."""
    x = x - x.mean(2, keepdim=True)
    return ((x @ metric) * x).sum()


@torch.no_grad()
def _read(model: PreTrainedModel, sequences: Iterable[Tensor], see: See, progress: Progress = silent) -> None:
    """Run the model over the sequences, watched."""
    with watched_attention(model, see):
        for ids in sequences:
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
            progress(ids.numel())


def _products(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the sum over batch and time of `w x^T x`, `[H, D, D]` float64, for x `[B, H, T, D]` and w `[B, H, T]`."""
    weighted = x if weight is None else x * weight[..., None]
    return (weighted.mT @ x).double().sum(0)


def _add(sums: dict[int, Tensor], layer: int, new: Tensor) -> None:
    sums[layer] = sums[layer] + new.double() if layer in sums else new.double()


def _check_layers(model: PreTrainedModel, ids: Tensor, identity: dict[str, Any]) -> None:
    """Raise ValueError if no layer caches keys and values, or of other widths than the configuration says."""
    widths: list[tuple[str, int]] = []

    def see(layer: int, inputs: AttentionInputs) -> None:
        widths.extend([("key", inputs.cached_keys.shape[-1]), ("value", inputs.values.shape[-1])])

    _read(model, [ids], see)
    if not widths:
        raise ValueError(f"a {type(model).__name__} of these settings has no layer that caches keys and values")
    for name, found in widths:
        if found != identity[f"{name}_dim"]:
            said = identity[f"{name}_dim"]
            raise ValueError(
                f"{name}s are cached {found} wide, not {said} as configured: such models are not supported"
            )
