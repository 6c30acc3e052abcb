"""Results of numbered items in one file, written after each batch, so that a killed measurement goes on."""

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.atomic_files import write_atomic
from data_pipeline.fingerprint import fingerprint

log = logging.getLogger(__name__)

LOG_SECONDS = 30  # between two lines about the progress


def saved_results(
    folder: Path,
    name: str,
    identity: Mapping[str, Any],
    number: int,
    compute: Callable[[Sequence[int]], list[Any]],
    batch_size: int,
) -> list[Any]:
    """Return the results of items 0 to `number` - 1: read from a file in `folder` where they are there, else computed.

    Args:
        name: begins the file's name, and names the work in the log.
        identity: everything that decides the results but for the number of the item; it is in the file's name.
        compute: returns the results (JSON values) of the items with these numbers.
        batch_size: items computed at a time.
    """
    plain = re.sub(r"[^\w.=-]+", "_", name)
    file = folder / f"{plain}-{fingerprint(identity)}.json"
    found = json.loads(file.read_text(encoding="utf-8"))["results"] if file.is_file() else {}
    missing = [item for item in range(number) if str(item) not in found]
    if found and missing:
        log.info("%s: %s of %s were done before", name, number - len(missing), number)
    last = time.monotonic()
    for start in range(0, len(missing), batch_size):
        batch = missing[start : start + batch_size]
        found |= {str(item): result for item, result in zip(batch, compute(batch), strict=True)}
        write_atomic(file, json.dumps({"identity": identity, "results": found}, ensure_ascii=False) + "\n")
        if time.monotonic() - last > LOG_SECONDS:
            last = time.monotonic()
            log.info("%s: %s of %s", name, number - len(missing) + start + len(batch), number)
    return [found[str(item)] for item in range(number)]
