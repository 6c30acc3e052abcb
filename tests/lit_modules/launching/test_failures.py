"""The first rank that failed, and the logs of the others."""

import contextlib
import json
import logging
import subprocess
import sys
from dataclasses import replace

import pytest

from lit_modules.launching import failures, rank_logs, run_folder
from lit_modules.launching.process import ProcessInfo
from tests.conftest import ROOT

HERE = ProcessInfo(world_size=2, local_size=2, launcher="srun")


@pytest.fixture
def as_rank(monkeypatch):
    def become(rank: int, **values: object) -> None:
        here = replace(HERE, rank=rank, local_rank=rank, **values)
        for module in (failures, rank_logs):
            monkeypatch.setattr(module, "this_process", lambda: here)

    return become


def end_with(error: Exception, folder) -> int:
    with pytest.raises(run_folder.SilentExit) as raised, failures.report_first_failure(folder, debug=False):
        raise error
    return raised.value.status


def test_the_first_rank_that_fails_is_recorded_and_speaks_and_later_ones_are_silent(as_rank, tmp_path, capsys):
    as_rank(1)
    assert end_with(ArithmeticError("too much"), tmp_path) == 1
    as_rank(0)
    assert end_with(RuntimeError("connection closed by peer"), tmp_path) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("palimpsest: rank 1 of 2 on ")
    assert f"failed first: ArithmeticError: too much; its log is {tmp_path}/logs/rank_00001.log" in said
    assert json.loads((tmp_path / "failed.json").read_text())["rank"] == 1
    assert failures.first_failure(tmp_path) == said.removeprefix("palimpsest: ").strip()


def test_a_users_mistake_is_said_once_and_in_its_own_words(as_rank, tmp_path, capsys):
    for rank in (0, 1):
        as_rank(rank)
        assert end_with(ValueError("model.vocab_size=100 is smaller"), tmp_path) == 2
    assert capsys.readouterr().err == "palimpsest: model.vocab_size=100 is smaller\n"


def test_a_rank_that_comes_after_rank_0_has_discarded_the_folder_is_silent(as_rank, tmp_path, capsys):
    as_rank(1)
    assert end_with(ValueError("model.vocab_size=100 is smaller"), tmp_path / "gone") == 2
    assert capsys.readouterr().err == ""


def test_a_new_attempt_keeps_the_failures_of_those_before_it(as_rank, tmp_path):
    as_rank(0)
    for number in (1, 2):
        end_with(RuntimeError(f"attempt {number}"), tmp_path)
        failures.archive_failure(tmp_path)
    failures.archive_failure(tmp_path)
    kept = [json.loads((tmp_path / f"failed-{number}.json").read_text())["error"] for number in (1, 2)]
    assert kept == ["RuntimeError: attempt 1", "RuntimeError: attempt 2"]
    assert failures.first_failure(tmp_path) is None


def test_an_error_of_a_process_alone_is_left_as_it_is(as_rank, tmp_path):
    as_rank(0, world_size=1, launcher=None)
    with pytest.raises(ArithmeticError), failures.report_first_failure(tmp_path, debug=False):
        raise ArithmeticError
    assert list(tmp_path.iterdir()) == []


def test_the_process_that_started_the_others_is_silent_when_one_of_them_has_spoken(as_rank, tmp_path, capsys):
    as_rank(1, launcher="lightning")
    failures.record_failure(tmp_path, ArithmeticError("too much"))
    capsys.readouterr()
    as_rank(0, world_size=1, launcher=None)
    assert end_with(RuntimeError("connection closed by peer"), tmp_path) == 1
    assert capsys.readouterr().err == ""


def test_all_that_another_rank_says_is_in_its_log_and_its_failure_on_the_terminal(tmp_path):
    code = (
        "import logging, os, sys, pathlib; from lit_modules.launching import rank_logs; "
        "from lit_modules.launching.process import this_process; folder = sys.argv[1]; "
        "handlers = [rank_logs.Terminal(), rank_logs.LogFile(rank_logs.log_file(folder, 'palimpsest'))]; "
        "logging.basicConfig(handlers=handlers, level='INFO', format='%(message)s'); "
        "rank_logs.redirect_to_log_file(pathlib.Path(folder), this_process()); "
        "print('printed', flush=True); logging.info('logged'); os.write(2, b'from a library\\n'); "
        "rank_logs.print_on_terminal('said')"
    )
    environment = {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "said\n")
    log = (tmp_path / "logs" / "rank_00001.log").read_text()
    assert sorted(log.splitlines()) == ["from a library", "logged", "printed"]


def test_a_traceback_goes_into_the_log_file_and_not_to_the_terminal(tmp_path, capsys):
    handler = logging.FileHandler(tmp_path / "palimpsest.log")
    logging.root.addHandler(handler)
    try:
        rank_logs.write_traceback(ArithmeticError("too much"))
    finally:
        logging.root.removeHandler(handler)
        handler.close()
    assert "ArithmeticError: too much" in (tmp_path / "palimpsest.log").read_text()
    assert capsys.readouterr().err == ""


def test_what_a_full_disk_does_not_take_of_a_log_is_lost_without_a_traceback(tmp_path, capfd):
    (tmp_path / "a-file").touch()
    record = logging.makeLogRecord({"msg": "said"})
    with open("/dev/full", "w") as full:
        no_folder = rank_logs.LogFile(tmp_path / "a-file" / "log", delay=True)
        for handler in (rank_logs.LogFile("/dev/full"), rank_logs.Terminal(full), no_folder):
            handler.handle(record)
        with contextlib.suppress(OSError):
            full.close()
    assert capfd.readouterr().err == ""
    rank_logs.Terminal(None).handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    assert "Logging error" in capfd.readouterr().err, "what is wrong in the program is still seen"
