"""Phases on one machine: their order, what is rerun, and how a run ends that cannot continue."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_pipeline.executors import Local
from tests.conftest import ROOT
from tests.data_pipeline.executors.steps import phase, times


@pytest.mark.parametrize("workers", [1, 2])
def test_all_tasks_of_a_phase_end_before_the_next_begins(tmp_path: Path, workers: int) -> None:
    phases = [phase(tmp_path / "traces", name, tasks=3, seconds=0.05) for name in ("read", "write")]
    assert Local(workers).run(phases, tmp_path / "logs")
    ended = [times(tmp_path / "traces", "read", task)["ended"][0] for task in range(3)]
    began = [times(tmp_path / "traces", "write", task)["began"][0] for task in range(3)]
    assert max(ended) <= min(began)
    assert sorted(folder.name for folder in (tmp_path / "logs").glob("0*")) == ["00-read", "01-write"]


def test_tasks_run_side_by_side(tmp_path: Path) -> None:
    assert Local(2).run([phase(tmp_path / "traces", "read", fail=(0, 1), how="meet")], tmp_path / "logs")


def test_tasks_that_ended_are_not_run_again(tmp_path: Path) -> None:
    phases = [phase(tmp_path / "traces", "read", tasks=4, fail=(2,), how="mistake")]
    for _ in range(2):
        with pytest.raises(ValueError, match="no such file"):
            Local(1).run(phases, tmp_path / "logs")
    (tmp_path / "traces" / "mended").touch()
    assert Local(1).run(phases, tmp_path / "logs")
    assert Local(1).run(phases, tmp_path / "logs")
    assert [len(times(tmp_path / "traces", "read", task)["began"]) for task in range(4)] == [1, 1, 3, 1]
    assert not list((tmp_path / "logs" / "00-read" / "errors").iterdir())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_found_in_a_task_ends_the_run_in_its_own_words(tmp_path: Path, workers: int, capfd) -> None:
    phases = [
        phase(tmp_path / "traces", "read", tasks=2, fail=(1,), how="mistake"),
        phase(tmp_path / "traces", "write"),
    ]
    with pytest.raises(ValueError, match=r"^corpus\.sources\.papers\.metadata=nowhere\.jsonl: no such file; give one$"):
        Local(workers).run(phases, tmp_path / "logs")
    assert not list((tmp_path / "traces").glob("write*"))
    assert capfd.readouterr() == ("", "")
    told = (tmp_path / "logs" / "00-read" / "errors" / "00001.txt").read_text()
    assert told == (
        "task 1 of phase read: ValueError: corpus.sources.papers.metadata=nowhere.jsonl: no such file; give one\n"
    )


def test_a_failed_task_does_not_wait_for_a_long_one_before_it(tmp_path: Path) -> None:
    slow = phase(tmp_path / "traces", "read", tasks=2, fail=(0,), how="hang")
    slow.steps.append(phase(tmp_path / "traces", "fail", fail=(1,), how="mistake").steps[0])
    begun = time.monotonic()
    with pytest.raises(ValueError, match="no such file"):
        Local(2).run([slow], tmp_path / "logs")
    assert time.monotonic() - begun < 20


def test_an_error_of_another_kind_says_which_task_and_where_its_log_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError) as raised:
        Local(2).run([phase(tmp_path / "traces", "read", fail=(1,), how="bug")], tmp_path / "logs")
    log = tmp_path / "logs" / "00-read" / "logs" / "task_00001.log"
    assert raised.value.__notes__ == [f"in task 1 of phase read; its log is {log}"]
    assert "no such column" in log.read_text()


def test_an_error_that_does_not_pickle_is_told_nevertheless(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: 1 and 2"):
        Local(2).run([phase(tmp_path / "traces", "read", fail=(0,), how="unpicklable")], tmp_path / "logs")


def test_a_task_killed_by_the_system_ends_the_run_in_one_line(tmp_path: Path) -> None:
    phases = [phase(tmp_path / "traces", "read", tasks=3, fail=(1,), how="killed")]
    words = r"^executor\.workers=2: task 1 of phase read: .* status -9 \(out of memory\?\): lower executor\.workers.*$"
    with pytest.raises(ValueError, match=words):
        Local(2).run(phases, tmp_path / "logs")
    assert "task 1 of phase read" in (tmp_path / "logs" / "00-read" / "errors" / "00001.txt").read_text()
    (tmp_path / "traces" / "mended").touch()
    assert Local(2).run(phases, tmp_path / "logs")


def test_what_a_crashed_process_printed_is_kept_off_the_terminal(tmp_path: Path, capfd) -> None:
    with pytest.raises(ValueError, match=r"status -6 .*; what its process printed is in .*processes\.log$"):
        Local(2).run([phase(tmp_path / "traces", "read", fail=(1,), how="crash")], tmp_path / "logs")
    assert "a library in C has failed a check" in (tmp_path / "logs" / "processes.log").read_text()
    assert capfd.readouterr() == ("", "")


def test_a_process_that_a_full_disk_has_ended_is_told_as_such(tmp_path: Path, monkeypatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("data_pipeline.executors.local.write_atomic", full)
    phases = [phase(tmp_path / "traces", "read", fail=(1,), how="crash")]
    with pytest.raises(ValueError, match=r"^corpus\.output=corpora/x: the disk is full: free some"):
        Local(2).run(phases, tmp_path / "logs", "corpus.output=corpora/x")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_line_that_names_the_setting(tmp_path: Path, workers: int) -> None:
    phases = [phase(tmp_path / "traces", "read", fail=(1,), how="full_disk")]
    with pytest.raises(ValueError, match=r"^corpus\.output=corpora/x: the disk is full at part\.parquet: free some"):
        Local(workers).run(phases, tmp_path / "logs", "corpus.output=corpora/x")


def test_another_number_of_tasks_is_refused_in_the_same_folder(tmp_path: Path) -> None:
    Local(1).run([phase(tmp_path / "traces", "read", tasks=2)], tmp_path / "logs")
    with pytest.raises(ValueError, match=r"00-read: started with 2 tasks, now 3: give 2, or a new folder"):
        Local(1).run([phase(tmp_path / "traces", "read", tasks=3)], tmp_path / "logs")


@pytest.mark.parametrize("workers", [1, 2])
def test_what_libraries_say_goes_to_the_log_of_the_task(tmp_path: Path, workers: int, capfd, caplog) -> None:
    caplog.set_level(logging.INFO)
    Local(workers).run([phase(tmp_path / "traces", "read", fail=(0,), how="talk")], tmp_path / "logs")
    log = (tmp_path / "logs" / "00-read" / "logs" / "task_00000.log").read_text()
    assert "WARNING  | a.library:talk" in log
    assert "a library has spoken" in log
    assert "datatrove has spoken" in log
    assert capfd.readouterr() == ("", "")
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == ["1/1 read: 2 tasks"] * 2


def test_the_peak_memory_of_each_task_is_its_own(tmp_path: Path) -> None:
    Local(1).run([phase(tmp_path / "traces", "read", tasks=3, fail=(1,), how="eat")], tmp_path / "logs")
    taken = [
        json.loads((tmp_path / "logs" / "00-read" / "resources" / f"{task:05d}.json").read_text()) for task in range(3)
    ]
    before, eaten, after = (resources["peak_rss_bytes"] for resources in taken)
    assert eaten - before > 150_000_000
    assert eaten - after > 150_000_000


DRIVER = """
import signal
import sys
from pathlib import Path
from data_pipeline.executors import Local
from tests.data_pipeline.executors.steps import phase
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background commands ignore
folder = Path(sys.argv[1])
Local(2).run([phase(folder / "traces", "read", fail=(0, 1), how="hang")], folder / "logs")
"""


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_task_outlives_the_command(tmp_path: Path, ended_by: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, tmp_path], env=environment, stderr=subprocess.DEVNULL)
    traces = [tmp_path / "traces" / f"read-{task}" for task in range(2)]
    until(lambda: all(trace.exists() and trace.read_text().endswith("\n") for trace in traces))
    workers = [int(trace.read_text().split()[1]) for trace in traces]
    driver.send_signal(ended_by)
    driver.wait(timeout=20)
    until(lambda: not any(map(alive, workers)))


def until(condition) -> None:
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    raise TimeoutError


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers_at_all_are_refused(workers: int) -> None:
    with pytest.raises(ValueError, match=rf"executor\.workers={workers}: give a whole number, 1 or more, or null"):
        Local(workers)
