"""A full replica refuses a request. The caller doesn't notice: the request waits and is answered."""

import asyncio
import signal
import time
from pathlib import Path

from activator.http.exchange import now_us
from activator.queue.policy.replica_credit import LONGEST_PAUSE_S
from kelvin.contracts.errors import ModelNotFound, Refused
from kelvin.contracts.timeline import Stage
from kelvin.ipc.tcp_listener import listen
from runtime.lifecycle.credit_policy import Credits
from tests.activator.control import replica_row
from tests.activator.queue.slot_world import KEY
from tests.activator.request.hedge_world import ground, outcome
from tests.activator.world import world
from tests.runtime.fakes import LIMITS, script_of, serve_replica
from tests.runtime.scripted_engine import ScriptedEngine

ALONE = {"connection": "close"}  # so that each request may reach either activator


async def test_a_refused_request_waits_and_is_answered(tmp_path: Path) -> None:
    """Another activator uses all streams of the only replica. The refusals count as no retry and open no breaker, and
    are a few per second. The record is a normal one.
    """

    async with world(tmp_path) as here:
        replica = await here.replica("a", max_streams=2)
        replica.credits = credits = Credits(2)
        for _ in range(2):
            assert credits.try_enter("other", 2, time.monotonic())
        began_s = time.monotonic()
        requests = [asyncio.create_task(here.post()) for _ in range(3)]
        await replica.until(lambda each: each.refused >= 6)
        seconds = time.monotonic() - began_s
        assert replica.refused <= 12 + 3 * seconds / LONGEST_PAUSE_S
        assert not replica.calls
        for _ in range(2):
            credits.leave("other")
        assert [each.status for each in await asyncio.gather(*requests)] == [200] * 3
        assert await here.metric_value("kelvin_retries_total") == 0
        assert await here.metric_value("kelvin_breaker_openings_total", of="replica") == 0
        assert await here.metric_value("kelvin_replica_refusals_total") == replica.refused
        records = await here.control.wait_for_records(3)
        assert [record.outcome for record in records] == ["ok"] * 3


async def test_the_wait_after_a_refusal_is_part_of_the_queue(tmp_path: Path) -> None:
    """The timeline's dispatch time is when the replica accepted the request."""

    async with ground(tmp_path) as here:
        replica = await here.replica("a", max_streams=1)
        replica.credits = credits = Credits(1)
        assert credits.try_enter("other", 1, time.monotonic())
        requests = here.ask()
        await replica.until(lambda each: each.refused >= 3)
        freed_us = now_us()
        credits.leave("other")
        assert await outcome(requests) is None
        assert requests.call.account.timeline.at_us[Stage.DISPATCHED] >= freed_us


async def test_deleted_version_ends_a_refused_request(tmp_path: Path) -> None:
    """The caller gets `model_not_found` and does not wait for a start."""

    async with ground(tmp_path) as here:
        replica, versions = await here.replica("a", max_streams=1), {KEY}

        class Deleting(Credits):
            def try_enter(self, name: str, wants: int, now_s: float) -> bool:
                versions.clear()
                here.slots.feed(removed_replicas=("a",), removed_versions=(KEY,))
                return False

        replica.credits = Deleting(1)
        failed = await outcome(here.ask(is_current=lambda: KEY in versions))
        assert isinstance(failed, Refused)
        assert isinstance(failed.failure, ModelNotFound)


async def test_caller_may_leave_while_its_request_is_refused(tmp_path: Path) -> None:
    """Nothing of its request is left, and the next one is answered."""

    async with world(tmp_path) as here:
        replica = await here.replica("a", max_streams=1)
        replica.credits = credits = Credits(1)
        assert credits.try_enter("other", 1, time.monotonic())
        requests = asyncio.create_task(here.post())
        await replica.until(lambda each: each.refused >= 2)
        requests.cancel()
        await asyncio.gather(requests, return_exceptions=True)
        await here.wait_for_metric("kelvin_requests_inside", 0)
        credits.leave("other")
        assert (await here.post()).status == 200


async def test_two_activators_at_a_runtime(tmp_path: Path) -> None:
    """Two activators at the real API of a runtime over a scripted engine, without Redis. Together they never exceed its
    streams, and all requests are answered.
    """

    listener = listen("127.0.0.1", 0)
    try:
        async with (
            world(tmp_path, listener=listener) as here,
            serve_replica(here.data, ScriptedEngine(script_of(" there was"), paced=True)) as runtime,
        ):
            credits, sources = runtime.replica.credits, set[str]()
            await here.publish(replica_row("x", LIMITS.max_streams))
            old = await here.start_successor()
            async with asyncio.timeout(90):
                while len(sources) < 2:
                    requests = [asyncio.create_task(here.post(**ALONE)) for _ in range(2 * LIMITS.max_streams)]
                    while any(not each.done() for each in requests):
                        assert credits.active_requests <= LIMITS.max_streams
                        sources |= credits._activators.keys()
                        if credits.active_requests == LIMITS.max_streams:
                            runtime.engine.run_freely()
                        await asyncio.wait(requests, timeout=0.05)
                    assert [each.result().status for each in requests] == [200] * len(requests)
            old.send_signal(signal.SIGTERM)
            assert await old.wait() == 0
    finally:
        listener.close()
