"""Small pretrained models of every family, in float64, with weights large enough that attention is not flat."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lit_modules.networks import Linearization, LinearizedForCausalLM, linearize
from tests.lit_modules.networks.linearized import saved_bases

SIZES = saved_bases.SIZES | {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None}

OF_FAMILY = {
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 6, "head_dim": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
}


def build_stock(family: str, **overrides) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | OF_FAMILY[family] | overrides)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def build_linearized(family: str = "llama", overrides: dict | None = None, **settings) -> LinearizedForCausalLM:
    model = linearize(build_stock(family, **(overrides or {})), Linearization(**settings)).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.new_parameters().values():
            parameter += 0.3 * torch.randn_like(parameter)  # away from where it begins
    return model


@pytest.fixture(scope="session")
def stock():
    return build_stock


@pytest.fixture(scope="session")
def linearized():
    return build_linearized


@pytest.fixture(scope="session")
def ids():
    return torch.randint(1, 61, (2, 13), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of small stock models, by family."""
    parent = tmp_path_factory.mktemp("bases")
    return {family: saved_bases.write_base(parent / family, family) for family in ("llama", "mistral", "qwen3", "phi3")}
