"""See what the attention layers of a running model read, in models of this project and in stock ones."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lit_modules.networks.language_modelling import LanguageModelling
from lit_modules.networks.linearized.softmax import SoftmaxAttention
from lit_modules.networks.mixers.attention import Attention
from lit_modules.networks.positions import Positions

WATCHED = "watched"
"""Name of the attention implementation that stock models have meanwhile."""


class AttentionInputs(NamedTuple):
    """What one attention layer reads; heads that query heads share are not repeated.

    Args:
        queries: `[B, Hq, T, D]`, normalized and rotated by their positions.
        keys: `[B, Hk, S, D]`, as the scores read them.
        values: `[B, Hv, S, Dv]`.
        cached_keys: `[B, Hk, S, Dc]`, as a cache holds them: `keys`, or what a map makes them from.
        finish: computes keys from cached keys, both as above; None where they are the same.
        log_forget: logs of the forget gates `[B, Hq, S]` float32, or None without: their sum from key to query is added
            to a score.
        scale: the factor of the scores; None is `D ** -0.5`.
        softcap: scores become `softcap * tanh(score / softcap)` before the gates; None leaves them.
        window: the number of newest tokens that a query sees; None is all.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    cached_keys: Tensor
    finish: Callable[[Tensor], Tensor] | None = None
    log_forget: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None


See = Callable[[int, AttentionInputs], None]


@contextmanager
def watched_attention(model: PreTrainedModel, see: See) -> Iterator[None]:
    """Call `see(layer, inputs)` in each forward pass, for each layer that attends to keys and values.

    Layers with a state of constant size are passed over. Run the model without a cache, or `see` gets the new tokens
    alone.

    Raises:
        ValueError: if a stock model's attention does not go through transformers' `AttentionInterface`.
    """
    with ExitStack() as stack:
        if isinstance(model, LanguageModelling):
            stack_of_layers: Any = model.base_model.layers
            for number, layer in enumerate(stack_of_layers):
                mixer = layer.self_attn
                if isinstance(mixer, Attention):
                    stack.enter_context(_watched_mixer(mixer, functools.partial(see, number)))
                elif isinstance(mixer, SoftmaxAttention):
                    stack.enter_context(_watched_softmax(mixer, functools.partial(see, number)))
        else:
            stack.enter_context(_watched_stock(model, see))
        yield


@contextmanager
def _watched_mixer(mixer: Attention, see: Callable[[AttentionInputs], None]) -> Iterator[None]:
    """Watch an attention layer of our own; a key map's input is what its cache holds."""
    unmapped: list[Tensor] = []

    def watch(inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], positions: Positions, **options: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in inputs[:3])
        log_forget = None if inputs[3] is None else inputs[3].transpose(1, 2)
        if mixer.k_map_proj is None:
            see(AttentionInputs(q, k, v, k, log_forget=log_forget))
        else:
            cached, mapped = unmapped.pop().transpose(1, 2), functools.partial(finish, positions)
            see(AttentionInputs(q, k, v, cached, mapped, log_forget))
        return operation(inputs, positions, **options)

    def finish(positions: Positions, cached: Tensor) -> Tensor:
        return mixer.finish_keys(cached.transpose(1, 2), positions.rotary).transpose(1, 2)

    def keep(module: nn.Module, inputs: tuple[Tensor]) -> None:
        unmapped[:] = inputs

    operation = mixer.operation
    handle = None if mixer.k_map_proj is None else mixer.k_map_proj.register_forward_pre_hook(keep)
    try:
        with _replaced(mixer, "operation", watch):
            yield
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def _watched_softmax(attention: SoftmaxAttention, see: Callable[[AttentionInputs], None]) -> Iterator[None]:
    """Watch a softmax layer of a linearized model."""
    operation = attention.softmax_attention

    def watch(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **options: Any) -> Tensor:
        keys = k.transpose(1, 2)
        scale, window = attention.scale, attention.sliding_window
        see(AttentionInputs(q.transpose(1, 2), keys, v.transpose(1, 2), keys, scale=scale, window=window))
        return operation(q, k, v, *arguments, **options)

    with _replaced(attention, "softmax_attention", watch):
        yield


@contextmanager
def _replaced(module: nn.Module, name: str, function: Callable[..., Tensor]) -> Iterator[None]:
    """Replace a method of one module."""
    own = module.__dict__.get(name)  # set by context parallelism, which replaces a method too
    setattr(module, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(module, name)
        else:
            setattr(module, name, own)


@contextmanager
def _watched_stock(model: PreTrainedModel, see: See) -> Iterator[None]:
    """Watch a stock model through an attention implementation that calls the one it has."""
    before = model.config._attn_implementation

    def watch(module: Any, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
        scale, softcap, window = (options.get(name) for name in ("scaling", "softcap", "sliding_window"))
        see(module.layer_idx, AttentionInputs(query, key, value, key, scale=scale, softcap=softcap, window=window))
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return ALL_ATTENTION_FUNCTIONS.get(before, eager)(module, query, key, value, *arguments, **options)

    AttentionInterface.register(WATCHED, watch)
    AttentionMaskInterface.register(WATCHED, ALL_MASK_ATTENTION_FUNCTIONS[before])
    try:
        model.set_attn_implementation(WATCHED)
        if model.config._attn_implementation != WATCHED:
            raise ValueError(f"the attention of a {type(model).__name__} cannot be watched: it has its own interface")
        yield
    finally:
        model.set_attn_implementation(before)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(WATCHED)
