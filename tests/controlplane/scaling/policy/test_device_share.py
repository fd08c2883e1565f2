"""Devices are divided among claims in order. The parts fit the devices, except for the least part of claims that found
none left.
"""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaling.policy.device_share import DeviceClaim, divide_devices

A, B, C = DeviceClaim("a", 0, 6), DeviceClaim("b", 0, 4), DeviceClaim("c", 0, 4)


@pytest.mark.parametrize(
    ("devices", "claims", "want"),
    [
        pytest.param(100, (A, B, C), (6, 4, 4), id="enough devices: each claim gets its maximum"),
        pytest.param(8, (A, B, C), (6, 2, 1), id="later claims get the rest, at least one"),
        pytest.param(8, (C, B, A), (4, 4, 1), id="the order counts, not the names"),
        pytest.param(2, (A, B, C), (2, 1, 1), id="no part exceeds the devices"),
        pytest.param(0, (A, B), (1, 1), id="no devices: one each"),
        pytest.param(-1, (A,), (1,), id="fewer than none: one"),
        pytest.param(8, (A, DeviceClaim("b", 3, 4), C), (6, 3, 1), id="the least is part of the share"),
        pytest.param(8, (DeviceClaim("a", 0, 6, True), B, C), (6, 4, 4), id="a leaving claim takes nothing"),
        pytest.param(8, (A, DeviceClaim("b", 0, 4, True), C), (6, 2, 2), id="a leaving claim still gets what was left"),
        pytest.param(8, (), (), id="no claims"),
    ],
)
def test_divide(devices: int, claims: tuple[DeviceClaim[str], ...], want: tuple[int, ...]) -> None:
    assert tuple(divide_devices(devices, claims)[claim.key] for claim in claims) == want


@st.composite
def _claims(draw: st.DrawFn) -> list[DeviceClaim[int]]:
    made = []
    for key in range(draw(st.integers(0, 12))):
        maximum = draw(st.integers(1, 1000))
        made.append(DeviceClaim(key, draw(st.integers(0, maximum)), maximum, draw(st.booleans())))
    return made


def _exceeds(devices: int, claims: Sequence[DeviceClaim[int]], parts: dict[int, int]) -> bool:
    """Return whether the parts allow more replicas than the rule permits."""
    staying = [claim for claim in claims if not claim.is_leaving]
    left, short = devices, 0
    for claim in staying:
        minimum = max(1, claim.minimum)
        short += minimum if minimum > left else 0
        left = max(0, left - parts[claim.key])
    return sum(parts[claim.key] for claim in staying) > devices + short


@given(devices=st.integers(0, 2000), claims=_claims())
def test_divided_devices_stay_within_bounds(devices: int, claims: list[DeviceClaim[int]]) -> None:
    """Each part is within its claim's bounds. Without leaving claims, the sum exceeds the devices only by least parts
    that did not fit.
    """
    parts = divide_devices(devices, claims)
    for claim in claims:
        assert max(1, claim.minimum) <= parts[claim.key] <= claim.maximum
    assert not _exceeds(devices, claims, parts)


@given(devices=st.integers(0, 2000), claims=_claims(), more=st.integers(0, 100))
def test_later_claims_change_no_earlier_share(devices: int, claims: list[DeviceClaim[int]], more: int) -> None:
    """A later or a leaving claim changes no part. More devices never make a part smaller."""
    parts = divide_devices(devices, claims)
    assert divide_devices(devices, [*claims, DeviceClaim(99, 0, 1000)]).items() >= parts.items()
    leaves = [DeviceClaim(99, 0, 1000, True), *claims]
    assert divide_devices(devices, leaves).items() >= parts.items(), "one that leaves"
    assert all(divide_devices(devices + more, claims)[key] >= part for key, part in parts.items())


def test_undivided_maximums_exceed_devices() -> None:
    """Negative control: undivided maximums exceed the devices."""
    claims = [DeviceClaim(key, 0, 1000) for key in range(3)]
    assert _exceeds(8, claims, {claim.key: claim.maximum for claim in claims})
    assert _exceeds(8, claims, {claim.key: min(claim.maximum, 8) for claim in claims})
    assert not _exceeds(8, claims, divide_devices(8, claims))
