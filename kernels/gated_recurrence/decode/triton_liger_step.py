"""Decoding step of a Liger layer in Triton: the kernel of `triton_windowed_step`, starting from the projections.

Each program recomputes its inputs from the projections: they are small and, after the first read, in the cache.
"""

from torch import Tensor

from kernels.gated_recurrence.decode.triton_windowed_step import empty_out, launch
from kernels.gated_recurrence.forms import PER_CHANNEL
from kernels.operation import register_operation


def _liger_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cosine: Tensor,
    sine: Tensor,
    state: Tensor,
    ring_keys: Tensor,
    ring_values: Tensor,
    late_keys: Tensor | None,
    tokens: Tensor,
    kv_start: Tensor | None,
    gate_shift: Tensor | None,
    state_weight: Tensor,
    window_weight: Tensor,
    gate: str,
    temperature: float,
    feature_map: str,
    sinks: int,
    window_scale: float,
) -> Tensor:
    """Run `kernels.gated_recurrence.liger_step`; same arguments and result."""
    return launch(
        q, k, v, state, ring_keys, ring_values, tokens, kv_start, state_weight, window_weight, sinks, window_scale,
        cosine=cosine, sine=sine, gate_shift=gate_shift, late_keys=late_keys, per_head=gate not in PER_CHANNEL,
        gate=gate, temperature=temperature, feature_map=feature_map,
    )  # fmt: skip


def _fake(q, k, v, *_):
    return empty_out(q, v)


triton_liger_step = register_operation(
    "triton_liger_step", _liger_step, _fake, mutates=("state", "ring_keys", "ring_values", "late_keys")
)
