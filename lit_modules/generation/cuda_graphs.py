"""Generation with one CUDA graph replay per token, so that small kernels do not wait for host launches.

A step is everything that a token needs: embedding, layers, head, choosing the next token, and writing it to the output.
All state that changes from token to token is on the device. Without CUDA the same step runs eagerly.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import Cache

from lit_modules.generation.fused_blocks import BlockSteps
from lit_modules.generation.fused_layers import FusedProduct, fused_head, fused_layer_step, fused_layers
from lit_modules.networks import PalimpsestForCausalLM
from lit_modules.networks.caches import CompressedCache, StaticAttentionCacheLayer
from lit_modules.networks.caches.linearized import LinearizedCacheLayer
from lit_modules.networks.linearized import Linearization, LinearizedForCausalLM, linearize
from lit_modules.networks.linearized.families import FAMILIES
from lit_modules.networks.positions import Positions, locate

STEPS_BETWEEN_CHECKS = 16
"""Tokens between two points at which the host prints and checks whether all rows have ended."""

WARM_UP = 3
"""Tokens whose step runs before capture, so that kernels are compiled and libraries have their workspaces."""

PROMPT_TOKENS = 32768
"""Tokens of all rows' prompts that go through the model at once with a compressed cache, which packs after each."""

Choice = Callable[[Tensor], Tensor]
"""Maps logits `[B, vocabulary]` float32 to tokens `[B]`."""


def can_be_captured(model: Any) -> bool:
    """Return whether `model` is on a GPU, linearized or ours, and its step never synchronizes with the host.

    Of our own networks those are captured whose layers cache keys and values alone. Rotary tables that depend on the
    longest position so far synchronize at each token.
    """
    if not isinstance(model, LinearizedForCausalLM | PalimpsestForCausalLM) or model.device.type != "cuda":
        return False
    if isinstance(model, PalimpsestForCausalLM):
        return model.model.caches_keys_and_values_alone
    rope_type = model.model.rotary_emb.rope_type
    return rope_type != "longrope" and "dynamic" not in rope_type


def with_own_attention(model: Any) -> Any:
    """Return a stock model of a supported family with this project's attention, on the same weights; others as is."""
    family = FAMILIES.get(model.config.model_type)
    if family is None or type(model) is not family.model_class:
        return model
    own = linearize(model, Linearization(softmax_layers=tuple(range(model.config.num_hidden_layers))))
    return own.train(model.training)


@torch.no_grad()
def generate_captured(
    model: LinearizedForCausalLM | PalimpsestForCausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_ids: Sequence[int] = (),
    pad_token_id: int = 0,
    generator: torch.Generator | None = None,
    streamer: Any = None,
    fused: bool = True,
    compile: bool = False,
    cache: CompressedCache | None = None,
) -> Tensor:
    """Continue prompts, as `generate` does, until all rows have ended.

    Args:
        model: a linearized model, or one of our own with attention, in eval mode.
        input_ids: `[B, T]` int64, left-padded.
        attention_mask: `[B, T]` of 0 and 1; None without padding.
        max_new_tokens: 1 or more.
        temperature: of sampling; 0 takes the likeliest token and ignores top_k and top_p.
        top_k: sample from this many likeliest tokens; None: from all.
        top_p: sample from the likeliest tokens with this total probability; None: from all.
        eos_token_ids: tokens that end a row.
        pad_token_id: fills a row after its end.
        generator: random generator on the model's device; None for torch's own.
        streamer: of transformers, for a batch of 1; receives new tokens, `STEPS_BETWEEN_CHECKS` at a time.
        fused: run layers as in `fused_layers` and `fused_blocks`, where possible; moves weights in memory, once.
        compile: compile the layers' step, which takes a minute and fuses the remaining small kernels.
        cache: an empty one of this model, with a capacity for prompts and new tokens; None: the model's own.

    Returns:
        `[B, T + new]` int64, including prompts; new is `max_new_tokens`, or the longest row's tokens until its end.

    Raises:
        ValueError: a prompt ends in padding, or on a GPU `can_be_captured` refuses the model.
    """
    if input_ids.is_cuda and not can_be_captured(model):
        raise ValueError(f"{type(model).__name__} cannot be decoded by replays: use its own generate")
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
        raise ValueError("attention_mask ends in padding: pad prompts on the left")
    batch, length = input_ids.shape
    chunk = length if cache is None else max(1, PROMPT_TOKENS // batch)
    held: Cache = model.new_cache(length + max_new_tokens) if cache is None else cache
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        seen = None if attention_mask is None else attention_mask[:, :stop]
        logits = model(
            input_ids[:, start:stop], attention_mask=seen, past_key_values=held, use_cache=True, logits_to_keep=1
        ).logits
    positions = locate(batch, length, 0, input_ids.device, attention_mask)
    choose = make_token_choice(temperature, top_k, top_p, generator)
    output = Output(batch, max_new_tokens, eos_token_ids, pad_token_id, input_ids.device)
    step = DecodingStep(model, held, positions, choose, output, fused=fused, compile=compile)
    step.take(choose(logits[:, -1].float()))
    replay = Replay(step, generator)
    if streamer is not None:
        streamer.put(input_ids.cpu())
    shown = 0
    for made in range(1, max_new_tokens + 1):
        if made == max_new_tokens or made % STEPS_BETWEEN_CHECKS == 0:
            shown = _show(output, shown, made, streamer)
            if bool(output.ended.all()):
                break
        if made < max_new_tokens:
            replay()
    if streamer is not None:
        streamer.end()
    return torch.cat((input_ids, output.tokens[:, : output.longest()]), dim=1)


def make_token_choice(
    temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Choice:
    """Return the function that chooses a token; arguments as in `generate_captured`."""
    if temperature == 0:
        return lambda logits: logits.argmax(-1)
    no_tokens: Any = None  # of the text so far, which no warper reads
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(temperature))])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p is not None and top_p < 1:
        warpers.append(TopPLogitsWarper(float(top_p)))

    def sample(logits: Tensor) -> Tensor:
        # The first arrival among exponential variables with these rates; multinomial may synchronize with the host.
        probabilities = warpers(no_tokens, logits).softmax(-1)
        return (probabilities / torch.empty_like(probabilities).exponential_(generator=generator)).argmax(-1)

    return sample


class Output:
    """The new tokens of a batch, and which rows have ended, on the device.

    Args:
        batch: number of rows.
        capacity: new tokens per row.
        eos_token_ids: tokens that end a row.
        pad_token_id: fills a row after its end.
        device: of the tokens.
    """

    def __init__(
        self, batch: int, capacity: int, eos_token_ids: Sequence[int], pad_token_id: int, device: torch.device
    ):
        self.tokens = torch.full((batch, capacity), pad_token_id, dtype=torch.int64, device=device)
        self.ended = torch.zeros(batch, dtype=torch.bool, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.ends = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)
        self.pad_token_id = pad_token_id

    def append(self, tokens: Tensor) -> Tensor:
        """Write the next `tokens` `[B]`; return them with padding in rows that had ended."""
        tokens = tokens.masked_fill(self.ended, self.pad_token_id)
        self.tokens.index_copy_(1, self.count, tokens[:, None])
        self.count += 1
        if self.ends.numel():
            self.ended |= (tokens[:, None] == self.ends).any(-1)
        return tokens

    def longest(self) -> int:
        """Return the number of tokens until the last row ended, or so far."""
        made = int(self.count)
        if not bool(self.ended.all()) or not self.ends.numel():
            return made
        is_end = (self.tokens[:, :made, None] == self.ends).any(-1)
        return int(is_end.int().argmax(1).max()) + 1


class _Counters:
    """The token counters of all layers' caches, merged into one tensor per kind to save a kernel per layer.

    Args:
        cache: holds the prompts. Its layers' counters become views of the merged tensors.
    """

    def __init__(self, cache: Cache):
        counted = (LinearizedCacheLayer, StaticAttentionCacheLayer)
        self._layers = [layer for layer in cache.layers if isinstance(layer, counted)]
        self._early, self._late = self._together("counters_with_new"), self._together("counters_before_new")

    def _together(self, kind: str) -> list[Tensor]:
        """Merge, by name, all counters that the layers list under `kind`."""
        owners: dict[str, list[LinearizedCacheLayer | StaticAttentionCacheLayer]] = {}
        for layer in self._layers:
            for name in getattr(layer, kind):
                owners.setdefault(name, []).append(layer)
        together = []
        for name, layers in owners.items():
            counters = torch.stack([getattr(layer, name) for layer in layers])
            width = counters.shape[1]
            # Align each to 16 bytes, since kernels are specialized on alignment.
            together.append(F.pad(counters, (0, -width % (16 // counters.element_size()))))
            for layer, mine in zip(layers, together[-1], strict=True):
                setattr(layer, name, mine[:width])
        return together

    @contextmanager
    def moved_together(self) -> Iterator[None]:
        """Advance the counters of all layers by one token around the layers' step."""
        for counters in self._early:
            counters += 1
        for layer in self._layers:
            layer.is_counted_elsewhere = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.is_counted_elsewhere = False
        for counters in self._late:
            counters += 1


class DecodingStep:
    """One token of every row, from the last chosen token to the next, as a call that a CUDA graph can capture.

    Args:
        model: a causal language model with the layers of Hugging Face's Llama, or one of our own, in eval mode.
        cache: the layers' cache, which holds the prompts.
        positions: of the prompts' tokens.
        choose: chooses the next token from logits.
        output: receives the tokens.
        fused: fuse layers and head where possible; for a linearized model or one of our own.
        compile: compile the layers and the head.
    """

    def __init__(
        self,
        model: Any,
        cache: Cache,
        positions: Positions,
        choose: Choice,
        output: Output,
        *,
        fused: bool = True,
        compile: bool = False,
    ):
        self.model, self.cache, self.choose, self.output = model, cache, choose, output
        self.token = torch.zeros_like(positions.index[:, -1:])
        self.positions = Positions(positions.index[:, -1:].clone(), kv_start=positions.kv_start)
        self.held = cache.get_seq_length()
        self._counters = _Counters(cache)
        self._layer, self._fused_layer, self._head = _layer_step, fused_layer_step, _head_step
        self._compile = compile
        self._blocks = BlockSteps(model, cache, fused=fused) if isinstance(model, PalimpsestForCausalLM) else None
        self._fused = fused_layers(model) if fused and self._blocks is None else [None] * len(cache.layers)
        self._norm_and_head = fused_head(model) if fused else None
        self._alone = [Cache(layers=[layer]) for layer in cache.layers]

    def __call__(self) -> None:
        """Run the last token through the model, choose the next and write it."""
        through = self._through_layers if self._blocks is None else self._blocks
        hidden = self.model.model.embed_tokens(self.token)
        with self._counters.moved_together():
            hidden = through(hidden, self.positions)
        self.take(self.choose(self._head(self.model, self._norm_and_head, hidden)))
        if self._compile:
            # Compile from the second call on: state that layers create in their first call would need another program.
            self._layer, self._fused_layer = torch.compile(_layer_step), torch.compile(fused_layer_step)
            self._head = torch.compile(_head_step)
            if self._blocks is not None:
                self._blocks.compile()
            self._compile = False

    def _through_layers(self, hidden: Tensor, positions: Positions) -> Tensor:
        tables = self.model.model.rotary_emb(hidden, position_ids=positions.index)
        caches: list[Any] = self.cache.layers  # also of stock models, whose layers do not use the host's count
        for number, (layer, fused) in enumerate(zip(self.model.model.layers, self._fused, strict=True)):
            # Host integers are compiled into a layer's step as constants. Its layer index and cache length would cause
            # one compilation per layer and token. A replay does not change the host's count either.
            if fused is not None:
                hidden = self._fused_layer(fused, hidden, positions, tables, caches[number])
            else:
                with _first_of_its_cache(layer.self_attn):
                    hidden = self._layer(layer, hidden, positions, tables, self._alone[number])
            caches[number].length = self.held
        return hidden

    def prepare(self) -> None:
        """Do what has to be done on the host before each call, captured or not."""
        if isinstance(self.cache, CompressedCache):
            self.cache.prepare_step()

    def take(self, tokens: Tensor) -> None:
        """Set `tokens` `[B]` as the next token of each row."""
        self.token.copy_(self.output.append(tokens)[:, None])
        self.positions.index.add_(1)


class Replay:
    """Calls of a step: the first few run, the next is captured, and all later ones replay it.

    Args:
        step: the step to call; without CUDA it always runs.
        generator: the step's random generator, if it is not torch's own.
    """

    def __init__(self, step: DecodingStep, generator: torch.Generator | None = None):
        self.step, self.generator, self.calls = step, generator, 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Produce one token."""
        self.step.prepare()
        if not self.step.token.is_cuda or self.calls < WARM_UP:
            self.calls += 1
            self.step()
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            if self.generator is not None:
                self.graph.register_generator_state(self.generator)
            # Other threads, such as those that pin training batches, may allocate device memory meanwhile.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.step()
        self.graph.replay()


@contextmanager
def _first_of_its_cache(attention: Any) -> Iterator[None]:
    """Make the layer's cache the first one within this context."""
    number = attention.layer_idx
    attention.layer_idx = 0
    try:
        yield
    finally:
        attention.layer_idx = number


def _layer_step(
    layer: torch.nn.Module, hidden: Tensor, positions: Positions, tables: tuple[Tensor, Tensor], cache: Cache
) -> Tensor:
    return layer(
        hidden,
        attention_mask=None,
        position_ids=positions.index,
        past_key_values=cache,
        use_cache=True,
        position_embeddings=tables,
        positions=positions,
    )


def _head_step(model: Any, norm_and_head: FusedProduct | None, hidden: Tensor) -> Tensor:
    """Return logits `[B, vocabulary]` float32."""
    if norm_and_head is not None:
        return norm_and_head(hidden[:, 0]).float()
    return model.lm_head(model.model.norm(hidden))[:, -1].float()


def _show(output: Output, shown: int, made: int, streamer: Any) -> int:
    """Send new tokens to the streamer, up to the row's end; return the number of tokens handled so far."""
    if streamer is not None:
        for token in output.tokens[:, shown : min(made, output.longest())].cpu().unbind(1):
            streamer.put(token)
    return made
