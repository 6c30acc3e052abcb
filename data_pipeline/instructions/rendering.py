"""Records as tokens, by the Alpaca prompts or a chat template, with an exact mask of the answers' tokens."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from common.settings import SettingError
from data_pipeline.instructions.records import Record
from data_pipeline.tokens.tokenizer import text_start

# Stanford Alpaca's prompts, word for word: other models and data use the same format.
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # a chat template with this marks the generated text

REFUSALS = (jinja2.TemplateError, ValueError, TypeError)  # errors that a template raises


class Example(NamedTuple):
    """A record's tokens, int32 [n], and the mask of learned tokens, bool [n]; the first is never learned."""

    tokens: np.ndarray
    learned: np.ndarray


class AlpacaTemplate:
    """The two Alpaca prompts, then the answer and eos.

    Prompt and answer are encoded separately, as at inference. A special token quoted in a text is encoded as plain
    characters. The prompt starts with the tokens that the tokenizer puts before a text (bos, or nothing).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, loss_on: str) -> None:
        self.loss_on, self.eos = loss_on, tokenizer.eos_token_id
        self._lead = text_start(tokenizer)
        self._encoder = _plain(tokenizer)
        self._encoder.encode_special_tokens = True

    def render(self, records: Sequence[Record]) -> list[Example]:
        """Return an example for each record; raise ValueError if a record lacks a field."""
        prompts, answers = [], []
        for record in records:
            instruction = record.text("instruction")
            context = record.text("input") if record.has("input") else ""
            answers.append(record.text("output"))
            prompts.append((WITH_INPUT if context else WITHOUT_INPUT).format(instruction=instruction, input=context))
        encoded = [
            [encoding.ids for encoding in self._encoder.encode_batch_fast(texts, add_special_tokens=False)]
            for texts in (prompts, answers)
        ]
        return [self._example(prompt, answer) for prompt, answer in zip(*encoded, strict=True)]

    def _example(self, prompt: list[int], answer: list[int]) -> Example:
        tokens = np.array([*self._lead, *prompt, *answer, self.eos], np.int32)
        learned = np.ones(len(tokens), bool)
        learned[: len(self._lead) + len(prompt) if self.loss_on == "answers" else 1] = False
        return Example(tokens, learned)


class ChatTemplate:
    """The tokenizer's chat template, for conversations, and for instructions as conversations of one turn.

    Answers are the text that the template marks as generated. Without marks, they are what the template adds to the
    prompt: the prompt must be a prefix of the whole, in text and in tokens. White space at the end of an answer is not
    learned if it is tokenized separately. The last answer ends with eos, which is added if the template does not.

    Raises:
        ValueError: the tokenizer has no chat template. `name` is the tokenizer's name in the message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, loss_on: str, name: str) -> None:
        self.tokenizer, self.loss_on, self.eos = tokenizer, loss_on, tokenizer.eos_token_id
        try:
            template = tokenizer.get_chat_template()
        except ValueError:
            fix = "use data.template=alpaca, or a tokenizer with one"
            raise SettingError("data.template", "chat", fix, f"needs a chat template, and {name} has none") from None
        self._marked = MARKED.search(template) is not None
        self._encoder = _plain(tokenizer)

    def render(self, records: Sequence[Record]) -> list[Example | None]:
        """Return an example for each record, or None where a token spans a prompt and an answer.

        Raises:
            ValueError: a record lacks a field, or the template's answers cannot be separated from the prompts.
        """
        return [self._example(record) for record in records]

    def _example(self, record: Record) -> Example | None:
        messages = record.messages() if record.has("messages") else _as_messages(record)
        try:
            if self.loss_on == "all":
                text = self._text(messages)
                tokens = self._encode(text[: len(text.rstrip())])
                return self._ended(tokens, np.ones(len(tokens), bool))
            found = self._by_mark(messages) if self._marked else None
            if found is not None:
                return self._ended(*found)
            spans = self._spans(messages)
        except REFUSALS as error:
            reason = str(error).partition("\n")[0][:200]
            raise ValueError(f"{record.where}: the tokenizer's chat template refuses it: {reason}") from error
        if spans is None:
            raise ValueError(
                f"{record.where}: the tokenizer's chat template makes no text of the conversation up to each prompt "
                "and answer that begins the text of the whole, so answers cannot be told from prompts: use "
                "data.loss_on=all, data.template=alpaca, or a chat template that marks answers with {% generation %}"
            )
        found = self._by_spans(spans)
        return None if found is None else self._ended(*found)

    def _text(self, messages: list[dict], prompt: bool = False) -> str:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert isinstance(text, str)  # with tokenize=False
        return text

    def _encode(self, text: str) -> np.ndarray:
        # `encode` of a single text would also compute the offset of each token.
        return np.array(self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int32)

    def _by_mark(self, messages: list[dict]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return tokens and answer mask by the template's marks; None if a marked span has no separate token."""
        rendered: Any = self.tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},  # no warning above the model's context, which is fine here
        )
        learned = np.array(rendered["assistant_masks"], bool)
        runs = np.count_nonzero(learned & ~np.concatenate([[False], learned[:-1]]))
        if runs != sum(message["role"] == "assistant" for message in messages):
            return None
        return np.array(rendered["input_ids"], np.int32), learned

    def _spans(self, messages: list[dict]) -> list[tuple[str, str]] | None:
        """Return each answer's (prompt, prompt and answer); None where these are not prefixes of the whole text."""
        text, spans = self._text(messages), []
        try:
            for number, message in enumerate(messages):
                if message["role"] == "assistant":
                    prompt = self._text(messages[:number], prompt=True) if number else self._text_before_all()
                    whole = text if message is messages[-1] else self._text(messages[: number + 1])
                    if prompt is None or not (whole.startswith(prompt) and text.startswith(whole)):
                        return None
                    spans.append((prompt, whole))
        except REFUSALS:  # the template accepts the whole conversation, but not its beginning alone
            return None
        return spans

    def _text_before_all(self) -> str | None:
        """Return the prompt of an answer that starts a conversation; templates render no empty conversation.

        It is the common prefix of two answers, up to the generation prompt. What a template writes after that (such as
        an empty thought) belongs to the answer, as in later turns.
        """
        asked = [{"role": "user", "content": "?"}]
        asking = self._text(asked, prompt=True).removeprefix(self._text(asked))
        one, other = (self._text([{"role": "assistant", "content": letter}]) for letter in "ab")
        differing = [place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
        end = one.rfind(asking, 0, differing[0]) if differing else -1
        return None if end < 0 else one[: end + len(asking)]

    def _by_spans(self, spans: list[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray] | None:
        tokens = self._encode(_without_tail(*spans[-1]))
        begins = [self._boundary(tokens, prompt) for prompt, _ in spans]
        ends = [*(self._end(tokens, *span) for span in spans[:-1]), len(tokens)]
        if None in begins or None in ends:
            return None
        learned = np.zeros(len(tokens), bool)
        for begin, end in zip(begins, ends, strict=True):
            learned[begin:end] = True
        return tokens, learned

    def _end(self, tokens: np.ndarray, prompt: str, whole: str) -> int | None:
        end = self._boundary(tokens, _without_tail(prompt, whole))
        # None: the white space after the answer may share a token with its last character.
        return self._boundary(tokens, whole) if end is None else end

    def _boundary(self, tokens: np.ndarray, text: str) -> int | None:
        """Return the number of tokens of a text prefix, or None if it ends within a token."""
        beginning = self._encode(text)
        return len(beginning) if np.array_equal(tokens[: len(beginning)], beginning) else None

    def _ended(self, tokens: np.ndarray, learned: np.ndarray) -> Example:
        """End an example with a learned eos: cut white space after the last one, or append one."""
        ends = np.flatnonzero(tokens == self.eos)
        if len(ends) and not str(self.tokenizer.decode(tokens[ends[-1] + 1 :].tolist())).strip():
            tokens, learned = tokens[: ends[-1] + 1], learned[: ends[-1] + 1].copy()
            learned[-1] = True
        else:
            tokens, learned = np.append(tokens, np.int32(self.eos)), np.append(learned, True)
        learned[0] = False
        return Example(tokens, learned)


def _as_messages(record: Record) -> list[dict[str, str]]:
    instruction = record.text("instruction")
    context = record.text("input") if record.has("input") else ""
    asked = f"{instruction}\n\n{context}" if context else instruction
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": record.text("output")}]


def _without_tail(prompt: str, whole: str) -> str:
    return whole[: max(len(prompt), len(whole.rstrip()))]


def _plain(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return a copy of the backend tokenizer without truncation and padding."""
    plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    return plain
