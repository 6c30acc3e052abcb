"""Rotations of cached keys and values, and the file that holds them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from lit_modules.networks import PalimpsestConfig
from lit_modules.networks.caches.balanced import balanced_transform
from lit_modules.networks.caches.rotations import (
    LayerRotations,
    Rotations,
    covariance_rotation,
    hadamard,
    model_identity,
    read_rotations,
    spread,
    write_rotations,
)

SIZES = [*range(1, 131), 192, 256, 384, 512]


def llama(**sizes) -> LlamaForCausalLM:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50} | sizes
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=16, **sizes))


def covariance(size: int) -> torch.Tensor:
    rows = torch.randn(4 * size, size, dtype=torch.float64) * torch.linspace(0.1, 3, size)
    return rows.mT @ rows


@pytest.fixture
def model():
    return llama()


@pytest.fixture
def fitted(model):
    def layer() -> LayerRotations:
        centred, plain = (balanced_transform(covariance(8), covariance(8), mean) for mean in (torch.randn(2, 8), None))
        return LayerRotations(covariance_rotation(covariance(8)), hadamard(8), centred, plain)

    layers = {n: layer() for n in range(2)}
    return Rotations(layers, model_identity(model), 30_000)


@pytest.fixture
def file(fitted, tmp_path):
    write_rotations(tmp_path / "rotations.safetensors", fitted)
    return tmp_path / "rotations.safetensors"


@pytest.mark.parametrize("size", SIZES)
def test_matrices_of_every_size_are_orthogonal(size):
    one = torch.eye(size, dtype=torch.float64)
    for matrix in (hadamard(size, torch.float64), covariance_rotation(covariance(size)).double()):
        assert (matrix.mT @ matrix - one).abs().max() < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_no_entry_of_a_hadamard_matrix_is_large(size):
    power = size & -size
    largest = hadamard(size, torch.float64).abs().max()
    bound = power**-0.5 if size == power else (2 / size) ** 0.5
    assert largest <= bound + 1e-12


def test_a_hadamard_matrix_of_a_power_of_two_has_sylvesters_signs():
    scipy_linalg = pytest.importorskip("scipy.linalg")
    wanted = torch.tensor(scipy_linalg.hadamard(64)) / 8.0
    assert torch.equal(hadamard(64), wanted.float())


@pytest.mark.parametrize("size", [0, -4, 8.0])
def test_a_size_that_is_no_head_dimension_is_refused(size):
    with pytest.raises(ValueError, match=f"head_dim={size}"):
        hadamard(size)


@pytest.mark.parametrize("size", SIZES)
def test_every_place_is_dealt_once(size):
    assert sorted(spread(size).tolist()) == list(range(size))


def test_places_are_bit_reversed():
    assert spread(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert spread(6).tolist() == [0, 4, 2, 1, 5, 3]


@pytest.mark.parametrize("size", [64, 128])
def test_every_channel_gets_the_same_share_of_the_energy(size):
    data = covariance(size)
    rotation = covariance_rotation(data).double()
    energies = (rotation.mT @ data @ rotation).diagonal()
    assert torch.allclose(energies, data.diagonal().mean().expand(size), rtol=1e-5)


def test_the_composition_is_eigenvectors_hadamard_and_dealt_places():
    values = torch.tensor([1.0, 4.0, 2.0, 3.0], dtype=torch.float64)
    order = torch.eye(4, dtype=torch.float64)[:, [1, 3, 2, 0]]  # eigenvectors by falling eigenvalue
    wanted = torch.empty(4, 4, dtype=torch.float64)
    wanted[:, spread(4)] = order @ hadamard(4, torch.float64)
    assert torch.allclose(covariance_rotation(values.diag()).double(), wanted)


def test_a_rotation_is_the_same_again_and_depends_on_no_scale():
    data = covariance(40)
    assert torch.equal(covariance_rotation(data), covariance_rotation(data.clone()))
    assert torch.allclose(covariance_rotation(data), covariance_rotation(2 * data), atol=1e-5)


def test_covariances_of_few_tokens_have_a_rotation():
    token = torch.randn(1, 16)
    for data in (token.mT @ token, torch.zeros(16, 16)):
        rotation = covariance_rotation(data)
        assert (rotation.mT @ rotation - torch.eye(16)).abs().max() < 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_covariances_that_are_not_finite_are_refused(value):
    with pytest.raises(ValueError, match="not finite"):
        covariance_rotation(torch.full((4, 4), value))


def test_a_file_gives_back_what_was_written(file, fitted, model):
    for given in (model, model.config):
        found = read_rotations(file, given)
        assert found.tokens == 30_000
        assert found.layers.keys() == fitted.layers.keys()
        for number, layer in fitted.layers.items():
            for name in ("key", "value"):
                for way in ("rotation", "balanced"):
                    read, written = (each.transform(name, way) for each in (found.of_layer(number), layer))
                    assert (read.mean is None) == (written.mean is None)
                    assert all(x.equal(y) for x, y in zip(read, written, strict=True) if y is not None)
    own = ["key", "key.inverse", "key.matrix", "key.mean", "value", "value.inverse", "value.matrix"]
    assert sorted(load_file(file)) == [f"layers.{number}.{name}" for number in range(2) for name in own]


def test_a_layer_without_rotations_is_named(fitted):
    with pytest.raises(ValueError, match="none of layer 7"):
        fitted.of_layer(7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_weights_in_another_dtype_are_the_same_model(tmp_path, dtype):
    stored = llama().bfloat16()
    write_rotations(tmp_path / "r", Rotations({}, model_identity(stored), 1))
    assert read_rotations(tmp_path / "r", stored.to(dtype)).layers == {}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: llama(), "has other weights"),
        (lambda: llama(num_hidden_layers=3), "layers 2 and not 3"),
        (lambda: llama(num_key_value_heads=4), "key_heads 2 and not 4"),
        (lambda: llama(head_dim=16), "key_dim 8 and not 16"),
        (lambda: PalimpsestConfig(), "architecture llama and not palimpsest"),
    ],
)
def test_rotations_of_another_model_are_refused_in_one_line(file, other, said):
    with pytest.raises(ValueError, match="belongs to another model") as raised:
        read_rotations(file, other())
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_diffqkvs_unequal_heads_are_part_of_the_identity():
    config = PalimpsestConfig(hidden_size=64, num_heads=4, num_key_heads=1, num_value_heads=2, key_head_dim=8)
    found = model_identity(config)
    assert (found["key_heads"], found["value_heads"], found["key_dim"], found["value_dim"]) == (1, 2, 8, 16)


def damaged(file, change) -> None:
    """Change the tensors or the record of a file."""
    import safetensors

    with safetensors.safe_open(file, "pt") as opened:
        record = json.loads(opened.metadata()["rotations"])
    tensors = load_file(file)
    change(tensors, record)
    save_file(tensors, file, {"rotations": json.dumps(record)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, r: t.pop("layers.1.value"), "lacks layers.1.value"),
        (lambda t, r: t["layers.0.key"].mul_(1.1), "layers.0.key, which is not orthogonal"),
        (lambda t, r: t["layers.0.key"].fill_(float("nan")), "layers.0.key, which is not orthogonal"),
        (lambda t, r: t.update({"layers.0.key": torch.eye(4)}), r"layers.0.key of shape \[4, 4\]"),
        (lambda t, r: t.update({"layers.9.key": torch.eye(8)}), "unknown tensor layers.9.key"),
        (lambda t, r: t.pop("layers.0.value.inverse"), "lacks layers.0.value.inverse"),
        (lambda t, r: t["layers.0.value.matrix"].mul_(1.1), "layers.0.value.inverse, which is not the inverse of"),
        (lambda t, r: t["layers.0.value.matrix"][:, 3].zero_(), "layers.0.value.inverse, which is not the inverse of"),
        (lambda t, r: t["layers.1.key.mean"].fill_(float("inf")), "layers.1.key.mean, which is not finite"),
        (lambda t, r: t.update({"layers.1.key.mean": torch.zeros(4, 8)}), r"key.mean of shape \[4, 8\], which"),
        (lambda t, r: r.update(version=1), "version 1, and version 2 can be read"),
        (lambda t, r: r.pop("model"), "holds no rotations"),
    ],
)
def test_a_damaged_file_is_refused(file, model, change, said):
    damaged(file, change)
    with pytest.raises(ValueError, match=said):
        read_rotations(file, model)


def test_a_missing_file_a_text_and_other_tensors_are_refused(tmp_path, model):
    with pytest.raises(ValueError, match="is not a file: give the output of job=calibrate"):
        read_rotations(tmp_path / "none", model)
    (tmp_path / "text").write_text("layers")
    save_file({"layers.0.key": torch.eye(8)}, tmp_path / "others")
    for name in ("text", "others"):
        with pytest.raises(ValueError, match="holds no rotations"):
            read_rotations(tmp_path / name, model)
