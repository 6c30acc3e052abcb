"""The recurrent mixers are what their papers say. What holds for every mixer is in test_causal_lm.py."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM, count_parameters, flops_per_token
from lit_modules.networks.mixers import MIXERS
from lit_modules.networks.positions import locate

EXACT = {"rtol": 0, "atol": 1e-9}
IDS = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(1))
RECURRENT = sorted(MIXERS.keys() - {"attention"})


def fresh(**switches) -> PalimpsestForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "intermediate_size": 96}
    return PalimpsestForCausalLM(PalimpsestConfig(**sizes | {"short_conv_width": 4} | switches))


def gradients(model, **inputs) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(IDS, shift_labels=IDS.roll(-1, 1), **inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def normalize(x: torch.Tensor, norm) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def convolve(x: torch.Tensor, convolution) -> torch.Tensor:
    """[T, C] through torch's own convolution, zeros before the first token."""
    padded = F.pad(x.T[None], (convolution.weight.shape[1] - 1, 0))
    return F.conv1d(padded, convolution.weight[:, None], convolution.bias, groups=x.shape[1])[0].T


def scan(q, k, v, decay) -> torch.Tensor:
    """The recurrence of one row, token by token: q, k [T, H, Dk], v [T, H, Dv], decay of the rows [T, H, Dk]."""
    state, out = torch.zeros(k.shape[1], k.shape[2], v.shape[2], dtype=k.dtype), []
    for t in range(len(k)):
        state = decay[t, :, :, None] * state + k[t, :, :, None] * v[t, :, None, :]
        out.append((q[t, :, :, None] * state).sum(1))
    return torch.stack(out)


def heads(count: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.unflatten(-1, (count, -1)) for x in tensors]


@pytest.fixture
def nothing_compiled():
    """Reset compilation: blocks compiled by other tests count against the limit."""
    torch.compiler.reset()


@torch.no_grad()
@pytest.mark.parametrize("width", [None, 3])
def test_hgrn2_is_the_papers_recurrence_over_its_bound(build, width):
    mixer = build(mixers="hgrn2", short_conv_width=width, state_dim=5).model.layers[0].self_attn
    hidden = torch.randn(1, 9, 32, dtype=torch.float64)
    bound = torch.rand(4, 5, dtype=torch.float64)
    x = [mixer.q_proj(hidden[0]), mixer.f_proj(hidden[0]), mixer.i_proj(hidden[0])]
    if width is not None:
        x = [convolve(y, mixer.convolutions[name]) for y, name in zip(x, "qfi", strict=True)]
    q, f, i = heads(4, *x)
    forget = bound + (1 - bound) * f.sigmoid()
    out = scan(q * q.sigmoid(), 1 - forget, i, forget).flatten(1) / math.sqrt(5)
    expected = mixer.o_proj(normalize(out, mixer.o_norm))
    assert_close(mixer(hidden, locate(1, 9, 0, hidden.device), lower_bound=bound)[0], expected, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("width", [None, 3])
def test_gla_is_the_papers_recurrence(build, width):
    mixer = build(mixers="gla", short_conv_width=width, gate_rank=3).model.layers[0].self_attn
    hidden = torch.randn(1, 9, 32, dtype=torch.float64)
    x = [mixer.q_proj(hidden[0]), mixer.k_proj(hidden[0]), mixer.v_proj(hidden[0])]
    if width is not None:
        x = [F.silu(convolve(y, mixer.convolutions[name])) for y, name in zip(x, "qkv", strict=True)]
    logits = mixer.decay_down_proj(hidden[0]) @ mixer.decay_up_proj.weight.T + mixer.decay_up_proj.bias
    q, k, v, decay = heads(4, *x, logits.sigmoid() ** (1 / 16))
    assert (k.shape[-1], v.shape[-1]) == (4, 8)
    out = normalize(scan(q, k, v, decay) / 2, mixer.o_norm).flatten(1)
    expected = mixer.o_proj(F.silu(mixer.g_proj(hidden[0])) * out)
    assert_close(mixer(hidden, locate(1, 9, 0, hidden.device))[0], expected, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("width", [None, 3])
def test_mamba2_is_the_papers_state_space(build, width):
    mixer = build(mixers="mamba2", short_conv_width=width, state_dim=6).model.layers[0].self_attn
    hidden = torch.randn(1, 9, 32, dtype=torch.float64)
    z, projected, dt = mixer.in_proj(hidden[0]).split([64, 76, 4], dim=-1)
    mixed = F.silu(projected if width is None else convolve(projected, mixer.convolutions["xBC"]))
    x, B, C = mixed[:, :64].unflatten(-1, (4, 16)), mixed[:, 64:70], mixed[:, 70:]
    dt = torch.log1p((dt + mixer.dt_bias).exp())
    state, out = torch.zeros(4, 16, 6, dtype=torch.float64), []
    for t in range(9):
        # h_t = exp(dt A) h_{t-1} + dt B x and y = C h + D x, with A = -exp(A_log)
        state = torch.exp(-dt[t] * mixer.A_log.exp())[:, None, None] * state
        state = state + dt[t, :, None, None] * x[t, :, :, None] * B[t]
        out.append(state @ C[t] + mixer.D[:, None] * x[t])
    expected = mixer.out_proj(normalize(torch.stack(out).flatten(1) * F.silu(z), mixer.norm))
    assert_close(mixer(hidden, locate(1, 9, 0, hidden.device))[0], expected, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("width", [None, 3])
def test_gsa_is_softmax_attention_over_slots_that_forget(build, width):
    mixer = build(mixers="gsa", short_conv_width=width, num_slots=3).model.layers[0].self_attn
    hidden = torch.randn(1, 9, 32, dtype=torch.float64)
    x = [mixer.q_proj(hidden[0]), mixer.k_proj(hidden[0]), mixer.v_proj(hidden[0])]
    if width is not None:
        x = [convolve(y, mixer.convolutions[name]) for y, name in zip(x, "qkv", strict=True)]
    q, k, v, gate = heads(4, *map(F.silu, x), mixer.f_proj(hidden[0]).sigmoid() ** (1 / 8))
    keys = values = torch.zeros(4, 3, 8, dtype=torch.float64)
    out = []
    for t in range(9):
        keys = gate[t, :, :, None] * keys + (1 - gate[t])[:, :, None] * k[t, :, None, :]
        values = gate[t, :, :, None] * values + (1 - gate[t])[:, :, None] * v[t, :, None, :]
        weights = (keys @ q[t, :, :, None])[..., 0].softmax(-1)
        out.append((weights[:, None, :] @ values)[:, 0])
    expected = mixer.o_proj(normalize(F.silu(torch.stack(out).flatten(1)), mixer.o_norm))
    assert_close(mixer(hidden, locate(1, 9, 0, hidden.device))[0], expected, **EXACT)


@torch.no_grad()
def test_lower_bounds_rise_with_depth_over_the_layers_that_have_them(build):
    model = build(num_layers=5, mixers=["attention", "hgrn2", "hgrn2", "attention", "hgrn2"]).model
    first, second, third = model.lower_bounds()
    assert model.lower_bounds.logits.shape == (3, 4, 8)
    assert (first == 0).all()
    assert (second > 0).all()
    assert (third > second).all()
    assert (third < 1).all()
    given = [layer.get("lower_bound") for layer in model._shared()]
    assert given[0] is given[3] is None
    assert_close((given[1], given[2], given[4]), (first, second, third))
    assert build(mixers=["attention", "hgrn2"]).model.lower_bounds is None


@torch.no_grad()
@pytest.mark.parametrize("sizes", [[3, 20, 17], [24] + [1] * 16], ids=["in_chunks", "a_prompt_and_steps"])
def test_a_long_continuation_equals_the_parallel_pass(recurrent_model, sizes):
    cache = recurrent_model.new_cache()
    pieces = [recurrent_model(piece, past_key_values=cache).logits for piece in IDS.split(sizes, dim=1)]
    assert_close(torch.cat(pieces, dim=1), recurrent_model(IDS).logits, **EXACT)


def test_gradients_of_a_continuation_flow_through_its_own_tokens(recurrent_model):
    cache = recurrent_model.new_cache()
    with torch.no_grad():
        recurrent_model(IDS[:, :9], past_key_values=cache)
    logits = recurrent_model(IDS[:, 9:14], past_key_values=cache).logits
    assert_close(logits, recurrent_model(IDS[:, :14]).logits[:, 9:], **EXACT)
    logits.sum().backward()
    assert recurrent_model.model.embed_tokens.weight.grad.isfinite().all()
    assert not any(state.requires_grad for layer in cache.layers for state in getattr(layer, "states", ()))


@torch.no_grad()
@pytest.mark.parametrize("mixer", RECURRENT)
def test_a_cache_is_of_one_size_however_long_the_text(build, mixer):
    model = build(mixers=mixer, state_dim=4, num_slots=4, short_conv_width=4)

    def held(length: int) -> list[int]:
        layer = model(torch.ones(1, length, dtype=torch.long), use_cache=True).past_key_values.layers[0]
        return [x.untyped_storage().nbytes() for x in (*layer.states, *layer.tails.values())]

    assert held(3) == held(70)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mixer", RECURRENT)
def test_blocks_compile_in_place_without_a_graph_break(nothing_compiled, build, mixer, checkpointing, backend):
    model = build(mixers=mixer, state_dim=6, short_conv_width=4).train()
    expected = gradients(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
        assert_close(gradients(model), expected)
    for block in model.model.layers:
        block.compile(fullgraph=True, backend=backend)
    assert_close(gradients(model), expected)


@pytest.mark.parametrize("mixer", RECURRENT)
def test_compiled_blocks_take_packed_documents(nothing_compiled, build, mixer):
    model = build(mixers=mixer, state_dim=6, short_conv_width=4).train()
    ids, cu_seqlens = IDS.view(1, -1), torch.tensor([0, 5, 21, 22, 80], dtype=torch.int32)
    expected = model(ids, shift_labels=ids, cu_seqlens=cu_seqlens).loss
    for block in model.model.layers:
        block.compile(fullgraph=True, backend="eager")
    assert_close(model(ids, shift_labels=ids, cu_seqlens=cu_seqlens).loss, expected)


@pytest.mark.parametrize("mixer", RECURRENT)
def test_blocks_of_one_kind_are_compiled_once(nothing_compiled, build, mixer):
    model, compiled = build(mixers=mixer, num_layers=12, state_dim=6, short_conv_width=4).train(), []

    def count(graph, _):
        compiled.append(graph)
        return graph

    for block in model.model.layers:
        block.compile(fullgraph=True, backend=count)
    gradients(model)
    assert len(compiled) == 1


@pytest.mark.parametrize("mixer", RECURRENT)
def test_autocast_to_bf16_moves_the_loss_by_little_and_a_bf16_model_generates(mixer):
    model = fresh(mixers=mixer, state_dim=16)
    exact = model(IDS, shift_labels=IDS.roll(-1, 1)).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(IDS, shift_labels=IDS.roll(-1, 1)).loss
    loss.backward()
    assert_close(loss, exact, rtol=1e-2, atol=0)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    model = model.bfloat16().eval()
    cache = model.new_cache()
    assert model(IDS, past_key_values=cache).logits.dtype == torch.bfloat16
    assert all(state.dtype == torch.float32 for state in cache.layers[0].states)
    assert model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=60).shape == (2, 43)


def test_a_fresh_mamba2_forgets_and_steps_at_the_papers_rates():
    model = fresh(mixers="mamba2", state_heads=128, state_dim=4)
    for layer in model.model.layers:
        mixer = layer.self_attn
        rates, steps = mixer.A_log.exp(), F.softplus(mixer.dt_bias)
        assert 1 <= rates.min() < 2
        assert 15 < rates.max() <= 16.001
        assert 0.999e-3 < steps.min() < 2e-3
        assert 0.05 < steps.max() < 0.1001
        assert (mixer.D == 1).all()
        assert (mixer.convolutions["xBC"].bias == 0).all()
        assert 0.45 < mixer.convolutions["xBC"].weight.abs().max() <= 0.5
    first, second = (layer.self_attn.A_log for layer in model.model.layers[:2])
    assert not first.equal(second)


def test_fresh_bounds_are_even_steps_of_depth():
    bounds = fresh(mixers="hgrn2").model.lower_bounds()
    assert_close(bounds, tuple(torch.full((4, 16), share) for share in (0.0, 1 / 3, 2 / 3)))


def test_weight_decay_spares_rates_step_sizes_skips_and_bounds():
    model = fresh(mixers=["mamba2", "hgrn2", "hgrn2"], state_dim=4)
    spared = model.no_decay_parameters()
    mamba2 = {f"model.layers.0.self_attn.{name}" for name in ("A_log", "dt_bias", "D", "convolutions.xBC.bias")}
    assert mamba2 | {"model.lower_bounds.logits", "model.layers.1.self_attn.o_norm.weight"} <= spared
    assert spared <= {name for name, _ in model.named_parameters()}
    assert "model.layers.0.self_attn.convolutions.xBC.weight" not in spared
    assert "model.layers.0.self_attn.in_proj.weight" not in spared


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state_heads": 5}, r"state_heads=5 does not divide the 64 value channels \(expand_value=1 times hidden"),
        ({"expand_value": 1.1}, "num_heads=4 does not divide the 70.4 value channels"),
        ({"state_dim": 0}, "state_dim=0: give a whole number"),
        ({"num_slots": None}, "num_slots=null: give a whole number"),
        ({"gate_rank": 1.5}, "gate_rank=1.5: give a whole number"),
        ({"expand_value": -1}, "expand_value=-1: give a number above 0"),
        ({"gate_temperature": 0}, "gate_temperature=0: give a number above 0"),
        ({"short_conv_width": 0}, "short_conv_width=0: give a whole number"),
        ({"mixers": "mamba"}, "mixers=mamba is unknown: give one of attention, hgrn2"),
    ],
)
def test_sizes_that_cannot_work_are_named_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        fresh(**{"mixers": "gla"} | arguments)
    assert "\n" not in str(error.value)


def test_packed_documents_are_not_cached_and_tokens_not_taken_back(build):
    model = build(mixers="hgrn2")
    cu_seqlens = torch.tensor([0, 5, 40], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens with a cache: packed documents have a state each"):
        model(IDS[:1], cu_seqlens=cu_seqlens, use_cache=True)
    repeating = IDS[:1, :8].repeat(1, 3)
    with pytest.raises(ValueError, match="generate without assistant_model and prompt_lookup_num_tokens"):
        model.generate(repeating, max_new_tokens=24, do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=5)


def test_operations_beside_the_parameters_are_five_for_each_element_of_the_states():
    def mixing(mixer: str) -> int:
        model = fresh(mixers=mixer, state_dim=8, num_slots=5)
        return flops_per_token(model.config, 100) // 3 - 2 * count_parameters(model).active

    assert {mixer: mixing(mixer) / 15 for mixer in RECURRENT} == {
        "gla": 4 * 8 * 16,
        "gsa": 4 * 5 * (8 + 16),
        "hgrn2": 4 * 8 * 16,
        "mamba2": 4 * 8 * 32,
    }
    assert mixing("attention") == 3 * 2 * 64 * 100


def test_every_mixer_is_in_the_tests_of_all_mixers_and_in_the_list_that_users_read(recurrent_switches):
    mixers = [switches["mixers"] for switches in recurrent_switches.values()]
    tested = {name for names in mixers for name in ([names] if isinstance(names, str) else names)}
    assert tested == set(MIXERS)
    conf = Path(__file__).parents[3] / "conf/model/_base.yaml"
    comment = next(line for line in conf.read_text().splitlines() if line.startswith("mixers:"))
    assert all(name in comment for name in MIXERS)
