"""Contents of a progress line."""

import logging
from types import SimpleNamespace

import pytest
import torch

from lit_modules.callbacks.progress import Progress, is_report_due

GIB = 2.0**30


class Strategy:
    """Eight ranks of which another one has allocated 70 GiB."""

    def reduce(self, value: torch.Tensor, reduce_op: str) -> torch.Tensor:
        return {"max": torch.maximum}[reduce_op](value, torch.full_like(value, 70 * GIB))


def test_throughput_is_the_whole_runs_and_mfu_and_tokens_for_each_gpu_count_every_gpu(monkeypatch, caplog):
    """Eight GPUs of which four share each sequence: the data-parallel size is 2, and eight do the work."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 60 * GIB)
    monkeypatch.setattr(torch, "tensor", lambda value, device: torch.as_tensor(value, dtype=torch.float64))
    logged = {}
    trainer = SimpleNamespace(
        global_step=4,
        max_steps=8,
        world_size=8,
        is_global_zero=True,
        strategy=Strategy(),
        loggers=[SimpleNamespace(log_metrics=lambda metrics, step: logged.update(metrics))],
    )
    module = SimpleNamespace(
        take_metrics=dict,
        batch_tokens=4000,
        flops_per_token=1e9,
        device=torch.device("cuda", 0),
        take_mean_loss=lambda: 2.0,
        learning_rate=1e-3,
        gradient_norm=1.0,
        skipped_steps=0,
    )
    progress = Progress(every_tokens=8000)
    progress.steps, progress.seconds, progress.peak = 2, 0.5, 1e12
    progress.report(trainer, module)
    assert logged["tokens_per_second"] == 16000
    assert logged["tokens_per_second_per_gpu"] == 2000
    assert logged["mfu"] == pytest.approx(16000 * 1e9 / 8e12)
    assert logged["memory_gib"] == 70
    assert "16.0k tokens/s (2.00k on each GPU)" in caplog.text


def test_a_report_follows_the_first_step_each_interval_and_the_last_step_and_no_micro_batch_between():
    module = SimpleNamespace(
        ends_step=lambda batch_idx: batch_idx % 2 == 1, steps_for_tokens=lambda tokens: tokens // 100
    )

    def reports(batch_idx: int) -> bool:
        trainer = SimpleNamespace(global_step=(batch_idx + 1) // 2, max_steps=7)
        return is_report_due(trainer, module, batch_idx, every_tokens=300)

    assert [(i + 1) / 2 for i in range(14) if reports(i)] == [1, 3, 6, 7]
