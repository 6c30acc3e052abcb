"""The caches of `benchmark.caches`: names of files, changes, and what a model gets."""

import hydra
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DynamicCache

from evaluation.caches import bits_per_element, read_cache, read_caches
from lit_modules.networks.caches import CompressedCache
from tests.conftest import ROOT

NARROW = {"kivi": {"window": 8, "values": {"group": 16}}}  # the tiny models' heads have 16 channels


@pytest.fixture(autouse=True)
def conf():
    """As within the command."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def test_a_name_may_have_changes_which_are_in_the_name():
    plain, changed = read_caches(["kivi", {"kivi": {"window": 64, "keys": {"bits": 4}}}])
    assert (plain.name, changed.name) == ("kivi", "kivi window=64 keys.bits=4")
    assert changed.settings.window == 64
    assert (changed.settings.keys.bits, changed.settings.values.bits) == (4, plain.settings.values.bits)
    assert plain.identity() != changed.identity()
    assert [cache.name for cache in read_caches("full")] == ["full"]


@pytest.mark.parametrize("name", ["ours", "llama"])
def test_a_model_gets_its_own_cache_or_a_compressed_one_and_both_say_their_bits(request, name):
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(name)).eval()
    own, packed = (read_cache(cache).new(model) for cache in ("full", NARROW))
    assert not isinstance(own, CompressedCache)
    assert isinstance(own, DynamicCache) is (name == "llama")
    assert isinstance(packed, CompressedCache)
    with torch.no_grad():
        for cache in (own, packed):
            model(torch.arange(600)[None] % 300, past_key_values=cache, use_cache=True)
    assert bits_per_element(own, model.dtype) == 32
    assert bits_per_element(packed, model.dtype) < 32


def test_rotations_count_by_their_content(tmp_path):
    ids = []
    for place, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        (tmp_path / place).mkdir()
        path = tmp_path / place / "rotations.safetensors"
        save_file({"x": torch.tensor([value])}, path)
        cache = read_cache({"kivi": {"rotations": str(path), "keys": {"transform": "rotation"}}})
        assert cache.name == "kivi rotations=rotations.safetensors keys.transform=rotation"
        ids.append(cache.identity())
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (None, "benchmark.caches=null: name one or more"),
        ([], "benchmark.caches=[]: name one or more"),
        ([3], "benchmark.caches=3 is no cache"),
        ([{"kivi": 3}], 'benchmark.caches={"kivi": 3} is no cache'),
        (["kivy"], "benchmark.caches=kivy is not known: give one of "),
        (["_base"], "benchmark.caches=_base is not known"),
        (["full", "full"], "benchmark.caches=full is there twice"),
        ([{"kivi": {"windw": 3}}], "benchmark.caches.kivi.windw is not known: did you mean"),
        ([{"kivi": {"keys": {"bitz": 3}}}], "benchmark.caches.kivi.keys.bitz is not known: did you mean"),
        ([{"kivi": {"keys": {"bits": 3}}}], "benchmark.caches.kivi.keys.bits=3: give one of 0, 2, 4, 16"),
        ([{"kivi": {"window": 0}}], "benchmark.caches.kivi.window=0"),
        ([{"kivi": {"rotations": "/no/such/file", "keys": {"transform": "rotation"}}}], "=/no/such/file is not a file"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(asked, said):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole line is looked at)
        read_caches(asked)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
