"""Context parallelism: one row of packed documents dealt out over the ranks of a group.

Rank r of n holds the tokens r N / n to (r + 1) N / n - 1 of a row of N everywhere but in the mixers' operations over
time. Around these, as in DeepSpeed Ulysses (arXiv 2309.14509), an exchange of all with all turns a part of the tokens
with all heads into all tokens with a part of the heads, and back. An operation so sees whole sequences, and what it
sums over time (forget gates, states) it sums as on one device. What looks back a few tokens before that (KV-shift,
short convolutions) is given the last hidden states of the rank before; their projections are made twice.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.networks.linear_cross_entropy import IGNORE_INDEX
from lit_modules.networks.mixers import MIXERS
from lit_modules.networks.mixers.recurrent import RecurrentMixer
from lit_modules.networks.positions import Positions, locate

KEY = "strategy.context_parallel_size"


def split_context(model: PalimpsestForCausalLM, group: dist.ProcessGroup) -> "ContextParallel":
    """Let every mixer of `model` exchange tokens for heads over `group`, in place; its parameters stay as they are.

    To be called before the blocks' first forward pass. The model then takes what `ContextParallel.part` gives.

    Raises:
        ValueError: the ranks cannot share the heads of a mixer.
    """
    check_heads(model.config, group.size())
    plan = ContextParallel(group)
    for block in model.model.layers:
        mixer = block.self_attn
        mixer.operation = functools.partial(plan.over_heads, mixer.operation, mixer.look_back)
        # before the hooks of a tensor plan, after which hidden states are no plain tensors
        mixer.register_forward_pre_hook(plan.look_back, with_kwargs=True, prepend=True)
        mixer.register_forward_hook(plan.drop_what_was_looked_back_at)
    return plan


def check_heads(config: PalimpsestConfig, size: int, tensor_parallel_size: int = 1) -> None:
    """Raises ValueError when `size` ranks cannot share what tensor parallelism leaves to each of a mixer's heads."""
    for name in dict.fromkeys(config.mixers):
        recurrent = issubclass(MIXERS[name], RecurrentMixer)
        heads = MIXERS[name].state_shape(config).heads if recurrent else config.num_heads
        if heads // tensor_parallel_size % size:
            key = f"model.{'state_heads' if recurrent else 'num_heads'}={heads}"
            left = f" that strategy.tensor_parallel_size={tensor_parallel_size} leaves" * (tensor_parallel_size > 1)
            raise ValueError(
                f"{KEY}={size} does not divide the {heads // tensor_parallel_size} heads{left} of the mixer {name} "
                f"({key}): give a divisor"
            )


def check_tokens(tokens: int, size: int) -> None:
    """Raises ValueError when `size` ranks cannot share the `tokens` of a micro-batch."""
    if tokens % size:
        raise ValueError(
            f"{KEY}={size} does not divide the {tokens} tokens of a micro-batch (data.micro_batch_size times "
            "data.sequence_length, or in validation data.validation_length): give a size that does"
        )


def whole_sequences(plan: "ContextParallel | None") -> AbstractContextManager[None]:
    """Within, a model takes whole sequences on this rank alone, whether there is a plan for it or not."""
    return nullcontext() if plan is None else plan.suspended()


class ContextParallel:
    """This rank's part in a group that shares sequences. Every rank of `group` has to take the same steps.

    Args:
        group: the ranks, in the order of their parts of a sequence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.active = True

    def part(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """This rank's part of a batch, which all ranks of the group have whole.

        Args:
            batch: input_ids and targets `[1, N]` int64, cu_seqlens int32 `[documents + 1]`; also component `[N]`, where
                tokens have one.

        Returns:
            input_ids, targets `[1, N / n]`, component `[N / n]`; positions, of these tokens, for the model; and
            targets_per_rank, the targets of the whole row over n: what to divide the sum of this rank's losses by, so
            that the mean over the ranks is the mean over the row.

        Raises:
            ValueError: the tokens cannot be dealt out evenly.
        """
        targets, cu_seqlens = batch["targets"], batch["cu_seqlens"]
        length = targets.shape[1]
        check_tokens(length, self.size)
        own = slice(self.rank * length // self.size, (self.rank + 1) * length // self.size)
        index = locate(1, length, 0, targets.device, cu_seqlens=cu_seqlens).index
        tokens = {name: batch[name][..., own] for name in ("input_ids", "targets", "component") if name in batch}
        return tokens | {
            "positions": Positions(index[:, own], cu_seqlens=cu_seqlens),
            "targets_per_rank": (targets != IGNORE_INDEX).sum().clamp(min=1).double() / self.size,
        }

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within, the model takes whole sequences, on this rank alone."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def look_back(self, mixer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """A hook before a mixer's forward pass: put the tokens that it looks back at before its own."""
        if not self.active:
            return arguments, keywords
        hidden, positions, *cache = arguments
        if positions.cu_seqlens is None or any(x is not None for x in cache):
            raise ValueError(
                "a sequence is split over ranks, and this is no part of one: give the model what "
                "ContextParallel.part returns, or whole sequences under ContextParallel.suspended"
            )
        count = mixer.look_back
        if count == 0:
            return arguments, keywords
        if hidden.shape[1] < count:
            raise ValueError(
                f"{KEY}={self.size} leaves {hidden.shape[1]} tokens to a rank, and a mixer looks back at {count}: "
                "give a smaller size"
            )
        hidden = torch.cat((self._last_of_the_rank_before(hidden, count), hidden), dim=1)
        return (hidden, _begun_earlier(positions, count), *cache), keywords

    def drop_what_was_looked_back_at(self, mixer: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> Tensor:
        """A hook after a mixer's forward pass: `out` `[B, T, hidden_size]` of this rank's own tokens alone."""
        return out[:, mixer.look_back :] if self.active else out

    def over_heads(
        self,
        operation: Callable[..., Tensor],
        looked_back: int,
        inputs: Sequence[Tensor | None],
        positions: Positions,
        *cache: Any,
        logit_bound: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """A mixer's `operation` over whole sequences and this rank's heads.

        Args:
            looked_back: tokens at the beginning that belong to the rank before.
            inputs, positions, cache, options: the operation's own. `inputs` are `[B, T, heads, ...]`; the first has
                the most heads.
            logit_bound: `[heads]`, of the operations that take one.

        Returns:
            `[B, T, heads, width]`, zero at the tokens looked back at.
        """
        if not self.active:
            bound = {} if logit_bound is None else {"logit_bound": logit_bound}
            return operation(inputs, positions, *cache, **bound, **options)
        heads = inputs[0].shape[2]
        if heads % self.size:
            raise ValueError(f"{KEY}={self.size} does not divide the {heads} heads on a rank: give a divisor")
        own = [x if x is None else x[:, looked_back:] for x in inputs]
        given = self._heads_for_tokens([x for x in own if x is not None])
        if logit_bound is not None:
            options["logit_bound"] = logit_bound.chunk(self.size)[self.rank]
        whole = [x if x is None else given.pop(0) for x in own]
        whole = type(inputs)(*whole) if hasattr(inputs, "_fields") else tuple(whole)
        out = self._tokens_for_heads(operation(whole, positions, *cache, **options))
        return F.pad(out, (0, 0, 0, 0, looked_back, 0))

    def _heads_for_tokens(self, tensors: list[Tensor]) -> list[Tensor]:
        """Each `[B, N / n, h, ...]` of this rank's tokens to `[B, N, h / n, ...]` of this rank's heads.

        Where n does not divide h, heads are repeated until it does. One exchange for all tensors of a dtype.
        """
        whole: list[Tensor | None] = [None] * len(tensors)
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            numbers = [number for number, x in enumerate(tensors) if x.dtype == dtype]
            dealt = [self._dealt(tensors[number]) for number in numbers]
            packed = torch.cat([x.flatten(3) for x in dealt], dim=-1)  # [B, N / n, n, widths]
            received = self._exchange(packed.permute(2, 0, 1, 3)).transpose(0, 1).flatten(1, 2)
            pieces = received.split([math.prod(x.shape[3:]) for x in dealt], dim=-1)
            for number, part, piece in zip(numbers, dealt, pieces, strict=True):
                heads = piece.unflatten(-1, part.shape[3:])
                whole[number] = _as_many(heads, tensors[number], self.size)
        return whole

    def _dealt(self, x: Tensor) -> Tensor:
        """`[B, T, h, ...]` to `[B, T, n, heads of a rank, ...]`; of heads that are one and the same, one to each."""
        heads = x.shape[2]
        if _is_one(x) and heads > self.size:
            x = x[:, :, : self.size]
        elif heads % self.size:
            x = x.repeat_interleave(self.size // math.gcd(heads, self.size), dim=2)
        return x.unflatten(2, (self.size, -1))

    def _tokens_for_heads(self, out: Tensor) -> Tensor:
        """`[B, N, H / n, D]` of this rank's heads to `[B, N / n, H, D]` of this rank's tokens."""
        parts = out.unflatten(1, (self.size, -1)).transpose(0, 1)  # [n, B, N / n, H / n, D]
        return self._exchange(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part i of `[n, ...]` to rank i; what each rank has sent here, in their order."""
        return all_to_all_single_autograd(parts.contiguous(), None, None, self.group)

    def _last_of_the_rank_before(self, hidden: Tensor, count: int) -> Tensor:
        """The last `count` tokens `[B, count, hidden_size]` of the rank before this one.

        The first rank is given the last one's, so that all take the same steps: as no document goes on from there,
        nothing comes of them.
        """
        last = hidden[:, -count:]
        to_next, from_before = [0] * self.size, [0] * self.size
        to_next[(self.rank + 1) % self.size] = from_before[self.rank - 1] = count * hidden.shape[0]
        given = all_to_all_single_autograd(last.flatten(0, 1).contiguous(), from_before, to_next, self.group)
        return given.view_as(last)


def _is_one(x: Tensor) -> bool:
    """Whether the heads of `x` `[B, T, h, ...]` are views of a single one."""
    return x.shape[2] > 1 and x.stride(2) == 0


def _as_many(heads: Tensor, dealt: Tensor, size: int) -> Tensor:
    """`heads` that a rank was given of `dealt` `[B, T, h, ...]`: a view of h / n heads where one was sent for all."""
    if not _is_one(dealt) or heads.shape[2] == dealt.shape[2] // size:
        return heads
    return heads.expand(-1, -1, dealt.shape[2] // size, *heads.shape[3:])


def _begun_earlier(positions: Positions, count: int) -> Positions:
    """`positions` of this rank's tokens and of `count` before, which matter only as what the first of these follow."""
    index = positions.index
    before = index[:, :1] - torch.arange(count, 0, -1, device=index.device)
    rotary = positions.rotary and tuple(F.pad(table, (0, 0, count, 0)) for table in positions.rotary)
    return positions._replace(index=torch.cat((before.clamp(min=0), index), dim=1), rotary=rotary)
