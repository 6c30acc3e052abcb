"""Feature maps by clusters: keys become shares of clusters, queries the weights of the cluster centers.

With the centers c_f, the map g of keys, and attention's scale:

    f(q) . g(k) = sum_f exp(scale q . c_f + b_f) softmax_f(W k + d)

For a key equal to a center this is exp(scale q . k).
"""

import torch
from torch import Tensor, nn

from lit_modules.networks.linearized.feature_maps import headwise

LARGEST_EXPONENT = 40.0
"""Cap on the log-weight of a cluster: finite even with the window's scale and summed over a document."""


class _Clusters(nn.Module):
    def __init__(self, heads: int, head_dim: int, clusters: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, clusters, head_dim, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(heads, clusters, dtype=torch.float32))

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial value of each parameter, by name."""
        raise NotImplementedError

    @torch.no_grad()
    def _reset(self) -> None:
        for name, value in self.initial_values().items():
            getattr(self, name).copy_(value)

    def _centers(self) -> Tensor:
        """Draw the initial centers, the same for queries and keys of every head until `fit`."""
        drawn = torch.randn(self.weight.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        return drawn.to(self.weight.device, self.weight.dtype).expand_as(self.weight)

    def _logits(self, x: Tensor) -> Tensor:
        return headwise(x, self.weight) + self.bias


class ClusterKeys(_Clusters):
    """`softmax(W k + d)`; for centers c with variance r per channel, W = c / r and d = -c^2 / 2 r."""

    def __init__(self, heads: int, head_dim: int, clusters: int):
        super().__init__(heads, head_dim, clusters)
        self._reset()

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial value of each parameter, by name."""
        centers = self._centers()
        return {"weight": centers, "bias": -centers.square().sum(-1) / 2}

    @torch.no_grad()
    def fit(self, centers: Tensor, variance: Tensor) -> None:
        """Set the parameters from centers `[heads, clusters, head_dim]` and variances `[heads]`."""
        self.weight.copy_(centers / variance[:, None, None])
        self.bias.copy_(-centers.square().sum(-1) / 2 / variance[:, None])

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, T, H, D]` to `[B, T, H, clusters]`; computed in float32 at least."""
        return self._logits(x).softmax(-1).to(x.dtype)


class ClusterQueries(_Clusters):
    """`exp(W q + b)`; for centers c, W = scale c.

    Args:
        scale: scale of attention's scores.
    """

    def __init__(self, heads: int, head_dim: int, clusters: int, scale: float):
        super().__init__(heads, head_dim, clusters)
        self.scale = scale
        self._reset()

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial value of each parameter, by name."""
        return {"weight": self._centers() * self.scale, "bias": torch.zeros_like(self.bias)}

    @torch.no_grad()
    def fit(self, centers: Tensor) -> None:
        """Set the parameters from centers `[key heads, clusters, head_dim]`."""
        self.weight.copy_(centers.repeat_interleave(len(self.weight) // len(centers), dim=0) * self.scale)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, T, H, D]` to `[B, T, H, clusters]`; computed in float32 at least, and float32 for float16 inputs."""
        weights = self._logits(x).clamp(max=LARGEST_EXPONENT).exp()
        return weights if x.dtype == torch.float16 else weights.to(x.dtype)  # most would overflow float16
