"""Devices are given out in turn: together no more than there are, and beyond that the least of who found none left."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaling.policy.device_share import DeviceClaim, divide_devices

A, B, C = DeviceClaim("a", 0, 6), DeviceClaim("b", 0, 4), DeviceClaim("c", 0, 4)


@pytest.mark.parametrize(
    ("devices", "claims", "want"),
    [
        pytest.param(100, (A, B, C), (6, 4, 4), id="where there is enough each has its own"),
        pytest.param(8, (A, B, C), (6, 2, 1), id="who comes later has what is left, and one at the least"),
        pytest.param(8, (C, B, A), (4, 4, 1), id="in turn, whatever they are called"),
        pytest.param(2, (A, B, C), (2, 1, 1), id="none has more than there is"),
        pytest.param(0, (A, B), (1, 1), id="one each of nothing"),
        pytest.param(-1, (A,), (1,), id="and of less"),
        pytest.param(8, (A, DeviceClaim("b", 3, 4), C), (6, 3, 1), id="what is always there is a part"),
        pytest.param(8, (DeviceClaim("a", 0, 6, True), B, C), (6, 4, 4), id="who leaves holds nothing"),
        pytest.param(8, (A, DeviceClaim("b", 0, 4, True), C), (6, 2, 2), id="and has what was left all the same"),
        pytest.param(8, (), (), id="nobody"),
    ],
)
def test_divide(devices: int, claims: tuple[DeviceClaim[str], ...], want: tuple[int, ...]) -> None:
    """The parts, in turn."""
    assert tuple(divide_devices(devices, claims)[claim.key] for claim in claims) == want


@st.composite
def _claims(draw: st.DrawFn) -> list[DeviceClaim[int]]:
    made = []
    for key in range(draw(st.integers(0, 12))):
        maximum = draw(st.integers(1, 1000))
        made.append(DeviceClaim(key, draw(st.integers(0, maximum)), maximum, draw(st.booleans())))
    return made


def _exceeds(devices: int, claims: Sequence[DeviceClaim[int]], parts: dict[int, int]) -> bool:
    """Whether more may be ordered than is said."""
    staying = [claim for claim in claims if not claim.is_leaving]
    left, short = devices, 0
    for claim in staying:
        least = max(1, claim.least)
        short += least if least > left else 0
        left = max(0, left - parts[claim.key])
    return sum(parts[claim.key] for claim in staying) > devices + short


@given(devices=st.integers(0, 2000), claims=_claims())
def test_divided_devices_stay_within_bounds(devices: int, claims: list[DeviceClaim[int]]) -> None:
    """Each within its own bounds; all but the leaving within the devices and the least of who found fewer left."""
    parts = divide_devices(devices, claims)
    for claim in claims:
        assert max(1, claim.least) <= parts[claim.key] <= claim.maximum
    assert not _exceeds(devices, claims, parts)


@given(devices=st.integers(0, 2000), claims=_claims(), more=st.integers(0, 100))
def test_later_claims_change_no_earlier_share(devices: int, claims: list[DeviceClaim[int]], more: int) -> None:
    """For those before; and more devices are never less of them."""
    parts = divide_devices(devices, claims)
    assert divide_devices(devices, [*claims, DeviceClaim(99, 0, 1000)]).items() >= parts.items()
    leaves = [DeviceClaim(99, 0, 1000, True), *claims]
    assert divide_devices(devices, leaves).items() >= parts.items(), "one that leaves"
    assert all(divide_devices(devices + more, claims)[key] >= part for key, part in parts.items())


def test_undivided_maximums_exceed_devices() -> None:
    """The control: each model's own `max` and nothing else is seen to be too much."""
    claims = [DeviceClaim(key, 0, 1000) for key in range(3)]
    assert _exceeds(8, claims, {claim.key: claim.maximum for claim in claims})
    assert _exceeds(8, claims, {claim.key: min(claim.maximum, 8) for claim in claims})
    assert not _exceeds(8, claims, divide_devices(8, claims))
