"""Rotations of cached keys and values before they are quantized, and the file that holds a model's.

A rotation is an orthogonal `[D, D]` matrix R that multiplies a head's row vectors from the right. A cache holds `k R`
and, with another matrix, `v S`. Scores are the same with `q R`, because `q R (k R)^T = q k^T`. Attention's output is
turned back by `S^T`, or the output projection is. A layer's heads share its two matrices.

`hadamard` needs no data. `covariance_rotation` is OSCAR's (arXiv 2605.17757): the eigenvectors of a covariance, then a
Hadamard matrix, which gives every channel the same share of every eigenvector's energy.
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

VERSION = 1
FIT = "fit this model's with job=calibrate"
TOLERANCE = 1e-4
"""Largest entry of `R^T R - 1` in a file; float32 leaves 1e-6."""


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


class LayerRotations(NamedTuple):
    """The rotations of a layer's cached keys `[Dk, Dk]` and values `[Dv, Dv]`, float32."""

    key: Tensor
    value: Tensor


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
    """Write a safetensors file with `layers.3.key` and `layers.3.value`, whole or not at all.

    Raises:
        OSError: if it cannot be written.
    """
    tensors = {
        f"layers.{number}.{name}": matrix.float().cpu().contiguous()
        for number, layer in sorted(rotations.layers.items())
        for name, matrix in layer._asdict().items()
    }
    record = {"version": VERSION, "tokens": rotations.tokens, "model": rotations.model}
    write_atomic(path, save(tensors, {"rotations": json.dumps(record)}))


def read_rotations(path: Path, model: PreTrainedModel | PreTrainedConfig) -> Rotations:
    """Read the file that job=calibrate wrote, and check that it is this model's.

    Args:
        path: the safetensors file.
        model: with a configuration alone, weights are not compared.

    Raises:
        ValueError: if there is no such file, it is of another kind or version or model, or a matrix is not orthogonal.
    """
    if not path.is_file():
        raise SettingError("rotations", path, "give the output of job=calibrate", "is not a file")
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
    """Return the matrices of a file by layer, after checking their sizes and that they are orthogonal."""
    layers = {}
    for number in range(model["layers"]):
        pair = [tensors.pop(f"layers.{number}.{name}", None) for name in LayerRotations._fields]
        if pair == [None, None]:
            continue
        for name, matrix in zip(LayerRotations._fields, pair, strict=True):
            _check_matrix(path, f"layers.{number}.{name}", matrix, model[f"{name}_dim"])
        layers[number] = LayerRotations(*(matrix for matrix in pair if matrix is not None))
    if tensors:
        raise SettingError("rotations", path, FIT, f"has an unknown tensor {min(tensors)}")
    return layers


def _check_matrix(path: Path, name: str, matrix: Tensor | None, size: int) -> None:
    """Raise ValueError for a matrix that is missing, of another size, or not orthogonal."""
    if matrix is None:
        raise SettingError("rotations", path, FIT, f"lacks {name}")
    if matrix.shape != (size, size):
        problem = f"has {name} of shape {list(matrix.shape)}, and its heads are {size} wide"
        raise SettingError("rotations", path, FIT, problem)
    exact = matrix.double()
    if not (exact.mT @ exact - torch.eye(size, dtype=torch.float64)).abs().max() < TOLERANCE:
        raise SettingError("rotations", path, FIT, f"has {name}, which is not orthogonal")
