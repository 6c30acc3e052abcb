"""The norm of gradients that are on one device or sharded."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `limit`; return the norm before, float32 at least.

    Parameters may be sharded over different meshes, or not at all; every rank gets the same norm.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    by_mesh = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    norms = [gather_full(nn.utils.get_total_norm(group)) for group in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local_shard(gradient) for gradient in gradients], factor)
    return norm


def gather_full(tensor: Tensor) -> Tensor:
    """Return the tensor, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
