"""A loaded checkpoint with lm-eval's interface."""

import contextlib
import copy
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from common.settings import SettingError
from data_pipeline.tokens.tokenizer import add_document_start, document_start
from lit_modules.networks import PalimpsestConfig

LARGEST_BATCH = 64
CPU_BATCH = 8  # a CPU does not refuse a too large batch, but is slow


class CheckpointLM(HFLM):
    """Log-likelihoods and generations of a model, with lm-eval's interface.

    Differences from lm-eval's class: our models see every text start with the document token of training, which is
    never scored and never doubled; log-probabilities are float32 at least; the batch size is searched once per
    power-of-two length; truncated requests are counted.

    lm-eval pads on the right and passes no mask for scoring: in a causal model padding cannot affect earlier tokens.

    Args:
        model, tokenizer: from `lit_modules.generation.job.load`; the model is on its device.
        batch_size: requests at a time, or "auto".
        max_length: tokens of context; None means the value of the model's configuration.

    Attributes:
        cut: number of requests longer than max_length, which lost their first tokens.

    Raises:
        ValueError: if the tokenizer has no token to start a text; later, if an answer is longer than the context, or
            log-likelihoods are NaN.
    """

    add_bos_token: bool  # lm-eval sets it

    def __init__(self, model: Any, tokenizer: Any, batch_size: int | str, max_length: int | None) -> None:
        tokenizer, first = copy.deepcopy(tokenizer), None
        if isinstance(model.config, PalimpsestConfig):
            first = document_start(tokenizer)
            add_document_start(tokenizer)
        elif document_start(tokenizer) is None:
            raise ValueError(
                "checkpoint: its tokenizer names neither a bos_token nor an eos_token, which begin a text: set one in "
                "its tokenizer_config.json"
            )
        if batch_size == "auto" and model.device.type == "cpu":
            batch_size = CPU_BATCH
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch_size,
            max_batch_size=LARGEST_BATCH,
            max_length=max_length,
            prefix_token_id=first,
            softmax_dtype=torch.float64 if model.dtype == torch.float64 else torch.float32,
        )
        self.cut = 0
        self.longest = 1  # tokens of the longest text for rolling log-likelihood
        self.found: dict[int, int] = {}  # by tokens per request: the largest batch that fits memory

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Return logits `[B, T, vocabulary]` of right-padded tokens `[B, T]`."""
        with torch.no_grad():
            return self.model(inps, use_cache=False).logits

    def loglikelihood(self, requests: list, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty())

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Call lm-eval's method without the tokenizer's document token, because lm-eval prepends it itself."""
        with self.bare_tokens():
            self.longest = max(len(self.tok_encode(request.args[0])) for request in requests)
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty())

    @contextlib.contextmanager
    def bare_tokens(self) -> Iterator[None]:
        kept, self.add_bos_token = self.add_bos_token, False
        try:
            yield
        finally:
            self.add_bos_token = kept

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        longest = max((len(answer) for *_, answer in requests), default=0)
        if longest > self.max_length:
            fix = f"give {longest}, if the model can read so many"
            raise SettingError("benchmark.max_length", self.max_length, fix, f"is below an answer's {longest} tokens")
        self.cut += sum(len(context) + len(answer) > self.max_length + 1 for _, context, answer in requests)
        silent = disable_tqdm or override_bs is not None  # else one bar per batch of a long text
        found = super()._loglikelihood_tokens(requests, disable_tqdm=silent, override_bs=override_bs)
        if any(math.isnan(log_likelihood) for log_likelihood, _ in found):
            raise ValueError(
                "checkpoint: its log-likelihoods are not numbers, so weights are damaged, or dtype="
                f"{str(self.model.dtype).removeprefix('torch.')} is too coarse for them"
            )
        return found

    def _detect_batch_size(self, requests: Sequence[tuple] | None = None, pos: int = 0) -> int:
        """Return the largest batch that fits memory at the length of request `pos`, rounded up to a power of two.

        For rolling texts it is the longest length. Each length is tried once.
        """
        length = len(requests[pos][1]) + len(requests[pos][2]) if requests else self.longest
        length = min(self.max_length, 1 << (length - 1).bit_length())
        if length not in self.found:
            self.found[length] = super()._detect_batch_size([(None, [0] * length, [0])])
        return self.found[length]
