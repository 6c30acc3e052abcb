"""Exports under plain `transformers`: its pipeline and its server write what `job=generate` writes."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers.utils.import_utils import is_serve_available

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM, export_pretrained
from lit_modules.networks.loader_file import FILE
from tests.conftest import ROOT
from tests.evaluation.conftest import make_starting_tokenizer

PROMPT, TOKENS = "the gate forgets", 24
SWITCHES = {
    "fox": {"qk_norm": True, "output_gate": True, "output_norm": True, "kv_shift": True},
    "sigma": {
        "forget_gate": "none",
        "rope": True,
        "num_key_heads": 1,
        "num_value_heads": 2,
        "augmented_query_dim": 48,
    },
}
PIPELINE = f"""
import json, sys
from transformers import pipeline
assert "lit_modules" not in sys.modules
for folder in sys.argv[1:]:
    writer = pipeline("text-generation", model=folder, trust_remote_code=True, device="cpu")
    (out,) = writer({PROMPT!r}, max_new_tokens={TOKENS}, do_sample=False)
    print(json.dumps(out["generated_text"]))
    writer.model.save_pretrained(folder + "_again")
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Exports of a tiny FoX and a tiny DiffQKV, by name."""
    folder = tmp_path_factory.mktemp("exports")
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48}
    for name, switches in SWITCHES.items():
        torch.manual_seed(0)
        config = PalimpsestConfig(**sizes, **switches, initializer_range=0.3, bos_token_id=0, eos_token_id=0)
        export_pretrained(PalimpsestForCausalLM(config), folder / name, make_starting_tokenizer())
    return {name: folder / name for name in SWITCHES}


@pytest.fixture
def elsewhere(tmp_path):
    """The environment of a process that imports nothing of ours by itself."""
    caches = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "no_proxy": "*"}
    return os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"} | caches


@pytest.fixture
def generated(run):
    """What `job=generate` writes after the prompt, from an export."""

    def call(export):
        asked = (f"prompt={PROMPT}", "temperature=0", f"max_new_tokens={TOKENS}", "device=cpu")
        found = run("job=generate", f"checkpoint={export}", *asked, tiny=False)
        assert found.status == 0, found.err
        return found.out.removesuffix("\n").removeprefix(PROMPT)

    return call


@pytest.mark.long
def test_a_pipeline_writes_what_the_job_writes_and_its_model_can_be_saved_again(exports, elsewhere, generated):
    done = subprocess.run(
        [sys.executable, "-c", PIPELINE, *map(str, exports.values())],
        env=elsewhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = map(json.loads, done.stdout.splitlines())
    for export, text in zip(exports.values(), written, strict=True):
        assert text == PROMPT + generated(export)
        again = export.with_name(f"{export.name}_again")
        assert [path.name for path in again.glob("*.py")] == [FILE]
        assert (again / FILE).read_text() == (export / FILE).read_text()
        assert (again / "config.json").read_text() == (export / "config.json").read_text()


class Server:
    """`transformers serve FOLDER` on a free port of the loopback."""

    def __init__(self, folder: Path, environment: dict, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [Path(sys.executable).with_name("transformers"), "serve", str(folder), "--trust-remote-code"]
        self.folder, self.log = str(folder), log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port), "--device", "cpu"],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def ask(self, path: str, **body) -> dict:
        """Put a question when the server is up."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps({"model": self.folder, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        until = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            try:
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                pytest.fail(f"{error}: {self.log.read_text()}")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)  # it is not up yet

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


@pytest.mark.long
@pytest.mark.skipif(not is_serve_available(), reason="needs `pip install 'palimpsest-lm[serve]'`")
def test_a_server_writes_what_the_job_writes(exports, elsewhere, generated, tmp_path):
    servers = {name: Server(folder, elsewhere, tmp_path / f"{name}.log") for name, folder in exports.items()}
    try:
        for name, export in exports.items():
            answer = servers[name].ask("/v1/completions", prompt=PROMPT, max_tokens=TOKENS, temperature=0)
            assert answer["choices"][0]["text"] == generated(export)
            assert answer["usage"]["completion_tokens"] == TOKENS
    finally:
        for server in servers.values():
            server.stop()
