"""Language modelling around a stack: targets, loss, logits, the generation cache and saving."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from common.settings import SettingError
from lit_modules.networks.linear_cross_entropy import IGNORE_INDEX, linear_cross_entropy
from lit_modules.networks.loader_file import write_loader_file
from lit_modules.networks.positions import Positions


class LanguageModelling:
    """A mixin for models with `lm_head`, `new_cache()` and `stack()`; place it before Hugging Face's classes."""

    lm_head: nn.Linear
    config: Any  # the model class declares which

    def new_cache(self) -> Cache:
        """Return an empty cache for `past_key_values`."""
        raise NotImplementedError

    def stack(self, **arguments: Any) -> BaseModelOutputWithPast:
        """Run all layers and the final norm with the arguments of `forward`."""
        raise NotImplementedError

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
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits, the loss, or both.

        Args:
            input_ids: `[B, T]` int64.
            attention_mask: `[B, S]` of 0 and 1, S including cached tokens: zeros on the left of a row, or on its right
                if nothing is generated (outputs at padding are unspecified).
            position_ids: `[B, T]`, only for the rotary embedding; by default each document counts from 0.
            past_key_values: a cache from `new_cache()`, updated in place.
            inputs_embeds: `[B, T, hidden_size]`, instead of input_ids.
            labels: `[B, T]` int64, the unshifted inputs, shifted here; -100 is ignored. Logits are returned too.
            use_cache: return a cache; by default outside training, if neither targets nor cu_seqlens are given.
            logits_to_keep: number of last tokens whose logits are returned (0: all), or indices.
            cu_seqlens: `[N + 1]` int32, bounds of packed documents in a batch of 1, which do not see each other.
            positions: layout of the batch, instead of cu_seqlens and the like, from which it is computed by default.
            shift_labels: `[B, T]` int64, targets already shifted; -100 is ignored. Logits are None, and exist only for
                a few tokens at a time: use this for training.
            reduction: "mean" over the targets that are not ignored (0 if there are none), "sum", or "none": float32
                `[B, T]` without gradient, 0 where ignored. With labels, position t holds the loss of token t + 1.
            num_items_in_batch: divisor of the summed loss, given by Hugging Face's Trainer.

        Raises:
            ValueError: for arguments that contradict each other, masks with holes, a cache of another model.
        """
        targets = next_tokens(labels, shift_labels)
        if use_cache is None and targets is not None:
            use_cache = past_key_values is not None
        outputs = self.stack(
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
        assert hidden is not None
        if targets is not None:
            loss = self._loss(hidden, targets, reduction, num_items_in_batch)
        if shift_labels is None:
            logits = self._logits(hidden, logits_to_keep)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *arguments: Any, **options: Any
    ) -> None:
        """Save as Hugging Face does, with the file through which `trust_remote_code` finds the classes."""
        type(self.config)._auto_class = None  # set by a load through that file; would add a copy of the class's module
        super().save_pretrained(save_directory, is_main_process, *arguments, **options)  # type: ignore[misc]
        if is_main_process:
            write_loader_file(save_directory, type(self.config), type(self))

    @property
    def init_continuous_batching(self) -> Any:
        """Missing, so that `transformers serve --continuous-batching` generates without paged attention."""
        raise AttributeError("these layers cannot read a paged cache")

    def _loss(self, hidden: Tensor, targets: Tensor, reduction: str, num_items_in_batch: int | Tensor | None) -> Tensor:
        if num_items_in_batch is None:
            return linear_cross_entropy(hidden, self.lm_head.weight, targets, reduction=reduction)
        return linear_cross_entropy(hidden, self.lm_head.weight, targets, reduction="sum") / num_items_in_batch

    def _logits(self, hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        """Compute the logits of the last `logits_to_keep` tokens (0: all), or of these indices."""
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return self.lm_head(hidden[:, kept])

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:  # transformers declares a bool, returns None and reads neither
        """Use `new_cache()` instead of a `DynamicCache` (Hugging Face's hook for the cache of `generate`)."""
        if generation_config.cache_implementation is not None:
            problem = "does not fit this model"
            raise SettingError("cache_implementation", generation_config.cache_implementation, "leave it out", problem)
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            cache._is_user_defined = True
        elif generation_config.use_cache:
            cache = model_kwargs["past_key_values"] = self.new_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()


def next_tokens(labels: Tensor | None, shift_labels: Tensor | None) -> Tensor | None:
    """Return the target of each token `[B, T]`: `shift_labels`, or `labels` shifted, or None for neither.

    Raises:
        ValueError: if both are given.
    """
    if labels is not None and shift_labels is not None:
        raise ValueError("labels and shift_labels are both given: give shift_labels alone for targets already shifted")
    if labels is None:
        return shift_labels
    return torch.cat((labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)), dim=1)
