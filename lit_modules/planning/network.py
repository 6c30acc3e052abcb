"""The parts of a network, each kind traced once: blocks, the embedding, and the final norm with the loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM
from lit_modules.networks.block import Block
from lit_modules.networks.counting import count_parameters
from lit_modules.networks.linear_cross_entropy import linear_cross_entropy
from lit_modules.networks.mixers.hgrn2 import HGRN2
from lit_modules.networks.norm import RMSNorm
from lit_modules.networks.positions import Positions
from lit_modules.parallel.recomputing import apply_recomputation
from lit_modules.planning.compiled import trace_compiled
from lit_modules.planning.eager import on_gpu, trace_eager
from lit_modules.planning.setup import Setup
from lit_modules.planning.work import Traced


@dataclass(frozen=True)
class Parts:
    """Costs of a network's parts for one micro-batch: embedding, each block, final norm with loss."""

    embedding: Traced
    blocks: tuple[Traced, ...]
    loss: Traced


class Network:
    """A configuration's network without contents; traces are cached for setups that share them.

    Attributes:
        parameters, tensors: number of parameters and of tensors; a shared matrix counts once.
        others: number of parameters outside the blocks.
        block_parameters: number of parameters of each block.
    """

    def __init__(self, config: PalimpsestConfig) -> None:
        with torch.device("meta"):
            self.model = PalimpsestForCausalLM(config)
        self.config = config
        self.parameters = count_parameters(self.model).total
        self.tensors = len(list(self.model.parameters()))
        self.block_parameters = [sum(p.numel() for p in block.parameters()) for block in self.model.model.layers]
        self.others = self.parameters - sum(self.block_parameters)
        self._traced: dict[tuple, Traced] = {}

    def parts(self, setup: Setup) -> Parts:
        """Return the parts as `setup` runs them."""
        ends = torch.bfloat16 if setup.precision == "bf16-true" else torch.float32
        weights = torch.bfloat16 if setup.sharded and setup.autocast else ends
        tokens, autocast = setup.rank_tokens, setup.autocast
        return Parts(
            self._once(_trace_embedding, tokens, ends, autocast),
            tuple(
                self._once(_trace_block, tokens, ends, autocast, mixer, weights, setup.compile, setup.policy(number))
                for number, mixer in enumerate(self.config.layer_mixers)
            ),
            self._once(_trace_loss, tokens, ends, autocast),
        )

    def _once(
        self, trace: Callable[..., Traced], tokens: int, dtype: torch.dtype, autocast: bool, *rest: object
    ) -> Traced:
        key = (trace.__name__, tokens, dtype, autocast, *rest)
        if key not in self._traced:
            with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                self._traced[key] = trace(self.config, tokens, dtype, *rest)
        return self._traced[key]


def _trace_block(
    config: PalimpsestConfig,
    tokens: int,
    dtype: torch.dtype,
    mixer: str,
    weights: torch.dtype,
    compile: bool,
    policy: str,
) -> Traced:
    with torch.device("meta"):
        block = Block(config, mixer)
    on_meta_device(block, weights)
    hidden = torch.empty(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    index, bounds = torch.empty(1, tokens, dtype=torch.int64), torch.empty(2, dtype=torch.int32)
    tables = [torch.empty(1, tokens, config.head_dim) for _ in range(2 * config.rope)]
    shared = []
    if isinstance(block.self_attn, HGRN2) and config.layer_mixers.count(mixer) > 1:
        shared = [torch.empty(*block.self_attn.shape[:2])]

    def run(hidden: Tensor, index: Tensor, bounds: Tensor, *others: Tensor) -> Tensor:
        rotary = (others[0], others[1]) if tables else None
        positions = Positions(index, cu_seqlens=bounds, rotary_index=index if rotary else None, rotary=rotary)
        return block.forward(
            hidden, positions, None, **dict(zip(("lower_bound",), others[len(tables) :], strict=False))
        )

    inputs = [hidden, index, bounds, *tables, *shared]
    if compile:
        return trace_compiled(run, block, inputs, policy)
    block.forward = on_gpu(block.forward, fused=True)  # type: ignore[method-assign]  # of this block alone
    apply_recomputation([block], policy)
    return trace_eager(run, inputs, list(block.parameters()))


def _trace_embedding(config: PalimpsestConfig, tokens: int, dtype: torch.dtype) -> Traced:
    weight = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, requires_grad=True)
    ids = torch.empty(1, tokens, dtype=torch.int64)
    return trace_eager(partial(nn.functional.embedding, weight=weight), [ids], [weight])


def _trace_loss(config: PalimpsestConfig, tokens: int, dtype: torch.dtype) -> Traced:
    with torch.device("meta"):
        norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
    on_meta_device(norm, dtype)
    weight = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, requires_grad=True)
    hidden = torch.empty(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    targets = torch.empty(1, tokens, dtype=torch.int64)

    def loss(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(norm(hidden), weight, targets)

    return trace_eager(on_gpu(loss, fused=True), [hidden], [*norm.parameters(), weight])


def on_meta_device(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the parameters of a module on the meta device by fake tensors of the surrounding FakeTensorMode."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
