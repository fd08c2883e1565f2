"""A tenant's requests are counted while they last, and refused beyond its limit; others' are not its matter."""

import pytest

from activator.shares import Shares
from contracts.errors import Refused
from contracts.traffic_errors import TenantBusy


def test_shares() -> None:
    """Up to the limit, each its own; a place that is left is free again, however it was left."""
    shares = Shares()
    with shares.enter("a", 2):
        with shares.enter("a", 2), shares.enter("b", 1):
            with pytest.raises(Refused) as refused, shares.enter("a", 2):
                raise AssertionError("unreachable")
            assert refused.value.failure == TenantBusy(2, 1.0)
            with shares.enter("c", None):
                assert repr(shares) == "<Shares tenants=3 inside=4>"
        with pytest.raises(KeyError), shares.enter("a", 2):
            raise KeyError
        with shares.enter("a", 2):
            pass
    assert repr(shares) == "<Shares tenants=0 inside=0>"


def test_a_limit_that_shrinks() -> None:
    """Who is inside stays; nobody comes in until fewer are."""
    shares = Shares()
    with shares.enter("a", 3), shares.enter("a", 3), pytest.raises(Refused), shares.enter("a", 1):
        raise AssertionError("unreachable")
    with shares.enter("a", 1):
        pass
