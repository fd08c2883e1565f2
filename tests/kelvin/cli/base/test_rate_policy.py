"""How durations and byte rates are parsed, and how many senders a rate allows."""

import pytest

from kelvin.cli.base.rate_policy import parse_duration_s, parse_rate, sender_count

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "rate"),
    [("65536", 65536), ("64K", 65536), ("64k", 65536), ("10M", 10 * MIB), ("1G", 1024 * MIB)],
)
def test_rate_is_parsed_with_binary_units(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "K", "-1M", "10MB", "1.5M", "0", "63K", "65535", "10 M", "9" * 16, "1048577G"])
def test_invalid_rate_is_refused_with_the_value(text: str) -> None:
    """The error quotes the value."""
    with pytest.raises(ValueError, match="must be") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "bytes_s", "chunk_bytes", "want"),
    [
        pytest.param(4, None, 8 * MIB, 4, id="no limit"),
        pytest.param(4, 10 * MIB, 8 * MIB, 4, id="a limit that is fast enough for all"),
        pytest.param(16, MIB, 8 * MIB, 3, id="as many as can send a chunk in half a minute"),
        pytest.param(4, 65536, 8 * MIB, 1, id="at least one"),
        pytest.param(4, 65536, 0, 4, id="nothing to send"),
    ],
)
def test_sender_count_follows_the_rate(parallel: int, bytes_s: int | None, chunk_bytes: int, want: int) -> None:
    assert sender_count(parallel, bytes_s, chunk_bytes) == want


@pytest.mark.parametrize(("text", "want"), [("45s", 45), ("30m", 1800), ("24h", 86_400), ("90d", 7_776_000), ("0s", 0)])
def test_duration_is_a_number_and_a_unit(text: str, want: int) -> None:
    """A duration is a whole number and a unit."""
    assert parse_duration_s(text) == want


@pytest.mark.parametrize("text", ["", "24", "h", "1.5h", "-1h", "1w", "24 h", "9999999999s"])
def test_invalid_duration_is_refused(text: str) -> None:
    """The error states the rule."""
    with pytest.raises(ValueError, match="must be a whole number and one of s, m, h, d"):
        parse_duration_s(text)
