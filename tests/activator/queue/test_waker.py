"""Waker: one wake call for all waiting requests, repeated while they wait."""

import asyncio

import pytest

from activator.queue import waker as wake
from activator.queue.waker import Waker
from activator.routing.policy.version_key import VersionKey
from tests.eventually import eventually

KEY = VersionKey("t", "m", "v" * 64)


class FakeAutoscaler:
    """A control plane that accepts wake calls, or is absent."""

    def __init__(self) -> None:
        self.accepts = True
        self.wake_calls = 0
        self.has_called = asyncio.Event()

    async def send_wake(self, key: VersionKey) -> bool:
        self.wake_calls += 1
        self.has_called.set()
        return self.accepts


async def test_wake_call_is_sent_once_and_at_once() -> None:
    """Any number of requests share one call. After the end of the wake, a new one is sent at once."""

    autoscaler = FakeAutoscaler()
    waker = Waker(autoscaler.send_wake)
    for _ in range(5):
        waker.start_wake(KEY)
    began = waker.wake_sent_us(KEY)
    assert began is not None
    await asyncio.sleep(0)
    assert autoscaler.wake_calls == 1
    waker.stop_wake(KEY)
    assert waker.wake_sent_us(KEY) is None
    waker.start_wake(KEY)
    await asyncio.sleep(0)
    assert autoscaler.wake_calls == 2
    await waker.close()


@pytest.mark.parametrize("accepts", [pytest.param(True, id="accepted"), pytest.param(False, id="not accepted")])
async def test_wake_call_repeats_while_requests_wait(accepts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call repeats soon if it was not accepted, later if it was. After the end of the wake it stops."""
    monkeypatch.setattr(wake, "AGAIN_S" if accepts else "RETRY_S", 0.01)

    autoscaler = FakeAutoscaler()
    autoscaler.accepts = accepts
    waker = Waker(autoscaler.send_wake)
    waker.start_wake(KEY)
    async with asyncio.timeout(30):
        while autoscaler.wake_calls < 3:
            autoscaler.has_called.clear()
            await autoscaler.has_called.wait()
    waker.stop_wake(KEY)
    calls_before = autoscaler.wake_calls
    await asyncio.sleep(0.05)
    assert autoscaler.wake_calls == calls_before
    await waker.close()


@pytest.mark.parametrize("is_timed", [pytest.param(False, id="wake"), pytest.param(True, id="timed wake")])
@pytest.mark.virtual_time
async def test_version_is_woken_after_an_unexpected_error(is_timed: bool) -> None:
    """An error such as "no descriptor left" does not end the repetition."""

    class Failing(FakeAutoscaler):
        async def send_wake(self, key: VersionKey) -> bool:
            if await super().send_wake(key) and self.wake_calls < 3:
                raise OSError(24, "too many open files")
            return True

    autoscaler = Failing()
    waker = Waker(autoscaler.send_wake, clock=asyncio.get_running_loop().time)
    if is_timed:
        waker.start_wake_for(KEY, 9.0)
    else:
        waker.start_wake(KEY)
    await asyncio.sleep(1.0)
    assert autoscaler.wake_calls == 3
    await asyncio.sleep(60.0)
    assert repr(waker) == f"<Waker waking={int(not is_timed)} timed=0>"
    await waker.close()
    assert repr(waker) == "<Waker waking=0 timed=0>"


async def test_timed_wake_repeats_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent at once, repeats until its time is over, and is shared by all callers. It can start again."""
    monkeypatch.setattr(wake, "AGAIN_S", 0.001)

    autoscaler, now_s = FakeAutoscaler(), 100.0
    waker = Waker(autoscaler.send_wake, clock=lambda: now_s)
    for _ in range(5):
        waker.start_wake_for(KEY, 9.0)
    async with asyncio.timeout(30):
        while autoscaler.wake_calls < 3:
            autoscaler.has_called.clear()
            await autoscaler.has_called.wait()
        assert repr(waker) == "<Waker waking=0 timed=1>"
        now_s = 109.0
        await eventually(lambda: repr(waker) == "<Waker waking=0 timed=0>")
    calls_before = autoscaler.wake_calls
    waker.start_wake_for(KEY, 9.0)
    await asyncio.sleep(0)
    assert autoscaler.wake_calls == calls_before + 1
    await waker.close()


async def test_timed_wake_ends_with_the_start() -> None:
    """A wake for waiting requests replaces the timed one. Its end does not end a timed wake."""

    autoscaler = FakeAutoscaler()
    waker = Waker(autoscaler.send_wake)
    waker.start_wake(KEY)
    waker.start_wake_for(KEY, 9.0)
    assert repr(waker) == "<Waker waking=1 timed=0>"
    waker.stop_wake(KEY)
    waker.start_wake_for(KEY, 9.0)
    waker.stop_wake(KEY)
    waker.stop_timed_wakes(KEY.tenant, "w" * 64)
    assert repr(waker) == "<Waker waking=0 timed=1>"
    waker.stop_timed_wakes(KEY.tenant, KEY.version)
    assert repr(waker) == "<Waker waking=0 timed=0>"
    await waker.close()
