"""How keys and values are quantized and laid out in memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

MAX_SCALE = 65504.0
"""Largest float16."""
MAX_OFFSET = 2048.0
"""Largest offset in steps: float16 has 11 bits."""
MANY_QUERIES = 16
"""Queries of a step; more are those of a prompt."""


@dataclass(frozen=True)
class Format:
    """Asymmetric round-to-nearest quantization of `[B, H, T, D]`.

    A group of numbers shares a scale and an offset, both in float16: `x ~ scale * (code + offset)`, with
    `scale = (max - min) / (2^bits - 1)`, |min| / MAX_OFFSET at least, and `offset = min / scale`.

    Args:
        bits: 2 or 4.
        groups_along: "channels": each token has D / group groups (the values of KIVI, arXiv 2402.02750).
            "tokens": each channel has one group for `group` tokens (its keys).
        group: numbers in a group, a multiple of 8 (of 16 along tokens); with "channels" it divides D.
        high_channels: the first channels, a multiple of 8, have 4 bits, the others 2 (Kitty, MLSys 2026); only for
            2 bits along tokens. The channels have to be sorted, most important first.
        clip: a group is clipped to this quantile of its absolute values before rounding (OSCAR, arXiv 2605.17757);
            1 clips nothing.

    Raises:
        ValueError: a setting is out of range.
    """

    bits: int = 2
    groups_along: str = "channels"
    group: int = 64
    high_channels: int = 0
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise ValueError(f"bits={self.bits}: give 2 or 4")
        if self.groups_along not in ("channels", "tokens"):
            raise ValueError(f"groups_along={self.groups_along!r}: give channels or tokens")
        least = 16 if self.groups_along == "tokens" else 8
        if self.group < least or self.group % least:
            raise ValueError(f"group={self.group}: give a multiple of {least}")
        if self.high_channels < 0 or self.high_channels % 8:
            raise ValueError(f"high_channels={self.high_channels}: give a multiple of 8")
        if self.high_channels and (self.bits, self.groups_along) != (2, "tokens"):
            raise ValueError(f"high_channels={self.high_channels} is for bits=2 and groups_along=tokens")
        if not 0 < self.clip <= 1:
            raise ValueError(f"clip={self.clip}: give a quantile above 0, at most 1")

    @property
    def clip_rank(self) -> int:
        """The place, in a group's ascending absolute values, of the one that the group is clipped to.

        It is an order statistic, as OSCAR's code takes it; torch.quantile would interpolate.
        """
        return min(int(self.clip * self.group), self.group - 1)

    def high_of(self, head_dim: int) -> int:
        """Return how many of a head's channels have 4 bits."""
        return head_dim if self.bits == 4 else self.high_channels

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError if heads of this width cannot be packed."""
        if head_dim % 8:
            raise ValueError(f"head_dim={head_dim} is not a multiple of 8: a byte holds four channels")
        if self.groups_along == "channels" and head_dim % self.group:
            raise ValueError(
                f"head_dim={head_dim} is not a multiple of group={self.group}: give a group that divides it"
            )
        if self.groups_along == "channels" and self.group % (head_dim // 4):
            raise ValueError(f"group={self.group} is not a multiple of head_dim / 4 = {head_dim // 4}")
        if self.high_channels > head_dim:
            raise ValueError(f"high_channels={self.high_channels} is more than head_dim={head_dim}")

    def bits_per_number(self, head_dim: int) -> float:
        """Return the bits that a packed number takes, metadata included."""
        return 2 + 2 * self.high_of(head_dim) / head_dim + 32 / self.group


@dataclass(frozen=True)
class Packed:
    """Packed keys or values: N blocks of `block` tokens for each row and head.

    A code of 4 bits is split into two planes of 2 bits: `code = low + 4 * high`. A byte holds the 2-bit codes of four
    channels, D / 4 apart: byte w has channel `i * D / 4 + w` in bits 2i and 2i + 1 (in the high plane, of C channels,
    `i * C / 4 + w`). So the four codes of a byte belong to four different tiles, and a kernel needs no exchange between
    threads to unpack them. Keys lie token by token, values channel by channel: in both, the four bytes of a register
    are neighbors along the axis that the matrix product sums over.

    Attributes:
        low: uint8 `[B, H, N, block, D / 4]`; values `[B, H, N, D / 4, block]`.
        high: uint8, the same with C / 4 bytes, or None.
        metadata: float16, pairs of scale and offset: `[B, H, N, D, 2]` for groups along tokens,
            `[B, H, N, D / group, block, 2]` along channels.
        format: the quantization.
        by_channel: True for values.
    """

    low: Tensor
    high: Tensor | None
    metadata: Tensor
    format: Format
    by_channel: bool

    @property
    def block(self) -> int:
        """Tokens in a block."""
        return self.low.shape[-1 if self.by_channel else -2]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return 4 * self.low.shape[-2 if self.by_channel else -1]

    @property
    def blocks(self) -> int:
        """Blocks of a row and head."""
        return self.low.shape[2]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that exist: low, high unless None, metadata."""
        return tuple(x for x in (self.low, self.high, self.metadata) if x is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors())

    def map(self, move: Callable[[Tensor], Tensor]) -> "Packed":
        """Return a copy in which `move` was applied to every tensor."""
        high = None if self.high is None else move(self.high)
        return replace(self, low=move(self.low), high=high, metadata=move(self.metadata))


@dataclass(frozen=True)
class PackedPast:
    """The packed tokens of one layer.

    Attributes:
        keys, values: blocks of the same number of tokens, `N` of each row.
        blocks: int32 `[B]`, how many of a row's N blocks are in use, the first ones.
        decay: float32 `[B, Hq, N, block]`, the sum of the log forget gates up to each token, or None without gates.
        key_rotation: invertible `[D, D]`, or None: keys were packed as `k A` with `A = key_rotation^-T`, which is
            `key_rotation` itself where that is orthogonal. Queries of packed keys are multiplied with it.
        value_rotation: the same for values; the packed tokens' output is multiplied with its transpose.
        debias: whether half the variance of the keys' rounding errors is taken from their logits. An error e of a logit
            makes its weight `exp(e)` times as large, which is above 1 on average: packed tokens would get too much of
            the attention. With errors even within a step, `error_variance` of `reference.py` is the variance. More
            than MANY_QUERIES queries have the mean of theirs.
    """

    keys: Packed
    values: Packed
    blocks: Tensor
    decay: Tensor | None = None
    key_rotation: Tensor | None = None
    value_rotation: Tensor | None = None
    debias: bool = False
