"""`eventually` and `wait` return once a condition holds, and name it if it never does."""

import asyncio

import pytest

from tests.eventually import PATIENCE_S, eventually, wait
from tests.virtual_loop import run_virtually


@pytest.mark.parametrize("after_s", [0.0, PATIENCE_S / 2])
@pytest.mark.virtual_time
async def test_eventually_returns_once_it_holds(after_s: float) -> None:
    """`eventually` returns within a moment of the change, and at once if the condition already holds."""

    loop = asyncio.get_running_loop()
    await eventually(lambda: loop.time() >= after_s)
    assert loop.time() == pytest.approx(after_s, abs=0.01)


def test_eventually_fails_after_its_limit() -> None:
    with pytest.raises(AssertionError, match="a door that opens does not come about"):
        run_virtually(eventually(lambda: False, "a door that opens"))


def test_blocking_wait_sees_what_comes() -> None:
    """`wait` polls until the condition holds, and no longer."""
    looks = iter((False, False, True))
    wait(lambda: next(looks), "the third look")
    assert next(looks, None) is None


def test_blocking_wait_names_what_never_comes() -> None:
    with pytest.raises(AssertionError, match="it is not so that a door opens"):
        wait(lambda: False, "a door opens", limit_s=0.01)
