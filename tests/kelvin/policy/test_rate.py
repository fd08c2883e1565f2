"""However the pieces come: never more than the rate allows, and no longer waits than it asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.policy.rate import Bucket, parse_rate, senders, take

MIB = 1 << 20


@pytest.mark.parametrize(
    ("taken", "waits"),
    [
        pytest.param([(0.0, 25)], [0.0], id="a full bucket gives its burst at once"),
        pytest.param([(0.0, 25), (0.0, 10)], [0.0, 0.1], id="an empty one as fast as it fills"),
        pytest.param([(0.0, 25), (0.1, 10)], [0.0, 0.0], id="what flowed in meanwhile is there"),
        pytest.param([(0.0, 25), (9.0, 26)], [0.0, 0.01], id="left alone, it holds no more than a burst"),
        pytest.param([(0.0, 125)], [1.0], id="a piece larger than the bucket waits for what is over"),
        pytest.param([(0.0, 25), (0.0, 10), (0.0, 10)], [0.0, 0.1, 0.2], id="who comes later waits behind the others"),
        pytest.param([(0.0, 0)], [0.0], id="nothing costs nothing"),
    ],
)
def test_take(taken: list[tuple[float, int]], waits: list[float]) -> None:
    """100 bytes a second, 25 in the bucket; when, how many, and how long it has to wait."""
    bucket, found = Bucket(100.0), []
    for now, nbytes in taken:
        bucket, wait_s = take(bucket, nbytes, now)
        found.append(wait_s)
    assert found == pytest.approx(waits)


@given(
    bytes_s=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 100)), min_size=1, max_size=50),
)
def test_never_more_than_the_rate(bytes_s: int, steps: list[tuple[float, int]]) -> None:
    """Between any two pieces: what is sent fits the time, but for a burst and the first piece."""
    bucket, now, sent = Bucket(float(bytes_s)), 0.0, []
    for pause_s, nbytes in steps:
        now += pause_s
        bucket, wait_s = take(bucket, nbytes, now)
        now += wait_s  # one sender: it waits before it goes on
        sent.append((now, nbytes))
    for first in range(len(sent)):
        total = 0
        for at, nbytes in sent[first + 1 :]:
            total += nbytes
            assert total <= bytes_s * (at - sent[first][0] + bucket.burst_s) + 1e-6


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
