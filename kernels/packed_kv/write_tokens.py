"""Writing new tokens into the slots of a cache, at places that only the device knows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.operation import register_operation
from kernels.rounding import next_power_of_2


def _write_tokens(storage: Tensor, new: Tensor, end: Tensor) -> None:
    """Write `new` `[B, H, T, D]` into the slots of `storage` `[B, H, S, D]` that end at `end` int32 `[B]`.

    A row that has no room for its tokens is not written.
    """
    batch, heads, tokens, width = new.shape
    if storage.is_cuda and storage.stride(3) == 1 and new.stride(3) == 1:
        with torch.cuda.device_of(storage):
            _write_row[(batch * heads * tokens,)](
                storage, new, end, *storage.stride()[:3], *new.stride()[:3], heads, tokens, storage.shape[2], width,
                next_power_of_2(width), num_warps=1,
            )  # fmt: skip
        return
    place = end.long()[:, None] - tokens + torch.arange(tokens, device=end.device)
    storage.scatter_(2, place[:, None, :, None].expand_as(new), new)


write_tokens = register_operation("write_tokens", _write_tokens, lambda storage, new, end: None, mutates=("storage",))


@triton.jit(do_not_specialize=["heads", "tokens", "slots"])
def _write_row(
    storage, new, end, storage_b, storage_h, storage_s, new_b, new_h, new_t, heads, tokens, slots,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) % tokens
    head = tl.program_id(0) // tokens % heads
    row = (tl.program_id(0) // (tokens * heads)).to(tl.int64)
    slot = tl.load(end + row) - tokens + token
    channel = tl.arange(0, PADDED)
    values = tl.load(new + row * new_b + head * new_h + token * new_t + channel, mask=channel < WIDTH)
    place = row * storage_b + head.to(tl.int64) * storage_h + slot.to(tl.int64) * storage_s
    tl.store(storage + place + channel, values, mask=(channel < WIDTH) & (slot >= 0) & (slot < slots))
