"""`job=corpus`: build a corpus from its sources, on one machine or on many."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from common.settings import under
from data_pipeline.corpus.layout import Layout
from data_pipeline.corpus.plan import phases
from data_pipeline.corpus.recipe import read_recipe
from data_pipeline.fingerprint import read_manifest
from data_pipeline.identity import EARLIER, SAMPLE
from data_pipeline.job_folder import JobFolder

log = logging.getLogger(__name__)


def run(cfg: Any) -> None:
    """Build the corpus that `corpus` describes in `corpus.output`, with `executor`.

    The same command continues a killed run.

    Raises:
        ValueError: a mistake in the settings or the data, in one line.
    """
    from hydra.utils import instantiate

    from common.setting_nodes import plain_dict

    settings = plain_dict(cfg.corpus, throw_on_missing=True)
    recipe = read_recipe(settings)
    folder = JobFolder(Path(recipe.output).expanduser().absolute(), "corpus")
    recipe = dataclasses.replace(recipe, output=str(folder.path))
    executor = instantiate(cfg.executor, _convert_="all")
    files, earlier = {}, {}
    for name, source in recipe.sources.items():
        with under(f"corpus.sources.{name}"):
            files[name], earlier[name] = (source.identity(by) for by in (SAMPLE, EARLIER))
    planned = phases(recipe)
    shared = {key: value for key, value in settings.items() if key not in ("output", "most_skipped")}
    with folder.held("run"):
        folder.begin({**shared, "files": files}, {**shared, "files": earlier})
        if folder.manifest.exists():
            log.info("%s is finished: nothing is left to do", folder.key)
            return
        layout = Layout(folder.path)
        if not executor.run(planned, layout.logs, folder.key):
            log.info("%s is complete when it has a %s", folder.key, folder.manifest.name)
            return
    _tell(folder)


def _tell(folder: JobFolder) -> None:
    manifest = read_manifest(folder.path)
    for name, found in manifest["categories"].items():
        documents = found["train"]["documents"] + found["validation"]["documents"]
        size = found["train"]["bytes"] + found["validation"]["bytes"]
        log.info("%s: %s documents, %.1f MB", name, f"{documents:,}", size / 1e6)
    log.info("documents/, corpus.md and %s are in %s", folder.manifest.name, folder.path)
