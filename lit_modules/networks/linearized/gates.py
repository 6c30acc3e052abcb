"""Gates of the recurrence from a layer's own keys, and the few parameters that a recipe may add to it."""

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
    """Gate logits of one head: its channels, its slots, one, or 0 for gates that are constant."""
    if settings.gate in PER_CHANNEL:
        return head_dim
    if settings.gate == "slots":
        return settings.num_slots
    return int(settings.gate in PER_HEAD)


def pool(keys: Tensor, width: int) -> Tensor:
    """Adaptive average pooling of keys `[B, T, H, D]`, all heads side by side, to `[B, T, H, width]`, in float32.

    Equal widths are left as they are (arXiv 2503.01496, section 3.1).
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
    """The recurrence of the settings' form (arXiv 2503.01496, table 1).

    Args:
        q: `[B, T, Hq, F]`, mapped.
        k: `[B, T, Hk, F]`, mapped; of HGRN2 it does not matter.
        v: `[B, T, Hk, D]`.
        logits: `[B, T, Hk, gate_width]` float32, None where that is 0.
    """
    gate, temperature = settings.gate, settings.gate_temperature
    if gate == "slots":
        return forms.slots(q, k, v, logits, temperature=temperature)
    if gate in PER_HEAD:
        logits = logits.squeeze(-1)
    elif gate in PER_CHANNEL:
        # A map that has made several channels of one gives all of them its gate.
        logits = logits.repeat(1, 1, 1, q.shape[-1] // logits.shape[-1])
    return forms.liger(gate, q, k, v, logits, temperature=temperature)


class GateProjection(nn.Module):
    """Gate logits from the hidden states, by a matrix that is drawn: the ablation of pooled keys."""

    def __init__(self, hidden_size: int, heads: int, width: int):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads * width, hidden_size, dtype=torch.float32))

    def initial_values(self) -> dict[str, Tensor]:
        """What the parameters begin as, by name."""
        return {"weight": torch.randn_like(self.weight) * 0.02}

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, T, hidden_size]` to `[B, T, heads, width]`, float32 at least."""
        logits = F.linear(hidden, self.weight.to(hidden.dtype)).unflatten(-1, (self.heads, -1))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class GateShift(nn.Module):
    """What is learned to be added to the gate's logits, for each head."""

    def __init__(self, heads: int):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(heads, dtype=torch.float32))

    def initial_values(self) -> dict[str, Tensor]:
        """What the parameters begin as, by name."""
        return {"shift": torch.zeros_like(self.shift)}

    def forward(self, logits: Tensor) -> Tensor:
        """`[B, T, heads, width]` shifted."""
        return logits + self.shift[:, None]


class BranchWeights(nn.Module):
    """Alpha and beta, learned, one for all heads or one for each.

    Args:
        count: 1, or the query heads.
        state, window: where they begin; window is None where there is no window, and no beta.
    """

    def __init__(self, count: int, state: float, window: float | None):
        super().__init__()
        self.start = {"state": state, "window": window}
        self.state = nn.Parameter(torch.full((count,), state, dtype=torch.float32))
        self.window = None if window is None else nn.Parameter(torch.full((count,), window, dtype=torch.float32))

    def initial_values(self) -> dict[str, Tensor]:
        """What the parameters begin as, by name."""
        return {name: torch.full_like(value, self.start[name]) for name, value in self.named_parameters()}

    def forward(self, heads: int) -> tuple[Tensor, Tensor | None]:
        """Alpha and beta `[heads]` float32."""
        return self.state.expand(heads), None if self.window is None else self.window.expand(heads)


class OutputNorm(RMSNorm):
    """Each head of the recurrence's output normalized, with a learned scale for each channel, as SUPRA's GroupNorm."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__(heads, head_dim, eps=1e-5)
        self.weight = nn.Parameter(torch.ones(heads, head_dim, dtype=torch.float32))

    def initial_values(self) -> dict[str, Tensor]:
        """What the parameters begin as, by name."""
        return {"weight": torch.ones_like(self.weight)}

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` `[B, T, heads, head_dim]` in float32 at least; result in x's dtype."""
        return super().forward(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)
