"""The configuration of a Palimpsest network: flat, plain fields, checked at construction."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from common.settings import NO_VALUE, SettingError, check_choice, check_number, check_switch, check_whole, instead

FORGET_GATES = ("data_dependent", "data_independent", "fixed", "none")
MOST_LAYERS = 10_000


class PalimpsestConfig(PreTrainedConfig):
    """Sizes and switches of one causal language model.

    The switches are those of FoX (arXiv 2503.02130, section 3 and table 3) and of DiffQKV (Sigma, arXiv 2501.13629):
    separate heads and sizes for queries, keys and values. They apply to attention; recurrent mixers use `state_heads`
    to `short_conv_width`.

    A model is an embedding, `num_layers` pre-norm blocks (a token mixer and a SwiGLU each) and a linear head. The
    switches are independent: all off is a Transformer (LLaMA) without RoPE, `rope` alone is a stock LLaMA,
    `forget_gate="data_dependent"` alone FoX (LLaMA), and together with `qk_norm`, `output_gate`, `output_norm` and
    `kv_shift` FoX (Pro).

    Args:
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream; `num_heads` divides it.
        num_layers: number of blocks.
        num_heads: query heads of each block.
        num_key_heads, num_value_heads: heads of the keys and of the values; each divides num_heads, and query head h
            reads key head `h // (num_heads / num_key_heads)`. None means num_heads.
        key_head_dim: width of a cached key head, at most hidden_size / num_heads, the value for None. A trained linear
            map per head brings a smaller one to that width at each read, before QK-norm and rotation.
        augmented_query_dim: inner width of a SwiGLU on the projected queries; None means no SwiGLU.
        intermediate_size: inner width of each block's SwiGLU; None means blocks with only a mixer, as in Mamba-2.
        mixers: one registered mixer name for each layer ("attention", "hgrn2", "gla", "mamba2", "gsa"), or one for
            all; None means "attention" everywhere.
        forget_gate: "data_dependent" (sigmoid(w x + b)), "data_independent" (a learned bias per head), "fixed", or
            "none" (also None): the first line of figure 7.
        gate_time_min, gate_time_max: decay times, in tokens, of the first and the last head, log-spaced between;
            initial values of data-independent gates, constants of fixed gates.
        rope: rotate queries and keys by their position (arXiv 2104.09864), as Hugging Face's Llama does.
        rope_base: base of the rotation's wavelengths.
        qk_norm: RMSNorm on queries and keys, with separate weights per head.
        output_gate: multiply the attention output by sigmoid(W x).
        output_norm: RMSNorm on each head of the attention output.
        kv_shift: mix each key and value with its predecessor's, by a data-dependent share per head.
        state_heads: heads of the recurrent mixers, one state each; None means num_heads.
        state_dim: key width of a state head; None means its value width, half of it for "gla", and 128 for "mamba2".
            "gsa" has two states: key by slot, and slot by value.
        expand_value: value channels of all state heads over hidden_size; None means 1, and 2 for "mamba2".
        num_slots: slots per head of "gsa".
        gate_rank: width between the two matrices of the gate of "gla".
        gate_temperature: divisor of the log gates of "gla" and "gsa"; None means 16 and 8.
        short_conv_width: width in tokens of the convolution before the recurrence, on the channels that each mixer
            names; None means no convolution.
        prune: natural log of the attention mass that may be skipped (arXiv 2504.06949), -10 in the paper; None computes
            all.
        norm_eps: added to the mean square in every RMSNorm.
        initializer_range: initial standard deviation of every weight matrix.
        tie_word_embeddings: share the embedding's matrix with the head.
        bos_token_id, eos_token_id, pad_token_id: for generation; None where the tokenizer has none.
        max_position_embeddings: training length in tokens; informative, nothing is truncated to it.
        kwargs: arguments of every Hugging Face configuration (`architectures`, `dtype`, ...).

    Raises:
        ValueError: with one line that names the argument, its value and the fix. The model checks the names in `mixers`
            (`lit_modules.networks.mixers.check_mixers`).
    """

    model_type = "palimpsest"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "rms_norm_eps": "norm_eps",
    }

    # PreTrainedConfig makes a dataclass of these. `@strict` is left out: its refusals take two lines and name no fix.
    vocab_size: int = 50257
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_key_heads: int | None = None
    num_value_heads: int | None = None
    key_head_dim: int | None = None
    augmented_query_dim: int | None = None
    intermediate_size: int | None = 2048
    mixers: Sequence[str] | str | None = None
    forget_gate: str | None = "data_dependent"
    gate_time_min: float | None = None
    gate_time_max: float | None = None
    rope: bool = False
    rope_base: float = 500000.0
    qk_norm: bool = False
    output_gate: bool = False
    output_norm: bool = False
    kv_shift: bool = False
    state_heads: int | None = None
    state_dim: int | None = None
    expand_value: float | None = None
    num_slots: int = 64
    gate_rank: int = 16
    gate_temperature: float | None = None
    short_conv_width: int | None = None
    prune: float | None = None
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    max_position_embeddings: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.transformers_version is None:
            _refuse_unknown_keys(kwargs)
        self.forget_gate = "none" if self.forget_gate is None else self.forget_gate
        self._check_sizes()  # before num_layers repeats the mixer
        mixers = "attention" if self.mixers is None else self.mixers
        self.mixers = [mixers] * self.num_layers if isinstance(mixers, str) else list(mixers)
        self.check()
        super().__post_init__(**kwargs)
        self.validate()  # the checks of Hugging Face's own arguments

    @property
    def layer_mixers(self) -> Sequence[str]:
        """The mixer of each layer: `mixers`, which is a list once the configuration is made."""
        assert self.mixers is not None
        return self.mixers

    @property
    def head_dim(self) -> int:
        """Width of one query head and of one value head."""
        return self.hidden_size // self.num_heads

    @property
    def head_counts(self) -> tuple[int, int, int]:
        """Numbers of query, key and value heads."""
        return self.num_heads, self.num_key_heads or self.num_heads, self.num_value_heads or self.num_heads

    @property
    def cached_key_dim(self) -> int:
        """Width of one cached key head."""
        return self.key_head_dim or self.head_dim

    def check(self) -> None:
        """Check that the values fit one another; a model calls it again, because attributes may be set later.

        Raises:
            ValueError: if they do not.
        """
        self._check_sizes()
        self._check_switches()
        self._check_gate()
        self._check_mixers()

    def _check_sizes(self) -> None:
        check_whole("num_layers", self.num_layers, 1, MOST_LAYERS)  # `mixers` holds one name per layer
        for key in ("vocab_size", "hidden_size", "num_heads"):
            check_whole(key, getattr(self, key), 1)
        for key in ("intermediate_size", "max_position_embeddings"):
            check_whole(key, getattr(self, key), 1, null=True)
        if self.hidden_size % self.num_heads:
            fix = f"give a divisor, such as {_nearest_divisor(self.hidden_size, self.num_heads)}"
            raise SettingError("num_heads", self.num_heads, fix, f"does not divide hidden_size={self.hidden_size}")
        if self.rope and self.head_dim % 2:
            problem = f"rotates pairs, but hidden_size/num_heads={self.head_dim} is odd"
            raise SettingError("rope", True, "make it even", problem)
        self._check_keys_and_values()
        for key in ("norm_eps", "initializer_range", "rope_base"):
            check_number(key, getattr(self, key), above=0)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            check_whole(key, getattr(self, key), 0, self.vocab_size - 1, null=True)

    def _check_keys_and_values(self) -> None:
        for key in ("num_key_heads", "num_value_heads", "key_head_dim", "augmented_query_dim"):
            check_whole(key, getattr(self, key), 1, null=True)
        for key, count in zip(("num_key_heads", "num_value_heads"), self.head_counts[1:], strict=True):
            if self.num_heads % count:
                fix = f"give a divisor, such as {_nearest_divisor(self.num_heads, count)}, or null for as many"
                raise SettingError(key, count, fix, f"does not divide num_heads={self.num_heads}")
        if self.cached_key_dim > self.head_dim:
            problem = f"is above hidden_size/num_heads={self.head_dim}, the width it is mapped to"
            raise SettingError("key_head_dim", self.key_head_dim, f"give at most {self.head_dim}, or null", problem)

    def _check_switches(self) -> None:
        for key in ("rope", "qk_norm", "output_gate", "output_norm", "kv_shift", "tie_word_embeddings"):
            check_switch(key, getattr(self, key))

    def _check_gate(self) -> None:
        check_choice("forget_gate", self.forget_gate, FORGET_GATES)
        needed = self.forget_gate in ("data_independent", "fixed")
        for key in ("gate_time_min", "gate_time_max"):
            if needed and getattr(self, key) is None:
                raise SettingError(key, None, f"give a time in tokens, forget_gate={self.forget_gate} needs it")
            check_number(key, getattr(self, key), above=0, null=True)
        first, last = self.gate_time_min, self.gate_time_max
        if needed and first is not None and last is not None and last < first:
            raise SettingError("gate_time_max", last, "swap them", f"is below gate_time_min={first}")
        if self.prune is not None and self.forget_gate == "none":
            raise SettingError("prune", self.prune, "set forget_gate, or prune=null", "has nothing to prune by")
        check_number("prune", self.prune, below=0, null=True)  # the log of a share

    def _check_mixers(self) -> None:
        given = len(self.layer_mixers)
        if given != self.num_layers:
            problem = f"has {given} names for num_layers={self.num_layers}"
            raise SettingError("mixers", NO_VALUE, "give one a layer", problem)
        for key in ("state_heads", "state_dim", "short_conv_width"):
            check_whole(key, getattr(self, key), 1, null=True)
        for key in ("num_slots", "gate_rank"):
            check_whole(key, getattr(self, key), 1)
        for key in ("expand_value", "gate_temperature"):
            check_number(key, getattr(self, key), above=0, null=True)


def _nearest_divisor(size: int, wanted: int) -> int:
    """Search outwards from `wanted`: trying every number would take minutes for a size of a billion."""
    wanted = min(wanted, size)
    near = (d for distance in range(wanted) for d in (wanted - distance, wanted + distance))
    return next(d for d in near if size % d == 0)


def _refuse_unknown_keys(kwargs: dict[str, Any]) -> None:
    """Refuse unknown keys, because a misspelt key would become an attribute that nothing reads.

    Saved configurations are not checked: they name the transformers version that wrote them, which may know more keys
    than the installed one.
    """
    base = PreTrainedConfig()
    hugging_face = {"name_or_path", "torch_dtype", "attn_implementation", "experts_implementation"}
    for key in kwargs:
        known = key in hugging_face or hasattr(base, key)
        if not known and not key.startswith("_"):
            names = [field.name for field in fields(PalimpsestConfig) if not hasattr(base, field.name)]
            raise SettingError(key, kwargs[key], instead(key, names), "is not a key of a model")
