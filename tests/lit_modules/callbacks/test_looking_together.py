"""Callbacks that run the model when no rank has all of its weights."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def test_gates_and_samples_of_a_model_in_parts_are_those_of_a_whole_one_and_one_rank_writes_them(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = subprocess.run(
        [sys.executable, "-m", "tests.lit_modules.callbacks.looking_together", str(port), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert found.returncode == 0, found.stderr
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("found ")]
    seen = json.loads(line.removeprefix("found "))
    (gates, texts) = seen["alone"]
    assert len(gates) == 6
    assert all(texts)
    for shared in ("weights", "heads"):
        assert seen[shared][0] == pytest.approx(gates, rel=1e-4)
        assert seen[shared][1] == texts
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    names = ("figures/forget_gates.png", "samples/step_00000001.txt")
    assert written == {f"{shared}/rank0/{name}" for shared in seen for name in names}
