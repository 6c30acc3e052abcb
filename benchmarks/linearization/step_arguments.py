"""Random arguments of the steps that decode with a state and a window."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def step_arguments(
    batch: int, heads: int, groups: int, dim: int, window: int, sinks: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor | int]:
    """Return random arguments of `windowed_step` at the first token, with an empty state and ring."""
    normal = lambda *shape: torch.randn(batch, *shape, device=device)  # noqa: E731
    return {
        "q": normal(1, heads * groups, dim).to(dtype),
        "k": normal(1, heads, dim).to(dtype),
        "v": normal(1, heads, dim).to(dtype),
        "log_decay": logsigmoid(normal(1, heads, dim)) / 16,
        "state": torch.zeros(batch, heads, dim, dim, device=device),
        "q_window": normal(1, heads * groups, dim).to(dtype),
        "k_window": normal(1, heads, dim).to(dtype),
        "ring_keys": torch.zeros(batch, sinks + window, heads, dim, device=device, dtype=dtype),
        "ring_values": torch.zeros(batch, sinks + window, heads, dim, device=device, dtype=dtype),
        "tokens": torch.zeros(1, dtype=torch.int32, device=device),
        "state_weight": torch.full((heads * groups,), 0.5, device=device),
        "window_weight": torch.full((heads * groups,), 0.5, device=device),
        "sinks": sinks,
    }


def liger_arguments(
    batch: int,
    heads: int,
    groups: int,
    dim: int,
    window: int,
    sinks: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    late: bool = False,
) -> dict[str, Tensor | int]:
    """Return random arguments of `liger_step`, like those of `windowed_step`; q, k and v are views of one product.

    late: the state lags behind; rings are full, and their first tokens enter the state next.
    """
    taken = ("state", "ring_keys", "ring_values", "tokens", "state_weight", "window_weight", "sinks")
    given = step_arguments(batch, heads, groups, dim, window, sinks, dtype, device)
    widths = [heads * groups * dim, heads * dim, heads * dim]
    projected = torch.randn(batch, 1, sum(widths), device=device)
    q, k, v = (part.unflatten(-1, (-1, dim)) for part in projected.to(dtype).split(widths, dim=-1))
    angles = 6 * torch.randn(batch, 1, dim // 2, device=device).repeat(1, 1, 2)
    tables = {"cosine": angles.cos().to(dtype), "sine": angles.sin().to(dtype)}
    if late:
        tables["late_keys"] = torch.randn(batch, window + 1, heads, dim, device=device).to(dtype)
        given["ring_values"].normal_()
        given["tokens"] += window
    return {"q": q, "k": k, "v": v, **tables, **{name: given[name] for name in taken}}
