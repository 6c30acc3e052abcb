"""Operations in PyTorch and Triton; imports nothing else of this project."""

from kernels.forgetting_attention import forgetting_attention
from kernels.gated_recurrence import gated_recurrence, gated_recurrence_step, gated_slot_attention

__all__ = ["forgetting_attention", "gated_recurrence", "gated_recurrence_step", "gated_slot_attention"]
