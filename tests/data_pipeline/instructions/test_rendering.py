import numpy as np
import pytest

from data_pipeline.instructions.records import Record
from data_pipeline.instructions.rendering import WITH_INPUT, WITHOUT_INPUT, AlpacaTemplate, ChatTemplate
from tests.data_pipeline.instructions.conftest import CHAT, alpaca_records, make_tokenizer

# The same as CHAT, with the answers marked.
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A template that leaves out what it wrote before the last answer.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last and message['role'] == 'assistant' %}thought {% endif %}{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [("system", "be brief"), ("user", "why?"), ("assistant", "the key"), ("user", "and?"), ("assistant", "é 日本")]


def records(rows):
    return [Record(f"data.path=x: record {number}", row, {}) for number, row in enumerate(rows, 1)]


def conversation(turns):
    return records([{"messages": [{"role": role, "content": content} for role, content in turns]}])


def chat(turns, loss_on="answers", **settings):
    tokenizer = make_tokenizer(**settings)
    (example,) = ChatTemplate(tokenizer, loss_on, "tokenizer.path=x").render(conversation(turns))
    return tokenizer, example


def learned_texts(tokenizer, example):
    """Return the text of each run of learned tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.learned.astype(int), [0]])))
    return [tokenizer.decode(example.tokens[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("bos", [False, True])
def test_alpaca_examples_are_what_the_tokenizer_makes_of_prompt_and_answer(bos):
    tokenizer, rows = make_tokenizer(bos), alpaca_records(7)
    examples = AlpacaTemplate(tokenizer, "answers").render(records(rows))
    for row, example in zip(rows, examples, strict=True):
        prompt = tokenizer((WITH_INPUT if row["input"] else WITHOUT_INPUT).format(**row))["input_ids"]
        answer = tokenizer(row["output"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        assert example.tokens.tolist() == prompt + answer
        assert example.learned.tolist() == [False] * len(prompt) + [True] * len(answer)
        assert (example.tokens[0] == tokenizer.bos_token_id) == bos
        assert tokenizer.decode(example.tokens[example.learned].tolist()) == row["output"] + "<|im_end|>"


def test_all_tokens_are_learned_but_the_first():
    rows = records(alpaca_records(2))
    for example in AlpacaTemplate(make_tokenizer(), "all").render(rows):
        assert not example.learned[0]
        assert example.learned[1:].all()


@pytest.mark.parametrize("output", ["", " ", "\n", "<|im_end|>", "{input}"])
def test_an_answer_is_text_whatever_it_quotes(output):
    tokenizer = make_tokenizer()
    rows = records([{"instruction": "quote {output} <|im_start|>", "output": output}])
    (example,) = AlpacaTemplate(tokenizer, "answers").render(rows)
    assert tokenizer.decode(example.tokens[example.learned].tolist()) == output + "<|im_end|>"
    assert np.isin(example.tokens, (0, 1, 2)).sum() == 1  # the eos at the end is the only special token
    assert "quote {output} <|im_start|>\n\n### Response:\n" in tokenizer.decode(example.tokens.tolist())


@pytest.mark.parametrize("missing", ["absent", None, ""])
def test_without_an_input_the_shorter_prompt_is_used(missing):
    row = {"instruction": "ask", "output": "say", **({} if missing == "absent" else {"input": missing})}
    tokenizer = make_tokenizer()
    (example,) = AlpacaTemplate(tokenizer, "answers").render(records([row]))
    assert "### Input" not in tokenizer.decode(example.tokens.tolist())


@pytest.mark.parametrize("template", [CHAT, MARKED], ids=["prefix", "marked"])
def test_answers_of_a_conversation_are_learned_with_their_ends(template):
    tokenizer, example = chat(TURNS, chat_template=template)
    whole = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in TURNS], tokenize=False)
    assert tokenizer.decode(example.tokens.tolist()) == whole.rstrip()
    assert example.tokens.tolist() == tokenizer(whole.rstrip(), add_special_tokens=False)["input_ids"]
    assert learned_texts(tokenizer, example) == ["the key<|im_end|>", "é 日本<|im_end|>"]


def test_a_mark_that_finds_no_token_gives_way_to_the_prefix():
    # An empty answer marked without its end is no token.
    template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    turns = [("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "é")]
    tokenizer, example = chat(turns, chat_template=template)
    assert learned_texts(tokenizer, example) == ["<|im_end|>", "é<|im_end|>"]


def test_the_last_answer_s_end_is_learned_where_the_mark_leaves_it_out():
    template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    tokenizer, example = chat(TURNS, chat_template=template)
    assert learned_texts(tokenizer, example) == ["the key", "é 日本<|im_end|>"]


def test_eos_is_added_where_a_template_ends_in_another_token():
    tokenizer, example = chat(TURNS, eos_token="<|endoftext|>")
    assert learned_texts(tokenizer, example) == ["the key<|im_end|>", "é 日本<|im_end|><|endoftext|>"]


PLAIN = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def test_a_template_of_plain_text_works():
    tokenizer, example = chat(TURNS, chat_template=PLAIN)
    assert learned_texts(tokenizer, example) == ["the key", "é 日本<|im_end|>"]


def test_a_line_end_is_learned_where_it_is_one_token_with_the_answer_s_last_word():
    tokenizer, example = chat(TURNS, chat_template=PLAIN, lines=True)
    assert "key\n" in tokenizer.decode(tokenizer("the key\n")["input_ids"][-1:])
    assert learned_texts(tokenizer, example) == ["the key\n", "é 日本<|im_end|>"]


def test_of_an_empty_answer_its_end_is_learned():
    tokenizer, example = chat([("user", "a"), ("assistant", "")], chat_template=PLAIN)
    assert tokenizer.decode(example.tokens.tolist()) == "user:\na\nassistant:\n<|im_end|>"
    assert learned_texts(tokenizer, example) == ["<|im_end|>"]


def test_loss_on_all_needs_no_answer_to_be_told():
    tokenizer, example = chat(TURNS, loss_on="all", chat_template=FORGETFUL)
    assert example.learned.tolist() == [False] + [True] * (len(example.tokens) - 1)
    assert tokenizer.decode(example.tokens.tolist()).endswith("thought é 日本<|im_end|>")


def test_a_template_whose_answers_cannot_be_told_is_refused():
    _, example = chat(TURNS[:3], chat_template=FORGETFUL)  # one turn can
    assert example.learned.any()
    other_prompt = CHAT.replace("assistant\n{% endif %}", "assistant, at length\n{% endif %}")
    assert other_prompt != CHAT
    for template in (FORGETFUL, other_prompt):
        with pytest.raises(
            ValueError, match=r"^data\.path=x: record 1: .* cannot be told .*data\.loss_on=all"
        ) as error:
            chat(TURNS, chat_template=template)
        assert "\n" not in str(error.value)


def test_an_answer_whose_first_token_joins_the_prompt_is_left_out():
    merged = make_tokenizer(chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    rows = conversation([("user", "describ"), ("assistant", "es")])
    assert merged.tokenize("describes") != merged.tokenize("describ") + merged.tokenize("es")
    assert ChatTemplate(merged, "answers", "x").render(rows) == [None]


# One that writes of itself before the first turn, and one in which nothing marks who speaks.
GREETING = CHAT.replace("{% for", "<|im_start|>system\nbe brief<|im_end|>\n{% for", 1)
BARE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ended"),
    [(CHAT, "<|im_end|>"), (MARKED, "<|im_end|>"), (GREETING, "<|im_end|>"), (BARE, "<|im_end|>"), (PLAIN, "")],
    ids=["prefix", "marked", "greeting", "bare", "plain"],
)
def test_an_answer_that_begins_a_conversation_is_learned(template, ended):
    tokenizer, example = chat([("assistant", "the key"), *TURNS[1:]], chat_template=template)
    first, *others = learned_texts(tokenizer, example)
    assert others == [f"the key{ended}", "é 日本<|im_end|>"]
    assert first == ("the key"[1:] + ended if template == BARE else "the key" + ended)  # the first token never is
    assert tokenizer.decode(example.tokens.tolist()).startswith("<|im_start|>system") == (template == GREETING)


def test_what_a_template_puts_into_an_answer_is_learned_where_no_question_is_before_it():
    turns = [("user", "?"), ("assistant", "é")]
    for begin in (0, 1):
        tokenizer, example = chat(turns[begin:], chat_template=FORGETFUL)
        assert learned_texts(tokenizer, example) == ["thought é<|im_end|>"]


def test_a_conversation_whose_order_a_template_refuses_is_told():
    turns = [("assistant", "hello"), *TURNS[1:]]
    alternating = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user begins') }}{% endif %}" + CHAT
    with pytest.raises(ValueError, match=r"record 1: the tokenizer's chat template refuses it: a user begins$"):
        chat(turns, chat_template=alternating)
    questioned = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no question') }}"
        "{% endif %}" + CHAT
    )
    chat(TURNS, chat_template=questioned)
    with pytest.raises(ValueError, match=r"record 1: .* cannot be told .*data\.loss_on=all") as error:
        chat(turns, chat_template=questioned)
    assert "empty conversation" not in str(error.value)
    silent = "{% for m in messages %}{{ m['role'] }}<|im_end|>{% endfor %}"
    with pytest.raises(ValueError, match=r"record 1: .* cannot be told"):
        chat(turns, chat_template=silent)


def test_what_a_template_raises_is_told():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"record 1: the tokenizer's chat template refuses it: roles must alternate$"):
        chat(TURNS, chat_template=template)


def test_a_tokenizer_without_a_chat_template_is_told():
    with pytest.raises(ValueError, match=r"^data\.template=chat needs a chat template, and tokenizer\.path=x has none"):
        ChatTemplate(make_tokenizer(chat_template=None), "answers", "tokenizer.path=x")


def test_instructions_are_conversations_of_one_turn():
    tokenizer = make_tokenizer()
    rows = records([{"instruction": "ask", "input": "of this", "output": "say"}])
    (example,) = ChatTemplate(tokenizer, "answers", "x").render(rows)
    turns = "<|im_start|>user\nask\n\nof this<|im_end|>\n<|im_start|>assistant\nsay<|im_end|>"
    assert tokenizer.decode(example.tokens.tolist()) == turns
    assert learned_texts(tokenizer, example) == ["say<|im_end|>"]
