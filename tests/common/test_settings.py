"""Settings: the error about one, checks, and differences."""

import pickle

import pytest

from common.settings import (
    NO_VALUE,
    SettingError,
    check_choice,
    check_number,
    check_switch,
    check_whole,
    differences,
    under,
)


def test_what_is_null_may_have_become_a_mapping_of_nulls():
    assert not differences({"kept": None}, {"kept": {"every": None, "most_sensitive": None}})
    assert differences({"kept": None}, {"kept": {"every": 2, "most_sensitive": None}}).keys() == {"kept"}


def test_an_error_says_key_value_problem_and_fix():
    assert str(SettingError("data.seed", None, "give 1")) == "data.seed=null: give 1"
    assert str(SettingError("lr", [1, True], "give one", "is a list")) == "lr=[1, true] is a list: give one"
    assert str(SettingError("stages", NO_VALUE, "give one", "is empty")) == "stages is empty: give one"


def test_a_place_comes_before_the_key_once_also_from_another_process():
    with pytest.raises(SettingError) as caught, under("data.source"), under("data.source"):
        raise SettingError("path", "here", "give a folder")
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.key == "data.source.path"
    assert str(again) == str(caught.value) == "data.source.path=here: give a folder"


@pytest.mark.parametrize(
    ("check", "arguments", "wrong", "fix"),
    [
        (check_whole, {"least": 1}, [0, 1.0, True, "1", None], "give a whole number, 1 or more"),
        (check_whole, {"least": 1, "most": 3, "null": True}, [4], "give a whole number, from 1 to 3, or null"),
        (check_number, {}, [True, "1", None, float("nan")], "give a number"),
        (check_number, {"above": 0, "most": 1}, [0, 1.1], "give a number above 0 and at most 1"),
        (
            check_number,
            {"least": 0, "below": 1, "null": True},
            [-1, 1],
            "give a number at least 0 and below 1, or null",
        ),
        (check_choice, {"known": (None, "a")}, ["b", 1], "give one of null, a"),
        (check_switch, {}, ["true", 1, None], "give true or false"),
    ],
)
def test_checks_name_the_key_and_the_fix(check, arguments, wrong, fix):
    for value in wrong:
        with pytest.raises(SettingError) as caught:
            check("a.b", value, **arguments)
        assert (caught.value.key, caught.value.fix) == ("a.b", fix)


def test_checks_accept_what_fits():
    check_whole("a", None, 1, null=True)
    check_whole("a", 3, 1, 3)
    check_number("a", 1, above=0, most=1)
    check_number("a", None, null=True)
    check_choice("a", None, (None, "b"))
    check_switch("a", False)
