import os
import random
import resource
import signal

import numpy as np
import pytest
import torch

from lit_modules import checkpoints


def whole(folder, step, size=1000):
    io = checkpoints.AtomicCheckpointIO()
    path = folder / f"step_{step:08d}.ckpt"
    io.save_checkpoint({"weights": torch.full((size,), float(step)), "step": step}, path)
    assert io.failed is None
    return path


def test_the_newest_checkpoint_is_found(tmp_path):
    paths = [whole(tmp_path, step) for step in (5, 10, 100)]
    assert checkpoints.newest_whole(tmp_path) == paths[-1]
    assert checkpoints.newest_whole(tmp_path / "none") is None


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_a_truncated_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, caplog, part):
    before, last = whole(tmp_path, 5), whole(tmp_path, 10)
    os.truncate(last, int(part * last.stat().st_size))
    assert checkpoints.newest_whole(tmp_path) == before
    assert str(last) in caplog.text
    assert "truncated or damaged" in caplog.text


def test_a_flipped_bit_in_the_weights_is_noticed(tmp_path):
    before, last = whole(tmp_path, 5), whole(tmp_path, 10)
    content = bytearray(last.read_bytes())
    content[content.index(torch.full((8,), 10.0).numpy().tobytes()) + 16] ^= 1
    last.write_bytes(content)
    assert checkpoints.newest_whole(tmp_path) == before


def test_when_every_checkpoint_is_damaged_the_run_is_not_started_from_nothing(tmp_path):
    os.truncate(whole(tmp_path, 5), 100)
    with pytest.raises(ValueError, match="no undamaged checkpoint"):
        checkpoints.newest_whole(tmp_path)


def test_a_full_disk_leaves_the_checkpoint_that_was_there_and_says_so(tmp_path, caplog):
    path = whole(tmp_path, 5)
    io = checkpoints.AtomicCheckpointIO()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # writing more than this fails, as on a full disk
    try:
        io.save_checkpoint({"weights": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert io.failed == path
    assert "could not be written" in caplog.text
    assert torch.load(path, weights_only=True)["step"] == 5
    assert os.listdir(tmp_path) == [path.name]


def test_random_state_comes_back_in_every_generator():
    kept = checkpoints.RandomState()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    random.gauss(0, 1)
    state = kept.state_dict()
    drawn = torch.rand(4), np.random.rand(4), random.random(), random.gauss(0, 1)
    torch.rand(7), np.random.rand(7), random.random()
    kept.load_state_dict(state)
    kept.on_train_start(None, None)
    again = torch.rand(4), np.random.rand(4), random.random(), random.gauss(0, 1)
    assert torch.equal(drawn[0], again[0])
    assert np.array_equal(drawn[1], again[1])
    assert drawn[2:] == again[2:]


def test_random_state_survives_the_safe_loader(tmp_path):
    path = tmp_path / "state.ckpt"
    torch.save(checkpoints.RandomState().state_dict(), path)
    kept = checkpoints.RandomState()
    kept.load_state_dict(torch.load(path, weights_only=True))
    kept.on_train_start(None, None)


@pytest.mark.parametrize("settings", [{"every_tokens": 0}, {"every_tokens": 10, "keep_last": 0}])
def test_settings_that_keep_nothing_are_refused(settings):
    with pytest.raises(ValueError, match="checkpoint"):
        checkpoints.Checkpoints(**settings)
