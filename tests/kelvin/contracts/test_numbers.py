"""Numbers from outside must be ASCII digits."""

import pytest

from kelvin.contracts.numbers import parse_whole_number


@pytest.mark.parametrize(
    "written",
    [
        pytest.param("", id="nothing"),
        pytest.param("\u0663", id="Arabic digits"),
        pytest.param("\uff13", id="full-width digits"),
        pytest.param("\u00b2", id="superscript"),
        pytest.param("+3", id="a sign"),
        pytest.param("-3", id="a negative number"),
        pytest.param(" 3", id="a space"),
        pytest.param("3\n", id="the end of a line"),
        pytest.param("1_000", id="an underscore"),
        pytest.param("0x3", id="hexadecimal"),
        pytest.param("3.0", id="a fraction"),
        pytest.param("1e3", id="an exponent"),
        pytest.param("nan", id="no number"),
        pytest.param("inf", id="infinity"),
        pytest.param("9" * 16, id="more digits than allowed"),
    ],
)
def test_anything_but_digits_is_no_number(written: str) -> None:
    """Anything but ASCII digits gives None, as text and as bytes."""
    assert parse_whole_number(written) is None
    assert parse_whole_number(written.encode()) is None


@pytest.mark.parametrize(("written", "number"), [("0", 0), ("007", 7), ("9" * 15, 10**15 - 1)])
def test_digits_are_a_number(written: str, number: int) -> None:
    """Leading zeros are allowed. The number of digits is limited."""
    assert parse_whole_number(written) == parse_whole_number(written.encode()) == number
    assert parse_whole_number(written, len(written)) == number
