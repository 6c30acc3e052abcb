"""The forget gate of FoX (arXiv 2503.02130, section 3.1 and figure 7): one log-decay per token and head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_modules.networks.config import PalimpsestConfig


class ForgetGate(nn.Module):
    """`log f` for every token and head: data-dependent, learned per head, or fixed per head."""

    def __init__(self, config: PalimpsestConfig):
        super().__init__()
        self.kind = config.forget_gate
        self.num_heads = config.num_heads
        self.decay_times = (config.gate_time_min, config.gate_time_max)
        if self.kind == "data_dependent":
            self.proj = nn.Linear(config.hidden_size, config.num_heads)
        elif self.kind == "data_independent":
            self.bias = nn.Parameter(torch.empty(config.num_heads))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `hidden` `[B, T, hidden_size]` to `log_forget` `[B, T, H]`, float32 at least.

        The projection runs in float32 too: errors of the logits add up over thousands of tokens.
        """
        batch, length, _ = hidden.shape
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        if self.kind == "data_dependent":
            with torch.autocast(hidden.device.type, enabled=False):
                return F.logsigmoid(F.linear(hidden.to(dtype), self.proj.weight.to(dtype), self.proj.bias.to(dtype)))
        if self.kind == "data_independent":
            log_forget = F.logsigmoid(self.bias.to(dtype))
        else:
            log_forget = -1 / self.initial_times(hidden.device, dtype)
        return log_forget.expand(batch, length, self.num_heads)

    def initial_times(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return decay times in tokens `[H]`, log-spaced from the configured minimum to the maximum."""
        first, last = (math.log(time) for time in self.decay_times if time is not None)
        return torch.linspace(first, last, self.num_heads, device=device, dtype=dtype).exp()

    def initial_bias(self, device: torch.device) -> Tensor:
        """Return the bias `[H]` with log-sigmoid -1/T: `-log(expm1(1/T))`, in float64 because 1/T may be small."""
        return -(1 / self.initial_times(device, torch.float64)).expm1().log()
