"""Connection and request limits per address: never more than rate plus burst, in bounded memory."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.http.address_limits_policy import AddressLimiter, AddressLimits, is_padded, is_slow, parse_networks

LIMITS = AddressLimits(
    max_connections=2, rate=10.0, trusted=parse_networks("10.0.0.0/8,::1"), burst_s=0.5, max_sources=4
)


@pytest.mark.parametrize(
    ("gaps_s", "want"),
    [
        pytest.param([0.0] * 5, None, id="a burst passes"),
        pytest.param([0.0] * 6, 0.1, id="the next one waits for one interval"),
        pytest.param([0.0] * 60, 0.1, id="a refusal does not lengthen the wait"),
        pytest.param([0.0] * 6 + [0.1], None, id="it passes after the wait"),
        pytest.param([0.0] * 6 + [0.06], 0.04, id="it does not pass before"),
        pytest.param([0.1] * 200, None, id="requests at the rate always pass"),
        pytest.param([*[0.0] * 5, 99.0, *[0.0] * 5], 0.1, id="a long pause is worth one burst"),
    ],
)
def test_request_rate_of_a_source_is_limited(gaps_s: list[float], want: float | None) -> None:
    """Return the wait of the last request, when requests arrive with these gaps."""
    addresses, now_s, wait_s = AddressLimiter(LIMITS), 1000.0, None
    for gap_s in gaps_s:
        now_s += gap_s
        wait_s = addresses.check_request_rate("a", now_s)
    assert wait_s == (None if want is None else pytest.approx(want))


def test_sources_are_independent_and_bounded() -> None:
    """A flood from one address costs another nothing. A flood of addresses evicts no address that keeps sending."""
    addresses = AddressLimiter(LIMITS)
    for _ in range(6):
        addresses.check_request_rate("loud", 0.0)
    assert addresses.check_request_rate("loud", 0.0) is not None
    assert addresses.check_request_rate("quiet", 0.0) is None
    for number in range(100):
        addresses.check_request_rate(f"other {number}", 1.0 + number / 10)
        assert addresses.check_request_rate("loud", 1.0 + number / 10) is None  # its rate is one request per 0.1 s
        addresses.check_integrity()
    assert repr(addresses) == "<AddressLimiter connected=0 known=4>"


def test_connections_are_bounded_and_charged_as_requests() -> None:
    """A third connection is refused until one ends. Connections that open and close again meet the request rate."""
    addresses = AddressLimiter(LIMITS)
    assert [addresses.try_open("a", 0.0) for _ in range(3)] == [True, True, False]
    addresses.record_closed("a")
    assert addresses.try_open("a", 0.0)
    addresses.record_closed("a")
    opened = 0
    while addresses.try_open("a", 0.0):
        addresses.record_closed("a")
        opened += 1
        addresses.check_integrity()
    assert opened == 2  # of the burst of five, three were used above
    addresses.record_closed("a")
    assert repr(addresses) == "<AddressLimiter connected=0 known=1>"


@given(st.lists(st.floats(0, 0.3), max_size=200))
def test_source_never_exceeds_burst_plus_rate(gaps_s: list[float]) -> None:
    """In any interval: at most the burst plus the rate times the length."""
    addresses, now_s, passed = AddressLimiter(LIMITS), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        if addresses.check_request_rate("a", now_s) is None:
            passed.append(now_s)
    for first, began_s in enumerate(passed):
        for last in range(first, len(passed)):
            assert last - first + 1 <= LIMITS.rate * (LIMITS.burst_s + passed[last] - began_s) + 1e-6


@pytest.mark.parametrize(
    ("address", "want"),
    [
        pytest.param("192.0.2.7", "192.0.2.7", id="an untrusted address"),
        pytest.param("10.1.2.3", None, id="a trusted load balancer"),
        pytest.param("::ffff:10.1.2.3", None, id="the same over IPv6"),
        pytest.param("::1", None, id="this machine"),
        pytest.param("2001:db8:1:2:3::4", "2001:db8:1:2::/64", id="an IPv6 address counts as its /64"),
        pytest.param("fe80::1%eth0", "fe80::/64", id="an address with a zone"),
        pytest.param("", "", id="a closed connection"),
    ],
)
def test_trusted_addresses_are_not_counted(address: str, want: str | None) -> None:
    """None: the address is not counted."""
    assert AddressLimiter(LIMITS).source(address) == want


def test_networks_setting_is_parsed() -> None:
    assert parse_networks("none") == ()
    assert parse_networks("10.0.0.0/8, ::1") == (ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("::1/128"))
    for wrong in ("", "10.0.0.1/8", "loopback", "10.0.0.0/8,"):
        with pytest.raises(ValueError, match=r".*"):
            parse_networks(wrong)


@pytest.mark.parametrize(
    ("nbytes", "want"),
    [
        pytest.param(0, True, id="nothing"),
        pytest.param(499, True, id="too little"),
        pytest.param(500, False, id="exactly the minimum"),
    ],
)
def test_body_below_the_minimum_rate_is_slow(nbytes: int, want: bool) -> None:
    """The minimum is 100 bytes/s over 5 s."""
    assert is_slow(nbytes, 5.0, 100.0) is want
    assert not is_slow(nbytes, 5.0, 0.0)


@pytest.mark.parametrize(
    ("raw", "body", "want"),
    [
        pytest.param(6_000_000, 1_000_000, False, id="a million chunks of one byte"),
        pytest.param(1024, 0, False, id="nothing yet"),
        pytest.param(1025, 0, True, id="an extension without end"),
        pytest.param(2_000_000, 100_000, True, id="extensions between single bytes"),
    ],
)
def test_oversized_body_framing_is_padded(raw: int, body: int, want: bool) -> None:
    """Heads are limited to 1 KiB here."""
    assert is_padded(raw, body, 1024) is want
