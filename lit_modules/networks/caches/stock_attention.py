"""Stock models of transformers attend to a compressed cache through an attention function that is registered here.

What a cache's `update` returns goes straight to the attention function, so a compressed layer returns itself. The
function `compressed:sdpa` recognizes it; ordinary tensors go to `sdpa`, whose masks it also takes.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from common.settings import SettingError
from lit_modules.networks.caches.compressed_layer import CompressedCacheLayer

PREFIX = "compressed:"


def use_compressed_attention(config: PreTrainedConfig) -> None:
    """Let the attention layers of a model with this configuration recognize compressed layers.

    All else they do as before: the function that the model had gets their tensors, and makes their masks.

    Raises:
        SettingError: the model's attention has masks of its own kind.
    """
    name = config._attn_implementation or "sdpa"
    if name.startswith(PREFIX):
        return
    if (name != "eager" and name not in ALL_MASK_ATTENTION_FUNCTIONS) or name == "flex_attention":
        raise SettingError("attn_implementation", name, "give sdpa, eager or flash_attention_2", "has other masks")

    def attend(module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if isinstance(key, CompressedCacheLayer):
            return _attend(module, query, key, attention_mask, **kwargs), None
        original = _eager_of(module) if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        return original(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(PREFIX + name, attend)
    AttentionMaskInterface.register(PREFIX + name, ALL_MASK_ATTENTION_FUNCTIONS[name])
    config._attn_implementation = PREFIX + name


def restore_attention(config: PreTrainedConfig) -> None:
    """Undo `use_compressed_attention`."""
    config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)


def model_sizes(config: PreTrainedConfig) -> str:
    """Return what tells a stock model from one of another kind or size."""
    return f"{config.model_type} of {config.num_hidden_layers} layers of {config.hidden_size}"


def left_padding(mask: Tensor) -> list[int]:
    """Return the padding on the left of each row, by the newest token's row of a mask; waits for the device.

    Args:
        mask: `[B, S]` or `[B, 1, T, S]`, bool, or a number that is 0 (in `[B, S]` not 0) where a token is visible.

    Raises:
        ValueError: a hidden token follows a visible one.
    """
    if mask.ndim == 2:
        visible = mask != 0
    else:
        last = mask[:, 0, -1]
        visible = last if last.dtype == torch.bool else last == 0
    padding = (~visible).int().cumprod(-1).sum(-1)
    holes = visible.sum(-1) != visible.shape[-1] - padding
    table = torch.stack((padding, holes.to(padding.dtype))).tolist()
    if any(table[1]):
        raise ValueError(
            f"attention_mask has a hole in row {table[1].index(1)}: a compressed cache takes padding on the left alone"
        )
    return [int(count) for count in table[0]]


def _attend(
    module: Any,
    query: Tensor,
    layer: CompressedCacheLayer,
    mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attend to a compressed layer; returns `[B, T, H, D]`.

    Raises:
        ValueError: the cache is another model's, or the model adds something to its attention that it does not have.
    """
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} has {name} in its attention, and a compressed cache does not")
    if layer.books.model != (sizes := model_sizes(module.config)):
        raise ValueError(f"the cache was made for {layer.books.model}, and this model is {sizes}: make one for it")
    if mask is not None and not isinstance(mask, Tensor):
        raise ValueError(f"{type(module).__name__} has a mask of type {type(mask).__name__}, give tensors")
    padding: Callable[[], Sequence[int]] | None = None if mask is None else lambda: left_padding(mask)
    out = layer.attend_new(query, scale=scaling, padding=padding, softcap=softcap)
    return out.transpose(1, 2).contiguous()


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """Return the attention function in the file of a stock module."""
    function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return function
