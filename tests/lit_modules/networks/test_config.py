"""A configuration that cannot work is refused in one line that names the key; one that can comes back from its file."""

import copy
import pickle

import pytest
from transformers import AutoConfig

from lit_modules.networks import PalimpsestConfig, PalimpsestForCausalLM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 7, "hidden_size": 64}, "num_heads=7 does not divide hidden_size=64: give a divisor, such as 8"),
        ({"num_layers": 0}, "num_layers=0: give a whole number"),
        ({"num_layers": None}, "num_layers=null: give a whole number"),
        ({"hidden_size": 64.0}, "hidden_size=64.0: give a whole number"),
        ({"hidden_size": 36, "num_heads": 12, "rope": True}, "hidden_size/num_heads=3 is odd"),
        ({"num_key_heads": 5}, "num_key_heads=5 does not divide num_heads=12: give a divisor, such as 4, or null"),
        ({"num_value_heads": 24}, "num_value_heads=24 does not divide num_heads=12: give a divisor, such as 12"),
        ({"num_key_heads": 0}, "num_key_heads=0: give a whole number"),
        ({"key_head_dim": 65}, "key_head_dim=65 is above hidden_size/num_heads=64, .* give at most 64, or null"),
        ({"key_head_dim": 0.5}, "key_head_dim=0.5: give a whole number"),
        ({"augmented_query_dim": -1}, "augmented_query_dim=-1: give a whole number"),
        ({"augmented_query_dim": True}, "augmented_query_dim=true: give a whole number"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4 is not a key of a model"),
        ({"forget_gate": "learned"}, "forget_gate=learned: give one of data_dependent"),
        ({"forget_gate": "fixed"}, "gate_time_min=null: give a time in tokens, forget_gate=fixed needs it"),
        ({"forget_gate": "fixed", "gate_time_min": 9, "gate_time_max": 3}, "gate_time_max=3 is below gate_time_min=9"),
        ({"forget_gate": None, "prune": -10}, "prune=-10 has nothing to prune by"),
        ({"prune": 1e-4}, "prune=0.0001: give a number below 0"),
        ({"qk_norm": "yes"}, "qk_norm=yes: give true or false"),
        ({"norm_eps": 0}, "norm_eps=0: give a number above 0"),
        ({"mixers": ["attention"], "num_layers": 2}, "mixers has 1 names for num_layers=2"),
        ({"num_head": 8}, r"num_head=8 is not a key of a model: did you mean num_heads\?"),
        ({"num_hidden_layers": 8}, "num_hidden_layers=8 is not a key of a model"),
        ({"pad_token_id": 100, "vocab_size": 64}, "pad_token_id=100: give a whole number, from 0 to 63"),
    ],
)
def test_what_cannot_work_is_named_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        PalimpsestConfig(**arguments)
    assert "\n" not in str(error.value)


def test_a_mixer_that_is_not_registered_is_named_where_the_model_is_built():
    config = PalimpsestConfig(mixers=["attention", "atention"], num_layers=2)
    with pytest.raises(ValueError, match="mixers=atention is unknown: give one of attention, h"):
        PalimpsestForCausalLM(config)


def test_values_set_after_the_fact_are_checked_by_the_model(build):
    config = build(forget_gate="none").config
    config.num_layers = 3
    with pytest.raises(ValueError, match="mixers has 2 names for num_layers=3"):
        PalimpsestForCausalLM(config)


def test_a_configuration_survives_its_file(tmp_path):
    config = PalimpsestConfig(
        hidden_size=64,
        num_heads=4,
        num_layers=3,
        forget_gate="fixed",
        gate_time_min=2,
        gate_time_max=50.0,
        prune=-10.0,
        num_key_heads=1,
        num_value_heads=2,
        key_head_dim=8,
        augmented_query_dim=96,
    )
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, PalimpsestConfig)
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert PalimpsestForCausalLM(loaded).num_parameters() == PalimpsestForCausalLM(config).num_parameters()


def test_a_configuration_equals_its_copies_and_no_other():
    config = PalimpsestConfig(mixers=["attention", "gla"], num_layers=2, architectures=["PalimpsestForCausalLM"])
    assert config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    assert config != PalimpsestConfig(mixers=["attention", "hgrn2"], num_layers=2, architectures=config.architectures)


def test_keys_of_a_newer_transformers_are_kept_where_a_file_names_it():
    assert PalimpsestConfig(transformers_version="99.0", new_key=3).new_key == 3


def test_hugging_face_finds_sizes_under_its_own_names():
    config = PalimpsestConfig(hidden_size=64, num_heads=4, num_layers=3)
    assert (config.num_hidden_layers, config.num_attention_heads, config.head_dim) == (3, 4, 16)


def test_key_and_value_heads_follow_the_query_heads_unless_they_are_given():
    config = PalimpsestConfig(hidden_size=64, num_heads=4, num_value_heads=2)
    assert (config.head_counts, config.cached_key_dim) == ((4, 4, 2), 16)
    config.num_heads = 8
    assert (config.head_counts, config.cached_key_dim) == ((8, 8, 2), 8)


def test_no_gate_may_be_written_as_null():
    assert PalimpsestConfig(forget_gate=None).forget_gate == "none"
