"""Requirements of training: initial values, precision, decay groups, checkpointing, compilation, pruning, gradients."""

import math

import pytest
import torch
from torch.testing import assert_close

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.networks.positions import locate
from lit_modules.networks.rotary import rotary_tables

pytestmark = pytest.mark.core

IDS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))
TARGETS = IDS.roll(-1, 1)
PRO = {"qk_norm": True, "output_gate": True, "output_norm": True, "kv_shift": True}
SIGMA = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 4, "augmented_query_dim": 24}


def fresh(**switches) -> PalimpsestForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 96}
    return PalimpsestForCausalLM(PalimpsestConfig(**sizes, **switches))


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(IDS, shift_labels=TARGETS).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_a_fresh_model_starts_as_the_paper_says():
    model = fresh(**PRO)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert 0.017 < parameter.std() < 0.023, name
    assert model(IDS, shift_labels=TARGETS).loss.item() == pytest.approx(math.log(61), abs=0.1)


def test_two_models_of_one_seed_are_equal_and_another_seeds_differ():
    first, second = fresh(**PRO).state_dict(), fresh(**PRO).state_dict()
    assert all(first[name].equal(second[name]) for name in first)
    torch.manual_seed(1)
    other = PalimpsestForCausalLM(fresh(**PRO).config).state_dict()
    assert not first["lm_head.weight"].equal(other["lm_head.weight"])


@pytest.mark.parametrize("kind", ["data_independent", "fixed"])
def test_gates_without_data_decay_over_times_even_in_log_from_first_to_last_head(kind):
    model = fresh(forget_gate=kind, gate_time_min=4.0, gate_time_max=4000.0)
    log_forget = model.model.layers[1].self_attn.forget_gate(torch.randn(2, 5, 64))
    assert log_forget.shape == (2, 5, 4)
    assert_close(log_forget[1, 3], -1 / torch.tensor([4.0, 40.0, 400.0, 4000.0]), rtol=2e-4, atol=0)
    learned = [name for name, _ in model.named_parameters() if "forget_gate" in name]
    assert len(learned) == (2 if kind == "data_independent" else 0)


def test_the_parts_of_diffqkv_start_and_decay_as_every_matrix():
    model = fresh(num_key_heads=2, num_value_heads=1, key_head_dim=8, augmented_query_dim=96)
    parts = {name: parameter for name, parameter in model.named_parameters() if "k_map" in name or "augmented" in name}
    assert len(parts) == 8
    assert not parts.keys() & model.no_decay_parameters()
    for name, parameter in parts.items():
        assert 0.017 < parameter.std() < 0.023, name


def test_weight_decay_spares_norms_and_biases_and_nothing_else():
    model = fresh(**PRO)
    spared = model.no_decay_parameters()
    assert spared <= {name for name, _ in model.named_parameters()}
    decayed = {name for name, _ in model.named_parameters()} - spared
    assert all(name.endswith(("proj.weight", "lm_head.weight", "embed_tokens.weight")) for name in decayed)
    assert "model.layers.0.self_attn.k_shift_proj.weight" in decayed
    assert "model.layers.0.self_attn.forget_gate.proj.weight" in decayed
    assert {"model.norm.weight", "model.layers.1.self_attn.q_norm.weight"} <= spared
    assert "model.layers.1.self_attn.forget_gate.proj.bias" in spared
    independent = fresh(forget_gate="data_independent", gate_time_min=2.0, gate_time_max=9.0)
    assert "model.layers.0.self_attn.forget_gate.bias" in independent.no_decay_parameters()


def test_every_parameter_of_every_switch_gets_a_gradient(any_model):
    any_model.train()
    for name, gradient in gradients(any_model).items():
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("heads", [{}, SIGMA], ids=["all_heads", "sigmas_heads"])
def test_the_gate_leaves_bf16_under_autocast(heads):
    model = fresh(**PRO, **heads)
    gate = model.model.layers[0].self_attn.forget_gate
    hidden = torch.randn(2, 16, 64)
    exact = gate(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gate(hidden).equal(exact)
        loss = model(IDS, shift_labels=TARGETS).loss
    assert gate(hidden.bfloat16()).dtype == torch.float32
    assert loss.dtype == torch.float32
    assert_close(loss, model(IDS, shift_labels=TARGETS).loss, rtol=1e-2, atol=0)


@pytest.mark.parametrize("heads", [{}, SIGMA], ids=["all_heads", "sigmas_heads"])
def test_a_bf16_model_runs_and_generates(heads):
    model = fresh(**PRO, **heads, rope=True).bfloat16().eval()
    assert model(IDS).logits.dtype == torch.bfloat16
    assert model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=60).shape == (2, 19)


def test_activation_checkpointing_changes_no_gradient(fox_pro):
    expected = gradients(fox_pro.train())
    fox_pro.gradient_checkpointing_enable()
    assert fox_pro.is_gradient_checkpointing
    assert_close(gradients(fox_pro), expected)
    with pytest.raises(ValueError, match="past_key_values in training with gradient checkpointing"):
        fox_pro(IDS, past_key_values=fox_pro.new_cache())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_compile_in_place_without_a_graph_break(fox_pro, backend, checkpointing):
    expected = gradients(fox_pro.train())
    if checkpointing:
        fox_pro.gradient_checkpointing_enable()
    for block in fox_pro.model.layers:
        block.compile(fullgraph=True, backend=backend)
    assert_close(gradients(fox_pro), expected)
    assert list(fox_pro.state_dict()) == list(expected)  # no _orig_mod in the names


@pytest.mark.parametrize("heads", [{}, SIGMA], ids=["all_heads", "sigmas_heads"])
def test_compiled_blocks_take_packed_documents(build, heads):
    model = build(rope=True, **PRO, **heads).train()
    ids, cu_seqlens = IDS.view(1, -1), torch.tensor([0, 5, 21, 32], dtype=torch.int32)
    expected = model(ids, shift_labels=ids, cu_seqlens=cu_seqlens).loss
    for block in model.model.layers:
        block.compile(fullgraph=True, backend="eager")
    assert_close(model(ids, shift_labels=ids, cu_seqlens=cu_seqlens).loss, expected)


@torch.no_grad()
@pytest.mark.parametrize("heads", [{}, {"num_key_heads": 2, "num_value_heads": 1, "key_head_dim": 4, "rope": True}])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_pruning_moves_logits_by_no_more_than_the_mass_it_leaves_out(build, qk_norm, heads):
    ids = torch.randint(0, 61, (1, 600), generator=torch.Generator().manual_seed(2))
    pruned, exact = build(qk_norm=qk_norm, prune=-10.0, **heads), build(qk_norm=qk_norm, **heads)
    assert_close(pruned(ids).logits, exact(ids).logits, rtol=0, atol=1e-2)
    cache = pruned.new_cache()
    steps = [pruned(piece, past_key_values=cache).logits for piece in ids.split([500, 99, 1], dim=1)]
    assert_close(torch.cat(steps, dim=1), exact(ids).logits, rtol=0, atol=1e-2)


@torch.no_grad()
def test_the_logit_bound_of_qk_norm_holds_for_any_hidden_state(build):
    mixer = build(qk_norm=True, rope=True).model.layers[0].self_attn.bfloat16()
    # The worst case: equal weights and k = q, so that bf16 rounding alone decides on which side a logit falls.
    mixer.k_proj.weight.copy_(mixer.q_proj.weight)
    mixer.q_norm.weight.fill_(1.3)
    mixer.k_norm.weight.fill_(1.3)
    positions = locate(1, 256, 0, torch.device("cpu"))
    positions = positions._replace(rotary=rotary_tables(positions.index, 8, 1e4))
    q, k, *_ = mixer.project((100 * torch.randn(1, 256, 32)).bfloat16(), positions, None)
    logits = torch.einsum("bihd,bjhd->hij", q.double(), k.double()) / 8**0.5
    assert (logits.abs().amax((1, 2)) <= mixer._logit_bound()).all()


@torch.no_grad()
def test_shift_gate_and_attention_can_be_recomputed_from_what_project_returns(fox_pro):
    mixer = fox_pro.model.layers[0].self_attn
    hidden = torch.randn(2, 9, 32, dtype=torch.float64)
    q, k, v, log_forget = mixer.project(hidden, locate(2, 9, 0, hidden.device), None)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 8**0.5
    decay = log_forget.cumsum(1).transpose(1, 2)
    scores += decay[..., :, None] - decay[..., None, :]
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    out = mixer.o_norm(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)).flatten(2)
    expected = mixer.o_proj(mixer.g_proj(hidden).sigmoid() * out)
    assert_close(mixer(hidden, locate(2, 9, 0, hidden.device)), expected)
