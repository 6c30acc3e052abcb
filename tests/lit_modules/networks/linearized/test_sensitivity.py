"""Which layers stay softmax attention: by measurement, and by the paper's rule."""

import pytest
import torch

from lit_modules.networks.linearized.conversion import linearize
from lit_modules.networks.linearized.families import FAMILIES
from lit_modules.networks.linearized.lora import add_lora
from lit_modules.networks.linearized.sensitivity import choose_layers, every_nth_layer, sensitivity
from lit_modules.networks.linearized.settings import Linearization


def make(**settings):
    """A random model of four layers, of which the third reads nothing from other tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    stock = FAMILIES["llama"]
    model = stock.model_class(stock.config_class(**sizes, num_attention_heads=2, initializer_range=0.2))
    torch.nn.init.zeros_(model.model.layers[2].self_attn.o_proj.weight)
    return linearize(model, Linearization(window=4, **settings))


@pytest.fixture(scope="module")
def batches():
    ids = torch.randint(0, 40, (4, 25), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": part[:, :-1], "shift_labels": part[:, 1:]} for part in ids.split([3, 1])]


def teacher_loss(model, batches, student=()):
    """Nats per token with these layers linearized, the others as they were pretrained; all batches weigh by tokens."""
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.mode = "student" if number in student else "teacher"
    with torch.no_grad():
        losses = [model(**batch, reduction="none").loss.flatten() for batch in batches]
    for layer in model.model.layers:
        layer.self_attn.mode = "student"
    return torch.cat(losses).mean()


def test_each_layer_is_measured_alone_over_all_tokens(batches):
    model = make().train()
    found = sensitivity(model, batches)
    teacher = teacher_loss(model, batches)
    expected = torch.stack([teacher_loss(model, batches, (layer,)) - teacher for layer in range(4)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found[2] == 0
    assert found[:2].abs().min() > 0.01
    assert model.training
    assert {layer.self_attn.mode for layer in model.model.layers} == {"student"}


def test_a_layer_that_is_kept_loses_nothing(batches):
    found = sensitivity(make(softmax_layers=[1]), batches)
    assert abs(found[1]) < 1e-6
    assert abs(found[0]) > 1e-4


def test_the_modes_come_back_when_a_batch_is_wrong(batches):
    model = make()
    with pytest.raises(ValueError, match="attention_mask is"):
        sensitivity(model, [{**batches[0], "attention_mask": torch.ones(1, 1)}])
    assert {layer.self_attn.mode for layer in model.model.layers} == {"student"}


def test_without_a_token_to_predict_there_is_nothing_to_measure(batches):
    nothing = [{**batch, "shift_labels": torch.full_like(batch["shift_labels"], -100)} for batch in batches]
    for empty in (nothing, []):
        with pytest.raises(ValueError, match="no token to predict"):
            sensitivity(make(), empty)


def test_the_most_sensitive_layers_are_chosen_in_order():
    assert choose_layers(torch.tensor([0.1, 0.9, -0.2, 0.4]), 2) == (1, 3)
    assert choose_layers([0.3, 0.1], 0) == ()
    with pytest.raises(ValueError, match="3 of 2 layers cannot be kept: give 0 to 2"):
        choose_layers([0.3, 0.1], 3)


def test_the_papers_rule_keeps_one_after_every_seven():
    assert every_nth_layer(16) == (7, 15)
    assert every_nth_layer(28, 8) == (7, 15, 23)
    assert every_nth_layer(4) == ()
    assert every_nth_layer(4, 1) == (0, 1, 2, 3)


def test_of_layers_that_lose_the_same_the_first_are_chosen():
    assert choose_layers([0.5] * 40, 3) == (0, 1, 2)
    assert choose_layers([0.0, 0.0, 0.7, 0.0, 0.0], 2) == (0, 2)


def test_dropout_of_a_model_in_training_has_no_part_in_what_is_measured(batches):
    model = add_lora(make(), rank=2, dropout=0.5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    assert torch.equal(sensitivity(model.train(), batches), sensitivity(model.eval(), batches))
