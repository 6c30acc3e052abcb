"""KV group sharing (arXiv 2501.13629, appendix E): equal heads in the weights, the same logits, a larger cache."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lit_modules.networks import PalimpsestForCausalLM, export_pretrained
from lit_modules.networks.kv_groups import cached_numbers, share_kv_groups

IDS = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(0))
PLAIN = {"forget_gate": "none", "rope": True}
PRO = {"qk_norm": True, "output_gate": True, "output_norm": True, "kv_shift": True}
DIFFQKV = {"num_key_heads": 1, "num_value_heads": 2}
AUGMENTED = {"augmented_query_dim": 24}
UNEQUAL = {  # and the number of heads that keys and values have afterwards
    "sigma": (PLAIN | DIFFQKV | AUGMENTED, 2),
    "fewer_value_heads": ({"num_value_heads": 1}, 4),
    "neither_is_a_multiple": (
        {"hidden_size": 48, "num_heads": 12, "num_key_heads": 4, "num_value_heads": 6, **AUGMENTED, **PLAIN},
        12,
    ),
    "small_keys": (PLAIN | AUGMENTED | {"key_head_dim": 4}, 4),
    "small_and_few_keys": (PRO | DIFFQKV | AUGMENTED | {"rope": True, "key_head_dim": 4}, 2),
    "beside_a_recurrence": (PRO | DIFFQKV | {"mixers": ["attention", "hgrn2"]}, 2),
    "shared_embedding": (PRO | DIFFQKV | {"tie_word_embeddings": True}, 2),
}


@torch.no_grad()
@pytest.mark.parametrize(("switches", "heads"), UNEQUAL.values(), ids=UNEQUAL.keys())
def test_a_model_with_repeated_heads_has_the_same_logits_and_equal_heads(build, tmp_path, switches, heads):
    model = build(**switches)
    before = copy.deepcopy(model.state_dict())
    export_pretrained(model, tmp_path / "export", form="shared_kv_groups")
    shared = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    assert type(shared) is PalimpsestForCausalLM
    assert shared.config.head_counts[1:] == (heads, heads)
    attention = shared.model.layers[0].self_attn
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape
    assert attention.k_map_proj is None
    assert_close(shared(IDS).logits, model(IDS).logits, rtol=0, atol=1e-9)
    assert_close(decoded(shared), decoded(model), rtol=0, atol=1e-9)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def decoded(model) -> torch.Tensor:
    """Logits of the second half, token by token after a cached first half."""
    cache = model.new_cache()
    steps = [model(piece, past_key_values=cache).logits for piece in IDS.split([6, 1, 1, 1, 1, 1, 1], dim=1)]
    return torch.cat(steps[1:], dim=1)


@torch.no_grad()
@pytest.mark.parametrize("heads", [DIFFQKV, {"num_key_heads": 4, "num_value_heads": 2}, {"key_head_dim": 4}])
def test_without_other_parts_the_shared_form_is_a_stock_llama(build, tmp_path, heads):
    model = build(**PLAIN, **heads)
    export_pretrained(model, tmp_path / "export", form="shared_kv_groups")
    llama = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    assert type(llama) is LlamaForCausalLM
    assert llama.config.num_key_value_heads == max(model.config.head_counts[1:])
    assert_close(llama(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)  # it normalizes in float32
    asked = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    written = [m.generate(IDS, **asked).tolist() for m in (model, llama)]
    assert written[0] == written[1]
    assert not list((tmp_path / "export").glob("*.py"))


def test_the_cost_is_what_the_caches_hold_and_stands_in_the_export(build, tmp_path):
    model = build(**PLAIN, hidden_size=256, num_heads=32, num_key_heads=4, num_value_heads=16)
    shared = share_kv_groups(model)
    for each, numbers in ((model, 2 * 20 * 8), (shared, 2 * 32 * 8)):
        cache = each.new_cache()
        for piece in IDS.split([11, 1], dim=1):
            each(piece, past_key_values=cache)
        held = sum((layer.keys.numel() + layer.values.numel()) // (2 * layer.keys.shape[1]) for layer in cache.layers)
        assert held == cached_numbers(each.config) == numbers
    export_pretrained(model, tmp_path / "export", form="shared_kv_groups")
    note = (tmp_path / "export" / "README.md").read_text()
    assert "4 key and 16 value heads" in note
    assert "512 numbers a token instead of 320, 1.60 times" in note


@torch.no_grad()
def test_a_key_map_is_multiplied_in_float32_and_rounded_once(build):
    model = build(**PLAIN, key_head_dim=4).bfloat16()
    mixer, shared = (m.model.layers[0].self_attn for m in (model, share_kv_groups(model)))
    exact = mixer.k_map_proj.weight.double() @ mixer.k_proj.weight.double().view(4, 4, 32)
    assert shared.k_proj.weight.dtype == torch.bfloat16
    assert torch.equal(shared.k_proj.weight, exact.view(32, 32).float().bfloat16())


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        (PLAIN, "form=shared_kv_groups changes nothing: the model has 4 key and 4 value heads of one width"),
        ({"mixers": "gla"}, "form=shared_kv_groups is for models with attention layers"),
    ],
)
def test_where_nothing_is_to_be_shared_one_line_says_so(build, tmp_path, switches, said):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole line is looked at)
        export_pretrained(build(**switches), tmp_path / "export", form="shared_kv_groups")
    assert str(error.value) == f"{said}: leave form out"
    assert not (tmp_path / "export").exists()
