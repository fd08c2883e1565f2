"""The meter page accounts for every nanosecond of a process's life, even if it ends early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kelvin.contracts.accounting.meter_format import METER_BYTES, Meter, Phase, decode_meter, encode_meter


@given(st.lists(st.tuples(st.sampled_from(Phase), st.integers(0, 10**12)), max_size=20), st.integers(0, 10**12))
def test_the_phases_add_up_to_the_life(moves: list[tuple[Phase, int]], last: int) -> None:
    """After any transitions, the phases add up to the time from birth to death."""
    now = 7
    meter = Meter(Phase.STANDBY, now, now)
    for phase, spent in moves:
        now += spent
        meter = meter.enter(phase, now)
    now += last
    assert sum(meter.close_interval(now).spent_ns) == now - 7


def test_a_page_comes_back_as_it_was_written() -> None:
    meter = Meter(Phase.ACTIVE, 1, 2, (3, 4, 5, 6), 7, "t", "m", "f" * 64, "cpu-1")
    page = encode_meter(meter, 2)
    assert len(page) == METER_BYTES
    assert decode_meter(page) == meter


def test_the_longest_device_class_is_whole() -> None:
    """A device class that doesn't fit is refused. Truncated, it would be billed as another class."""
    meter = Meter(Phase.IDLE, 1, 2, device_class="h" * 64, boot="b" * 36)
    assert decode_meter(encode_meter(meter, 2)) == meter
    with pytest.raises(ValueError, match="does not fit a meter page"):
        encode_meter(Meter(Phase.IDLE, 1, 2, device_class="h" * 65), 2)


def test_a_page_of_an_older_program_is_read() -> None:
    """A page of an older build has 32 bytes for the device class and no boot id. The missing bytes read as zeros."""
    page = bytearray(encode_meter(Meter(Phase.IDLE, 1, 2, device_class="cpu-1", boot="b" * 36), 2))
    page[296:] = bytes(len(page) - 296)
    assert decode_meter(bytes(page)) == Meter(Phase.IDLE, 1, 2, device_class="cpu-1")


@pytest.mark.parametrize("page", [b"", b"\0" * METER_BYTES, b"KMT1"], ids=["empty", "zeros", "short"])
def test_foreign_meter_page_is_refused(page: bytes) -> None:
    """A page in another format raises an error, so that it isn't billed."""
    with pytest.raises(ValueError, match="meter page"):
        decode_meter(page)
