"""Exports load as the saved model; a plain Transformer loads as a stock Llama."""

import json
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lit_modules.networks import PalimpsestForCausalLM, export_pretrained

IDS = torch.arange(24).view(2, 12)


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
