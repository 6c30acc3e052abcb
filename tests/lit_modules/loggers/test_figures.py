import numpy as np
import pytest
from PIL import Image

from common.gpus import peak_flops
from common.quantities import count, duration
from lit_modules.loggers.figures import draw_gates, draw_loss, draw_position_loss, moving_average


def test_the_moving_average_weighs_by_tokens_and_shrinks_at_the_ends():
    values, weights = np.array([1.0, 2.0, 30.0, 4.0]), np.array([1.0, 1.0, 0.0, 2.0])
    assert moving_average(values, weights, 3) == pytest.approx([1.5, 1.5, 10 / 3, 4.0])
    assert moving_average(values, weights, 1)[[0, 1, 3]] == pytest.approx([1, 2, 4])
    assert np.isnan(moving_average(values, weights, 1)[2])


def size(path):
    with Image.open(path) as image:
        image.load()
        return image.size


def test_figures_are_whole_png_files(tmp_path):
    loss = draw_loss([(10, 3.0), (20, 2.0)], [(20, 2.1)], tmp_path / "figures" / "loss.png")
    position = draw_position_loss(np.linspace(4, 2, 64), np.full(64, 50.0), 11, 32, tmp_path / "position.png")
    few = draw_position_loss(np.array([3.0]), np.array([1.0]), 101, 32, tmp_path / "few.png")
    triangle = np.tril(np.full((8, 8), 0.5))
    gated = draw_gates([("a", triangle, triangle), ("b", triangle, triangle)], tmp_path / "gated.png")
    ungated = draw_gates([("a", None, triangle)], tmp_path / "ungated.png")
    for path in (loss, position, few, gated, ungated):
        assert min(size(path)) > 200
    assert not list(tmp_path.rglob(".*"))


def test_the_loss_by_position_says_that_it_is_by_context(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("lit_modules.loggers.figures.write_figure", lambda path, figure: drawn.append(figure))
    draw_position_loss(np.linspace(4, 2, 64), np.full(64, 50.0), 11, 32, tmp_path / "position.png")
    for axes in drawn[0].axes:
        assert axes.get_xlabel().startswith("tokens of context")


def test_numbers_are_said_as_people_say_them():
    assert [count(n) for n in (512, 33_600, 1_200_000, 2_684_354_560)] == ["512", "33.6k", "1.20M", "2.68B"]
    assert [duration(s) for s in (41, 185, 7800, 360_000)] == ["41 s", "3 min 05 s", "2 h 10 min", "4 d 4 h"]


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
    ],
)
def test_a_peak_is_known_of_the_card_itself_and_of_no_other(name, tflops):
    assert peak_flops(name) == (None if tflops is None else pytest.approx(tflops * 1e12))
