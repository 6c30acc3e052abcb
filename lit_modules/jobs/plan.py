"""`job=plan`: the plan of a configured run, and where it is written."""

import json
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig

from common.atomic_files import write_atomic
from common.setting_types import check_type
from lit_modules.jobs.training_job import check_settings
from lit_modules.networks.counting import planned_parameters
from lit_modules.parallel.recomputing import check_policy
from lit_modules.planning.estimating import Planner
from lit_modules.planning.from_config import setup_of
from lit_modules.planning.report import as_json, as_text, draw


def run(cfg: DictConfig) -> None:
    """Print the plan of the configured run; write it where `output` says.

    Raises:
        ValueError: a setting cannot work; the line names its key.
    """
    check_settings(cfg)
    check_type("output", cfg.output, str | None)
    setup = setup_of(cfg)
    config = hydra.utils.instantiate(cfg.model, _convert_="all")
    check_policy(cfg.activation_checkpointing, config.num_layers)
    planned_parameters(config)  # one that cannot be counted cannot be planned
    planner = Planner(config)
    if cfg.strategy._target_ is None:
        setup = planner.chosen(setup)
    plan = planner.plan(setup, cfg.max_tokens)
    print(as_text(plan), flush=True)
    if cfg.output is not None:
        write(plan, Path(str(cfg.output)))


def write(plan: Any, path: Path) -> None:
    """The plan as JSON; with a picture beside it where the path names a folder.

    Raises:
        ValueError: it cannot be written there.
    """
    try:
        if path.suffix == ".json":
            write_atomic(path, json.dumps(as_json(plan), indent=2) + "\n")
            return
        write_atomic(path / "plan.json", json.dumps(as_json(plan), indent=2) + "\n")
        draw(plan, path / "memory.png")
    except OSError as error:
        raise ValueError(f"output={path} cannot be written: {error.strerror}") from error
