"""`job=export`: a model in another form, what it prints, and mistakes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lit_modules.networks import Linearization, PalimpsestConfig, PalimpsestForCausalLM, export_pretrained, linearize
from tests.evaluation.conftest import make_starting_tokenizer, small_llama

SIGMA = {"forget_gate": "none", "rope": True, "num_key_heads": 1, "num_value_heads": 2}


def write_export(folder, **switches):
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    torch.manual_seed(0)
    model = PalimpsestForCausalLM(PalimpsestConfig(**sizes, **switches, initializer_range=0.3))
    return export_pretrained(model, folder, make_starting_tokenizer())


@pytest.fixture(scope="module")
def sigma(tmp_path_factory):
    return write_export(tmp_path_factory.mktemp("export") / "sigma", **SIGMA)


@pytest.fixture
def export(run, tmp_path):
    def call(checkpoint, *overrides):
        return run("job=export", f"checkpoint={checkpoint}", f"output={tmp_path}/out", *overrides, tiny=False)

    return call


@pytest.fixture
def generated(run):
    def call(checkpoint):
        asked = ("prompt='the gate'", "temperature=0", "max_new_tokens=24", "device=cpu")
        return run("job=generate", f"checkpoint={checkpoint}", *asked, tiny=False).out

    return call


def test_shared_groups_write_the_same_text_and_say_what_they_cost(export, generated, sigma, tmp_path):
    done = export(sigma, "form=shared_kv_groups")
    assert done.status == 0, done.err
    assert f"transformers serve {tmp_path}/out\n" in done.out  # a stock Llama needs no code of ours
    assert f"{tmp_path}/out/README.md" in done.out
    assert "2 of each" in (tmp_path / "out" / "README.md").read_text()
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) is LlamaForCausalLM
    assert generated(tmp_path / "out") == generated(sigma)


def test_the_first_form_is_the_one_of_a_run(export, generated, sigma, tmp_path):
    (tmp_path / "out").mkdir()  # an empty folder is no loss
    done = export(sigma)
    assert done.status == 0, done.err
    assert f"transformers serve {tmp_path}/out --trust-remote-code\n" in done.out
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (sigma / "model.safetensors").read_bytes()
    assert not (tmp_path / "out" / "README.md").exists()
    assert generated(tmp_path / "out") == generated(sigma)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["form=llama"], "form=llama: give one of auto, stock_llama, shared_kv_groups"),
        (["form=stock_llama"], "form=stock_llama cannot hold num_key_heads=1 with num_value_heads=2: give form=shared"),
        (["output=/proc/nowhere"], "output=/proc/nowhere cannot be written"),
        (["output=5"], "output=5"),
        (["checkpoint=/nonexistent/run"], "checkpoint=/nonexistent/run is not a folder"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(export, sigma, tmp_path, overrides, said):
    done = export(sigma, *overrides)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert said in done.err
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_replaced(export, sigma, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    done = export(sigma)
    assert done.status == 2
    assert f"output={tmp_path}/out exists: give a new folder" in done.err
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"


def test_a_model_without_other_forms_is_refused(export, tmp_path):
    llama = write_export(tmp_path / "llama", forget_gate="none", rope=True)
    assert "is a stock Llama, which has no other form" in export(llama).err
    linearize(small_llama(), Linearization(window=16)).save_pretrained(tmp_path / "linearized")
    make_starting_tokenizer().save_pretrained(tmp_path / "linearized")
    linearized = tmp_path / "linearized"
    assert "is a LinearizedLlamaForCausalLM: give a model of job=pretrain" in export(linearized).err
