"""Context parallelism: one row of packed documents split over the ranks of a group.

Rank r of n holds the tokens r N / n to (r + 1) N / n - 1 of a row of N, except in the mixers' operations over time.
Around these, as in DeepSpeed Ulysses (arXiv 2309.14509), an all-to-all turns some tokens with all heads into all tokens
with some heads, and back. An operation therefore sees whole sequences, and sums over time (forget gates, states) as on
one device. Layers that look back a few tokens (KV-shift, short convolutions) receive the last hidden states of the
previous rank, and project them again.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from common.settings import SettingError
from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.networks.linear_cross_entropy import IGNORE_INDEX
from lit_modules.networks.mixers import MIXERS
from lit_modules.networks.mixers.attention import Attention
from lit_modules.networks.mixers.recurrent import RecurrentMixer
from lit_modules.networks.positions import Positions, locate

KEY = "strategy.context_parallel_size"


def split_context(model: PalimpsestForCausalLM, group: dist.ProcessGroup) -> "ContextParallel":
    """Let every mixer of `model` exchange tokens for heads over `group`, in place; parameters do not change.

    Call it before the blocks' first forward pass. The model then takes the output of `ContextParallel.part`.

    Raises:
        ValueError: if the ranks cannot share the heads of a mixer.
    """
    check_heads(model.config, group.size())
    plan = ContextParallel(group)
    for block in model.model.layers:
        mixer = block.self_attn
        mixer.operation = functools.partial(plan.over_heads, mixer.operation, mixer.look_back)
        # before the hooks of a tensor plan, which turn hidden states into DTensors
        mixer.register_forward_pre_hook(plan.prepend_earlier_tokens, with_kwargs=True, prepend=True)
        mixer.register_forward_hook(plan.drop_earlier_tokens)
    return plan


def check_heads(config: PalimpsestConfig, size: int, tensor_parallel_size: int = 1) -> None:
    """Check that `size` ranks can share the heads that tensor parallelism leaves to each rank.

    Raises:
        ValueError: if they cannot.
    """
    for name in dict.fromkeys(config.layer_mixers):
        mixer = MIXERS[name]
        heads, key = config.num_heads, "num_heads"
        if issubclass(mixer, RecurrentMixer):
            heads, key = mixer.state_shape(config).heads, "state_heads"
        if heads // tensor_parallel_size % size:
            left = f" that strategy.tensor_parallel_size={tensor_parallel_size} leaves" * (tensor_parallel_size > 1)
            of_mixer = f"of the mixer {name} (model.{key}={heads})"
            problem = f"does not divide the {heads // tensor_parallel_size} heads{left} {of_mixer}"
            raise SettingError(KEY, size, "give a divisor", problem)


def check_tokens(tokens: int, size: int) -> None:
    """Check that `size` ranks can share the `tokens` of a micro-batch.

    Raises:
        ValueError: if they cannot.
    """
    if tokens % size:
        problem = (
            f"does not divide the {tokens} tokens of a micro-batch (data.micro_batch_size times "
            "data.sequence_length, or in validation data.validation_length)"
        )
        raise SettingError(KEY, size, "give a size that does", problem)


def without_context_parallelism(plan: "ContextParallel | None") -> AbstractContextManager[None]:
    """Suspend the plan, if there is one: within, the model takes whole sequences on this rank alone."""
    return nullcontext() if plan is None else plan.suspended()


class ContextParallel:
    """This rank's part in a group that shares sequences. Every rank of `group` must make the same calls.

    Args:
        group: ranks in the order of their parts of a sequence.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.active = True

    def part(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return this rank's part of a batch; all ranks of the group have the whole batch.

        Args:
            batch: input_ids and targets `[1, N]` int64, cu_seqlens int32 `[documents + 1]`; optionally component `[N]`.

        Returns:
            input_ids, targets `[1, N / n]`, component `[N / n]`; positions of these tokens, for the model; and
            targets_per_rank, the number of targets in the row divided by n. Divide the sum of this rank's losses by it:
            the mean over the ranks is then the mean over the row.

        Raises:
            ValueError: if the ranks do not divide the tokens.
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
        """Suspend the plan: within, the model takes whole sequences on this rank alone."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def prepend_earlier_tokens(
        self, mixer: Attention | RecurrentMixer, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepend the tokens that a mixer looks back at (a forward pre-hook)."""
        if not self.active:
            return arguments, keywords
        hidden, positions, *cache = arguments
        if positions.cu_seqlens is None or any(x is not None for x in cache):
            raise ValueError(
                "a sequence is split over ranks, and this is not a part of one: give the model what "
                "ContextParallel.part returns, or whole sequences under ContextParallel.suspended"
            )
        count = mixer.look_back
        if count == 0:
            return arguments, keywords
        if hidden.shape[1] < count:
            problem = f"leaves {hidden.shape[1]} tokens to a rank, and a mixer looks back at {count}"
            raise SettingError(KEY, self.size, "give a smaller size", problem)
        hidden = torch.cat((self._last_tokens_of_previous_rank(hidden, count), hidden), dim=1)
        return (hidden, _with_earlier_tokens(positions, count), *cache), keywords

    def drop_earlier_tokens(self, mixer: Attention | RecurrentMixer, arguments: tuple[Any, ...], out: Tensor) -> Tensor:
        """Drop the prepended tokens from `out` `[B, T, hidden_size]` (a forward hook)."""
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
        """Run a mixer's `operation` over whole sequences and this rank's heads.

        Args:
            looked_back: leading tokens that belong to the previous rank.
            inputs, positions, cache, options: arguments of the operation. `inputs` are `[B, T, heads, ...]`; the first
                has the most heads.
            logit_bound: `[heads]`, for operations that take it.

        Returns:
            `[B, T, heads, width]`, zero at the prepended tokens.
        """
        if not self.active:
            bound = {} if logit_bound is None else {"logit_bound": logit_bound}
            return operation(inputs, positions, *cache, **bound, **options)
        own = [x[:, looked_back:] for x in inputs if x is not None]
        heads = own[0].shape[2]
        if heads % self.size:
            raise SettingError(KEY, self.size, "give a divisor", f"does not divide the {heads} heads on a rank")
        given = iter(self._heads_for_tokens(own))
        if logit_bound is not None:
            options["logit_bound"] = logit_bound.chunk(self.size)[self.rank]
        whole = tuple(None if x is None else next(given) for x in inputs)
        made = inputs._make(whole) if hasattr(inputs, "_make") else whole
        out = self._tokens_for_heads(operation(made, positions, *cache, **options))
        return F.pad(out, (0, 0, 0, 0, looked_back, 0))

    def _heads_for_tokens(self, tensors: list[Tensor]) -> list[Tensor]:
        """Turn each `[B, N / n, h, ...]` of this rank's tokens into `[B, N, h / n, ...]` of this rank's heads.

        If n does not divide h, heads are repeated until it does. All tensors of a dtype share one all-to-all.
        """
        whole = list(tensors)
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            numbers = [number for number, x in enumerate(tensors) if x.dtype == dtype]
            dealt = [self._split_heads(tensors[number]) for number in numbers]
            packed = torch.cat([x.flatten(3) for x in dealt], dim=-1)  # [B, N / n, n, widths]
            received = self._exchange(packed.permute(2, 0, 1, 3)).transpose(0, 1).flatten(1, 2)
            pieces = received.split([math.prod(x.shape[3:]) for x in dealt], dim=-1)
            for number, part, piece in zip(numbers, dealt, pieces, strict=True):
                heads = piece.unflatten(-1, part.shape[3:])
                whole[number] = _expand_heads(heads, tensors[number], self.size)
        return whole

    def _split_heads(self, x: Tensor) -> Tensor:
        """Reshape `[B, T, h, ...]` to `[B, T, n, heads of a rank, ...]`; of identical heads each rank gets one."""
        heads = x.shape[2]
        if _is_shared_head(x) and heads > self.size:
            x = x[:, :, : self.size]
        elif heads % self.size:
            x = x.repeat_interleave(self.size // math.gcd(heads, self.size), dim=2)
        return x.unflatten(2, (self.size, -1))

    def _tokens_for_heads(self, out: Tensor) -> Tensor:
        """Turn `[B, N, H / n, D]` of this rank's heads into `[B, N / n, H, D]` of this rank's tokens."""
        parts = out.unflatten(1, (self.size, -1)).transpose(0, 1)  # [n, B, N / n, H / n, D]
        return self._exchange(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send part i of `[n, ...]` to rank i; return the received parts in rank order."""
        return all_to_all_single_autograd(parts.contiguous(), None, None, self.group)

    def _last_tokens_of_previous_rank(self, hidden: Tensor, count: int) -> Tensor:
        """Return the last `count` tokens `[B, count, hidden_size]` of the previous rank.

        The first rank receives the last rank's, so that all ranks make the same calls. It does not use them, because a
        new document starts there.
        """
        last = hidden[:, -count:]
        to_next, from_before = [0] * self.size, [0] * self.size
        to_next[(self.rank + 1) % self.size] = from_before[self.rank - 1] = count * hidden.shape[0]
        given = all_to_all_single_autograd(last.flatten(0, 1).contiguous(), from_before, to_next, self.group)
        return given.view_as(last)


def _is_shared_head(x: Tensor) -> bool:
    """Return whether the heads of `x` `[B, T, h, ...]` are views of a single one."""
    return x.shape[2] > 1 and x.stride(2) == 0


def _expand_heads(heads: Tensor, dealt: Tensor, size: int) -> Tensor:
    """Expand the received `heads` of `dealt` `[B, T, h, ...]` to a view of h / n heads, if one was sent for all."""
    if not _is_shared_head(dealt) or heads.shape[2] == dealt.shape[2] // size:
        return heads
    return heads.expand(-1, -1, dealt.shape[2] // size, *heads.shape[3:])


def _with_earlier_tokens(positions: Positions, count: int) -> Positions:
    """Extend `positions` by `count` tokens before this rank's first; they only serve as its predecessors."""
    index = positions.index
    before = index[:, :1] - torch.arange(count, 0, -1, device=index.device)
    rotary = positions.rotary
    if rotary is not None:
        rotary = F.pad(rotary[0], (0, 0, count, 0)), F.pad(rotary[1], (0, 0, count, 0))
    return positions._replace(index=torch.cat((before.clamp(min=0), index), dim=1), rotary=rotary)
