"""LightningModule for pretraining: one of our networks from random weights, distributed over the ranks."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lit_modules.language_modelling import Training, model_arguments
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM, count_parameters, flops_per_token
from lit_modules.parallel.materializing import materialize
from lit_modules.parallel.spreading import distribute


class Pretraining(Training):
    """Next-token training from scratch.

    Args:
        config: the network's configuration.
        sequence_length: tokens of a training sequence, for the FLOP count.
        activation_checkpointing: a policy of lit_modules.parallel.recomputing.
        weights_later: build the network without weights; each rank creates its own when the model is distributed.
        optimizer, schedule, batch_tokens, compile: as in Training.

    Raises:
        ValueError: the optimizer cannot be built from its settings.
    """

    def __init__(
        self,
        config: PalimpsestConfig,
        *,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer],
        schedule: Callable[[int], float],
        batch_tokens: int,
        sequence_length: int,
        compile: bool = False,
        activation_checkpointing: str | int = "none",
        weights_later: bool = False,
    ) -> None:
        super().__init__(
            optimizer=optimizer,
            schedule=schedule,
            batch_tokens=batch_tokens,
            compile=compile,
            activation_checkpointing=activation_checkpointing,
        )
        self.random_state = torch.get_rng_state() if weights_later else None  # from which the weights will be drawn
        with torch.device("meta") if weights_later else contextlib.nullcontext():
            self.model = PalimpsestForCausalLM(config)
        self.parameter_count = count_parameters(self.model)
        self.flops_per_token = flops_per_token(config, sequence_length)
        self.is_spread = False

    def configure_model(self) -> None:
        """Distribute the network over the strategy's ranks once.

        Lightning calls this before each fit and validation.
        """
        if self.is_spread:
            return
        self.is_spread = True
        self.context = distribute(
            self.model,
            None if self._trainer is None else self.trainer.strategy,
            compile=self.compile_blocks,
            activation_checkpointing=self.activation_checkpointing,
        )
        if self.random_state is not None:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.random_state)
                materialize(self.model, self.trainer.strategy.root_device)

    def training_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.model(**model_arguments(batch), num_items_in_batch=batch.get("targets_per_rank")).loss

    def token_losses(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.model(**model_arguments(batch), reduction="none").loss[0]
