"""The error of a bad setting contains its name, its value and the rule."""

import pytest

from kelvin.contracts.setting_parser import BadSetting, integer, number, text


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        pytest.param("-3", "LIMIT=-3: must be 1 or more", id="below"),
        pytest.param("99", "LIMIT=99: must be 9 or less", id="above"),
        pytest.param("x", "LIMIT=x: must be a whole number", id="no number"),
        pytest.param("\u0663", "LIMIT=\u0663: must be a whole number", id="Arabic digits"),
        pytest.param("\uff13", "LIMIT=\uff13: must be a whole number", id="full-width digits"),
    ],
)
def test_integer_setting_refuses_bad_form_and_range(raw: str, message: str) -> None:
    """Format and range are checked."""
    with pytest.raises(BadSetting) as bad:
        integer({"LIMIT": raw}, "LIMIT", 5, low=1, high=9)
    assert str(bad.value) == message


@pytest.mark.parametrize("raw", ["nan", "inf", "-inf", "1e999"])
def test_number_must_be_finite(raw: str) -> None:
    """An infinite value would pass every later comparison."""
    with pytest.raises(BadSetting, match="finite"):
        number({"X": raw}, "X", 1.0, low=0)


def test_number_in_another_script_is_refused() -> None:
    """`float` would accept it, and a search for the value would not find it."""
    with pytest.raises(BadSetting, match="must be a number"):
        number({"X": "\u0663.5"}, "X", 1.0, low=0)


def test_unset_settings_have_their_defaults() -> None:
    """An unset variable has its default. A text without a default is required."""
    assert integer({}, "N", 5, low=1) == 5
    assert number({}, "X", 0.5, low=0) == 0.5
    assert text({}, "T", "d") == "d"
    with pytest.raises(BadSetting, match="is required"):
        text({}, "T")


@pytest.mark.parametrize("value", ["https://key:sesame@host/bucket", "s3://AK:ses/ame@b/c", "a=1,ws://u:sesame@h:1"])
def test_bad_setting_shows_no_credentials_of_a_url(value: str) -> None:
    """The error hides credentials in URLs, because startup logs must not show passwords."""
    message = str(BadSetting("PLACE", value, "must be another"))
    assert "ame" not in message
    assert "://…@" in message
