"""The causal language model, as Hugging Face knows models: `from_pretrained`, `generate`, `save_pretrained`."""

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from lit_modules.networks.block import Block
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.forget_gate import ForgetGate
from lit_modules.networks.headwise_linear import HeadwiseLinear
from lit_modules.networks.linear_cross_entropy import IGNORE_INDEX, linear_cross_entropy
from lit_modules.networks.mixers.hgrn2 import LowerBounds
from lit_modules.networks.mixers.mamba2 import Mamba2
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions, check_position_ids, locate
from lit_modules.networks.rotary import rotary_tables
from lit_modules.networks.short_convolution import ShortConvolution


class PalimpsestPreTrainedModel(PreTrainedModel):
    """What the bare stack and the language model share: initialization, and what Hugging Face asks about a model."""

    config_class = PalimpsestConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Block",)
    _skip_keys_device_placement = ("past_key_values",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Matrices normal with `initializer_range`, biases 0, norms 1; gates of fixed times as the config says."""
        if isinstance(module, (nn.Linear, nn.Embedding, HeadwiseLinear)):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, ForgetGate) and module.kind == "data_independent":
            init.copy_(module.bias, module.initial_bias(module.bias.device).to(module.bias.dtype))
        elif isinstance(module, ShortConvolution):
            # What torch gives a convolution: a filter of few taps needs larger ones than a matrix.
            init.uniform_(module.weight, -(module.weight.shape[1] ** -0.5), module.weight.shape[1] ** -0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, LowerBounds):
            init.zeros_(module.logits)
        elif isinstance(module, Mamba2):
            for name, value in module.initial_values().items():
                init.copy_(getattr(module, name), value)


class PalimpsestModel(PalimpsestPreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: PalimpsestConfig):
        config.check()
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, mixer) for mixer in config.mixers)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        bounded = config.mixers.count("hgrn2")
        # The first has the bound 0, so that one alone has nothing to learn.
        self.lower_bounds = LowerBounds(config, bounded) if bounded > 1 else None
        self.gradient_checkpointing = False
        self.post_init()

    def new_cache(self) -> Cache:
        """An empty cache, made of what each layer's mixer keeps."""
        return Cache(layers=[layer.self_attn.new_cache() for layer in self.layers])

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
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Hidden states `[B, T, hidden_size]` after the final norm; arguments as in `PalimpsestForCausalLM`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: give one of the two")
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions=True cannot be had: attention weights are never held, set it to false")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = not self.training and cu_seqlens is None and positions is None
        cache = self._cache_to_fill(past_key_values, use_cache)
        if positions is None:
            positions = self._positions(hidden, attention_mask, position_ids, cache, cu_seqlens)
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
        """What each layer's mixer is given of parameters that are not its own."""
        shared = [{} for _ in self.layers]
        if self.lower_bounds is not None:
            bounded = [layer for layer, name in zip(shared, self.config.mixers, strict=True) if name == "hgrn2"]
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
        expected = [type(layer.self_attn.new_cache()) for layer in self.layers]
        if [type(layer) for layer in past_key_values.layers] != expected:
            raise ValueError(
                f"past_key_values is a {type(past_key_values).__name__} of other layers than this model's: "
                "pass None, or what model.new_cache() returns"
            )
        return past_key_values

    def _positions(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        cu_seqlens: Tensor | None,
    ) -> Positions:
        batch, length, _ = hidden.shape
        past = 0 if cache is None else cache.get_seq_length()
        positions = locate(batch, length, past, hidden.device, attention_mask, cu_seqlens)
        if position_ids is not None and attention_mask is None and cu_seqlens is None:
            check_position_ids(position_ids)
        if position_ids is None:
            return positions
        return positions._replace(rotary_index=position_ids.expand(batch, length))

    def _rotating(self, positions: Positions) -> Positions:
        """`positions` with the tables of the rotary embedding, for `rotary_index` or else for `index`."""
        index = positions.index if positions.rotary_index is None else positions.rotary_index
        tables = rotary_tables(index, self.config.head_dim, self.config.rope_base)
        return positions._replace(rotary_index=index, rotary=tables)


class PalimpsestForCausalLM(PalimpsestPreTrainedModel, GenerationMixin):
    """A causal language model; every size and switch is in its `PalimpsestConfig`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PalimpsestConfig):
        super().__init__(config)
        self.model = PalimpsestModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def new_cache(self) -> Cache:
        """An empty cache for `past_key_values`."""
        return self.model.new_cache()

    def no_decay_parameters(self) -> set[str]:
        """Names of the parameters without weight decay: norms (those of single heads too), biases, gate biases, and
        those that a module names in its own `no_decay`."""
        norms = {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, RMSNorm)}
        biases = {name for name, _ in self.named_parameters() if name.rpartition(".")[2] == "bias"}
        own = {f"{name}.{key}" for name, module in self.named_modules() for key in getattr(module, "no_decay", ())}
        return norms | biases | own

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        positions: Positions | None = None,
        shift_labels: Tensor | None = None,
        reduction: str = "mean",
        num_items_in_batch: int | Tensor | None = None,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits, or the loss.

        Args:
            input_ids: `[B, T]` int64.
            attention_mask: `[B, S]` of 0 and 1, S counting what is cached: zeros on the left of a row, or on its right
                where nothing is generated (outputs at padding are unspecified).
            position_ids: `[B, T]`, for the rotary embedding alone; by default each document counts from 0.
            past_key_values: what `new_cache()` returned; it is filled in place.
            inputs_embeds: `[B, T, hidden_size]` in place of input_ids.
            labels: `[B, T]` int64, the inputs themselves, shifted here; -100 is left out. The logits come as well.
            use_cache: return a cache; by default, outside training, when neither targets nor cu_seqlens are given.
            logits_to_keep: logits of the last so many tokens (0: all), or of these indices.
            cu_seqlens: `[N + 1]` int32, packed documents in a batch of 1, which do not see each other.
            positions: where each token stands, in place of cu_seqlens and the like, from which it is found by default.
            shift_labels: `[B, T]` int64, the targets themselves; -100 is left out. No logits are made (None), nor
                ever held for more than a few tokens: this is the way to train.
            reduction: "mean" over the targets that count (0 when there is none), "sum", or "none": float32 `[B, T]`
                without a gradient, 0 where left out. With labels, position t then holds the loss of token t + 1.
            num_items_in_batch: divide the summed loss by this, as Hugging Face's Trainer asks.

        Raises:
            ValueError: for arguments that contradict each other, masks with holes, a cache of another model.
        """
        targets = _targets(labels, shift_labels)
        if use_cache is None and targets is not None:
            use_cache = past_key_values is not None
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            positions=positions,
            **kwargs,
        )
        hidden, loss, logits = outputs.last_hidden_state, None, None
        if targets is not None:
            loss = self._loss(hidden, targets, reduction, num_items_in_batch)
        if shift_labels is None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    def _loss(self, hidden: Tensor, targets: Tensor, reduction: str, num_items_in_batch: int | Tensor | None) -> Tensor:
        if num_items_in_batch is None:
            return linear_cross_entropy(hidden, self.lm_head.weight, targets, reduction=reduction)
        return linear_cross_entropy(hidden, self.lm_head.weight, targets, reduction="sum") / num_items_in_batch

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, generation_mode, batch_size: int, max_cache_length: int
    ) -> None:
        """Hugging Face's hook where `generate` makes its cache: ours in place of a `DynamicCache`."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} does not fit this model: leave it out"
            )
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            cache._is_user_defined = True
        elif generation_config.use_cache:
            cache = model_kwargs["past_key_values"] = self.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()


def _targets(labels: Tensor | None, shift_labels: Tensor | None) -> Tensor | None:
    if labels is not None and shift_labels is not None:
        raise ValueError("labels and shift_labels are both given: give shift_labels alone for targets already shifted")
    if labels is None:
        return shift_labels
    return torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)), dim=1)
