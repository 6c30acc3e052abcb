"""The arithmetic: operations in PyTorch and Triton, importing nothing else of this project."""

from kernels.forgetting_attention import forgetting_attention

__all__ = ["forgetting_attention"]
