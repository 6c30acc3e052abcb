import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from data_pipeline.card import write_card
from data_pipeline.card.contents import lengths
from data_pipeline.card.facts import read_facts
from data_pipeline.card.pictures import COLORS, draw_months, draw_steps
from tests.data_pipeline.card.conftest import document, step

Write = Callable[..., Path]
PNG = b"\x89PNG"


def card(folder: Path) -> str:
    write_card(folder, "A corpus", 4.0)
    return (folder / "corpus.md").read_text(encoding="utf-8")


def figures(folder: Path) -> set[str]:
    return {path.name for path in (folder / "figures").iterdir()}


def share(path: Path, color: str) -> float:
    """Return the fraction of a picture's pixels with a color."""
    with Image.open(path) as image:
        points = np.asarray(image.convert("RGB")).reshape(-1, 3)
    return float((points == [int(color[place : place + 2], 16) for place in (1, 3, 5)]).all(axis=1).mean())


def test_every_picture_that_is_shown_is_there(corpus: Write) -> None:
    removed = step("quality", (2, 2000), (1, 1000), {"short": {"man": (1, 1000)}})
    folder = corpus([document(1, date="2024-03-01")], [removed])
    shown = set(re.findall(r"\]\(figures/(\w+\.png)\)", card(folder)))
    assert shown == figures(folder) == {"composition.png", "steps.png", "reasons.png", "lengths.png", "months.png"}
    assert all((folder / "figures" / name).read_bytes().startswith(PNG) for name in shown)


def test_the_same_folder_gives_the_same_files(corpus: Write) -> None:
    folder = corpus(
        [document(n, date=f"20{n:02d}-05", licence="MIT", source=f"s{n % 12}", length=n * 77 + 1) for n in range(40)],
        [step("masks", (9, 900), (9, 890), {}, counts={"masked_email": 2})],
    )

    def contents() -> dict[str, bytes]:
        write_card(folder, "A corpus", 4.0)
        return {path.name: path.read_bytes() for path in [folder / "corpus.md", *(folder / "figures").iterdir()]}

    assert contents() == contents()


def test_a_picture_of_an_earlier_card_does_not_stay_without_data(corpus: Write) -> None:
    folder = corpus([document(1)])
    (folder / "figures").mkdir()
    (folder / "figures" / "months.png").write_bytes(PNG)
    assert "No document has a date." in card(folder)
    assert figures(folder) == {"composition.png", "lengths.png"}


def test_a_step_that_removes_everything_or_nothing_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "steps.png"
    draw_steps([("masks", 1000, 0, 0), ("quality", 0, 1000, 0), ("after", 0, 0, 0)], path)
    green, red = (share(path, color) for color in ("#55a868", "#c44e52"))
    assert green > 0.05
    assert abs(green - red) < 0.2 * red  # two bars as long as each other, and marks in the legend


def test_a_single_month_is_a_bar_and_no_wall(tmp_path: Path) -> None:
    draw_months(12 * 2024, {"man": np.array([1000.0])}, 1, tmp_path / "months.png")
    assert 0.02 < share(tmp_path / "months.png", COLORS[0]) < 0.25


def test_names_with_dollars_or_of_other_scripts_are_drawn(corpus: Write) -> None:
    folder = corpus([document(1, category="$\\frac{$"), document(2, category="日本語", length=7)])
    lengths(read_facts(folder / "documents"), folder / "figures")
    assert (folder / "figures" / "lengths.png").read_bytes().startswith(PNG)
