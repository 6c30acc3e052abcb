"""Triton's autotuner in less time: the configurations of a kernel are compiled at once, on all cores.

The peers' kernels try some hundred configurations, which one after the other take minutes to compile.
"""

import contextlib
import contextvars
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

MEASURE = {"warmup": 5, "rep": 20}  # milliseconds a configuration


def tune_in_parallel() -> None:
    """Change the autotuner of this process. Where this Triton lacks what it takes, all stays as it is."""
    with contextlib.suppress(ImportError):
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
        from triton.testing import do_bench

        measure_one = Autotuner._bench

        def compile_all(tuner: Autotuner, arguments: tuple, options: dict[str, Any]) -> None:
            with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool):
                tuner.warmup(*arguments, **options)

        def measure(tuner: Autotuner, *arguments: Any, config: Any, **options: Any) -> Any:
            # A tuning has a dictionary of arguments of its own, which warmup replaces.
            tuning = tuner.nargs
            if getattr(tuner, "_compiled_for", None) is not tuning:
                tuner._do_bench = partial(do_bench, **MEASURE)
                launch = {name: value for name, value in options.items() if name != "warmup"}
                # What fails to compile fails again, and is dealt with, where it is measured. The context keeps the
                # mode from outliving the failure.
                with contextlib.suppress(Exception):
                    contextvars.copy_context().run(compile_all, tuner, arguments, launch)
                tuner.nargs = tuner._compiled_for = tuning
            return measure_one(tuner, *arguments, config=config, **options)

        Autotuner._bench = measure
