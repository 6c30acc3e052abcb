"""Small float64 networks with every combination of switches in FoX's ablation (arXiv 2503.02130, table 3) and with
the heads of DiffQKV (arXiv 2501.13629) beside them; every recurrent mixer, alone and beside attention."""

import pytest
import torch

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM

GATE = {"forget_gate": "data_dependent"}
NONE = {"forget_gate": "none"}
TIMES = {"gate_time_min": 2.0, "gate_time_max": 64.0}
PRO = {"qk_norm": True, "output_gate": True, "output_norm": True, "kv_shift": True}
DIFFQKV = {"num_key_heads": 1, "num_value_heads": 2}
SIGMA = DIFFQKV | {"augmented_query_dim": 24}

ABLATION = {
    "transformer_llama_without_rope": NONE,
    "transformer_llama": NONE | {"rope": True},
    "transformer_llama_plus_gate": GATE | {"rope": True},
    "fox_llama": GATE,
    "plus_qk_norm": GATE | {"qk_norm": True},
    "plus_output_gate": GATE | {"qk_norm": True, "output_gate": True},
    "plus_output_norm": GATE | {"qk_norm": True, "output_gate": True, "output_norm": True},
    "fox_pro": GATE | PRO,
    "pro_minus_qk_norm": GATE | PRO | {"qk_norm": False},
    "pro_minus_output_gate": GATE | PRO | {"output_gate": False},
    "pro_minus_output_norm": GATE | PRO | {"output_norm": False},
    "pro_minus_kv_shift": GATE | PRO | {"kv_shift": False},
    "pro_plus_rope": GATE | PRO | {"rope": True},
    "transformer_pro": NONE | PRO | {"rope": True},
    "pro_without_gate_or_rope": NONE | PRO,
    "data_independent": {"forget_gate": "data_independent"} | TIMES,
    "fixed": {"forget_gate": "fixed"} | TIMES,
    "gqa": NONE | {"rope": True, "num_key_heads": 2, "num_value_heads": 2},
    "fewer_key_heads": NONE | {"rope": True} | DIFFQKV,
    "fewer_value_heads": GATE | {"num_value_heads": 1},
    "small_keys": NONE | {"rope": True, "key_head_dim": 4},
    "small_keys_without_rope": GATE | {"key_head_dim": 3},
    "augmented_queries": NONE | {"rope": True, "augmented_query_dim": 24},
    "sigma": NONE | {"rope": True} | SIGMA,
    "pro_with_sigmas_heads": GATE | PRO | SIGMA | {"rope": True, "key_head_dim": 4},
}

CONVOLVED = {"short_conv_width": 4}

RECURRENT = {
    "hgrn2": {"mixers": "hgrn2"},
    "hgrn2_convolved": {"mixers": "hgrn2", "state_heads": 2, "state_dim": 5} | CONVOLVED,
    "gla": {"mixers": "gla", "gate_rank": 3},
    "gla_convolved": {"mixers": "gla", "gate_temperature": 2.0, "expand_value": 0.5} | CONVOLVED,
    "mamba2": {"mixers": "mamba2", "state_dim": 6, "intermediate_size": None} | CONVOLVED,
    "mamba2_without_convolution": {"mixers": "mamba2", "state_dim": 6, "state_heads": 8},
    "gsa": {"mixers": "gsa", "num_slots": 7},
    "gsa_convolved": {"mixers": "gsa", "num_slots": 3, "gate_temperature": 1.0, "state_dim": 5} | CONVOLVED,
    "hybrid": GATE | PRO | {"mixers": ["hgrn2", "attention", "hgrn2"], "num_layers": 3},
    "hybrid_with_rope": NONE | {"rope": True, "mixers": ["attention", "mamba2"], "state_dim": 6} | CONVOLVED,
}


def build(**switches) -> PalimpsestForCausalLM:
    """A model in float64, in eval mode, whose every parameter is far enough from its start to matter."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    model = PalimpsestForCausalLM(PalimpsestConfig(**sizes | {"initializer_range": 0.3} | switches)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in model.no_decay_parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture
def recurrent_switches() -> dict[str, dict]:
    return RECURRENT


@pytest.fixture(name="build")
def build_fixture():
    return build


@pytest.fixture(params=(ABLATION | RECURRENT).values(), ids=(ABLATION | RECURRENT).keys())
def any_model(request) -> PalimpsestForCausalLM:
    return build(**request.param)


@pytest.fixture
def fox_pro() -> PalimpsestForCausalLM:
    return build(**ABLATION["fox_pro"])


@pytest.fixture(params=RECURRENT.values(), ids=RECURRENT.keys())
def recurrent_model(request) -> PalimpsestForCausalLM:
    return build(**request.param)


ATTENDING = ["fox_pro", "transformer_llama", "pro_plus_rope", "sigma", "pro_with_sigmas_heads"]


@pytest.fixture(params=ATTENDING)
def attending_model(request) -> PalimpsestForCausalLM:
    return build(**ABLATION[request.param])


@pytest.fixture(params=[*ATTENDING, "hgrn2", "mamba2", "gsa_convolved", "hybrid", "hybrid_with_rope"])
def generating_model(request) -> PalimpsestForCausalLM:
    return build(**(ABLATION | RECURRENT)[request.param])
