"""A pretrained language model whose attention is replaced, whatever its family."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

from common.settings import SettingError
from lit_modules.networks.language_modelling import LanguageModelling
from lit_modules.networks.linearized.base import MODES, SubstitutedAttention
from lit_modules.networks.linearized.families import check_config
from lit_modules.networks.linearized.liger import LigerAttention
from lit_modules.networks.linearized.lolcats import LolcatsAttention
from lit_modules.networks.linearized.settings import Linearization
from lit_modules.networks.linearized.softmax import SoftmaxAttention
from lit_modules.networks.positions import Positions, locate

MIXERS: dict[str, type[SubstitutedAttention]] = {
    "liger": LigerAttention,
    "lolcats": LolcatsAttention,
    "joint": LolcatsAttention,
}

ATTENTION = "linearized"
"""Attention implementation of linearized models: never called, so that transformers builds no mask."""


ADAPTER_PREFIX = "trained_on_the_linearized_model."
"""Prefix of an adapter's tensor names, so that peft does not load them into a stock model."""


def _never_called(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError(f"attn_implementation={ATTENTION!r} belongs to models whose layers attend by themselves")


AttentionInterface.register(ATTENTION, _never_called)


class LinearizedForCausalLM(LanguageModelling, PreTrainedModel):
    """A pretrained family's language model with the attention of its config's `linearization`.

    It precedes the stock class among the bases. Everything but attention is the stock model's.
    """

    config_class: type[PreTrainedConfig]
    model: Any  # the family's stack, such as LlamaModel

    # The few parameters that a recipe adds are float32 for any dtype of the model.
    _keep_in_fp32_modules_strict = [  # noqa: RUF012
        "feature_map",
        *(f"self_attn.{name}" for name in ("gate_proj", "gate_shift", "weights", "window_weight", "output_norm")),
    ]

    # peft renames an adapter's tensors by this when it loads them.
    _checkpoint_conversion_mapping: ClassVar[dict[str, str]] = {"^" + re.escape(ADAPTER_PREFIX): ""}

    def __init__(self, config: PreTrainedConfig):
        settings = self.linearization_of(config)
        check_config(config, settings.softmax_layers)
        config._attn_implementation = ATTENTION
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            mixer = SoftmaxAttention if number in settings.softmax_layers else MIXERS[settings.mixer]
            layer.self_attn = mixer(layer.self_attn, config, settings)
        self.post_init()

    def initialize_weights(self) -> None:
        """Set each module's `initial_values` (Hugging Face's hook for parameters that are not in the checkpoint)."""
        # The stock `_init_weights` does not know these modules.
        for module in self.modules():
            initial_values = getattr(module, "initial_values", None)
            if initial_values is not None and not getattr(module, "_is_hf_initialized", False):
                for name, value in initial_values().items():
                    init.copy_(getattr(module, name), value)
                module._is_hf_initialized = True  # type: ignore[assignment]  # a flag of transformers
        super().initialize_weights()

    @property
    def linearization(self) -> Linearization:
        """The settings of the layers."""
        return self.linearization_of(self.config)

    @staticmethod
    def linearization_of(config: PreTrainedConfig) -> Linearization:
        """Return the settings in a linearized configuration.

        Raises:
            ValueError: if a key or value is unknown.
        """
        try:
            return Linearization(**(config.linearization or {}))
        except TypeError as error:
            raise ValueError(f"config.json: linearization has a key that is not known: {error}") from error

    def attentions(self) -> list[SubstitutedAttention]:
        """Return the attention of every layer."""
        return [layer.self_attn for layer in self.model.layers]

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the source model does not have, by name, without LoRA."""
        return {
            f"model.layers.{number}.self_attn.{name}": parameter
            for number, attention in enumerate(self.attentions())
            for name, parameter in attention.named_parameters()
            if name.partition(".")[0] not in attention.taken
        }

    def no_decay_parameters(self) -> set[str]:
        """Return the names of parameters without weight decay: norms, biases, scales and shifts of heads."""
        vectors = {name for name, parameter in self.named_parameters() if parameter.ndim < 2 or name.endswith(".bias")}
        return vectors | {name for name in self.new_parameters() if ".output_norm." in name}

    def new_cache(self, capacity: int | None = None) -> Cache:
        """Return an empty cache for `past_key_values`.

        Args:
            capacity: maximum tokens, in storage at a fixed address; None: softmax layers have growing storage, up to
                their window.
        """
        return Cache(layers=[attention.new_cache(capacity) for attention in self.attentions()])

    def stack(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        positions: Positions | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the stack with the arguments of `forward`.

        Unlike there, `positions` may come with a cache: a captured decoding step takes its position from the cache's
        counter on the device.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: give one of the two")
        if kwargs.get("output_attentions"):
            fix = "attention weights are never held, set it to false"
            raise SettingError("output_attentions", True, fix, "cannot be had")
        if use_cache is None:
            alone = cu_seqlens is None and positions is None
            use_cache = past_key_values is not None or (alone and not self.training)
        cache = self._cache_to_fill(past_key_values, use_cache)
        if positions is None:
            tokens = input_ids if inputs_embeds is None else inputs_embeds
            assert tokens is not None
            past = 0 if cache is None else cache.get_seq_length()
            positions = locate(
                tokens.shape[0], tokens.shape[1], past, tokens.device, attention_mask, cu_seqlens, position_ids
            )
        elif any(x is not None for x in (attention_mask, position_ids, cu_seqlens)):
            raise ValueError("positions says all that attention_mask, position_ids and cu_seqlens do: give it alone")
        if cache is not None and positions.cu_seqlens is not None:
            raise ValueError("cu_seqlens with a cache: packed documents have a state each, set use_cache=False")
        return self.model(
            input_ids=input_ids,
            position_ids=_rotary_index(positions),
            past_key_values=cache,
            inputs_embeds=inputs_embeds,
            use_cache=cache is not None,
            positions=positions,
            **kwargs,
        )

    def _cache_to_fill(self, past_key_values: Cache | None, use_cache: bool) -> Cache | None:
        if past_key_values is None:
            return self.new_cache() if use_cache else None
        if self.training and self.is_gradient_checkpointing:
            raise ValueError(
                "past_key_values in training with gradient checkpointing would be filled twice: call eval() first"
            )
        given, attentions = past_key_values.layers, self.attentions()
        fits = (
            isinstance(layer, CacheLayerMixin) and attention.takes(layer)
            for attention, layer in zip(attentions, given, strict=False)
        )
        if len(given) != len(attentions) or not all(fits):
            raise ValueError(
                f"past_key_values is a {type(past_key_values).__name__} of other layers than this model's: "
                "pass None, or what model.new_cache() returns"
            )
        return past_key_values

    def features(
        self,
        input_ids: Tensor,
        *,
        positions: Positions | None = None,
        cu_seqlens: Tensor | None = None,
        mode: str = "student",
    ) -> Tensor:
        """Return hidden states `[B, T, hidden_size]` after the final norm.

        Args:
            input_ids: `[B, T]` int64.
            positions, cu_seqlens: as in `forward`.
            mode: "student"; "teacher": of the source model, without adapters and gradients; "transfer": the teacher's,
                and `transfer_losses` is available afterwards.
        """
        if positions is None:
            positions = locate(input_ids.shape[0], input_ids.shape[1], 0, input_ids.device, cu_seqlens=cu_seqlens)
        with self._mode(mode), torch.set_grad_enabled(torch.is_grad_enabled() and mode != "teacher"):
            outputs = self.model(
                input_ids=input_ids, position_ids=_rotary_index(positions), use_cache=False, positions=positions
            )
        return outputs.last_hidden_state

    def transfer_losses(self) -> Tensor:
        """Return the mean squared difference of student and teacher attention in the last "transfer" pass.

        It is taken before the output projection: `[layers]` float32, without the layers that stay softmax attention.

        Raises:
            RuntimeError: if there was no such pass.
        """
        losses = []
        for attention in self.attentions():
            if isinstance(attention, SoftmaxAttention):
                continue
            if attention.transfer_loss is None:
                raise RuntimeError('there are no transfer losses: call features(..., mode="transfer") first')
            losses.append(attention.transfer_loss)
        return torch.stack(losses)

    @contextmanager
    def _mode(self, mode: str) -> Iterator[None]:
        if mode not in MODES:
            raise SettingError("mode", mode, f"give one of {', '.join(MODES)}", "is not known")
        layers = self.model.layers
        before = [(layer.self_attn.mode, layer.gradient_checkpointing) for layer in layers]
        try:
            for layer in layers:
                layer.self_attn.mode = mode
                # Recomputation in the backward pass would run the student, because the mode is reset by then.
                layer.gradient_checkpointing &= mode == "student"
            yield
        finally:
            for layer, (own, checkpointing) in zip(layers, before, strict=True):
                layer.self_attn.mode, layer.gradient_checkpointing = own, checkpointing


def _rotary_index(positions: Positions) -> Tensor:
    return positions.index if positions.rotary_index is None else positions.rotary_index
