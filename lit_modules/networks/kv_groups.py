"""KV group sharing (Sigma, arXiv 2501.13629 v2, appendix E): keys repeated to the value heads, in the weights.

DiffQKV has fewer and possibly smaller key heads than value heads. Engines that know only grouped-query attention need
as many of both, of one width. The copy made here has that, and the same logits; its cache has lost what DiffQKV saves.
"""

import copy
import math

import torch
from torch import Tensor

from common.settings import SettingError
from lit_modules.networks.causal_lm import PalimpsestForCausalLM
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.mixers.attention import Attention

OF_KEYS = ("k_proj.weight", "k_shift_proj.weight", "k_norm.weight")  # a share of the rows for each head
OF_VALUES = ("v_proj.weight", "v_shift_proj.weight")


def share_kv_groups(model: PalimpsestForCausalLM) -> PalimpsestForCausalLM:
    """Return a copy with as many key heads as value heads, of one width, and the same logits.

    Heads are repeated up to the least common multiple of both numbers, which is the larger one where it is a multiple
    of the other. Query head h reads key head `h // (Hq / Hk)`, so the copies of a head stand next to each other. A key
    map is multiplied into the key projection: only the KV-shift is between them, which mixes tokens and not channels.
    What is not changed is shared with the model.

    Raises:
        SettingError: there is nothing to share.
    """
    config = shared_config(model.config)
    with torch.device("meta"):
        shared = PalimpsestForCausalLM(config)
    weights = model.state_dict()
    for number, layer in enumerate(model.model.layers):
        if isinstance(layer.self_attn, Attention):
            _repeat_heads(weights, f"model.layers.{number}.self_attn.", model.config, config)
    shared.load_state_dict(weights, strict=True, assign=True)
    shared.generation_config = copy.deepcopy(model.generation_config)
    return shared.train(model.training)


def shared_config(config: PalimpsestConfig) -> PalimpsestConfig:
    """Return the configuration of the copy that `share_kv_groups` makes.

    Raises:
        SettingError: keys and values have equal heads already, or no layer has any.
    """
    _, key_heads, value_heads = config.head_counts
    if "attention" not in config.layer_mixers:
        raise SettingError("form", "shared_kv_groups", "leave form out", "is for models with attention layers")
    if key_heads == value_heads and config.cached_key_dim == config.head_dim:
        problem = f"changes nothing: the model has {key_heads} key and {value_heads} value heads of one width"
        raise SettingError("form", "shared_kv_groups", "leave form out", problem)
    shared = copy.deepcopy(config)
    shared.num_key_heads = shared.num_value_heads = math.lcm(key_heads, value_heads)
    shared.key_head_dim = None
    return shared


def cached_numbers(config: PalimpsestConfig) -> int:
    """Count the numbers that all attention layers cache for each token, `Hk Dk + Hv Dv` a layer."""
    _, key_heads, value_heads = config.head_counts
    layers = list(config.layer_mixers).count("attention")
    return layers * (key_heads * config.cached_key_dim + value_heads * config.head_dim)


@torch.no_grad()
def _repeat_heads(weights: dict[str, Tensor], place: str, before: PalimpsestConfig, after: PalimpsestConfig) -> None:
    """Replace the weights of the attention layer at `place`, in `weights`."""
    _, key_heads, value_heads = before.head_counts
    _, heads, _ = after.head_counts
    key_map = weights.pop(f"{place}k_map_proj.weight", None)
    if key_map is not None:
        projection = weights[f"{place}k_proj.weight"]
        exact = torch.promote_types(projection.dtype, torch.float32)
        mapped = key_map.to(exact) @ projection.unflatten(0, (key_heads, -1)).to(exact)  # [Hk, D, hidden_size]
        weights[f"{place}k_proj.weight"] = mapped.flatten(0, 1).to(projection.dtype)
    for names, number in ((OF_KEYS, key_heads), (OF_VALUES, value_heads)):
        for name in (f"{place}{name}" for name in names if f"{place}{name}" in weights):
            by_head = weights[name].unflatten(0, (number, -1))
            weights[name] = by_head.repeat_interleave(heads // number, dim=0).flatten(0, 1)
