"""Faster Triton autotuning: the configurations of a kernel are compiled in parallel, on all cores.

The peers' kernels try some hundred configurations, which take minutes to compile one by one.
"""

import contextlib
import contextvars
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

MEASURE = {"warmup": 5, "rep": 20}  # milliseconds per configuration


def tune_in_parallel() -> None:
    """Patch this process's autotuner. Do nothing if this Triton lacks the needed functions."""
    with contextlib.suppress(ImportError):
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
        from triton.testing import do_bench

        measure_one = Autotuner._bench

        def compile_all(tuner: Autotuner, arguments: tuple, options: dict[str, Any]) -> None:
            with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool):
                tuner.warmup(*arguments, **options)

        def measure(tuner: Autotuner, *arguments: Any, config: Any, **options: Any) -> Any:
            # Each tuning has its own dictionary of arguments, which warmup replaces.
            tuning = tuner.nargs
            if getattr(tuner, "_compiled_for", None) is not tuning:
                tuner._do_bench = partial(do_bench, **MEASURE)
                launch = {name: value for name, value in options.items() if name != "warmup"}
                # A configuration that fails to compile fails again, and is handled, when measured. The context
                # resets the mode after a failure.
                with contextlib.suppress(Exception):
                    contextvars.copy_context().run(compile_all, tuner, arguments, launch)
                tuner.nargs = tuner._compiled_for = tuning
            return measure_one(tuner, *arguments, config=config, **options)

        Autotuner._bench = measure
