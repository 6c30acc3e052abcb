"""The LightningModule on batches made here, without text or Hydra."""

from types import SimpleNamespace

import lightning
import pytest
import torch
from torch.utils.data import DataLoader

from lit_modules import checkpoints
from lit_modules.launching import run_folder
from lit_modules.networks import PalimpsestConfig
from lit_modules.pretraining import Pretraining
from lit_modules.schedules import WarmupCosine

LENGTH, VOCABULARY = 16, 32


def config(**changes):
    settings = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32}
    return PalimpsestConfig(**(settings | {"qk_norm": True, "output_norm": True} | changes))


class Batches(lightning.LightningDataModule):
    """`count` batches of two packed documents; `poison` puts infinity into the embedding before these batches."""

    sequence_length = validation_length = LENGTH
    hf_tokenizer = None

    def __init__(self, count: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.batches = [
            {
                "input_ids": torch.randint(VOCABULARY, (1, LENGTH), generator=draw),
                "targets": torch.randint(VOCABULARY, (1, LENGTH), generator=draw),
                "cu_seqlens": torch.tensor([0, 5, LENGTH], dtype=torch.int32),
            }
            for _ in range(count)
        ]

    def loader(self):
        return DataLoader(self.batches, batch_size=None)

    train_dataloader = val_dataloader = loader


def module(schedule=lambda tokens: 1.0, **settings):
    torch.manual_seed(0)

    def adamw(groups):
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)

    made = {"optimizer": adamw, "schedule": schedule, "batch_tokens": LENGTH, "sequence_length": LENGTH} | settings
    return Pretraining(config(), **made)


def train(model, steps, tmp_path, callbacks=(), accumulate=1, clip=1.0):
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
        default_root_dir=tmp_path,
        callbacks=list(callbacks),
    )
    trainer.fit(model, datamodule=Batches(steps * accumulate))
    return trainer


class Poison(lightning.Callback):
    """Make the loss of these steps infinite (or NaN) by a factor on it."""

    def __init__(self, steps, value=float("nan")):
        self.steps, self.value, self.weights = steps, value, {}

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if batch_idx in self.steps:
            self.weights[batch_idx] = [p.detach().clone() for p in model.parameters()]
            self.handle = model.model.lm_head.weight.register_hook(lambda g: g * self.value)

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if batch_idx in self.steps:
            self.handle.remove()
            assert all(torch.equal(a, b) for a, b in zip(self.weights[batch_idx], model.parameters(), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(tmp_path, caplog, value):
    model = module()
    before = [p.detach().clone() for p in model.parameters()]
    poison = Poison({1, 3}, value)
    trainer = train(model, 6, tmp_path, [poison])
    assert len(poison.weights) == 2
    assert (model.skipped_steps, model.skipped_in_a_row) == (2, 0)
    assert trainer.global_step == 6  # the order of the data goes on
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert "step 2 is skipped" in caplog.text
    assert "step 4 is skipped" in caplog.text


def test_ten_steps_in_a_row_that_are_not_finite_stop_the_run_with_the_reason(tmp_path):
    model = module()
    with pytest.raises(
        run_folder.RunFailed, match=r"stopped at step 12: 10 steps in a row were not finite .*gradient norm"
    ):
        train(model, 20, tmp_path, [Poison(set(range(2, 20)))])
    assert model.skipped_steps == 10


def test_nine_in_a_row_do_not(tmp_path):
    model = module()
    train(model, 20, tmp_path, [Poison(set(range(2, 11)))])
    assert model.skipped_steps == 9


def test_the_learning_rate_is_the_schedules_at_the_middle_of_each_step(tmp_path):
    schedule = WarmupCosine(2 * LENGTH, 8 * LENGTH)
    rates = []

    class Watch(lightning.Callback):
        def on_before_optimizer_step(self, trainer, model, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    train(module(schedule), 8, tmp_path, [Watch()])
    assert rates == pytest.approx([1e-2 * schedule(int((s + 0.5) * LENGTH)) for s in range(8)])
    assert min(rates) > 0  # no step is wasted at a rate of zero


def test_norms_and_biases_do_not_decay_and_matrices_do():
    model = module()
    decayed, kept = model.configure_optimizers()["optimizer"].param_groups
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0
    names = {id(p): name for name, p in model.model.named_parameters()}
    assert {names[id(p)].rsplit(".", 2)[-2] for p in kept["params"]} >= {"q_norm", "k_norm", "norm", "input_layernorm"}
    assert not any("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in decayed["params"])
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_accumulated_micro_batches_give_the_gradient_of_the_whole_batch(tmp_path):
    grads = []

    class Watch(lightning.Callback):
        def on_before_optimizer_step(self, trainer, model, optimizer):
            grads.append([p.grad.clone() for p in model.parameters()])

    train(module(batch_tokens=4 * LENGTH), 1, tmp_path, [Watch()], accumulate=4)
    model = module()
    batches = Batches(4).batches
    loss = sum(model.training_step(batch, 0) for batch in batches) / 4
    loss.backward()
    for found, parameter in zip(grads[0], model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-7)


def test_activation_checkpointing_and_compiled_blocks_train_alike(tmp_path, monkeypatch):
    losses = []
    eager_compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: eager_compile(self, backend="aot_eager"))
    for settings in ({}, {"activation_checkpointing": "full"}, {"compile": True}):
        model = module(**settings)
        train(model, 5, tmp_path)
        losses.append(model.window_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(("policy", "again"), [("none", 0), (2, 1), ("full", 2)])
def test_activation_checkpointing_computes_blocks_again_in_the_backward_pass(tmp_path, policy, again):
    model, calls = module(activation_checkpointing=policy), []
    for block in model.model.model.layers:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    train(model, 1, tmp_path)
    assert len(calls) == 2 + again


def test_compiled_blocks_keep_the_names_of_their_parameters():
    assert list(module(compile=True).state_dict()) == list(module().state_dict())


def test_a_checkpoint_of_other_text_is_refused(tmp_path):
    model = module()
    model.data_fingerprint = "new"
    state = {}
    other = module()
    other.data_fingerprint = "old"
    other.trainer = SimpleNamespace(world_size=1)
    other.on_save_checkpoint(state)
    with pytest.raises(ValueError, match="blocks old, now new"):
        model.on_load_checkpoint(state | {"global_step": 1})


def test_an_optimizer_that_cannot_be_built_is_refused_before_training():
    with pytest.raises(ValueError, match="optimizer"):
        module(optimizer=lambda groups: torch.optim.AdamW(groups, lr="abc"))


def test_every_weight_and_counter_is_in_the_checkpoint_that_the_safe_loader_reads(tmp_path):
    model = module()
    trainer = train(model, 3, tmp_path, [checkpoints.RandomState()])
    path = tmp_path / "step_00000003.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=True)
    assert state["palimpsest"]["model_config"]["hidden_size"] == 16
    assert state["global_step"] == 3
    assert "RandomState" in state["callbacks"]


def test_a_clip_of_zero_is_no_clip(tmp_path):
    models = []
    for clip in (0, None):
        models.append(module())
        train(models[-1], 3, tmp_path, clip=clip)
    assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in models), strict=True))
    assert not torch.equal(models[0].model.lm_head.weight, module().model.lm_head.weight)


def test_each_rank_takes_back_its_own_sums_and_another_number_of_ranks_their_mean():
    model = module()
    for world_size, rank, found in ((2, 1, [3.0, 1.0]), (1, 0, [2.0, 1.0]), (4, 2, [2.0, 1.0])):
        model.trainer = SimpleNamespace(world_size=world_size, global_rank=rank)
        assert model.own_window([[1.0, 1.0], [3.0, 1.0]]) == found
