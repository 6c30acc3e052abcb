"""Attention whose old keys and values are packed in 2 or 4 bits."""

from torch import Tensor

from kernels.packed_kv.formats import Format, Packed, PackedPast
from kernels.packed_kv.operator import flat, operation
from kernels.packed_kv.reference import (
    dequantize,
    error_variance,
    pack,
    packed_attention_reference,
    quantize,
    read_squares,
    unpack,
)
from kernels.packed_kv.triton.pack import can_pack, pack_slots
from kernels.packed_kv.write_tokens import rotate, rotate_and_write, write_tokens

__all__ = [
    "Format",
    "Packed",
    "PackedPast",
    "can_pack",
    "dequantize",
    "error_variance",
    "pack",
    "pack_slots",
    "packed_attention",
    "packed_attention_reference",
    "quantize",
    "read_squares",
    "rotate",
    "rotate_and_write",
    "unpack",
    "write_tokens",
]


def packed_attention(
    q: Tensor,
    dense_keys: Tensor,
    dense_values: Tensor,
    dense_end: Tensor,
    past: PackedPast | None = None,
    *,
    dense_start: Tensor | None = None,
    scale: float | None = None,
    decay: Tensor | None = None,
    softcap: float | None = None,
    past_q: Tensor | None = None,
) -> Tensor:
    """Attend to packed tokens and to tokens in 16 bits ("dense") as one softmax.

    The queries are the last T dense tokens, causal among themselves; they see all other dense tokens and all packed
    tokens of their row. Softmax does not depend on the order of the keys, so the dense tokens may have any order before
    the queries. Packed tokens are dequantized in registers (CUDA) or by segments (elsewhere), never all at once. There
    is no gradient.

    Args:
        q: `[B, Hq, T, D]`, float16, bfloat16, float32 or float64.
        dense_keys: `[B, Hk, C, D]` in q's dtype, C slots; query head h reads head `h // (Hq / Hk)`.
        dense_values: `[B, Hv, C, Dv]`; query head h reads head `h // (Hq / Hv)`.
        dense_end: int32 `[B]`: the slots in use end here; those from here on may hold anything.
        past: the packed tokens, or None.
        dense_start: int32 `[B]`, the first slot in use (left padding); a query before it gives 0. None: 0.
        scale: factor on the logits; `D ** -0.5` when None.
        decay: float32 `[B, Hq, C]`, the sum of the log forget gates up to each dense token: `c_i - c_j` is added to the
            logits (FoX, arXiv 2503.02130, eq. 4). `past.decay` continues it. None without gates.
        softcap: logits become `softcap * tanh(logit / softcap)`. None leaves them.
        past_q: q times `past.key_rotation`, contiguous, if it is at hand (`rotate_and_write`): saves a launch.

    Returns:
        `[B, Hq, T, Dv]` in q's dtype.

    Raises:
        ValueError: sizes or dtypes do not fit.
    """
    _check(q, dense_keys, dense_values, past, decay)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    dense = q, dense_keys, dense_values, dense_end, dense_start, decay
    if past is None:
        return operation(*dense, [], None, None, None, None, None, [], [], False, scale, softcap)
    (keys, key_format), (values, value_format) = flat(past.keys), flat(past.values)
    return operation(
        *dense, keys + values, past.blocks, past.decay, past.key_rotation, past.value_rotation, past_q,
        key_format, value_format, past.debias, scale, softcap,
    )  # fmt: skip


def _check(q: Tensor, keys: Tensor, values: Tensor, past: PackedPast | None, decay: Tensor | None) -> None:
    batch, heads, time, head_dim = q.shape
    if time < 1 or keys.shape[2] < time:
        raise ValueError(
            f"q has {time} tokens, and the dense keys {keys.shape[2]} slots: they have to hold the queries"
        )
    for name, x in (("dense_keys", keys), ("dense_values", values)):
        if x.dtype != q.dtype or x.shape[0] != batch or heads % x.shape[1]:
            raise ValueError(f"{name} {tuple(x.shape)} {x.dtype} does not fit q {tuple(q.shape)} {q.dtype}")
    if keys.shape[3] != head_dim or values.shape[2] != keys.shape[2]:
        raise ValueError(
            f"dense_keys {tuple(keys.shape)} do not fit dense_values {tuple(values.shape)} and q's {head_dim} channels"
        )
    if past is None:
        return
    if past.keys.by_channel or not past.values.by_channel:
        raise ValueError("past: pack values with by_channel=True, and keys without")
    if past.keys.low.shape[:3] != (*keys.shape[:2], past.keys.blocks) or past.keys.head_dim != head_dim:
        raise ValueError(f"past.keys {tuple(past.keys.low.shape)} do not fit dense_keys {tuple(keys.shape)}")
    if past.values.low.shape[:3] != (*values.shape[:2], past.keys.blocks) or past.values.head_dim != values.shape[3]:
        raise ValueError(f"past.values {tuple(past.values.low.shape)} do not fit dense_values {tuple(values.shape)}")
    if past.keys.block != past.values.block:
        raise ValueError(f"past: keys have blocks of {past.keys.block} tokens, values of {past.values.block}")
    if (past.decay is None) != (decay is None):
        raise ValueError("decay and past.decay: give both or none")
