"""The card of a corpus: a page with pictures that says what is in it, and what was left out on the way and why."""

from pathlib import Path


def write_card(folder: Path, title: str, bytes_per_token: float) -> None:
    """Write corpus.md and figures/*.png into the folder of a corpus.

    It has documents/, and where there is something to tell record/merged.json, problems/, logs/ and labels/report/.
    `bytes_per_token`: tokens are estimated with it. The same folder gives the same files.
    """
    from data_pipeline.card.page import write_page  # here: many processes make a corpus, and one of them draws

    write_page(folder, title, bytes_per_token)
