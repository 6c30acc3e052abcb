"""The training of a linearized model: its stages, its teacher, and what is computed again."""

import contextlib
import dataclasses
import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import LlamaConfig, LlamaForCausalLM

from data_pipeline.tokens.batches import Sequence, collate
from lit_modules.linearization import module as linearization
from lit_modules.linearization.module import LinearizationTraining as Training
from lit_modules.linearization.stages import TrainingStage, plan_stages
from lit_modules.networks.linearized import Linearization, LinearizedForCausalLM, fingerprints, linearize
from lit_modules.networks.linearized.lora import add_lora
from lit_modules.schedules import Plateau, WarmupCosine

BATCH = 100  # tokens of a step


def small_llama(seed: int = 0, **settings) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        **settings,
    )
    return LlamaForCausalLM(config).double()


def with_lora(**settings) -> LinearizedForCausalLM:
    model = add_lora(linearize(small_llama(), Linearization(window=4, **settings)), rank=2)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)  # an adapter that does something
    return model


def training(model: LinearizedForCausalLM | None = None, schedule=None, **stages: TrainingStage) -> Training:
    module = Training(
        stages=stages or {"finetuning": TrainingStage()},
        max_tokens=10 * BATCH,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        schedule=schedule or Plateau(),
        batch_tokens=BATCH,
    )
    module.adopt(with_lora() if model is None else model)
    return module


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    """Two sequences of 12 tokens; in the first a document of 5 before one of 7, the second shorter than its place."""
    ids = torch.randint(61, (25,), generator=torch.Generator().manual_seed(3)).numpy()
    first = Sequence(ids[:12], ids[1:13], torch.tensor([0, 5]).numpy())
    second = Sequence(ids[13:22], ids[14:23], torch.tensor([0]).numpy())
    return collate([first, second], 12)


def test_stages_are_whole_steps_and_one_takes_the_rest():
    planned = plan_stages(
        {"a": TrainingStage(tokens=250), "b": TrainingStage(), "c": TrainingStage(tokens=100)}, 1000, BATCH
    )
    assert [(each.first, each.name, each.tokens) for each in planned] == [
        (0, "a", 300),
        (3, "b", 600),
        (9, "c", 100),
    ]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ({}, "stages is empty"),
        ({"a": TrainingStage(tokens=400)}, "max_tokens=1000"),
        ({"a": TrainingStage(tokens=1000), "b": TrainingStage()}, "max_tokens=1000"),
        ({"a": TrainingStage(), "b": TrainingStage()}, "stages a and b have no tokens"),
        ({"a": TrainingStage(tokens="many")}, "stages.a.tokens=many"),
        ({"a": TrainingStage(tokens=-5), "b": TrainingStage()}, "stages.a.tokens=-5"),
        (
            {"a": TrainingStage(tokens=1), "b": TrainingStage(tokens=1), "c": TrainingStage()},
            "stages.b.tokens=1 makes no step",
        ),
        ({"a": TrainingStage(kl="much")}, "stages.a.kl=much"),
        ({"a": TrainingStage(kl=float("nan"))}, "stages.a.kl=nan"),
        ({"a": TrainingStage(kl=True)}, "stages.a.kl=true"),
        ({"a": TrainingStage(cross_entropy=-1)}, "stages.a.cross_entropy=-1"),
        ({"a": TrainingStage(cross_entropy=0)}, "are all 0"),
        ({"a": TrainingStage(lr="fast")}, "stages.a.lr=fast"),
        ({"a": TrainingStage(lr=0)}, "stages.a.lr=0"),
        ({"a": TrainingStage(train=())}, "stages.a.train is empty"),
        ({"a": TrainingStage(train=("all",), attention_transfer=1)}, "stages.a: train=\\['all'\\]"),
    ],
)
def test_stages_that_cannot_work_are_refused_by_name(stages, said):
    with pytest.raises(ValueError, match=said) as raised:
        plan_stages(stages, 1000, BATCH)
    assert "\n" not in str(raised.value)


def test_the_teacher_predicts_as_the_stock_model_does_document_by_document(batch):
    module, stock, ends = training(), small_llama(), batch["cu_seqlens"].tolist()
    found = module.token_losses(batch, "teacher")
    for first, last in itertools.pairwise(ends):
        logits = stock(batch["input_ids"][:, first:last]).logits[0]
        expected = cross_entropy(logits, batch["targets"][0, first:last], ignore_index=-100, reduction="none")
        torch.testing.assert_close(found[first:last], expected)
    assert not torch.allclose(found, module.token_losses(batch), atol=1e-3)


def test_a_stage_trains_its_own_groups_and_no_others():
    module = training(
        with_lora(mixer="lolcats", feature_map="learned"),
        alignment=TrainingStage(tokens=300, train=("feature_maps",), cross_entropy=0, attention_transfer=1),
        finetuning=TrainingStage(lr=1e-4),
    )
    for stage, part in ((0, "feature_map"), (1, "lora_")):
        module.enter(stage)
        wanted = {name for name, parameter in module.model.named_parameters() if parameter.requires_grad}
        assert wanted
        assert all(part in name for name in wanted)
        assert wanted < module.trained
    module.parameter_groups()
    rates = {
        kind: [module.rate_factor(number, 100 * step) for step in (0, 2, 3, 9)]
        for number, kind in enumerate(module.groups)
    }
    assert rates == {"feature_maps": [1, 1, 0, 0], "lora": [0, 0, pytest.approx(0.1), pytest.approx(0.1)]}


def test_each_stage_runs_through_the_schedule_anew():
    alignment = TrainingStage(tokens=400, cross_entropy=0, attention_transfer=1)
    module = training(schedule=WarmupCosine(100, 1000), alignment=alignment, finetuning=TrainingStage())
    module.parameter_groups()
    assert [round(module.rate_factor(0, tokens), 3) for tokens in (0, 50, 100, 399, 400, 450, 500)] == [
        *(0, 0.5, 1),
        pytest.approx(0, abs=1e-4),
        *(0, 0.5, 1),
    ]
    module = training(schedule=Plateau(factor=0.5, patience=0), alignment=alignment, finetuning=TrainingStage())
    module.parameter_groups()
    module.enter(0)
    for loss in (1.0, 2.0):
        module.schedule.observe(loss)
    assert [module.rate_factor(0, tokens) for tokens in (399, 400)] == [0.5, 1]
    module.enter(1)
    module.schedule.observe(3.0)  # higher than the first stage's best, and the best of this one
    assert module.rate_factor(0, 500) == 1


def test_a_stage_shorter_than_the_schedules_warmup_is_named():
    schedule = WarmupCosine(max_tokens=1000, warmup_tokens=500)
    with pytest.raises(ValueError, match=r"^stages\.alignment: schedule\.warmup_tokens=500"):
        training(schedule=schedule, alignment=TrainingStage(tokens=300), finetuning=TrainingStage())


def gradients(module: Training, batch) -> dict[str, torch.Tensor]:
    module.enter(0)
    module.training_loss(batch).backward()
    return {name: p.grad.clone() for name, p in module.model.named_parameters() if p.grad is not None}


OBJECTIVES = {
    "cross_entropy": TrainingStage(),
    "kl": TrainingStage(cross_entropy=0, kl=1),
    "attention_transfer": TrainingStage(cross_entropy=0, attention_transfer=1),
    "all": TrainingStage(cross_entropy=0.3, kl=0.5, attention_transfer=2),
}


@pytest.mark.parametrize(
    ("objective", "way"), [*((name, "computed again") for name in OBJECTIVES), ("all", "compiled")]
)
def test_gradients_are_the_same_computed_again_or_compiled(batch, objective, way, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    settings = {"activation_checkpointing": "full"} if way == "computed again" else {"compile": True}
    plain, other = (
        Training(
            stages={"finetuning": OBJECTIVES[objective]},
            max_tokens=10 * BATCH,
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
            schedule=Plateau(),
            batch_tokens=BATCH,
            **given,
        )
        for given in ({}, settings)
    )
    plain.adopt(with_lora())
    other.adopt(with_lora())
    expected, found = gradients(plain, batch), gradients(other, batch)
    assert expected.keys() == found.keys()
    assert any(gradient.abs().max() > 1e-6 for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


class Alone:
    """Stub of a trainer on one device."""

    world_size, global_rank, accumulate_grad_batches = 1, 0, 1
    strategy = SimpleNamespace(reduce=lambda tensor, reduce_op: tensor)


@pytest.mark.parametrize("objective", ["cross_entropy", "kl", "all"])
def test_every_target_of_a_step_weighs_the_same_whichever_micro_batch_it_comes_to(objective):
    drawn = torch.randint(61, (4, 13), generator=torch.Generator().manual_seed(5)).numpy()
    sequences = []
    for tokens, answered in zip(drawn, (1, 11, 0, 7), strict=True):
        targets = tokens[1:].copy()
        targets[: 12 - answered] = -100
        sequences.append(Sequence(tokens[:12], targets, torch.tensor([0]).numpy()))
    stage = dataclasses.replace(OBJECTIVES[objective], attention_transfer=0.0)
    found, trainer = {}, Alone()
    for size in (4, 2, 1):
        module = training(a=stage)
        module.trainer = trainer
        module.enter(0)
        micro_batches = [collate(sequences[first : first + size], 12) for first in range(0, 4, size)]
        for number, micro_batch in enumerate(micro_batches):
            (module.training_step(micro_batch, number) / len(micro_batches)).backward()
        loss = torch.stack(module.micro_losses).mean() * module.weigh_gradients()
        means = module.take_metrics()
        assert loss.item() == pytest.approx(sum(getattr(stage, n.removeprefix("train/")) * v for n, v in means.items()))
        gradients = [p.grad for p in module.model.parameters() if p.grad is not None]
        found[size] = [loss, *means.values(), torch.cat([gradient.flatten() for gradient in gradients])]
    for size in (2, 1):
        for one, whole in zip(found[size], map(torch.as_tensor, found[4]), strict=True):
            assert torch.linalg.vector_norm(one - whole) < 1e-5 * torch.linalg.vector_norm(whole)


def test_where_all_weights_are_trained_the_teacher_of_kl_stays_as_it_was(batch):
    module = training(
        linearize(small_llama(), Linearization(window=4)), a=TrainingStage(train=("all",), kl=1, cross_entropy=0)
    )
    assert module.has_teacher
    before = module.token_losses(batch, "teacher")
    module.enter(0)
    optimizer = module.make_optimizer(module.parameter_groups())
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(module.training_loss(batch))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert module.token_losses(batch, "teacher").equal(before)


@pytest.mark.parametrize("objective", ["kl", "attention_transfer"])
def test_steps_on_one_batch_lower_their_objective(batch, objective):
    module = training(a=OBJECTIVES[objective])
    module.enter(0)
    optimizer = torch.optim.AdamW(module.parameter_groups(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        losses.append(module.training_loss(batch))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


def test_a_run_does_not_go_on_from_other_weights_of_the_base_model():
    kept = {"global_step": 1}
    module = training()
    module.trainer = Alone()
    module.on_save_checkpoint(kept)
    model = with_lora()
    with torch.no_grad():
        model.model.norm.weight *= 2
    with pytest.raises(ValueError, match=r"^base: its weights are not those that this run began with"):
        training(model).on_load_checkpoint(kept)


def test_a_run_of_an_earlier_version_goes_on_from_its_base_model(monkeypatch):
    module, resumed = training(), training()
    module.trainer = resumed.trainer = Alone()
    with monkeypatch.context() as earlier:
        earlier.setattr(linearization, "fingerprint", fingerprints._sampled)
        module.adopt(module.model)
    assert module.base_weights != resumed.base_weights
    progress = {"loops": {"fit_loop": {"epoch_loop.batch_progress": {"total": {}, "current": {}}}}}
    kept = {"global_step": 1, **progress}
    module.on_save_checkpoint(kept)
    resumed.on_load_checkpoint(kept)
    resumed.model.model.norm.weight.data *= 2
    with pytest.raises(ValueError, match=r"^base: its weights are not those"):
        resumed.on_load_checkpoint(kept)


def test_a_resumed_run_reports_the_mean_of_all_steps_since_the_last_report(batch):
    stages = {"a": OBJECTIVES["all"]}
    begins, resumes, trainer = training(**stages), training(**stages), Alone()
    progress = {"loops": {"fit_loop": {"epoch_loop.batch_progress": {"total": {}, "current": {}}}}, "global_step": 1}
    for module in (begins, resumes):
        module.trainer = trainer
        module.enter(0)
    begins.training_step(batch, 0)
    begins.window_loss, begins.window_steps = 2.5, 1
    begins.on_save_checkpoint(progress)
    resumes.on_load_checkpoint(progress)
    for module in (begins, resumes):
        module.training_step(batch | {"targets": batch["targets"].flip(1)}, 1)
    assert resumes.take_mean_loss() == 2.5
    found = begins.take_metrics()
    assert set(found) == {"train/attention_transfer", "train/cross_entropy", "train/kl"}
    assert resumes.take_metrics() == found


def test_a_checkpoint_has_what_is_trained_and_what_the_base_model_has_not():
    module = training(with_lora(gate_source="random"))
    names = {name for name in dict(module.named_parameters()) if module.checkpointed(name)}
    assert names == {
        name for name in dict(module.named_parameters()) if ".lora_" in name or ".self_attn.gate_proj." in name
    }


@pytest.fixture(scope="module")
def answers(batch) -> dict[str, torch.Tensor]:
    """The same, of which every other token alone is to be learned."""
    targets = batch["targets"].clone()
    targets[:, ::2] = -100
    return batch | {"targets": targets}


@torch.no_grad()
def stock_logits(batch) -> torch.Tensor:
    """`[N, vocabulary]` of the model as it was before, which reads each document alone."""
    stock, ends = small_llama(), batch["cu_seqlens"].tolist()
    return torch.cat([stock(batch["input_ids"][:, first:last]).logits[0] for first, last in itertools.pairwise(ends)])


def test_the_teachers_held_out_loss_is_the_stock_models_over_all_tokens_alike(batch, answers):
    module, logits = training(), stock_logits(batch)
    module.trainer = SimpleNamespace(
        datamodule=SimpleNamespace(val_dataloader=lambda: iter([batch, answers])),
        strategy=SimpleNamespace(reduce=lambda sums, reduce_op: sums),
        precision_plugin=SimpleNamespace(forward_context=contextlib.nullcontext),
    )
    first = cross_entropy(logits, batch["targets"][0]).item()
    both = cross_entropy(logits.repeat(2, 1), torch.cat((batch["targets"], answers["targets"]), 1)[0]).item()
    assert [module.measure("teacher", 1), module.measure("teacher")] == pytest.approx([first, both])
    assert abs(module.measure("student") - both) > 0.01
    assert module.training


@pytest.mark.parametrize("cross_entropy_weight", [0, 0.3])
@pytest.mark.parametrize("teacher", ["asked", "stored"])
def test_the_divergence_from_the_teacher_is_of_the_tokens_to_be_learned_and_no_others(
    answers, teacher, cross_entropy_weight
):
    module = training(a=TrainingStage(cross_entropy=cross_entropy_weight, kl=1))
    module.enter(0)
    targets, log_p = answers["targets"][0], stock_logits(answers).log_softmax(-1)
    if teacher == "stored":
        likeliest = tuple(part[None] for part in log_p.sort(descending=True))
        module.teacher_store = SimpleNamespace(of=lambda sequences, device: likeliest)
        order = SimpleNamespace(micro_batch=lambda number: [0, 1])
        module.trainer = SimpleNamespace(train_dataloader=SimpleNamespace(batch_sampler=order))
    hidden = module.model.features(answers["input_ids"], cu_seqlens=answers["cu_seqlens"])
    log_q = module.model.lm_head(hidden)[0].log_softmax(-1)
    divergence = kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)[targets != -100].mean()
    expected = cross_entropy_weight * cross_entropy(log_q, targets) + divergence
    torch.testing.assert_close(module.training_loss(answers), expected)


def test_weight_decay_shrinks_matrices_and_leaves_norms_biases_and_scalars():
    settings = Linearization(window=4, learned_weights="head", learned_gate_shift=True, output_norm=True)
    model = linearize(small_llama(attention_bias=True), settings)
    module = training(model, a=TrainingStage(train=("scalars", "norms", "all")))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)  # a bias of 0 would stay 0
            parameter.grad = torch.zeros_like(parameter)
    module.make_optimizer(module.parameter_groups()).step()
    vectors = {
        *("norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight", "output_norm.weight"),
        *("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"),
        *("weights.state", "weights.window", "gate_shift.shift"),
    }
    for name, parameter in model.named_parameters():
        assert bool((parameter == 1).all()) == (".".join(name.split(".")[-2:]) in vectors), name
