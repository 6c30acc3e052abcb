"""Exports load as the saved model; a plain Transformer loads as a stock Llama; others name what they load with."""

import json
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lit_modules.networks import Linearization, PalimpsestForCausalLM, export_pretrained, linearize
from lit_modules.networks.loader_file import FILE
from tests.evaluation.conftest import small_llama

IDS = torch.arange(24).view(2, 12)
PLAIN = {"forget_gate": "none", "rope": True}


@torch.no_grad()
def test_an_export_gives_the_same_logits_through_auto_classes(any_model, tmp_path, request):
    export_pretrained(any_model, tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    stock = request.node.callspec.id in ("transformer_llama", "gqa")
    assert type(loaded) is (LlamaForCausalLM if stock else PalimpsestForCausalLM)
    # Stock Llama normalizes in float32 even when its weights are float64.
    assert_close(loaded(IDS).logits, any_model(IDS).logits, rtol=0, atol=1e-5 if stock else 1e-9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]


def test_a_plain_transformer_loads_without_this_project(build, tmp_path):
    model = build(forget_gate="none", rope=True, rope_base=1234.0, norm_eps=1e-4, max_position_embeddings=77)
    export_pretrained(model, tmp_path / "export")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["max_position_embeddings"] == 77
    code = (
        "import sys, torch, transformers;"
        f"m = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / 'export')!r}, dtype=torch.float64);"
        "assert 'lit_modules' not in sys.modules;"
        "print(m(torch.arange(24).view(2, 12)).logits.sum().item())"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(out.stdout) == pytest.approx(model(IDS).logits.sum().item(), abs=1e-4)


def test_blocks_without_a_second_half_are_not_written_as_llamas(build, tmp_path):
    model = build(forget_gate="none", rope=True, intermediate_size=None)
    export_pretrained(model, tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    assert type(loaded) is PalimpsestForCausalLM
    assert loaded.num_parameters() == model.num_parameters()


@torch.no_grad()
def test_a_shared_matrix_stays_shared(build, tmp_path):
    for switches in ({"forget_gate": "none", "rope": True}, {}):
        model = build(tie_word_embeddings=True, **switches)
        export_pretrained(model, tmp_path / "export")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


def test_an_export_replaces_the_one_before_it_and_keeps_it_when_it_fails(build, tmp_path, monkeypatch):
    first, second = build(), build(qk_norm=True)
    export_pretrained(first, tmp_path / "export")
    (tmp_path / "export" / "stale.txt").touch()
    monkeypatch.setattr(second, "save_pretrained", lambda folder: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export_pretrained(second, tmp_path / "export")
    assert (tmp_path / "export" / "stale.txt").exists()
    monkeypatch.undo()
    export_pretrained(second, tmp_path / "export")
    assert not (tmp_path / "export" / "stale.txt").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").config.qk_norm


def test_exporting_leaves_the_model_as_it_was(build, tmp_path):
    model = build(forget_gate="none", rope=True)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    export_pretrained(model, tmp_path / "export")
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        ({"qk_norm": True, "kv_shift": True}, "qk_norm=true, kv_shift=true: leave form out"),
        ({"output_gate": True, "output_norm": True}, "output_gate=true, output_norm=true: leave form out"),
        ({"forget_gate": "data_dependent", "rope": False}, "forget_gate=data_dependent, rope=false: leave form out"),
        (
            {"num_key_heads": 1, "num_value_heads": 2, "augmented_query_dim": 24},
            "augmented_query_dim=24, num_key_heads=1 with num_value_heads=2: leave form out",
        ),
        (
            {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 4},
            "key_head_dim=4, num_key_heads=1 with num_value_heads=2: give form=shared_kv_groups, which makes",
        ),
        ({"mixers": ["attention", "gla"]}, "mixers=gla: leave form out"),
        ({"intermediate_size": None}, "intermediate_size=null: leave form out"),
    ],
)
def test_a_stock_llama_that_is_asked_for_names_everything_that_llama_does_not_have(build, tmp_path, switches, said):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole line is looked at)
        export_pretrained(build(**PLAIN | switches), tmp_path / "export", form="stock_llama")
    assert str(error.value).startswith(f"form=stock_llama cannot hold {said}")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "export").exists()


def test_a_stock_llama_that_is_asked_for_is_what_is_written_anyway(build, tmp_path):
    model = build(**PLAIN, num_key_heads=2, num_value_heads=2)
    for form in ("auto", "stock_llama"):
        export_pretrained(model, tmp_path / form, form=form)
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path / form)) is LlamaForCausalLM
    with pytest.raises(ValueError, match="form=onnx: give one of auto, stock_llama, shared_kv_groups"):
        export_pretrained(model, tmp_path / "other", form="onnx")


def test_a_linearized_model_has_the_file_too(tmp_path):
    linearize(small_llama(), Linearization(window=16)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"]["AutoConfig"] == "modeling_palimpsest.LinearizedLlamaConfig"
    found = {}
    exec(compile((tmp_path / FILE).read_text(), FILE, "exec"), found)
    assert found["LinearizedLlamaForCausalLM"].config_class is found["LinearizedLlamaConfig"]


def test_a_server_that_batches_continuously_is_led_to_its_ordinary_generation(build):
    """`transformers serve --continuous-batching` looks for this attribute, and needs a paged cache if it is there."""
    assert hasattr(small_llama(), "init_continuous_batching")
    assert not hasattr(build(), "init_continuous_batching")


def test_the_file_names_classes_that_can_be_imported(build, tmp_path):
    model = build()
    model.__class__ = type("FSDPPalimpsestForCausalLM", (PalimpsestForCausalLM,), {})  # as fully_shard does
    model.save_pretrained(tmp_path)
    found = {}
    exec(compile((tmp_path / FILE).read_text(), FILE, "exec"), found)
    assert found["PalimpsestForCausalLM"] is PalimpsestForCausalLM


def test_where_this_project_is_not_installed_the_file_says_so(build, tmp_path):
    """Its own words, and not `pip install lit_modules`, a package of somebody else."""
    build().save_pretrained(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lit_modules.networks.config", None)
        with pytest.raises(ImportError, match="this model needs the package palimpsest-lm"):
            exec(compile((tmp_path / FILE).read_text(), FILE, "exec"), {})
    from transformers.dynamic_module_utils import check_imports

    assert check_imports(tmp_path / FILE) == []
