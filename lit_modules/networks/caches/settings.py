"""The settings of a compressed cache: which tokens keep 16 bits, what becomes of the others, and which values are read.

Keys and values have settings of their own. `conf/cache/` has the published methods under their names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from common.settings import SettingError, check_choice, check_keys, check_number, check_whole
from kernels.packed_kv import Format
from lit_modules.networks.caches.rotations import COMMAND
from lit_modules.networks.caches.selection import POLICIES as BY_POSITION

BY_CONTENT = ("heavy_hitters", "prompt_attention", "forget_gate")
"""Policies that read attention scores or gates, not positions alone."""

FITTED = ("rotation", "balanced", "ordered")
"""Transforms from the file `rotations`."""

WAYS = ("none", "hadamard", *FITTED, "sorted")
BLOCK = 128
"""Tokens of a block where no group runs along tokens."""


@dataclass(frozen=True)
class TensorSettings:
    """What happens to the keys of a layer, or to its values.

    Args:
        keep: which tokens keep 16 bits. `log_sparse` (LogQuant, arXiv 2503.19950): 2W to 3W - 1 tokens, the newest
            dense, with gaps that double with every W back. `recent`: the newest. `first_and_recent`: the first too.
            `heavy_hitters` (H2O, arXiv 2306.14048): half the newest, half those with the largest sum of attention.
            `prompt_attention` (SnapKV, arXiv 2404.14469): half the newest, half those that the last queries of the
            prompt, or of its last chunk, attend to most; most of a prompt that is read at once is chosen from.
            `forget_gate`: the newest third, and others as dense as the forget gate's weight of them.
        bits: of the other tokens: 2 or 4; 0 evicts them; 16 keeps all tokens as they are, whatever `keep` says.
        groups_along: numbers that share a scale: `channels` of one token, or `tokens` of one channel (KIVI's keys).
        group: numbers in a group, a multiple of 16; None: a head's width along channels, BLOCK along tokens.
        high_channels: the first so many channels have 4 bits (Kitty); for 2 bits along tokens.
        transform: an invertible map before packing: `none`, `hadamard`, or from the file `rotations` OSCAR's `rotation`
            or `balanced`, which takes the mean of each head away too, or `ordered`, the same with what matters most in
            the first channels, for groups along tokens; `sorted`: channels by their range in the first block of the
            cache, the widest first.
        debias: whether half the variance of a packed key's rounding error is taken from its logits: an error e makes a
            weight `exp(e)` times as large, above 1 on average, so packed tokens would get too much of the attention.
            For keys; those that are mapped when they are read (DiffQKV's of half width) stay as they are.
        clip: quantile of a group's absolute values to which it is clipped before rounding (OSCAR); 1 clips nothing.
        window: the window of this tensor where it differs from the cache's.

    Raises:
        SettingError: a value is out of range, or two contradict each other; the key has no prefix, see `under`.
    """

    keep: str = "log_sparse"
    bits: int = 2
    groups_along: str = "channels"
    group: int | None = None
    high_channels: int = 0
    transform: str = "none"
    debias: bool = False
    clip: float = 1.0
    window: int | None = None

    def __post_init__(self) -> None:
        check_choice("keep", self.keep, BY_POSITION + BY_CONTENT)
        check_choice("bits", self.bits, (0, 2, 4, 16))
        check_choice("groups_along", self.groups_along, ("channels", "tokens"))
        check_choice("transform", self.transform, WAYS)
        check_whole("group", self.group, 16, null=True)
        if self.group is not None and self.group % 16:
            raise SettingError("group", self.group, "give a multiple of 16")
        check_whole("high_channels", self.high_channels, 0)
        if self.high_channels % 8:
            raise SettingError("high_channels", self.high_channels, "give a multiple of 8")
        if self.high_channels and (self.bits, self.groups_along) != (2, "tokens"):
            fix = "set bits=2 and groups_along=tokens, or high_channels=0"
            raise SettingError("high_channels", self.high_channels, fix, "is for 2 bits along tokens")
        check_choice("debias", self.debias, (False, True))
        check_number("clip", self.clip, above=0, most=1)
        check_whole("window", self.window, 1, null=True)

    @property
    def is_packed(self) -> bool:
        """Whether tokens are quantized."""
        return self.bits in (2, 4)

    @property
    def reads_content(self) -> bool:
        """Whether the choice of tokens depends on more than their positions."""
        return self.bits != 16 and self.keep in BY_CONTENT

    def format_of(self, width: int) -> Format:
        """Return how tokens of heads of this width are quantized; only where they are."""
        group = self.group or (width if self.groups_along == "channels" else BLOCK)
        return Format(self.bits, self.groups_along, group, self.high_channels, self.clip)

    def check_width(self, name: str, width: int) -> None:
        """Raise ValueError if heads of this width cannot be packed; `name` is where the settings are."""
        if self.is_packed:
            try:
                Format(groups_along="tokens").check_head_dim(width)  # before it becomes a group's size
                self.format_of(width).check_head_dim(width)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True)
class CacheSettings:
    """The settings of a compressed cache.

    Args:
        keys, values: of the keys and of the values; a mapping becomes `TensorSettings`.
        window: W of `log_sparse`, which keeps 2W to 3W - 1 tokens; elsewhere the tokens that keep 16 bits.
        first: the first tokens that `first_and_recent` keeps.
        rotations: the safetensors file of `transform=rotation`, `balanced` and `ordered`, which job=calibrate writes.
        top_values: values that a query head reads for a token that comes alone, those of its highest scores over all
            keys (selective V fetching, arXiv 2501.13629); where several tokens come at once, as in a prompt, it reads
            all. For keys and values of 16 bits. None: it always reads all.

    Raises:
        SettingError: a value is out of range, or two contradict each other.
    """

    keys: TensorSettings = field(default_factory=TensorSettings)
    values: TensorSettings = field(default_factory=TensorSettings)
    window: int = 64
    first: int = 0
    rotations: str | None = None
    top_values: int | None = None

    def __post_init__(self) -> None:
        for name in ("keys", "values"):
            given = getattr(self, name)
            if isinstance(given, Mapping):
                object.__setattr__(self, name, _tensor_settings(name, given))
        check_whole("window", self.window, 1)
        check_whole("first", self.first, 0)
        if self.values.debias:
            raise SettingError("values.debias", True, "set keys.debias", "is for logits, which keys make")
        if (self.keys.bits == 0) != (self.values.bits == 0):
            fix = f"set values.bits={self.keys.bits} too"
            raise SettingError("keys.bits", self.keys.bits, fix, f"evicts, but values.bits={self.values.bits}")
        if self.keys.reads_content or self.values.reads_content or self.keys.bits == 0:
            self._check_same_tokens()
        self._check_block()
        check_whole("top_values", self.top_values, 1, null=True)
        if self.top_values is not None and self.compresses:
            name, bits = next((name, t.bits) for name, t in self.tensors.items() if t.bits != 16)
            fix = "set keys.bits=16 and values.bits=16, or leave it out"
            raise SettingError("top_values", self.top_values, fix, f"reads tokens of 16 bits, but {name}.bits={bits}")
        fitted = {n: t.transform for n, t in self.tensors.items() if t.is_packed and t.transform in FITTED}
        if fitted and self.rotations is None:
            name, way = next(iter(fitted.items()))
            fix = f"name the file that job=calibrate wrote ({COMMAND})"
            raise SettingError("rotations", None, fix, f"with {name}.transform={way}")
        if self.rotations is not None and not fitted:
            fix = "set keys.transform or values.transform to rotation, balanced or ordered, or leave it out"
            raise SettingError("rotations", self.rotations, fix, "is not read")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "CacheSettings":
        """Build settings from plain values, as a YAML file of `conf/cache/` has them.

        Raises:
            SettingError: a key is unknown, or as the class does; keys begin with `cache.`.
        """
        check_keys("cache", settings, [each.name for each in fields(cls)])
        try:
            return cls(**settings)
        except SettingError as error:
            if not error.key.startswith("cache."):
                error.key = f"cache.{error.key}"
            raise

    @property
    def tensors(self) -> dict[str, TensorSettings]:
        """The settings of keys and values by name."""
        return {"keys": self.keys, "values": self.values}

    @property
    def block(self) -> int:
        """Tokens that are packed together: the group that runs along tokens, or BLOCK."""
        along = [t.group for t in self.tensors.values() if t.is_packed and t.groups_along == "tokens"]
        return along[0] or BLOCK if along else BLOCK

    @property
    def compresses(self) -> bool:
        """Whether any token loses its 16 bits."""
        return self.keys.bits != 16 or self.values.bits != 16

    @property
    def is_full(self) -> bool:
        """Whether a model's own cache does the same: no token loses its 16 bits, and all values are read."""
        return not self.compresses and self.top_values is None

    def window_of(self, tensor: TensorSettings) -> int:
        """Return the window of the keys or of the values."""
        return self.window if tensor.window is None else tensor.window

    def partition(self, tensor: TensorSettings) -> tuple[str, int, int, int]:
        """Return what decides which tokens of a tensor keep 16 bits: policy, window, first tokens, block.

        The policy is `all` for 16 bits. The block is 1 where tokens are evicted one by one.
        """
        if tensor.bits == 16:
            return "all", 0, 0, self.block
        first = self.first if tensor.keep == "first_and_recent" else 0
        evicts_singly = tensor.bits == 0 and tensor.keep in BY_POSITION
        return tensor.keep, self.window_of(tensor), first, 1 if evicts_singly else self.block

    def _check_same_tokens(self) -> None:
        if self.partition(self.keys) == self.partition(self.values):
            return
        keep = self.keys.keep if self.keys.bits == 0 or self.keys.reads_content else self.values.keep
        problem = "chooses for keys and values at once" if keep in BY_CONTENT else "evicts keys and values at once"
        raise SettingError(
            "values.keep", self.values.keep, f"keep, window and bits have to fit keys.keep={keep}", problem
        )

    def _check_block(self) -> None:
        along = {n: t.group or BLOCK for n, t in self.tensors.items() if t.is_packed and t.groups_along == "tokens"}
        if len(set(along.values())) > 1:
            fix = f"give keys.group={along['keys']} too"
            raise SettingError("values.group", along["values"], fix, "runs along tokens, and so do the keys' groups")


def _tensor_settings(name: str, given: Mapping[str, Any]) -> TensorSettings:
    check_keys(name, given, [each.name for each in fields(TensorSettings)])
    try:
        return TensorSettings(**given)
    except SettingError as error:
        raise error.under(name) from None
