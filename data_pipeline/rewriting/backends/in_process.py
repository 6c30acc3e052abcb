"""A Hugging Face model in this process, on the available device: for small runs, without a server."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.settings import SettingError, check_whole
from data_pipeline.rewriting.backends import Answer, Backend, Request, RewritingStopped


@dataclass(kw_only=True)
class InProcess(Backend):
    """The causal model of a Hugging Face folder or name, answering `batch_size` requests at a time.

    `device`: auto (a GPU if there is one), or a torch device. A model without a chat template gets the concatenated
    messages. Samples depend on which requests share a batch, so seeds do not reproduce them.
    """

    model: str
    batch_size: int = 8
    device: str = "auto"

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size, 1)

    @property
    def in_flight(self) -> int:
        return 2 * self.batch_size  # the next batch waits while one is generated

    async def start(self, folder: Path, requests: int, tokens: int) -> None:
        await asyncio.to_thread(self._load)
        self._waiting: asyncio.Queue[tuple[Request, asyncio.Future]] = asyncio.Queue()
        self._server = asyncio.create_task(self._serve())

    def _load(self) -> None:
        import torch
        import transformers
        from transformers.models.auto import AutoModelForCausalLM, AutoTokenizer

        transformers.logging.disable_progress_bar()
        device = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(self.model, padding_side="left")
            network: Any = AutoModelForCausalLM.from_pretrained(self.model, dtype="auto")
            self._tokenizer, self._network = tokenizer, network.to(device).eval()
        except (OSError, ValueError, RuntimeError) as error:
            first = str(error).strip().partition("\n")[0]
            raise SettingError("model", self.model, first, f"cannot be loaded on {device}") from error
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)

    async def complete(self, request: Request) -> Answer:
        answered = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((request, answered))
        return await answered

    async def _serve(self) -> None:
        """Answer waiting requests batch by batch; a request with other sampling starts the next batch."""
        held: tuple[Request, asyncio.Future] | None = None
        while True:
            batch = [held or await self._waiting.get()]
            held = None
            await asyncio.sleep(0)  # let the callers that were just answered ask again
            while len(batch) < self.batch_size and not self._waiting.empty():
                item = self._waiting.get_nowait()
                if _sampling(item[0]) != _sampling(batch[0][0]):
                    held = item
                    break
                batch.append(item)
            try:
                answers = await asyncio.to_thread(self._generate, [request for request, _ in batch])
            except Exception as error:
                for _, answered in batch:
                    if not answered.done():
                        answered.set_exception(error)
                continue
            for (_, answered), answer in zip(batch, answers, strict=True):
                if not answered.done():
                    answered.set_result(answer)

    def _generate(self, requests: list[Request]) -> list[Answer]:
        import torch

        from data_pipeline.tokens.tokenizer import end_tokens

        rows = [self._encoded(request.messages) for request in requests]
        limit = getattr(self._network.config, "max_position_embeddings", None) or 1 << 30
        fitting = [n for n, (row, r) in enumerate(zip(rows, requests, strict=True)) if len(row) + r.max_tokens <= limit]
        answers = [Answer("", "", 0, 0, 1, "too_long_for_model") for _ in requests]
        if not fitting:
            return answers
        first = requests[0]
        padded = self._tokenizer.pad({"input_ids": [rows[n] for n in fitting]}, return_tensors="pt")
        padded = padded.to(self._network.device)
        width = padded["input_ids"].shape[1]
        new_tokens = max(requests[n].max_tokens for n in fitting)
        if width + new_tokens > limit:  # a long prompt and a long answer of different requests: generate one by one
            return [self._generate([request])[0] for request in requests]
        drawn: dict[str, Any] = {"do_sample": False}
        if first.temperature > 0:
            drawn = {"do_sample": True, "temperature": first.temperature, "top_p": first.top_p, "top_k": 0}
        torch.manual_seed(sum(requests[n].seed for n in fitting) % 2**63)
        try:
            with torch.inference_mode():
                out = self._network.generate(
                    **padded, max_new_tokens=new_tokens, pad_token_id=self._tokenizer.pad_token_id, **drawn
                )
        except torch.OutOfMemoryError as error:
            problem = f"is out of memory with {len(fitting)} answers of up to {new_tokens} tokens at once"
            raise RewritingStopped("batch_size", self.batch_size, "give a smaller one", problem) from error
        ends = end_tokens(self._network, self._tokenizer)
        for n, row in zip(fitting, out[:, width:].tolist(), strict=True):
            answers[n] = self._answer(row[: requests[n].max_tokens], ends, len(rows[n]))
        return answers

    def _answer(self, row: list[int], ends: set[int], tokens_in: int) -> Answer:
        end = next((position for position, token in enumerate(row) if token in ends), None)
        text = self._tokenizer.decode(row[:end], skip_special_tokens=True)
        return Answer(text, "length" if end is None else "stop", tokens_in, len(row) if end is None else end + 1)

    def _encoded(self, messages: list[dict[str, str]]) -> list[int]:
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return self._tokenizer("\n\n".join(m["content"] for m in messages) + "\n\n")["input_ids"]

    async def close(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)


def _sampling(request: Request) -> tuple[float, float]:
    return request.temperature, request.top_p
