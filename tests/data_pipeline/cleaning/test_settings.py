from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from data_pipeline.cleaning.duplicates import PipelineStage

FOLDER = Path(__file__).parents[3] / "conf" / "cleaning"
STAGED = {"exact_documents", "near_duplicates", "exact_spans"}
COMPOSED = {"labels"}  # of several files: tests/data_pipeline/labels composes it
PATHS = sorted(path for path in FOLDER.glob("*.yaml") if path.stem not in COMPOSED)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_settings_that_are_shipped_make_their_step(path: Path, tmp_path: Path) -> None:
    (tmp_path / "set.txt").write_text("a text")
    settings = OmegaConf.load(path)
    if path.stem == "decontamination":
        sets = {"some": {"path": str(tmp_path / "set.txt")}}
        settings = OmegaConf.merge(settings, {"sets": sets, "folder": str(tmp_path), "report": None})
    made = instantiate(settings)
    if path.stem in STAGED:
        stages = made(folder=str(tmp_path), tasks=3)
        assert all(isinstance(stage, PipelineStage) for stage in stages)
        assert [stage.gives for stage in stages] == [False] * (len(stages) - 1) + [True]
        assert stages[0].tasks == stages[-1].tasks == 3
    else:
        assert callable(made.run)
