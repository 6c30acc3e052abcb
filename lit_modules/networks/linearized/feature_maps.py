"""Feature maps: maps of a head's queries and keys whose product approximates a softmax."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SoftmaxMap(nn.Module):
    """`softmax(x)` over a head's channels: no parameter (Liger, arXiv 2503.01496, section 3.1)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, T, H, D]` to the same shape; computed in float32 at least."""
        return x.softmax(-1, dtype=_wide(x)).to(x.dtype)


class LearnedMap(nn.Module):
    """`[softmax(W x), softmax(-W x)]` with one W per head (Hedgehog, arXiv 2402.04347; LoLCATs, arXiv 2410.10254).

    W starts as the identity, so that nothing is random and each channel starts as itself.
    """

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.weight = _parameter(heads, head_dim, head_dim)
        _reset(self)

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial value of each parameter, by name."""
        return {"weight": _identities(self.weight)}

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, T, H, D]` to `[B, T, H, 2 D]`; computed in float32 at least."""
        logits = headwise(x, self.weight)
        return torch.cat((logits.softmax(-1), (-logits).softmax(-1)), dim=-1).to(x.dtype)


class RectifiedMap(nn.Module):
    """`relu(W x + b)`, W and b per head (SUPRA, arXiv 2405.06640, section 2.3); W starts as the identity."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.weight = _parameter(heads, head_dim, head_dim)
        self.bias = _parameter(heads, head_dim)
        _reset(self)

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial value of each parameter, by name."""
        return {"weight": _identities(self.weight), "bias": torch.zeros_like(self.bias)}

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, T, H, D]` to the same shape; computed in float32 at least."""
        return F.relu(headwise(x, self.weight) + self.bias).to(x.dtype)


MAPS = {
    "softmax": lambda heads, head_dim: SoftmaxMap(),
    "learned": LearnedMap,
    "relu": RectifiedMap,
    "none": lambda heads, head_dim: None,
}


def make_feature_map(name: str, heads: int, head_dim: int) -> nn.Module | None:
    """Return the map `[B, T, heads, head_dim] -> [B, T, heads, F]` named by `Linearization.feature_map`.

    The owner's attribute must contain "feature_map" in its name: parameters are kept in float32 by that name.

    Returns:
        "softmax": F = head_dim, no parameter; "learned": F = 2 head_dim; "relu": F = head_dim; "none": None.
    """
    return MAPS[name](heads, head_dim)


def headwise(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `W x` per head: `[B, T, H, D]` and `[H, F, D]` to `[B, T, H, F]`, in float32 at least."""
    wide = _wide(x)
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("bthd,hfd->bthf", x.to(wide), weight.to(wide))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32))


@torch.no_grad()
def _reset(module: LearnedMap | RectifiedMap) -> None:
    for name, value in module.initial_values().items():
        getattr(module, name).copy_(value)


def _identities(weight: Tensor) -> Tensor:
    return torch.eye(weight.shape[-1], dtype=weight.dtype, device=weight.device).expand_as(weight)
