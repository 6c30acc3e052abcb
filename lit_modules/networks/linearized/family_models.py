"""Pretrained families with replaced attention, as Hugging Face models."""

from pathlib import Path
from typing import Any

from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.phi3 import Phi3Config, Phi3ForCausalLM
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

from lit_modules.networks.linearized.models import LinearizedForCausalLM


class LinearizedFamily(LinearizedForCausalLM):
    """A linearized model that loads its own adapters through Hugging Face's `load_adapter`."""

    def load_adapter(self, peft_model_id: str | Path | None = None, *args: Any, **options: Any) -> Any:
        """Load an adapter: one of `save_adapter` by `apply_adapter`, with its checks; others as Hugging Face does."""
        from lit_modules.networks.linearized import adapters  # imports this module

        if peft_model_id is not None and (Path(peft_model_id) / adapters.RECORD).is_file():
            return adapters.apply_adapter(self, peft_model_id)
        return super().load_adapter(None if peft_model_id is None else str(peft_model_id), *args, **options)


class LinearizedLlamaConfig(LlamaConfig):
    """Llama's configuration with linearization settings."""

    model_type = "linearized_llama"
    linearization: dict | None = None


class LinearizedMistralConfig(MistralConfig):
    """Mistral's configuration with linearization settings."""

    model_type = "linearized_mistral"
    linearization: dict | None = None


class LinearizedQwen2Config(Qwen2Config):
    """Qwen2's configuration with linearization settings."""

    model_type = "linearized_qwen2"
    linearization: dict | None = None


class LinearizedQwen3Config(Qwen3Config):
    """Qwen3's configuration with linearization settings."""

    model_type = "linearized_qwen3"
    linearization: dict | None = None


class LinearizedPhi3Config(Phi3Config):
    """Phi-3's configuration with linearization settings."""

    model_type = "linearized_phi3"
    linearization: dict | None = None


class LinearizedLlamaForCausalLM(LinearizedFamily, LlamaForCausalLM):
    """Llama with replaced attention."""

    config_class = LinearizedLlamaConfig


class LinearizedMistralForCausalLM(LinearizedFamily, MistralForCausalLM):
    """Mistral with replaced attention."""

    config_class = LinearizedMistralConfig


class LinearizedQwen2ForCausalLM(LinearizedFamily, Qwen2ForCausalLM):
    """Qwen2 with replaced attention."""

    config_class = LinearizedQwen2Config


class LinearizedQwen3ForCausalLM(LinearizedFamily, Qwen3ForCausalLM):
    """Qwen3 with replaced attention."""

    config_class = LinearizedQwen3Config


class LinearizedPhi3ForCausalLM(LinearizedFamily, Phi3ForCausalLM):
    """Phi-3 with replaced attention."""

    config_class = LinearizedPhi3Config


MODELS: dict[str, type[LinearizedForCausalLM]] = {
    model.config_class.model_type: model
    for model in (
        LinearizedLlamaForCausalLM,
        LinearizedMistralForCausalLM,
        LinearizedQwen2ForCausalLM,
        LinearizedQwen3ForCausalLM,
        LinearizedPhi3ForCausalLM,
    )
}
"""Model classes by model type."""
