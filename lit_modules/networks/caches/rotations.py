"""Maps of cached keys and values before they are quantized, and the file that holds a model's.

A map is an invertible `[D, D]` matrix A that multiplies a head's row vectors from the right. A cache holds `k A` and,
with another matrix, `v B`. Scores are the same with `q A^-T`, because `q A^-T (k A)^T = q k^T`. Attention's output is
turned back by `B^-1`, or the output projection is. A layer's heads share its two matrices. A rotation is orthogonal:
its inverse transposed is itself.

`hadamard` needs no data. `covariance_rotation` is OSCAR's (arXiv 2605.17757): the eigenvectors of a covariance, then a
Hadamard matrix, which gives every channel the same share of every eigenvector's energy. `balanced.py` has a map that is
not orthogonal.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from common.atomic_files import write_atomic
from common.settings import SettingError, check_whole
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.weight_sample import sampled_fingerprint

VERSION = 2
COMMAND = "palimpsest job=calibrate checkpoint=CHECKPOINT text=TEXT output=FILE.safetensors"
FIT = "fit this model's with job=calibrate"
TENSORS = ("key", "value")
TOLERANCE = 1e-4
"""Largest entry of `R^T R - 1` in a file; float32 leaves 1e-6."""

INVERSE_TOLERANCE = 1e-2
"""Largest entry of `A^T A^-T - 1` in a file; float32 leaves 1e-3 where A's singular values differ most."""


def hadamard(head_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an orthogonal matrix `[head_dim, head_dim]` that spreads each channel over all.

    For powers of two it is Sylvester's Hadamard matrix over `sqrt(head_dim)`, whose entries are all equal in size.
    Other sizes are `2^n m` with odd m: the Kronecker product of the Hadamard matrix of `2^n` and the orthogonal cosine
    transform of m (type II; entries up to `sqrt(2 / m)`).

    Raises:
        ValueError: if head_dim is not a whole number above 0.
    """
    check_whole("head_dim", head_dim, 1)
    power = head_dim & -head_dim
    signs = torch.ones(1, 1, dtype=torch.float64)
    while len(signs) < power:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return torch.kron(signs / math.sqrt(power), _cosines(head_dim // power)).to(dtype)


def _cosines(size: int) -> Tensor:
    """Return the orthogonal cosine transform of type II, `[frequency, place]` float64."""
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * index[:, None] * (index + 0.5)) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return matrix


def spread(size: int) -> Tensor:
    """Return the places `[size]` int64 to which channels are dealt one by one: neighbours come far apart.

    The bit-reversed numbers of the next power of two, without those that are too large.
    """
    bits = (size - 1).bit_length()
    reversed_bits = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits)) if bits else iter([0])
    return torch.tensor([place for place in reversed_bits if place < size])


def covariance_rotation(covariance: Tensor) -> Tensor:
    """Return OSCAR's rotation `[D, D]` float32 for a covariance `[D, D]`: `U H P`.

    U has the eigenvectors in order of falling eigenvalue, with the largest entry of each positive; H is `hadamard(D)`;
    P moves channel i of `U H` to place `spread(D)[i]`, which matters where a head has several groups.

    Raises:
        ValueError: if the covariance has numbers that are not finite.
    """
    if not covariance.isfinite().all():
        raise ValueError("a covariance has numbers that are not finite")
    exact = covariance.double().cpu()
    vectors = torch.linalg.eigh((exact + exact.mT) / 2).eigenvectors.flip(-1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    spread_out = (vectors * largest.sign()) @ hadamard(len(exact), torch.float64)
    rotation = torch.empty_like(spread_out)
    rotation[:, spread(len(exact))] = spread_out
    return rotation.float()


class Transform(NamedTuple):
    """What is done to a layer's keys or values before they are packed: `(x - mean) @ matrix`, float32.

    Softmax does not see a mean that all keys of a head lack, and attention's output lacks the values' mean.

    Attributes:
        matrix: `[D, D]`, invertible.
        inverse: its inverse transposed, which queries and outputs are multiplied with; a rotation's is itself.
        mean: `[H, D]` of each head, or None.
    """

    matrix: Tensor
    inverse: Tensor
    mean: Tensor | None = None

    @classmethod
    def rotation(cls, matrix: Tensor) -> "Transform":
        """Return the transform of an orthogonal matrix."""
        return cls(matrix, matrix)

    def unspread(self) -> "Transform":
        """Return the transform without what `covariance_rotation` ends with: eigenvectors in order of eigenvalue."""
        width = len(self.matrix)
        back = hadamard(width, torch.float64).mT
        matrix, inverse = ((x[:, spread(width)].double() @ back).float() for x in (self.matrix, self.inverse))
        return self._replace(matrix=matrix, inverse=inverse)

    def of_heads(self, heads: slice) -> "Transform":
        """Return the transform of some of the heads."""
        return self if self.mean is None else self._replace(mean=self.mean[heads])

    def like(self, x: Tensor) -> "Transform":
        """Return it on the device of x, with the mean in x's dtype: what is taken away and added is the same."""
        matrix = self.matrix.to(x.device)
        inverse = matrix if self.inverse is self.matrix else self.inverse.to(x.device)
        return Transform(matrix, inverse, None if self.mean is None else self.mean.to(x))


class LayerRotations(NamedTuple):
    """What was fitted to a layer's cached keys and values.

    Attributes:
        key, value: OSCAR's rotations, `[Dk, Dk]` and `[Dv, Dv]` float32.
        key_map, value_map: the balanced maps.
    """

    key: Tensor
    value: Tensor
    key_map: Transform
    value_map: Transform

    def transform(self, name: str, way: str) -> Transform:
        """Return what becomes of `key` or `value` by the way `rotation`, `balanced` or `ordered`."""
        if way != "rotation":
            fitted = self.key_map if name == "key" else self.value_map
            return fitted if way == "balanced" else fitted.unspread()
        return Transform.rotation(self.key if name == "key" else self.value)


@dataclass(frozen=True)
class Rotations:
    """A model's rotations.

    Args:
        layers: by number of the layer; layers that cache no keys and values have none.
        model: what the model is, from `model_identity`.
        tokens: the number of tokens that they were fitted to.
    """

    layers: dict[int, LayerRotations]
    model: dict[str, Any]
    tokens: int

    def of_layer(self, number: int) -> LayerRotations:
        """Return a layer's rotations.

        Raises:
            ValueError: if it has none.
        """
        if number not in self.layers:
            raise SettingError("rotations", "", FIT, f"has none of layer {number}")
        return self.layers[number]


def model_identity(model: PreTrainedModel | PreTrainedConfig) -> dict[str, Any]:
    """Return what tells a model from others: its kind and sizes and, of a model with weights, a fingerprint of them."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    if isinstance(config, PalimpsestConfig):
        _, key_heads, value_heads = config.head_counts
        key_dim, value_dim = config.cached_key_dim, config.head_dim
    else:
        key_heads = value_heads = getattr(config, "num_key_value_heads", None) or heads
        key_dim = value_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    identity = {
        "architecture": config.model_type,
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": heads,
        "key_heads": key_heads,
        "value_heads": value_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
    }
    if isinstance(model, PreTrainedModel):
        weights = dict(sorted(model.named_parameters()))
        identity["weights"] = sampled_fingerprint(weights.values())
    return identity


def write_rotations(path: Path, rotations: Rotations) -> None:
    """Write a safetensors file, whole or not at all.

    It has `layers.3.key`, the rotation, and of the balanced map `layers.3.key.matrix`, `layers.3.key.inverse` and,
    where there is one, `layers.3.key.mean`; and the same of `value`.

    Raises:
        OSError: if it cannot be written.
    """
    tensors: dict[str, Tensor | None] = {}
    for number, layer in sorted(rotations.layers.items()):
        for name in TENSORS:
            place = f"layers.{number}.{name}"
            parts = layer.transform(name, "balanced")._asdict()
            tensors |= {place: getattr(layer, name)} | {f"{place}.{part}": x for part, x in parts.items()}
    given = {name: x.float().cpu().contiguous() for name, x in tensors.items() if x is not None}
    record = {"version": VERSION, "tokens": rotations.tokens, "model": rotations.model}
    write_atomic(path, save(given, {"rotations": json.dumps(record)}))


def read_rotations(path: Path, model: PreTrainedModel | PreTrainedConfig) -> Rotations:
    """Read the file that job=calibrate wrote, and check that it is this model's.

    Args:
        path: the safetensors file.
        model: with a configuration alone, weights are not compared.

    Raises:
        ValueError: if there is no such file, it is of another kind or version or model, or a tensor is not
            what it should be.
    """
    if not path.is_file():
        raise SettingError("rotations", path, f"give the output of job=calibrate ({COMMAND})", "is not a file")
    try:
        with safe_open(path, "pt") as file:
            record = json.loads((file.metadata() or {})["rotations"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        version, found, tokens = record["version"], record["model"], int(record["tokens"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SettingError("rotations", path, "give the output of job=calibrate", "holds no rotations") from error
    if version != VERSION:
        raise SettingError("rotations", path, FIT, f"is of version {version}, and version {VERSION} can be read")
    _check_model(path, found, model_identity(model))
    return Rotations(_layers(path, tensors, found), found, tokens)


def _check_model(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ValueError at the first difference of two identities."""
    for key, value in wanted.items():
        if found.get(key) != value:
            other = "has other weights" if key == "weights" else f"{key} {found.get(key)} and not {value}"
            raise SettingError("rotations", path, FIT, f"belongs to another model ({other})")


def _layers(path: Path, tensors: dict[str, Tensor], model: dict[str, Any]) -> dict[int, LayerRotations]:
    """Return the matrices of a file by layer, after checking them."""
    layers = {}
    for number in range(model["layers"]):
        place = f"layers.{number}."
        if any(name.startswith(place) for name in tensors):
            key, value = (_rotation(path, tensors, place + name, model[f"{name}_dim"]) for name in TENSORS)
            key_map, value_map = (
                _map(path, tensors, place + name, model[f"{name}_heads"], model[f"{name}_dim"]) for name in TENSORS
            )
            layers[number] = LayerRotations(key, value, key_map, value_map)
    if tensors:
        raise SettingError("rotations", path, FIT, f"has an unknown tensor {min(tensors)}")
    return layers


def _rotation(path: Path, tensors: dict[str, Tensor], name: str, size: int) -> Tensor:
    """Take an orthogonal matrix."""
    matrix = _tensor(path, tensors, name, size, size)
    if not _distance(matrix, matrix) < TOLERANCE:
        raise SettingError("rotations", path, FIT, f"has {name}, which is not orthogonal")
    return matrix


def _map(path: Path, tensors: dict[str, Tensor], name: str, heads: int, size: int) -> Transform:
    """Take an invertible matrix, its inverse and, where there is one, the heads' mean."""
    matrix, inverse = (_tensor(path, tensors, f"{name}.{part}", size, size) for part in ("matrix", "inverse"))
    if not _distance(matrix, inverse) < INVERSE_TOLERANCE:
        raise SettingError("rotations", path, FIT, f"has {name}.inverse, which is not the inverse of {name}.matrix")
    mean = _tensor(path, tensors, f"{name}.mean", heads, size) if f"{name}.mean" in tensors else None
    if mean is not None and not mean.isfinite().all():
        raise SettingError("rotations", path, FIT, f"has {name}.mean, which is not finite")
    return Transform(matrix, inverse, mean)


def _tensor(path: Path, tensors: dict[str, Tensor], name: str, *shape: int) -> Tensor:
    """Take a tensor of this shape out of the file's."""
    found = tensors.pop(name, None)
    if found is None:
        raise SettingError("rotations", path, FIT, f"lacks {name}")
    if found.shape != shape:
        problem = f"has {name} of shape {list(found.shape)}, which should be {list(shape)}"
        raise SettingError("rotations", path, FIT, problem)
    return found


def _distance(matrix: Tensor, inverse: Tensor) -> float:
    """Return the largest entry of `A^T A^-T - 1`."""
    product = matrix.double().mT @ inverse.double()
    return (product - torch.eye(len(product), dtype=torch.float64)).abs().max().item()
