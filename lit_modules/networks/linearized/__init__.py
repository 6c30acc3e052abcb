"""Linearized pretrained models: attention becomes a recurrence and a window on the same weights.

    model = load_pretrained("meta-llama/Llama-3.2-1B", Linearization(gate="gla"), dtype=torch.bfloat16)

Importing this package registers them with Hugging Face's `AutoConfig` and `AutoModelForCausalLM`.
"""

from transformers.models.auto import AutoConfig, AutoModelForCausalLM

from lit_modules.networks.linearized.conversion import linearize, load_adapted, load_pretrained
from lit_modules.networks.linearized.family_models import MODELS
from lit_modules.networks.linearized.models import LinearizedForCausalLM
from lit_modules.networks.linearized.settings import Linearization

for model_type, model_class in MODELS.items():
    AutoConfig.register(model_type, model_class.config_class, exist_ok=True)
    AutoModelForCausalLM.register(model_class.config_class, model_class, exist_ok=True)

__all__ = ["Linearization", "LinearizedForCausalLM", "linearize", "load_adapted", "load_pretrained"]
