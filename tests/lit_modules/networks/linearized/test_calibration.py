"""Clusters fitted to a model's own keys, and the weight of the state relative to the window."""

import pytest
import torch

from lit_modules.networks.linearized.calibration import fit_clusters, k_means

JOINT = {"mixer": "joint", "gate": "none", "feature_map": "clusters", "num_slots": 16, "rotate_state": True}
SHORT = JOINT | {"window": 4, "sinks": 1}


@pytest.fixture
def documents() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    whole, packed = (torch.randint(1, 61, size, generator=generator) for size in ((2, 48), (1, 96)))
    return [
        {"input_ids": whole},
        {"input_ids": packed, "cu_seqlens": torch.tensor([0, 40, 43, 96], dtype=torch.int32)},
    ]


def transfer_loss(model, documents: list[dict[str, torch.Tensor]]) -> float:
    with torch.no_grad():
        model.features(**documents[0], mode="transfer")
    return model.transfer_losses().mean().item()


def test_clusters_of_clear_groups_are_their_means():
    groups = torch.tensor([[0.0, 9.0], [7.0, 0.0], [-6.0, -6.0]])
    points = groups.repeat(1, 40, 1) + 0.1 * torch.randn(1, 120, 2, generator=torch.Generator().manual_seed(0))
    centers, variance = k_means(points.expand(2, -1, -1), 6)
    assert torch.cdist(groups, centers[1]).amin(1).max() < 0.1
    assert variance.shape == (2,)
    assert variance.max() < 0.02


def test_fitted_clusters_are_nearer_to_the_teacher_than_drawn_ones_and_than_the_window(linearized, documents):
    window = {"window": 4, "sinks": 1, "state_weight": 0.0, "window_weight": 1.0}
    alone = transfer_loss(linearized(**window), documents)
    model = linearized(**SHORT)
    drawn = transfer_loss(model, documents)
    fit_clusters(model, documents)
    fitted = transfer_loss(model, documents)
    assert fitted < 0.8 * drawn
    assert fitted < 0.8 * alone


def test_a_cluster_for_every_key_is_the_teacher(linearized, stock):
    """With as many clusters as keys the recurrence is softmax attention itself."""
    model = linearized(**SHORT | {"num_slots": 40})
    ids = torch.randint(1, 61, (1, 40), generator=torch.Generator().manual_seed(5))
    fit_clusters(model, [{"input_ids": ids}])
    for attention in model.attentions():
        attention.window_weight.logit.data.zero_()
        attention.q_feature_map.bias.data.zero_()
        assert torch.sigmoid(attention.window_weight.logit).eq(model.linearization.state_weight).all()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock("llama")(ids).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_state_counts_what_is_best_in_every_head(linearized, documents):
    model = linearized(**SHORT)
    fit_clusters(model, documents[:1])
    attention = model.attentions()[0]
    seen = {}
    attention.register_forward_pre_hook(lambda module, args, inputs: seen.update(inputs), with_kwargs=True)
    model.features(**documents[0], mode="teacher")
    arguments = (seen[name] for name in ("hidden_states", "positions", "position_embeddings"))
    less, fitted, more = attention.errors(*arguments, torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64))
    assert (fitted <= less).all()
    assert (fitted <= more).all()


@torch.no_grad()
def test_errors_are_those_of_attention_transfer(linearized, documents):
    model = linearized(**SHORT)
    attention, seen = model.attentions()[0], {}
    attention.register_forward_pre_hook(lambda module, args, inputs: seen.update(inputs), with_kwargs=True)
    model.features(**documents[0], mode="transfer")
    arguments = (seen[name] for name in ("hidden_states", "positions", "position_embeddings"))
    (errors,) = attention.errors(*arguments, torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(errors.sum() / (2 * 48 * 32), attention.transfer_loss.double(), rtol=1e-5, atol=0)


def test_models_without_clusters_and_documents_that_are_short_are_refused_in_one_line(linearized, documents):
    with pytest.raises(ValueError, match=r"^linearization\.feature_map=softmax [^\n]+$"):
        fit_clusters(linearized(), documents)
    with pytest.raises(ValueError, match=r"^linearization\.window=60 with its sinks [^\n]+$"):
        fit_clusters(linearized(**SHORT | {"window": 60}), documents)


def test_clusters_that_weigh_more_than_float16_holds_are_finite_and_so_are_their_gradients(linearized, documents):
    exact, model = linearized(**SHORT), linearized(**SHORT)
    for one in (exact, model):
        for attention in one.attentions():
            attention.q_feature_map.bias.data.add_(14.0)
            attention.window_weight.logit.data.add_(10.0)  # beside which the window is still there
    model.half()
    for attention in model.attentions():
        for module in (attention.q_feature_map, attention.k_feature_map, attention.window_weight):
            module.float()
    outputs, gradients = [], []
    for one in (exact, model):
        loss = one.train()(**documents[1], shift_labels=documents[1]["input_ids"].roll(-1, 1)).loss
        outputs.append(loss.detach().double())
        gradients.append([g.double() for g in torch.autograd.grad(loss, list(one.new_parameters().values()))])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0.02, atol=0)
    for found, expected in zip(*reversed(gradients), strict=True):
        assert (found - expected).norm() <= 0.1 * expected.norm()
