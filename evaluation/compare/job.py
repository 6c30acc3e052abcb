"""The job: from the settings to the files."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from common.atomic_files import replace_atomically, write_atomic, write_figure
from common.settings import SettingError
from evaluation.compare.comparison import Comparison, compare_runs
from evaluation.compare.finding import find_runs
from evaluation.compare.page import as_html, as_markdown, first_tables, pictures
from evaluation.compare.reading import EVALUATED, Run, read_run
from evaluation.compare.tables import as_csv

log = logging.getLogger(__name__)

NAME = "compare"


def run(cfg: DictConfig) -> None:
    """Compare runs: write compare.html, .md, .csv and figures to `output`, and print the table.

    Raises:
        SettingError: a setting is invalid, there is nothing to compare, or `output` holds other files.
    """
    given = folders_of(plain(cfg.runs))
    baseline = plain(cfg.baseline)
    if not isinstance(baseline, str | dict | None):
        raise SettingError("baseline", baseline, "give a run's folder, or settings as {KEY: VALUE}")
    output = Path(str(cfg.output))
    check_output(output)
    comparison = compare_runs(readable(find_runs(given), given), baseline)
    write(comparison, output)
    print("\n".join(table.markdown() for table in first_tables(comparison)))
    log.info("written: %s/%s.html, .md, .csv and figures", output, NAME)


def plain(value: Any) -> Any:
    """Return a setting as plain containers."""
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def folders_of(value: Any) -> list[str]:
    """Return `runs` as a list of names.

    Raises:
        SettingError: it is neither a name nor a list of names.
    """
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(each, str) and each for each in names):
        raise SettingError("runs", value, "give a folder, or a list of folders, as [a,b]")
    return names


def check_output(output: Path) -> None:
    """Refuse a folder that holds anything but an earlier comparison, since it is replaced as a whole.

    Raises:
        SettingError: it does.
    """
    if output.is_file():
        raise SettingError("output", output, "give a folder", "is a file")
    others = [each.name for each in output.iterdir() if not each.name.startswith(NAME)] if output.is_dir() else []
    if others:
        problem = f"holds other files ({', '.join(sorted(others)[:3])})"
        raise SettingError("output", output, "give a folder for the comparison alone", problem)


def readable(folders: Sequence[Path], given: Sequence[str]) -> list[Run]:
    """Read the runs; those that have logged nothing or whose settings cannot be read are named and left out.

    Raises:
        SettingError: none is left.
    """
    found = []
    for folder in folders:
        each = read_run(folder)
        for note in each.notes:
            log.warning("%s", note)
        if not each.settings:
            log.warning("%s is left out: its config.yaml holds no settings", folder)
        elif each.state != EVALUATED and not each.summary and not each.curves.tokens:
            log.warning("%s is left out: it has logged nothing yet; compare again once metrics.csv has rows", folder)
        else:
            found.append(each)
    if not found:
        value = given[0] if len(given) == 1 else list(given)
        raise SettingError("runs", value, "compare again once a run has logged something", "has no run with results")
    return found


def write(comparison: Comparison, output: Path) -> None:
    """Write all files, or none.

    Raises:
        SettingError: the folder cannot be written.
    """
    drawn = pictures(comparison)
    try:
        with replace_atomically(output) as folder:
            for picture in drawn:
                write_figure(folder / picture.file, picture.figure)
            write_atomic(folder / f"{NAME}.html", as_html(comparison, drawn))
            write_atomic(folder / f"{NAME}.md", as_markdown(comparison, drawn))
            write_atomic(folder / f"{NAME}.csv", as_csv(comparison))
    except OSError as error:
        problem = f"cannot be written ({error.strerror or error})"
        raise SettingError("output", output, "give another folder", problem) from error
