"""Gates of the recurrence, from a layer's keys, and the few parameters that a recipe may add."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.gated_recurrence import forms
from kernels.gated_recurrence.forms import PER_CHANNEL, PER_HEAD, Recurrence, SlotRecurrence
from lit_modules.networks.norm import RMSNorm

if TYPE_CHECKING:
    from lit_modules.networks.linearized.settings import Linearization


def gate_width(settings: "Linearization", head_dim: int) -> int:
    """Return the gate logits per head: one per channel, one per slot, one, or 0 for constant gates."""
    if settings.gate in PER_CHANNEL:
        return head_dim
    if settings.gate == "slots":
        return settings.num_slots
    return int(settings.gate in PER_HEAD)


def pool(keys: Tensor, width: int) -> Tensor:
    """Pool keys `[B, T, H, D]` by adaptive averaging over all heads' channels to `[B, T, H, width]`, in float32.

    Equal widths are not pooled (arXiv 2503.01496, section 3.1).
    """
    heads, dim = keys.shape[-2:]
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    if width == dim:
        return wide
    if dim % width == 0:
        return wide.unflatten(-1, (width, -1)).mean(-1)
    if width % dim == 0:
        return wide.repeat_interleave(width // dim, dim=-1)
    pooled = F.adaptive_avg_pool1d(wide.flatten(2), heads * width)
    return pooled.unflatten(-1, (heads, width))


def gated(
    settings: "Linearization", q: Tensor, k: Tensor, v: Tensor, logits: Tensor | None
) -> Recurrence | SlotRecurrence:
    """Build the inputs of the recurrence in the form of the settings (arXiv 2503.01496, table 1).

    Args:
        q: `[B, T, Hq, F]`, mapped.
        k: `[B, T, Hk, F]`, mapped; HGRN2 ignores it.
        v: `[B, T, Hk, D]`.
        logits: `[B, T, Hk, gate_width]` float32, None if the width is 0.
    """
    gate, temperature = settings.gate, settings.gate_temperature
    if logits is None:
        return forms.liger(gate, q, k, v, None, temperature=temperature)
    if gate == "slots":
        return forms.slots(q, k, v, logits, temperature=temperature)
    if gate in PER_HEAD:
        logits = logits.squeeze(-1)
    elif gate in PER_CHANNEL:
        # A feature map with several outputs per channel uses the channel's gate for all of them.
        logits = logits.repeat(1, 1, 1, q.shape[-1] // logits.shape[-1])
    return forms.liger(gate, q, k, v, logits, temperature=temperature)


class GateProjection(nn.Module):
    """Gate logits from the hidden states by a randomly initialized matrix: the ablation of pooled keys."""

    def __init__(self, hidden_size: int, heads: int, width: int):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads * width, hidden_size, dtype=torch.float32))

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial value of each parameter, by name."""
        return {"weight": torch.randn_like(self.weight) * 0.02}

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[B, T, hidden_size]` to `[B, T, heads, width]`, float32 at least."""
        logits = F.linear(hidden, self.weight.to(hidden.dtype)).unflatten(-1, (self.heads, -1))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class GateShift(nn.Module):
    """A learned shift of the gate logits, per head."""

    def __init__(self, heads: int):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(heads, dtype=torch.float32))

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial value of each parameter, by name."""
        return {"shift": torch.zeros_like(self.shift)}

    def forward(self, logits: Tensor) -> Tensor:
        """Shift `[B, T, heads, width]`."""
        return logits + self.shift[:, None]


class BranchWeights(nn.Module):
    """Learned alpha and beta, one for all heads or one per head.

    Args:
        count: 1, or the number of query heads.
        state, window: initial values; window is None without a window, and then beta is None.
    """

    def __init__(self, count: int, state: float, window: float | None):
        super().__init__()
        self.start = {"state": state} if window is None else {"state": state, "window": window}
        self.state = nn.Parameter(torch.full((count,), state, dtype=torch.float32))
        self.window = None if window is None else nn.Parameter(torch.full((count,), window, dtype=torch.float32))

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial value of each parameter, by name."""
        return {name: torch.full_like(value, self.start[name]) for name, value in self.named_parameters()}

    def forward(self, heads: int) -> tuple[Tensor, Tensor | None]:
        """Return alpha and beta `[heads]` float32."""
        return self.state.expand(heads), None if self.window is None else self.window.expand(heads)


class OutputNorm(RMSNorm):
    """RMSNorm of each head of the recurrence's output, with a learned scale per channel, as SUPRA's GroupNorm."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__(heads, head_dim, eps=1e-5)
        self.weight = nn.Parameter(torch.ones(heads, head_dim, dtype=torch.float32))

    def initial_values(self) -> dict[str, Tensor]:
        """Return the initial value of each parameter, by name."""
        return {"weight": torch.ones_like(self.weight)}

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` `[B, T, heads, head_dim]` in float32 at least; result in x's dtype."""
        return super().forward(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
