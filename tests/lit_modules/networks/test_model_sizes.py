"""The model files: sizes of the papers (arXiv 2503.02130, 2501.13629), parameter counts, arithmetic per token."""

import pytest
import torch
from hydra.utils import instantiate

from lit_modules.networks import PalimpsestForCausalLM, count_parameters, flops_per_token
from lit_modules.networks.mixers import MIXERS
from tests.conftest import ROOT, composed

KINDS = ["fox_pro", "transformer_pro", "fox_llama", "transformer_llama"]
RECURRENT = {"hgrn2": (128, 128), "gla": (128, 256), "gsa": (256, 256), "mamba2": (128, 64)}
SHAPES = {"125m": (12, 768), "360m": (24, 1024), "760m": (24, 1536)}


def load(name: str):
    return instantiate(composed(f"model/{name}").model)


def count(config):
    with torch.device("meta"):
        return count_parameters(PalimpsestForCausalLM(config))


@pytest.mark.parametrize(
    ("kind", "millions"), [("fox_pro", 759), ("transformer_pro", 757), ("fox_llama", 757), ("transformer_llama", 756)]
)
def test_parameters_at_760m_are_the_papers(kind, millions):
    assert count(load(f"{kind}_760m")).active == pytest.approx(millions * 1e6, rel=0.003)


def test_every_size_of_every_model_is_what_its_name_says():
    print(f"\n{'model':24s}{'all but embedding':>20s}{'blocks':>16s}{'GFLOP/token, 16k':>18s}")
    for kind in KINDS:
        for size, (layers, width) in SHAPES.items():
            config = load(f"{kind}_{size}")
            parameters = count(config)
            flops = flops_per_token(config, 16384) / 1e9
            print(f"{kind + '_' + size:24s}{parameters.active:20,}{parameters.blocks:16,}{flops:18.2f}")
            assert (config.num_layers, config.hidden_size) == (layers, width)
            assert config.head_dim == (128 if kind.startswith("transformer") and size == "760m" else 64)
            assert (config.forget_gate != "none") == kind.startswith("fox")
            assert config.rope == kind.startswith("transformer")
            pro = {config.qk_norm, config.kv_shift, config.output_gate, config.output_norm}
            assert pro == {kind.endswith("pro")}
            ratio = 3.5 if kind.endswith("pro") else 4
            assert config.intermediate_size == -(-width * ratio * 2 / 3 // 256) * 256


@pytest.mark.parametrize(("kind", "millions", "flops"), [("hgrn2", 756, 1.54e9), ("mamba2", 780, 1.65e9)])
def test_recurrent_baselines_at_760m_have_the_papers_parameters_and_operations(kind, millions, flops):
    config = load(f"{kind}_760m")
    assert count(config).active == pytest.approx(millions * 1e6, rel=0.002)
    assert flops_per_token(config, 16384) / 3 == pytest.approx(flops, rel=0.005)
    assert flops_per_token(config, 16384) == flops_per_token(config, 1)


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_models_are_as_large_as_the_transformer_of_their_name(kind):
    for size, (layers, width) in SHAPES.items():
        config, transformer = load(f"{kind}_{size}"), load(f"transformer_llama_{size}")
        assert config.hidden_size == width
        assert config.num_layers == (2 * layers if kind == "mamba2" else layers)
        assert set(config.mixers) == {kind}
        assert count(config).active == pytest.approx(count(transformer).active, rel=0.05)
        assert MIXERS[kind].state_shape(config)[1:] == RECURRENT[kind]


@pytest.mark.parametrize(
    ("name", "layers", "head_dim", "rope_base", "blocks", "active", "total"),
    [
        ("sigma_1_5b", 26, 64, 50_000, 1_758_570_496, 2_021_238_784, 2_283_907_072),
        ("sigma_10b", 32, 128, 500_000, 9_462_616_064, 9_987_952_640, 10_513_289_216),
        ("sigma_ablation_1b", 22, 64, 50_000, 1_038_182_400, 1_300_850_688, 1_563_518_976),
    ],
)
def test_sigmas_models_have_the_papers_shapes_and_these_parameters(
    name, layers, head_dim, rope_base, blocks, active, total
):
    config = load(name)
    parameters = count(config)
    assert (config.num_layers, config.head_dim, config.rope_base) == (layers, head_dim, rope_base)
    assert config.head_counts == (32, 16 if "ablation" in name else 4, 16)
    assert (parameters.blocks, parameters.active, parameters.total) == (blocks, active, total)
    stated = f"{blocks / 1e9:.2f}B", f"{active / 1e9:.2f}B", f"{total / 1e9:.2f}B"
    comment = (ROOT / "conf" / "model" / f"{name}.yaml").read_text().partition("defaults")[0]
    assert all(number in comment for number in stated), stated


def test_the_tiny_model_has_about_a_million_parameters_in_its_blocks():
    assert 0.5e6 < count(load("fox_pro_tiny")).blocks < 2e6


def test_counts_add_up_and_a_shared_matrix_counts_once(build):
    untied, tied = count_parameters(build()), count_parameters(build(tie_word_embeddings=True))
    assert untied.total == untied.embedding + untied.blocks + untied.head
    assert untied.embedding == untied.head == 61 * 32
    assert tied.total == untied.total - untied.embedding
    assert tied.active == untied.active


def test_flops_per_token_follow_the_papers_formula(build):
    model = build()
    active = count_parameters(model).active
    assert flops_per_token(model.config, 100) == 3 * (2 * active + 2 * 2 * 32 * 100)
