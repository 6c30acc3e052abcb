"""Files that appear whole or not at all."""

import errno
import io
import os
from pathlib import Path
from typing import Any

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a disk, a quota or a limit that is used up answers


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file beside its place, to the disk, and rename it there: no reader sees a part of it, and what was
    there before stays if the write fails. Makes the folder. Raises OSError where the disk does not take it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "wb") as handle:
            handle.write(content.encode() if isinstance(content, str) else content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_figure(path: Path, figure: Any, **settings: Any) -> Path:
    """Write a matplotlib figure as a PNG, whole or not at all, and return its path. `settings`: of `savefig`."""
    image = io.BytesIO()
    figure.savefig(image, format="png", **{"dpi": 150, "bbox_inches": "tight", **settings})
    write_whole(path, image.getvalue())
    return path
