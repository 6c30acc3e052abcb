"""What the settings of a compressed cache refuse, and that those of conf/cache/ are what their methods say."""

from pathlib import Path

import hydra
import pytest
from omegaconf import OmegaConf

from common.settings import SettingError
from lit_modules.networks.caches import CacheSettings, TensorSettings

CONF = Path(__file__).parents[4] / "conf"


def settings_of(name: str) -> CacheSettings:
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        values = OmegaConf.to_container(hydra.compose(f"cache/{name}").cache)
    return CacheSettings.of(values | {"rotations": "a file" if name in ("oscar", "best") else None})


@pytest.mark.parametrize(
    "name", [file.stem for file in (CONF / "cache").glob("*.yaml") if not file.name.startswith("_")]
)
def test_every_file_is_a_setting(name):
    settings = settings_of(name)
    assert settings.is_full == (name == "full")


def test_logquant_in_a_file_and_as_defaults_differ_in_the_keys_groups_alone():
    assert settings_of("logquant") == CacheSettings(keys=TensorSettings(groups_along="tokens"))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"window": 0}, "cache.window=0: give a whole number, 1 or more"),
        ({"windw": 4}, "cache.windw is not known: did you mean cache.window?"),
        ({"keys": {"bit": 2}}, "keys.bit is not known: did you mean keys.bits?"),
        ({"values": {"bits": 8}}, "cache.values.bits=8: give one of 0, 2, 4, 16"),
        ({"keys": {"group": 24}}, "cache.keys.group=24: give a multiple of 16"),
        ({"keys": {"high_channels": 16}}, "cache.keys.high_channels=16 is for 2 bits along tokens"),
        ({"keys": {"clip": 0}}, "cache.keys.clip=0: give a number above 0 and at most 1"),
        ({"keys": {"keep": "newest"}}, "cache.keys.keep=newest: give one of log_sparse"),
        ({"keys": {"bits": 0}}, "cache.keys.bits=0 evicts, but values.bits=2: set values.bits=0 too"),
        (
            {"keys": {"bits": 0}, "values": {"bits": 0, "keep": "recent"}},
            "cache.values.keep=recent evicts keys and values at once: keep, window and bits have to fit keys.keep=log_",
        ),
        ({"keys": {"transform": "rotation"}}, "cache.rotations=null with keys.transform=rotation: name the file"),
        ({"top_values": 0}, "cache.top_values=0: give a whole number, 1 or more"),
        (
            {"top_values": 100},
            "cache.top_values=100 reads tokens of 16 bits, but keys.bits=2: set keys.bits=16 and values.bits=16, or",
        ),
        ({"top_values": 100, "keys": {"bits": 16}}, "cache.top_values=100 reads tokens of 16 bits, but values.bits=2"),
        ({"rotations": "a"}, "cache.rotations=a is not read: set keys.transform or"),
        (
            {"keys": {"groups_along": "tokens"}, "values": {"groups_along": "tokens", "group": 64}},
            "cache.values.group=64 runs along tokens, and so do the keys' groups: give keys.group=128 too",
        ),
    ],
)
def test_a_setting_that_does_not_fit_is_named_in_one_line(given, line):
    with pytest.raises(SettingError) as error:
        CacheSettings.of(given)
    assert line in str(error.value)
    assert "\n" not in str(error.value)
