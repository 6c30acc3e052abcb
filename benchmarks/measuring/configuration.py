"""The command's configuration, for benchmarks that run a part of a job."""

from pathlib import Path

import hydra
from omegaconf import DictConfig

CONF = Path(__file__).resolve().parents[2] / "conf"


def compose(*overrides: str) -> DictConfig:
    """Compose the command's configuration with these overrides."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", list(overrides))
