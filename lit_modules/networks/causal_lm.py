"""The causal language model with Hugging Face's interface: `from_pretrained`, `generate`, `save_pretrained`."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from common.settings import SettingError
from lit_modules.networks.block import Block
from lit_modules.networks.caches import StaticAttentionCacheLayer
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.forget_gate import ForgetGate
from lit_modules.networks.headwise_linear import HeadwiseLinear
from lit_modules.networks.language_modelling import LanguageModelling
from lit_modules.networks.mixers import check_mixers
from lit_modules.networks.mixers.attention import Attention
from lit_modules.networks.mixers.hgrn2 import LowerBounds
from lit_modules.networks.mixers.recurrent import RecurrentMixer
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions, locate
from lit_modules.networks.rotary import rotary_tables
from lit_modules.networks.short_convolution import ShortConvolution


class PalimpsestPreTrainedModel(PreTrainedModel):
    """Base of the bare stack and the language model: initialization and Hugging Face's class attributes."""

    config_class = PalimpsestConfig
    config: PalimpsestConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize matrices normal with `initializer_range`, biases 0, norms 1, all else by its branch below."""
        if isinstance(module, (nn.Linear, nn.Embedding, HeadwiseLinear)):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            bias = getattr(module, "bias", None)
            if bias is not None:
                init.zeros_(bias)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, ForgetGate) and module.kind == "data_independent":
            init.copy_(module.bias, module.initial_bias(module.bias.device).to(module.bias.dtype))
        elif isinstance(module, ShortConvolution):
            # torch's default for convolutions: a filter with few taps needs larger weights than a matrix.
            init.uniform_(module.weight, -(module.weight.shape[1] ** -0.5), module.weight.shape[1] ** -0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, LowerBounds):
            init.zeros_(module.logits)
        elif initial_values := getattr(module, "initial_values", None):
            for name, value in initial_values().items():
                init.copy_(getattr(module, name), value)


class PalimpsestModel(PalimpsestPreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: PalimpsestConfig):
        config.check()
        check_mixers(config)
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, mixer) for mixer in config.layer_mixers)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        bounded = config.layer_mixers.count("hgrn2")
        # The first layer has the bound 0, so a single layer has nothing to learn.
        self.lower_bounds = LowerBounds(config, bounded) if bounded > 1 else None
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def caches_keys_and_values_alone(self) -> bool:
        """Whether the cache may have a fixed capacity: no layer caches more than keys and values."""
        return all(mixer.caches_keys_and_values_alone for mixer in self._mixers())

    def new_cache(self, capacity: int | None = None) -> Cache:
        """Return an empty cache with one cache layer per mixer; `capacity` as in `PalimpsestForCausalLM`."""
        if capacity is None:
            return Cache(layers=[mixer.new_cache() for mixer in self._mixers()])
        if not self.caches_keys_and_values_alone:
            problem = "is for models whose layers cache keys and values, and nothing else"
            raise SettingError("capacity", capacity, "leave it out", problem)
        return Cache(layers=[StaticAttentionCacheLayer(capacity) for _ in self._mixers()])

    def _mixers(self) -> list[Attention | RecurrentMixer]:
        return [layer.self_attn for layer in self.layers if isinstance(layer, Block)]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Positions | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states `[B, T, hidden_size]` after the final norm; arguments as in `PalimpsestForCausalLM`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: give one of the two")
        if kwargs.get("output_attentions"):
            fix = "attention weights are never held, set it to false"
            raise SettingError("output_attentions", True, fix, "cannot be had")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = not self.training and cu_seqlens is None and positions is None
        cache = self._cache_to_fill(past_key_values, use_cache)
        if positions is None:
            past = 0 if cache is None else cache.get_seq_length()
            positions = locate(
                hidden.shape[0], hidden.shape[1], past, hidden.device, attention_mask, cu_seqlens, position_ids
            )
        elif any(x is not None for x in (attention_mask, position_ids, cache, cu_seqlens)):
            raise ValueError(
                "positions says all that attention_mask, position_ids, cu_seqlens and a cache do: give it alone"
            )
        if self.config.rope:
            positions = self._rotating(positions)
        states, shared = [hidden], self._shared()
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, positions, None if cache is None else cache.layers[number], **shared[number])
            states.append(hidden)
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=(*states[:-1], hidden) if output_hidden_states else None,
        )

    def _shared(self) -> list[dict[str, Tensor]]:
        """Return for each layer the arguments of its mixer that come from parameters shared between layers."""
        shared: list[dict[str, Tensor]] = [{} for _ in self.layers]
        if self.lower_bounds is not None:
            bounded = [layer for layer, name in zip(shared, self.config.layer_mixers, strict=True) if name == "hgrn2"]
            for layer, bound in zip(bounded, self.lower_bounds(), strict=True):
                layer["lower_bound"] = bound
        return shared

    def _cache_to_fill(self, past_key_values: Cache | None, use_cache: bool) -> Cache | None:
        if past_key_values is None:
            return self.new_cache() if use_cache else None
        if self.gradient_checkpointing and self.training:
            raise ValueError(
                "past_key_values in training with gradient checkpointing would be filled twice: call eval() first"
            )
        given: list[Any] = past_key_values.layers
        mixers = self._mixers()
        fits = (mixer.takes(layer) for mixer, layer in zip(mixers, given, strict=False))
        if len(given) != len(mixers) or not all(fits):
            raise ValueError(
                f"past_key_values is a {type(past_key_values).__name__} of other layers than this model's: "
                "pass None, or what model.new_cache() returns"
            )
        return past_key_values

    def _rotating(self, positions: Positions) -> Positions:
        """Return `positions` with the rotary tables, for `rotary_index` if given, else for `index`."""
        index = positions.index if positions.rotary_index is None else positions.rotary_index
        tables = rotary_tables(index, self.config.head_dim, self.config.rope_base)
        return positions._replace(rotary_index=index, rotary=tables)


class PalimpsestForCausalLM(LanguageModelling, PalimpsestPreTrainedModel, GenerationMixin):
    """A causal language model; its `PalimpsestConfig` holds every size and switch."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PalimpsestConfig):
        super().__init__(config)
        self.model = PalimpsestModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def new_cache(self, capacity: int | None = None) -> Cache:
        """Return an empty cache for `past_key_values`.

        Args:
            capacity: maximum tokens, in storage at a fixed address; None: storage grows.

        Raises:
            ValueError: a capacity for a model whose layers cache more than keys and values, or a state.
        """
        return self.model.new_cache(capacity)

    def stack(self, **arguments: Any) -> BaseModelOutputWithPast:
        """Run the stack with the arguments of `forward`."""
        return self.model(**arguments)

    def no_decay_parameters(self) -> set[str]:
        """Return the names of parameters without weight decay: norms, biases, and each module's `no_weight_decay`."""
        norms = {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, RMSNorm)}
        biases = {name for name, _ in self.named_parameters() if name.rpartition(".")[2] == "bias"}
        own = {
            f"{name}.{key}" for name, module in self.named_modules() for key in getattr(module, "no_weight_decay", ())
        }
        return norms | biases | own
