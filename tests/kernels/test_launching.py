"""Kernels compiled side by side: put off together, launched in order, once a kind; errors are those of the launch."""

import os
import threading

import pytest
from triton.runtime._async_compile import active_mode

from kernels import launching
from kernels.launching import compiled_side_by_side, on_grid


class Kernel:
    """The part of Triton's kernel that a launch uses. compiler: called where Triton would compile."""

    def __init__(self, name: str, log: list, compiler=lambda: None):
        self.name, self.log, self.compiler, self.compiled = name, log, compiler, False

    def finish(self, _) -> None:
        self.compiled = True

    def warmup(self, *args, grid, **kwargs) -> None:
        active_mode.get().submit(self.name, self.compiler, self.finish)

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            assert active_mode.get() is None
            if not self.compiled:
                self.finish(self.compiler())
                self.log.append(f"{self.name} alone")
            self.log.append((self.name, grid, args, kwargs))

        return launch


@pytest.fixture(autouse=True)
def two_processors(monkeypatch) -> None:
    monkeypatch.setattr(launching, "_compiled", set())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def test_kernels_are_compiled_side_by_side_and_launched_in_order():
    log, meeting = [], threading.Barrier(2)  # passed by two threads together, or by none
    first, second = (Kernel(name, log, lambda: meeting.wait(timeout=30)) for name in ("first", "second"))
    with compiled_side_by_side("kind"):
        on_grid(first, (1,))(1, x=2)
        on_grid(second, (2, 3))(4)
        on_grid(first, (5,))(6)
        assert not log
    assert log == [("first", (1,), (1,), {"x": 2}), ("second", (2, 3), (4,), {}), ("first", (5,), (6,), {})]


def test_a_kind_is_put_off_once_and_another_again():
    log = []
    kernel = Kernel("kernel", log)
    for kind, put_off in ((("a", 1), True), (("a", 1), False), (("a", 2), True)):
        log.clear()
        with compiled_side_by_side(kind):
            on_grid(kernel, (1,))()
            assert (not log) == put_off
        assert len(log) == 1
    on_grid(kernel, (1,))()
    assert len(log) == 2


def test_what_does_not_compile_fails_as_it_is_launched_and_again():
    def broken():
        raise ValueError("no registers left")

    log = []

    def launch_three():
        with compiled_side_by_side("kind"):
            on_grid(Kernel("right", log), (1,))()
            on_grid(Kernel("wrong", log, broken), (1,))()
            on_grid(Kernel("after", log), (1,))()

    for _ in range(2):
        log.clear()
        with pytest.raises(ValueError, match="no registers left"):
            launch_three()
        assert log == [("right", (1,), (), {})]


def test_after_an_error_on_the_way_nothing_is_launched_and_nothing_put_off():
    log = []
    kernel = Kernel("kernel", log)

    def fail():
        with compiled_side_by_side("kind"):
            on_grid(kernel, (1,))()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not log
    on_grid(kernel, (1,))()
    assert log == ["kernel alone", ("kernel", (1,), (), {})]
