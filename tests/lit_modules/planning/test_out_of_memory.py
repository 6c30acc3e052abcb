"""Out of memory gives one line: the request, the available memory, and what to lower."""

import hydra
import pytest
import torch
from omegaconf import DictConfig

from lit_modules.launching import start
from lit_modules.planning import out_of_memory
from tests.conftest import ROOT, TINY

CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.19 GiB of which ..."
GIB = 2**30


@pytest.fixture(scope="module")
def cfg() -> DictConfig:
    start.register_resolvers()
    large = [each for each in TINY if not each.startswith(("model.hidden_size", "data.micro", "data.batch"))]
    overrides = [
        *large,
        "data.source.path=x",
        "model.hidden_size=512",
        "data.micro_batch_size=4096",
        "data.batch_tokens=524288",
    ]
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return hydra.compose("config", overrides)


def said(cfg: DictConfig, error: Exception) -> str:
    with pytest.raises(ValueError, match="out of memory") as raised, out_of_memory.explain_out_of_memory(cfg):
        raise error
    assert raised.value.__cause__ is error
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_gpu_without_memory_is_told_with_what_the_plan_would_lower(cfg, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 8 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 * GIB, 12 * GIB))
    line = said(cfg, torch.OutOfMemoryError(CUDA))
    assert line.startswith(
        "out of memory on NVIDIA A100-SXM4-40GB: 2.50 GiB more asked for, 12.0 GiB in all, 3.0 GiB of them held by "
        "other processes; job=plan estimates "
    )
    peak, overrides = out_of_memory.planned_memory(cfg, 9 * GIB, on_gpu=True)
    assert peak > 9 * GIB
    assert f"estimates {peak / GIB:.1f} GiB for data.micro_batch_size=4096 x data.sequence_length=64: give " in line
    assert line.endswith(f": give {overrides}")
    assert "data.micro_batch_size=" in overrides


def test_something_is_lowered_even_where_the_plan_said_that_it_fits(cfg):
    _, overrides = out_of_memory.planned_memory(cfg, 10_000 * GIB, on_gpu=True)
    assert overrides is not None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: you tried to "
                     "allocate 1099511627776 bytes. Error code 12 (Cannot allocate memory)"),
        MemoryError("Unable to allocate 1024. GiB for an array"),
    ],
)  # fmt: skip
def test_main_memory_that_runs_out_is_told_without_gpus_to_add(cfg, error):
    line = said(cfg, error)
    assert line.startswith("out of memory on the CPU: 1,024.00 GiB more asked for, ")
    assert "trainer.devices" not in line


def test_without_a_plan_the_sizes_are_named(cfg, monkeypatch):
    monkeypatch.setattr(out_of_memory, "planned_memory", lambda *_: cfg.nothing)
    assert said(cfg, MemoryError()).endswith(
        "; lower data.micro_batch_size=4096 x data.sequence_length=64, or give activation_checkpointing=full"
    )


def test_a_job_that_trains_nothing_says_its_own_settings():
    lower = "give a smaller batch_size"
    with (
        pytest.raises(ValueError, match="memory") as raised,
        out_of_memory.explain_out_of_memory(DictConfig({}), lower),
    ):
        raise MemoryError
    assert str(raised.value).startswith("out of memory on the CPU: ")
    assert str(raised.value).endswith("; give a smaller batch_size")


def test_another_error_stays_what_it_is(cfg):
    with pytest.raises(RuntimeError, match="something else"), out_of_memory.explain_out_of_memory(cfg):
        raise RuntimeError("something else")
