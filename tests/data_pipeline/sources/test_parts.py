"""Sources with parts, read whole, as a pretraining run does."""

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from data_pipeline.documents import Document, Problems
from data_pipeline.sources.parts import SourceInParts
from data_pipeline.tokens.gathering import gather

CONF = Path(__file__).parents[3] / "conf"


class Numbers(SourceInParts):
    """Three parts of four documents; reading needs an index, which is prepared."""

    def identity(self) -> dict:
        return {"numbers": 3}

    def prepare(self, scratch, problems):
        (scratch / "words").write_text("zero one two three")
        problems.skip("numbers: 4", "too large")

    def parts(self, scratch):
        return [str(part) for part in range(3)]

    def read(self, part, scratch, problems):
        for word in (scratch / "words").read_text().split():
            yield Document(f"{part} {word} " * 20, f"{part}/{word}", {"source": "numbers"})


def test_parts_are_prepared_once_and_read_in_their_order():
    problems = Problems()
    documents = list(Numbers().documents(problems, 2))
    assert [document.id for document in documents[:5]] == ["0/zero", "0/one", "0/two", "0/three", "1/zero"]
    assert len(documents) == 12
    assert problems.counts == {"too large": 1}


def test_nothing_of_the_index_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    list(Numbers().documents(Problems(), 1))
    assert not list(tmp_path.iterdir())


def test_a_source_in_parts_is_gathered_like_any_other(tmp_path):
    counts = gather(Numbers(), tmp_path, 0.3, 1, Problems(), most_skipped=0.5)
    assert counts["train"]["documents"] + counts["validation"]["documents"] == 12


def test_every_source_is_a_choice_of_the_data_module():
    with initialize_config_dir(str(CONF), version_base=None):
        for path in sorted((CONF / "source").glob("*.yaml")):
            choice = compose("config", [f"source@data.source={path.stem}", "data=source"]).data.source
            for key in choice:
                if OmegaConf.is_missing(choice, key):
                    choice[key] = "."
            assert isinstance(instantiate(choice, _convert_="all"), SourceInParts), path.stem
