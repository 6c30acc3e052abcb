"""The norm of gradients that lie on one device or on many."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `limit`; return the norm before, float32 at least.

    Parameters may be spread over different meshes, or over none; every rank gets the same norm.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    by_mesh = defaultdict(list)
    for gradient in gradients:
        by_mesh[gradient.device_mesh if isinstance(gradient, DTensor) else None].append(gradient)
    norms = [whole(nn.utils.get_total_norm(group)) for group in by_mesh.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
    return norm


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered from all ranks where it is spread."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread, else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
