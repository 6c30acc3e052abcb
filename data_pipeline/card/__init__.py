"""Card of a corpus: a page with pictures of its content, and of what was removed and why."""

from pathlib import Path


def write_card(folder: Path, title: str, bytes_per_token: float) -> None:
    """Write corpus.md and figures/*.png into the folder of a corpus.

    The folder has documents/ and optionally record/merged.json, problems/, logs/ and labels/report/. Tokens are
    estimated with `bytes_per_token`. The same folder gives the same files.
    """
    from data_pipeline.card.page import write_page  # imported here: only one of many processes draws

    write_page(folder, title, bytes_per_token)
