"""The local backends: a model in this process, and a server that the job starts."""

import asyncio
import multiprocessing
import os
import sys
import time

import pytest

from data_pipeline.rewriting.backends import Request, RewritingStopped
from data_pipeline.rewriting.backends.in_process import InProcess
from data_pipeline.rewriting.backends.served import Served
from data_pipeline.rewriting.job import rewrite
from data_pipeline.rewriting.plan import read_plan
from tests.data_pipeline.rewriting.conftest import CONF, rows_of, settings_for, write_corpus


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Save a model with random weights and a byte vocabulary."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(["<|end|>", *alphabet])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=257, max_position_embeddings=1024, eos_token_id=0, bos_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_model_in_this_process_answers_each_document(tmp_path, tiny):
    source = write_corpus(tmp_path / "in", 5)
    short = {"short": {"system": "", "user": "$text", "max_tokens_ratio": 0.1}}
    plan = read_plan(settings_for(source, tmp_path / "out", screens={}, styles=short, attempts=1))
    total = rewrite(plan, InProcess(model=str(tiny), batch_size=4, device="cpu"), {})["total"]
    assert total["kept"] + total["left_out"] == total["requests"] == 5
    assert total["tokens_in"] > 5 * 300
    assert 5 <= total["tokens_out"] <= 5 * 256


def answers(backend, requests, folder):
    async def ask():
        await backend.start(folder, 0, 0)
        try:
            return await asyncio.gather(*(backend.complete(request) for request in requests))
        finally:
            await backend.close()

    return asyncio.run(ask())


def test_greedy_answers_do_not_depend_on_the_batch_and_the_longest_are_refused(tmp_path, tiny):
    texts = ["a short one", "one that is longer by far " * 8, "x" * 1000]
    requests = [Request([{"role": "user", "content": text}], 0.0, 1.0, 40 + n, n) for n, text in enumerate(texts)]
    together = answers(InProcess(model=str(tiny), batch_size=3, device="cpu"), requests, tmp_path)
    alone = answers(InProcess(model=str(tiny), batch_size=1, device="cpu"), requests, tmp_path)
    assert together == alone
    assert [answer.problem for answer in together] == ["", "", "too_long_for_model"]
    assert all(answer.tokens_out == 40 + n or answer.finish == "stop" for n, answer in enumerate(together[:2]))


def test_a_long_prompt_beside_a_long_answer_does_not_pass_the_models_end(tmp_path, tiny):
    widest = []

    class Measured(InProcess):
        def _load(self):
            super()._load()
            generate = self._network.generate

            def measured(input_ids, max_new_tokens, **others):
                widest.append(input_ids.shape[1] + max_new_tokens)
                return generate(input_ids=input_ids, max_new_tokens=max_new_tokens, **others)

            self._network.generate = measured

    requests = [
        Request([{"role": "user", "content": "x" * 900}], 0.0, 1.0, 10, 0),
        Request([{"role": "user", "content": "y"}], 0.0, 1.0, 300, 0),
    ]
    found = answers(Measured(model=str(tiny), batch_size=2, device="cpu"), requests, tmp_path)
    assert [answer.problem for answer in found] == ["", ""]
    assert max(widest) <= 1024


def test_a_model_that_is_not_there_is_named(tmp_path):
    plan = read_plan(settings_for(write_corpus(tmp_path / "in", 1), tmp_path / "out"))
    with pytest.raises(ValueError, match=r"rewrite\.backend\.model=/no/such cannot be loaded"):
        rewrite(plan, InProcess(model="/no/such", device="cpu"), {})


SERVER = """
import os, sys, time
from tests.data_pipeline.rewriting.conftest import ScriptedServer
port, lives = int(sys.argv[1]), int(sys.argv[2])
print("server", os.getpid(), flush=True)
def script(name, n):
    if lives and server.asked.total() > lives:
        os._exit(9)
    return "good"
server = ScriptedServer(script=script, delay=0.02, port=port)
with server:
    time.sleep(120)
"""


def served(tmp_path, lives=0, command=None, **settings):
    """Return a backend that starts the scripted server, which dies after `lives` requests."""
    script = tmp_path / "server.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(CONF.parents[1])!r})\n{SERVER}")
    command = command or [sys.executable, str(script), "{port}", str(lives)]
    settings = {"start_timeout_s": 60.0, "backoff_s": 0.2, "concurrency": 4, "timeout_s": 10.0, **settings}
    return Served(command=command, model="m", **settings)


def server_processes(output):
    """Return the started servers, as named in their log, that are still alive."""
    numbers = [int(line.split()[1]) for line in (output / "server.log").read_text().splitlines() if "server " in line]
    assert numbers
    return [number for number in numbers if is_alive(number)]


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_is_started_watched_started_again_and_stopped(tmp_path):
    output = tmp_path / "out"
    plan = read_plan(settings_for(write_corpus(tmp_path / "in", 30), output))
    summary = rewrite(plan, served(tmp_path, lives=20), {})
    assert summary["total"]["kept"] == len(rows_of(output)) == 30
    assert (output / "server.log").read_text().count("server ") == 2
    assert server_processes(output) == []


def test_a_server_that_keeps_dying_is_one_line_that_names_its_log(tmp_path):
    plan = read_plan(settings_for(write_corpus(tmp_path / "in", 40), tmp_path / "out"))
    with pytest.raises(RewritingStopped, match=r"status 9 after 1 restarts: see .*server\.log.* of 40 rewritings"):
        rewrite(plan, served(tmp_path, lives=10, max_restarts=1), {})
    assert server_processes(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["no-such-program", "{port}"], "no-such-program.* ended with status 127 before it was ready"),
        ([sys.executable, "-c", "import time; time.sleep(99)", "{port}"], "was not ready within"),
    ],
)
def test_a_server_that_never_answers_is_one_line(tmp_path, command, said):
    plan = read_plan(settings_for(write_corpus(tmp_path / "in", 1), tmp_path / "out"))
    with pytest.raises(RewritingStopped, match=said):
        rewrite(plan, served(tmp_path, command=command, start_timeout_s=1.0), {})


def test_a_command_without_a_port_is_refused():
    with pytest.raises(ValueError, match=r"^command=.*\{port\}"):
        Served(command=["vllm", "serve"], model="m")


def test_a_server_does_not_outlive_a_killed_job(tmp_path):
    output = tmp_path / "out"
    plan = read_plan(settings_for(write_corpus(tmp_path / "in", 200), output))
    backend = served(tmp_path)
    job = multiprocessing.get_context("fork").Process(target=lambda: rewrite(plan, backend, {}))
    job.start()
    deadline = time.monotonic() + 60
    while not list(output.glob("journals/*.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server_processes(output)
    job.kill()
    job.join()
    while server_processes(output) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server_processes(output) == []
