"""Choose the layers that stay softmax attention, by their measured loss increase or by the paper's rule."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lit_modules.networks.linear_cross_entropy import IGNORE_INDEX
from lit_modules.networks.linearized.models import LinearizedForCausalLM


@torch.no_grad()
def sensitivity(model: LinearizedForCausalLM, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    """Measure the loss increase when each layer alone is linearized and all others stay as pretrained.

    Args:
        batches: batches of any text: arguments of the model's `forward` with `shift_labels` (-100: ignored). They are
            kept in memory for one pass per layer and one more.

    Returns:
        `[layers]` float32 on the CPU, nats per token. A softmax layer has 0 or, with an adapter, the adapter's effect.

    Raises:
        ValueError: if there is no token to predict.
    """
    batches = list(batches)
    tokens = sum(int((batch["shift_labels"] != IGNORE_INDEX).sum()) for batch in batches)
    if tokens == 0:
        raise ValueError("the sensitivity of layers needs text: in what was given there is no token to predict")
    layers = model.attentions()
    modes, training = [layer.mode for layer in layers], model.training
    model.eval()
    try:
        for layer in layers:
            layer.mode = "teacher"
        teacher, losses = total_loss(model, batches), []
        for layer in layers:
            layer.mode = "student"
            losses.append(total_loss(model, batches))
            layer.mode = "teacher"
    finally:
        for layer, mode in zip(layers, modes, strict=True):
            layer.mode = mode
        model.train(training)
    return torch.tensor([(loss - teacher) / tokens for loss in losses])


def total_loss(model: LinearizedForCausalLM, batches: Iterable[dict[str, Tensor]]) -> float:
    """Return the loss in nats, summed over all tokens of the batches."""
    return sum(float(model(**batch, reduction="sum").loss) for batch in batches)


def choose_layers(sensitivities: Tensor | Sequence[float], count: int) -> tuple[int, ...]:
    """Return the indices of the `count` most sensitive layers, in order, to keep as softmax attention.

    Of equally sensitive layers the first is chosen.

    Raises:
        ValueError: if `count` exceeds the number of layers.
    """
    sensitivities = torch.as_tensor(sensitivities)
    if not 0 <= count <= len(sensitivities):
        raise ValueError(f"{count} of {len(sensitivities)} layers cannot be kept: give 0 to {len(sensitivities)}")
    return tuple(sorted(sensitivities.sort(descending=True, stable=True).indices[:count].tolist()))


def every_nth_layer(layers: int, n: int = 8) -> tuple[int, ...]:
    """Return the softmax layers of a hybrid, the last of every `n`: one after 7 linearized ones (arXiv 2503.01496)."""
    return tuple(range(n - 1, layers, n))
