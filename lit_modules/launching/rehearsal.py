"""Check of a run on the submitting machine, so that mistakes appear before anything is queued."""

import copy
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from lit_modules.launching.start import check_switches


def rehearse_run(launcher: Any, overrides: list[str], folder: Path) -> None:
    """Compose one run of a sweep as its job will, and raise the errors that its settings would cause there.

    Args:
        launcher: the launcher of hydra-submitit-launcher.
        overrides: the run's overrides.
        folder: the run's folder; it need not exist.
    """
    config = launcher.hydra_context.config_loader.load_sweep_config(launcher.config, overrides)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        cfg = without_hydra(config)
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        check_switches(cfg)
        if "check" in cfg.job:
            cfg.trainer.devices = config.hydra.launcher.tasks_per_node
            cfg.trainer.num_nodes = config.hydra.launcher.nodes
            hydra.utils.get_method(cfg.job.check)(cfg, folder)
    finally:
        HydraConfig.instance().cfg = before


def without_hydra(config: DictConfig) -> DictConfig:
    """Return the configuration that the job is called with."""
    cfg = copy.deepcopy(config)
    OmegaConf.set_readonly(cfg, False)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg
