"""The networks: one configuration, one causal language model, one block, and one file per token mixer.

Importing this package registers them and the linearized pretrained models with Hugging Face's `AutoConfig`, `AutoModel`
and `AutoModelForCausalLM`.
"""

from transformers.models.auto import AutoConfig, AutoModel, AutoModelForCausalLM

from lit_modules.networks.causal_lm import PalimpsestForCausalLM, PalimpsestModel
from lit_modules.networks.config import PalimpsestConfig
from lit_modules.networks.counting import ParameterCount, count_parameters, flops_per_token
from lit_modules.networks.export import export_pretrained
from lit_modules.networks.linearized import (
    Linearization,
    LinearizedForCausalLM,
    linearize,
    load_adapted,
    load_pretrained,
)
from lit_modules.networks.positions import Positions

AutoConfig.register("palimpsest", PalimpsestConfig, exist_ok=True)
AutoModel.register(PalimpsestConfig, PalimpsestModel, exist_ok=True)
AutoModelForCausalLM.register(PalimpsestConfig, PalimpsestForCausalLM, exist_ok=True)

__all__ = [
    "Linearization",
    "LinearizedForCausalLM",
    "PalimpsestConfig",
    "PalimpsestForCausalLM",
    "PalimpsestModel",
    "ParameterCount",
    "Positions",
    "count_parameters",
    "export_pretrained",
    "flops_per_token",
    "linearize",
    "load_adapted",
    "load_pretrained",
]
