"""FSDP2: a network whose blocks are sharded over processes trains as one that is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="two processes on CPUs talk through gloo")
def test_a_step_of_a_sharded_network_equals_the_same_step_on_one_device(tmp_path):
    program = Path(__file__).with_name("sharded_step.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(tmp_path / "meeting_point")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, error = process.communicate(timeout=120)
            assert process.returncode == 0, error[-2000:]
            result = json.loads(out)
            assert result["moved"] > 1e-2
            assert result["apart"] < 1e-6
    finally:
        for process in processes:
            process.kill()
