import asyncio
import email.utils
import time
from types import SimpleNamespace

import pytest

from common.settings import SettingError, shown
from data_pipeline.rewriting.backends import BudgetSpent
from data_pipeline.rewriting.backends.endpoint import Endpoint
from data_pipeline.rewriting.backends.limits import BURST_S, Budget, Pace, backoff, retry_after
from tests.data_pipeline.rewriting.conftest import run_rewriting, write_corpus


def test_a_pace_lets_through_what_it_says(monkeypatch):
    now, slept = [1000.0], []

    async def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(asyncio, "sleep", sleep)
    pace = Pace(per_minute=600)

    async def ask():
        for _ in range(100):
            await pace.wait()

    asyncio.run(ask())
    assert sum(slept) == pytest.approx(100 / 10 - BURST_S)


def test_no_pace_never_waits():
    asyncio.run(asyncio.wait_for(Pace(None).wait(10**12), 1))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), (None, None), ("", None), ("soon", None), ("nan", None)],
)
def test_retry_after_is_read(header, seconds):
    assert retry_after(header) == seconds


def test_retry_after_may_be_a_date():
    assert retry_after(email.utils.formatdate(time.time() + 30, usegmt=True)) == pytest.approx(30, abs=2)
    assert retry_after(email.utils.formatdate(time.time() - 30, usegmt=True)) == 0.0


def test_waits_double_up_to_the_longest_and_differ():
    for fault, longest in ((1, 1.0), (2, 2.0), (5, 16.0), (9, 60.0), (500, 60.0)):
        drawn = [backoff(fault, 1.0, 60.0) for _ in range(20)]
        assert longest / 2 <= min(drawn) < max(drawn) <= longest


def test_a_budget_holds_what_is_under_way():
    budget = Budget(max_requests=None, max_tokens=100)
    budget.reserve(60)
    with pytest.raises(BudgetSpent, match=r"^max_tokens=100"):
        budget.reserve(60)
    budget.settle(60, 10)
    budget.reserve(60)
    assert (budget.requests, budget.tokens) == (2, 10)


def test_a_server_that_says_when_is_not_asked_before(tmp_path, server):
    times = []

    def script(name, n):
        times.append(time.monotonic())
        return "later" if n == 1 else "good"

    server.script = script
    send = server.send

    def later(handler, kind, name, text):
        if kind == "later":
            return handler.reply(429, {"error": {"message": "later"}}, [("Retry-After", "0.6")])
        return send(handler, kind, name, text)

    server.send = later
    run_rewriting(write_corpus(tmp_path / "in", 1), tmp_path / "out", server)
    assert times[1] - times[0] >= 0.6


def test_requests_keep_to_the_number_under_way_and_to_the_pace(tmp_path, server):
    server.delay = 0.02
    start = time.monotonic()
    # 10 a second, of which BURST_S may come at once, however fast the server is.
    backend = {"concurrency": 5, "requests_per_minute": 600}
    run_rewriting(write_corpus(tmp_path / "in", 40), tmp_path / "out", server, backend)
    assert time.monotonic() - start >= 40 / 10 - BURST_S - 0.1
    assert server.most_in_flight <= 5


@pytest.mark.parametrize(
    "setting", [{"concurrency": 0}, {"tries": 1.5}, {"timeout_s": "x"}, {"max_tokens": -1}, {"backoff_s": True}]
)
def test_a_setting_that_cannot_be_is_named(setting):
    ((key, value),) = setting.items()
    with pytest.raises(SettingError, match=rf"^{key}={shown(value)}: give a "):
        Endpoint(base_url="http://x/v1", model="m", **setting)


def test_an_address_that_is_none_is_named(tmp_path):
    source, elsewhere = write_corpus(tmp_path / "in", 1), SimpleNamespace(url="localhost:8000")
    with pytest.raises(ValueError, match=r"base_url=localhost:8000: give an address like"):
        run_rewriting(source, tmp_path / "out", elsewhere)
