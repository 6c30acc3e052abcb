"""Objects that Python's garbage collector need not search."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from what is made within, such as imports: it lasts as long as the process.

    Searching it again and again takes a fifth of an import of torch and Lightning, and later half a second per full
    collection.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
