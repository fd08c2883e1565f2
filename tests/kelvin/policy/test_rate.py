"""How a limit on bytes per second is written, and how many senders it is worth."""

import pytest

from kelvin.policy.rate import parse_rate, senders

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "rate"),
    [("65536", 65536), ("64K", 65536), ("64k", 65536), ("10M", 10 * MIB), ("1G", 1024 * MIB)],
)
def test_parse(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "K", "-1M", "10MB", "1.5M", "0", "63K", "65535", "10 M", "9" * 16, "1048577G"])
def test_parse_refuses(text: str) -> None:
    """The value is named."""
    with pytest.raises(ValueError, match="must be") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "bytes_s", "chunk_bytes", "want"),
    [
        pytest.param(4, None, 8 * MIB, 4, id="without a limit as many as were asked for"),
        pytest.param(4, 10 * MIB, 8 * MIB, 4, id="a limit that is fast enough for all"),
        pytest.param(16, MIB, 8 * MIB, 3, id="as many as have their chunk through in half a minute"),
        pytest.param(4, 65536, 8 * MIB, 1, id="one at least"),
        pytest.param(4, 65536, 0, 4, id="nothing to send"),
    ],
)
def test_senders(parallel: int, bytes_s: int | None, chunk_bytes: int, want: int) -> None:
    assert senders(parallel, bytes_s, chunk_bytes) == want
