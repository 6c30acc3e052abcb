"""The form that all benchmarks share: the command line, the machine, and the Markdown page."""

import argparse
import datetime
import importlib.metadata
import platform
from pathlib import Path

import torch

from common.atomic_files import write_atomic

RESULTS = Path(__file__).resolve().parents[1] / "results"


class CommandLine(argparse.ArgumentParser):
    """Options of a benchmark: its own, and --output, the folder that it writes to.

    Args:
        doc: the benchmark's docstring, whose first line is the description.
    """

    def __init__(self, doc: str) -> None:
        super().__init__(description=doc.partition("\n")[0])
        self.add_argument("--output", type=Path, default=RESULTS, help="folder of the page; default: %(default)s")

    def parse_for_gpu(self) -> argparse.Namespace:
        """Parse the command line of a benchmark that measures a GPU."""
        arguments = self.parse_args()
        self.keep_results(arguments)
        return arguments

    def keep_results(self, arguments: argparse.Namespace) -> None:
        """Exit if a CPU's numbers would replace the repository's results of a GPU."""
        if not torch.cuda.is_available() and arguments.output.resolve() == RESULTS:
            instead = "give --output FOLDER, or measure on a GPU"
            self.exit(2, f"{self.prog}: {RESULTS} keeps results of a GPU, and this would replace them: {instead}\n")


def device_name() -> str:
    """Return the name of the GPU, or that there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, no GPU"


def versions(*packages: str) -> str:
    """Return packages with their installed versions; torch's says what it was built for."""
    found = []
    for package in packages:
        try:
            version = torch.__version__ if package == "torch" else importlib.metadata.version(package)
            found.append(f"{package} {version}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def measured_on(*packages: str, machine: str | None = None) -> str:
    """Return today's date, the machine (by default `device_name`), and the versions of packages."""
    return f"{datetime.date.today()}; {machine or device_name()}; {versions(*packages)}"


def page(title: str, *paragraphs: str, level: int = 1) -> str:
    """Return a Markdown page or, at level 2, a section of one. Empty paragraphs are left out."""
    return "\n\n".join([f"{'#' * level} {title}", *(text.rstrip("\n") for text in paragraphs if text)]) + "\n"


def publish(path: Path, text: str) -> None:
    """Print a page and write it."""
    print(text)
    write_atomic(path, text)
