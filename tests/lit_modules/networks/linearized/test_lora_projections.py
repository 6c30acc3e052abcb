"""Projections with LoRA in training, against peft's own forward pass and its gradients."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from lit_modules.networks.linearized import lora_projections
from lit_modules.networks.linearized.lora import add_lora, lora_layers

WIDTHS = {"q_proj": 24, "k_proj": 8, "v_proj": 12}


def projections(names=tuple(WIDTHS), dtype=torch.float64, lora_dtype=None, bias=False, base=nn.Linear, **options):
    """Frozen projections of an input of 16 channels, with LoRA of different ranks that is not the identity."""
    torch.manual_seed(0)
    holder = nn.ModuleDict({name: base(16, WIDTHS[name], bias=bias) for name in names}).requires_grad_(False)
    ranks = {"k_proj": 3} if "k_proj" in names else {}
    options = {"r": 4, "lora_alpha": 6, "rank_pattern": ranks, "target_modules": list(names)} | options
    inject_adapter_in_model(LoraConfig(**options), holder.to(dtype))
    for layer in lora_layers(holder).values():
        for factors in (layer.lora_A, layer.lora_B):
            factors.to(lora_dtype or torch.promote_types(dtype, torch.float32))
            for factor in factors.values():
                nn.init.normal_(factor.weight, std=0.3)
    return holder


def outputs_and_gradients(modules, x, project):
    """Outputs of `project`, and gradients of x and of what is trained, from a loss that no output is left out of."""
    x = x.clone().requires_grad_()
    outputs = project(list(modules.values()), x)
    generator = torch.Generator().manual_seed(1)
    loss = sum((y * torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y)).sum() for y in outputs)
    trained = [parameter for parameter in modules.parameters() if parameter.requires_grad]
    return [y.detach() for y in outputs], torch.autograd.grad(loss, [x, *trained])


def by_peft(modules, x):
    return [module(x) for module in modules]


def hidden(dtype, batch=3):
    return torch.randn(batch, 7, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


@pytest.fixture
def calls(monkeypatch):
    """Return the numbers of projections computed together."""
    counts, apply = [], lora_projections._Projections.apply

    def counted(x, scalings, *factors):
        counts.append(len(scalings))
        return apply(x, scalings, *factors)

    monkeypatch.setattr(lora_projections._Projections, "apply", counted)
    return counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("names", [("q_proj", "k_proj", "v_proj"), ("q_proj",), ("q_proj", "v_proj")], ids="-".join)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_all_gradients_are_those_of_peft(calls, dtype, names, bias):
    modules, x = projections(names, dtype, bias=bias), hidden(dtype)
    expected = outputs_and_gradients(modules, x, by_peft)
    found = outputs_and_gradients(modules, x, lora_projections.project)
    torch.testing.assert_close(found, expected)
    assert calls == [len(names)]


def test_bfloat16_errs_as_peft_does_and_gradients_of_lora_are_float32():
    modules, x = projections(dtype=torch.bfloat16), hidden(torch.bfloat16, batch=64)
    for layer in lora_layers(modules).values():
        layer.lora_B["default"].weight.data *= 0.2  # so that LoRA is the smaller part, as it is
    exact_modules = projections()
    exact_modules.load_state_dict({name: value.double() for name, value in modules.state_dict().items()})
    exact = outputs_and_gradients(exact_modules, x.double(), by_peft)
    errors = []
    for project in (by_peft, lora_projections.project):
        outputs, gradients = outputs_and_gradients(modules, x, project)
        pairs = zip((*outputs, *gradients), (*exact[0], *exact[1]), strict=True)
        errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in pairs])
    assert all(own <= 1.3 * theirs for theirs, own in list(zip(*errors, strict=True))[:4])  # of outputs, and of x
    assert max(errors[1]) < 2**-7
    assert [g.dtype for g in gradients] == [torch.bfloat16] + [torch.float32] * 6


def test_for_the_backward_pass_the_input_alone_is_kept_and_what_it_is_in_loras_rank():
    modules, x = projections(dtype=torch.bfloat16), hidden(torch.bfloat16, batch=64).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        lora_projections.project(list(modules.values()), x)
    of_tokens = [tensor for tensor in kept if len(tensor) == len(x)]
    assert [tuple(tensor.shape) for tensor in of_tokens] == [(64, 7, 16), (64, 7, 4 + 3 + 4)]
    assert of_tokens[0].data_ptr() == x.data_ptr()


def two_adapters(modules):
    inject_adapter_in_model(LoraConfig(r=2, target_modules=list(WIDTHS)), modules, adapter_name="other")
    for layer in lora_layers(modules).values():
        layer.set_adapter(["default", "other"])


def each(change):
    """A change of every layer."""
    return lambda modules: [change(layer) for layer in lora_layers(modules).values()]


def doubled(module, args, output):
    return 2 * output


MORE = {
    "dropout": ({"lora_dropout": 0.5}, None),
    "DoRA": ({"use_dora": True}, None),
    "LoRA's bias": ({"lora_bias": True, "bias": True}, None),
    "disabled": ({}, each(lambda layer: layer.enable_adapters(False))),
    "disabled, then told to be trained": (
        {},
        each(
            lambda layer: (layer.enable_adapters(False), layer.lora_A.requires_grad_(), layer.lora_B.requires_grad_())
        ),
    ),
    "merged": ({}, each(lambda layer: layer.merge())),
    "two adapters": ({}, two_adapters),
    "a trained base": ({}, each(lambda layer: layer.base_layer.weight.requires_grad_(True))),
    "frozen LoRA": ({}, each(lambda layer: layer.requires_grad_(False))),
    "another base": ({"base": type("Projection", (nn.Linear,), {})}, None),
    "a hook": ({}, each(lambda layer: layer.register_forward_hook(doubled))),
    "a hook before": ({}, each(lambda layer: layer.register_forward_pre_hook(lambda _, args: (2 * args[0],)))),
    "a hook of its base": ({}, each(lambda layer: layer.base_layer.register_forward_hook(doubled))),
    "a hook of LoRA's first factor": ({}, each(lambda layer: layer.lora_A["default"].register_forward_hook(doubled))),
    "a hook of LoRA's second factor": ({}, each(lambda layer: layer.lora_B["default"].register_forward_hook(doubled))),
    "a hook of gradients": ({}, each(lambda layer: layer.register_full_backward_hook(lambda *_: None))),
}


@pytest.mark.parametrize("what", MORE)
def test_what_is_more_or_less_than_plain_lora_computes_itself(calls, what):
    options, change = MORE[what]
    modules, x = projections(lora_dtype=torch.float64, **options), hidden(torch.float64)
    if change is not None:
        change(modules)
    torch.manual_seed(0)
    expected = by_peft(modules.values(), x)
    torch.manual_seed(0)
    assert all(map(torch.equal, lora_projections.project(list(modules.values()), x), expected))
    assert not calls


def test_without_gradients_each_computes_itself(calls):
    modules, x = projections(), hidden(torch.float64)
    with torch.no_grad():
        assert all(map(torch.equal, lora_projections.project(list(modules.values()), x), by_peft(modules.values(), x)))
    assert not calls


def test_one_without_lora_stands_among_those_with_it(calls):
    modules, x = projections(target_modules=["q_proj", "k_proj"]), hidden(torch.float64)
    expected = outputs_and_gradients(modules, x, by_peft)
    torch.testing.assert_close(outputs_and_gradients(modules, x, lora_projections.project), expected)
    assert calls == [2]


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_under_autocast_outputs_have_its_dtype_as_pefts_have(calls, base):
    modules, x = projections(dtype=base), hidden(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = outputs_and_gradients(modules, x, by_peft)
        found = outputs_and_gradients(modules, x, lora_projections.project)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.1)
    assert calls == [3]


@pytest.mark.parametrize("batch", [1, 2, 4, 5], ids=lambda batch: f"{7 * batch}_tokens")
def test_gradients_are_those_of_peft_whatever_the_number_of_tokens(monkeypatch, calls, batch):
    monkeypatch.setattr(lora_projections, "CHUNK_TOKENS", 14)
    modules, x = projections(), hidden(torch.float64, batch)
    expected = outputs_and_gradients(modules, x, by_peft)
    torch.testing.assert_close(outputs_and_gradients(modules, x, lora_projections.project), expected)
    assert calls == [3]


def test_a_packed_row_is_summed_in_many_products(monkeypatch):
    batches, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda x, y: batches.append(len(x)) or bmm(x, y))
    outputs_and_gradients(projections(dtype=torch.float32), torch.ones(1, 8192, 16), lora_projections.project)
    assert batches == [8, 8]


def test_it_is_compiled_for_any_number_of_tokens_at_once(monkeypatch):
    monkeypatch.setattr(lora_projections, "CHUNK_TOKENS", 14)
    modules, graphs = projections(("q_proj",)), []

    def counting(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(lora_projections.project, dynamic=True, backend=counting, fullgraph=True)
    for rows in (5, 4, 7, 6):
        x = hidden(torch.float64, rows).view(1, 7 * rows, 16)
        expected = outputs_and_gradients(modules, x, by_peft)
        torch.testing.assert_close(outputs_and_gradients(modules, x, compiled), expected)
    assert len(graphs) <= 2  # whole chunks, and whole ones with a rest


def test_it_is_compiled_without_a_break():
    modules, x = projections(), hidden(torch.float64)
    compiled = torch.compile(lora_projections.project, dynamic=False, backend="aot_eager", fullgraph=True)
    expected = outputs_and_gradients(modules, x, by_peft)
    torch.testing.assert_close(outputs_and_gradients(modules, x, compiled), expected)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_models_train_as_with_peft(linearized, ids, calls, monkeypatch, family, checkpointing):
    model = add_lora(linearized(family, window=4), rank=2, targets=["q_proj", "k_proj", "v_proj", "o_proj"]).double()
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight, generator=torch.Generator().manual_seed(4))
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    gradients = partial(torch.autograd.grad, inputs=trained)
    with monkeypatch.context() as patched:
        patched.setattr(lora_projections, "_is_plain", lambda *_: False)
        expected = gradients(model(ids, shift_labels=ids.roll(-1, 1)).loss)
    assert not calls
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(gradients(model(ids, shift_labels=ids.roll(-1, 1)).loss), expected)
    of_a_layer = [1, 1] if family == "phi3" else [3, 1]
    assert calls == of_a_layer * 2 * (2 if checkpointing else 1)


def test_a_base_whose_dtype_is_not_the_inputs_refuses_as_it_does_by_itself(calls):
    modules, x = projections(dtype=torch.bfloat16), hidden(torch.float32)
    for project in (by_peft, lora_projections.project):
        with pytest.raises(RuntimeError, match="dtype"):
            project(list(modules.values()), x)
    assert not calls


def test_autocast_leaves_float64_as_it_is(calls):
    modules, x = projections(lora_dtype=torch.float64), hidden(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        expected = outputs_and_gradients(modules, x, by_peft)
        found = outputs_and_gradients(modules, x, lora_projections.project)
    torch.testing.assert_close(found, expected)
    assert calls == [3]
