"""Shared checks of settings."""

from common.settings import differences


def test_what_is_null_may_have_become_a_mapping_of_nulls():
    assert not differences({"kept": None}, {"kept": {"every": None, "most_sensitive": None}})
    assert differences({"kept": None}, {"kept": {"every": 2, "most_sensitive": None}}).keys() == {"kept"}
