"""A background loop survives errors, counts and logs them, and makes the process not ready only while they continue."""

import asyncio
import logging

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from kelvin.contracts.errors import Refused, Unavailable
from kelvin.process.loops import (
    FAILING_AFTER,
    PROCESS_HEALTH,
    STEADY_S,
    LoopHealth,
    Loops,
    ready_while_loops_work,
    record_error,
)
from kelvin.telemetry.telemetry import open_without_traces


class Broken:
    """A loop body that raises until it is repaired."""

    def __init__(self, error: BaseException, works_for_s: float = 0.0) -> None:
        self._error: BaseException | None = error
        self._works_for_s = works_for_s
        self.began_s: list[float] = []

    async def run(self) -> None:
        self.began_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self._works_for_s)
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()

    def repair(self) -> None:
        self._error = None


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(24, "too many open files"), id="an error of the system"),
        pytest.param(RecursionError("nested"), id="a nested document"),
        pytest.param(MemoryError(), id="no memory"),
        pytest.param(ExceptionGroup("tasks", [KeyError("x")]), id="a group of errors"),
        pytest.param(asyncio.CancelledError(), id="a cancelled future that the body awaited"),
    ],
)
async def test_loop_is_started_again_after_any_error(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """The loop restarts soon. The error is counted and logged under the loop's name."""
    with caplog.at_level(logging.ERROR, "kelvin.process.loops"):
        health, broken = LoopHealth(), Broken(error)
        async with Loops(health) as loops:
            loops.start("feed", broken.run)
            await asyncio.sleep(0.05)
            broken.repair()
            await asyncio.sleep(1.0)
            assert len(broken.began_s) == 2
        assert health.errors == {"feed": 1}
    assert [getattr(record, "loop", "") for record in caplog.records] == ["feed"]


@pytest.mark.virtual_time
async def test_other_loops_go_on() -> None:
    """An error of one loop doesn't affect the others of its owner."""
    health, broken, sound = LoopHealth(), Broken(KeyError("x")), Broken(KeyError("x"), works_for_s=1e9)
    async with Loops(health) as loops:
        loops.start("broken", broken.run)
        loops.start("sound", sound.run)
        await asyncio.sleep(1000.0)
        assert len(sound.began_s) == 1
        assert len(broken.began_s) > 50


@pytest.mark.virtual_time
async def test_restarts_back_off() -> None:
    """Pauses grow up to ten seconds, so a loop that always fails costs almost nothing."""
    broken = Broken(ValueError("always"))
    async with Loops(LoopHealth()) as loops:
        loops.start("feed", broken.run)
        await asyncio.sleep(300.0)
    pauses = [later - earlier for earlier, later in zip(broken.began_s, broken.began_s[1:], strict=False)]
    assert 0.05 <= pauses[0] <= 0.1
    assert 5.0 <= pauses[-1] <= 10.0
    assert len(pauses) < 80


@pytest.mark.virtual_time
async def test_repeated_errors_take_readiness_until_a_minute_without() -> None:
    """From the fifth error in a row the process is not ready. It is ready again after a minute without errors."""
    health, broken = LoopHealth(), Broken(ValueError("always"))
    async with Loops(health) as loops:
        loops.start("feed", broken.run)
        while health.errors["feed"] < FAILING_AFTER - 1:
            await asyncio.sleep(0.01)
        assert health.failing() == ()
        while health.errors["feed"] < FAILING_AFTER:
            await asyncio.sleep(0.01)
        assert health.failing() == ("feed",)
        broken.repair()
        await asyncio.sleep(STEADY_S - 1)
        assert health.failing() == ("feed",)
        await asyncio.sleep(15.0)
        assert health.failing() == ()


@pytest.mark.virtual_time
@pytest.mark.parametrize(("works_for_s", "is_failing"), [(STEADY_S - 1, True), (STEADY_S + 1, False)])
async def test_errors_count_while_less_than_a_minute_lies_between(works_for_s: float, is_failing: bool) -> None:
    """Errors count as one row unless the loop works for more than a minute between them."""
    health = LoopHealth()
    async with Loops(health) as loops:
        loops.start("feed", Broken(ValueError("always"), works_for_s).run)
        await asyncio.sleep(20 * STEADY_S)
        assert health.errors["feed"] >= FAILING_AFTER
        assert bool(health.failing()) is is_failing


@pytest.mark.virtual_time
async def test_loop_of_one_version_takes_no_readiness() -> None:
    """A loop with `takes_readiness=False` is restarted and counted, but the process stays ready."""
    health = LoopHealth()
    async with Loops(health) as loops:
        loops.start("wake", Broken(ValueError("always")).run, about="acme/m", takes_readiness=False)
        await asyncio.sleep(600.0)
        assert health.errors["wake"] > FAILING_AFTER
        assert health.failing() == ()


@pytest.mark.virtual_time
@pytest.mark.parametrize("error", [Refused(Unavailable("the ledger")), ConnectionResetError(), TimeoutError()])
async def test_unavailable_dependency_takes_no_readiness(error: Exception) -> None:
    """A dependency's failure restarts the loop and is counted, but the process stays ready."""
    health = LoopHealth()
    async with Loops(health) as loops:
        loops.start("feed", Broken(error).run)
        await asyncio.sleep(600.0)
        assert health.errors["feed"] > FAILING_AFTER
        assert health.failing() == ()


@pytest.mark.virtual_time
async def test_ended_loop_takes_no_readiness() -> None:
    """A failing loop that is cancelled no longer makes the process not ready."""
    health = LoopHealth()
    async with Loops(health) as loops:
        task = loops.start("feed", Broken(ValueError("always")).run)
        await asyncio.sleep(60.0)
        assert health.failing() == ("feed",)
        task.cancel()
        await loops.wait()
        assert health.failing() == ()
        assert task.cancelled()


@pytest.mark.virtual_time
async def test_leaving_the_block_cancels_loops_and_waits() -> None:
    """Leaving waits for slow clean-up, and cancels a loop that waits for its restart."""
    health, is_gone = LoopHealth(), False

    async def slow() -> None:
        nonlocal is_gone
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(2.0)
            is_gone = True

    async with Loops(health) as loops:
        loops.start("slow", slow)
        loops.start("broken", Broken(ValueError("always")).run)
        await asyncio.sleep(30.0)
    assert is_gone
    assert not health.loops
    loops.start("late", slow)
    await loops.close()
    assert health.errors["late"] == 0


@pytest.mark.virtual_time
async def test_failed_cleanup_does_not_restart_a_cancelled_loop() -> None:
    """The error is counted, and closing the loops continues."""
    health, begun = LoopHealth(), asyncio.Event()

    async def body() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError(5, "can't be closed")

    async with asyncio.timeout(60.0), Loops(health) as loops:
        task = loops.start("feed", body)
        await begun.wait()
    assert task.cancelled()
    assert health.errors == {"feed": 1}


@pytest.mark.virtual_time
async def test_loop_that_returns_has_ended() -> None:
    """A loop that returns is done and isn't restarted."""
    began = 0

    async def body() -> None:
        nonlocal began
        began += 1

    async with Loops(LoopHealth()) as loops:
        await loops.start("leftovers", body)
        await asyncio.sleep(60.0)
    assert began == 1


async def _status_of(path: str, health: LoopHealth) -> int:
    """Return the status of `path` from an application that is always ready."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    await ready_while_loops_work(PlainTextResponse("ok"), health)(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.virtual_time
async def test_process_is_not_ready_while_a_loop_keeps_failing() -> None:
    """`/readyz` is 503 and other paths are served. A single error changes nothing."""
    health, broken = LoopHealth(), Broken(ValueError("always"))
    async with Loops(health) as loops:
        loops.start("feed", broken.run)
        await asyncio.sleep(0.01)
        assert await _status_of("/readyz", health) == 200
        await asyncio.sleep(30.0)
        assert await _status_of("/readyz", health) == 503
        assert await _status_of("/healthz", health) == 200
        broken.repair()
        await asyncio.sleep(STEADY_S + 15.0)
        assert await _status_of("/readyz", health) == 200


@pytest.mark.virtual_time
async def test_error_in_a_part_of_the_work_counts_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The body continues with its other parts. A part that keeps failing makes the loop failing until it has worked for
    STEADY_S. Control: many parts that fail once don't."""
    broken: list[str] = ["a", "b", "c", "d", "e", "f"]
    rounds = 0

    async def work() -> None:
        nonlocal rounds
        while True:
            for part in broken:
                record_error(KeyError(part), part)
            rounds += 1
            await asyncio.sleep(2.0)

    with caplog.at_level(logging.ERROR, "kelvin.process.loops"):
        health = LoopHealth()
        async with Loops(health) as loops:
            loops.start("parts", work)
            await asyncio.sleep(1.0)
            assert health.errors == {"parts": 6}
            assert health.failing() == ()
            await asyncio.sleep(2.0 * FAILING_AFTER)
            assert health.failing() == ("parts",)
            broken.clear()
            await asyncio.sleep(STEADY_S + 5.0)
            assert health.failing() == ()
        assert rounds > 30
    assert getattr(caplog.records[0], "about", "") == "a"


@pytest.mark.virtual_time
@pytest.mark.parametrize("round_s", [0.25, 0.9, 2.0])
async def test_part_that_fails_in_each_round_makes_a_failing_loop(
    round_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A part that fails in each round, however short, makes the loop failing. Few of its errors are logged."""

    async def work() -> None:
        while True:
            record_error(KeyError("x"), "a part")
            await asyncio.sleep(round_s)

    with caplog.at_level(logging.ERROR, "kelvin.process.loops"):
        health = LoopHealth()
        async with Loops(health) as loops:
            loops.start("parts", work)
            await asyncio.sleep(STEADY_S)
            assert health.errors["parts"] >= STEADY_S / round_s
            assert health.failing() == ("parts",)
    assert len(caplog.records) < 30


@pytest.mark.virtual_time
@pytest.mark.parametrize("is_defect_first", [True, False])
async def test_defect_counts_while_a_dependency_is_unavailable(is_defect_first: bool) -> None:
    """The order of the parts doesn't matter."""
    errors = [KeyError("x"), Refused(Unavailable("the database"))]

    async def work() -> None:
        while True:
            for error in errors if is_defect_first else reversed(errors):
                record_error(error, "a part")
            await asyncio.sleep(2.0)

    health = LoopHealth()
    async with Loops(health) as loops:
        loops.start("parts", work)
        await asyncio.sleep(2.0 * FAILING_AFTER)
        assert health.failing() == ("parts",)


@pytest.mark.virtual_time
async def test_part_with_an_unavailable_dependency_stays_ready() -> None:
    """A dependency's failure in one part leaves the process ready, as it does when it ends the body."""

    async def work() -> None:
        while True:
            record_error(Refused(Unavailable("the database")), "a part")
            await asyncio.sleep(2.0)

    health = LoopHealth()
    async with Loops(health) as loops:
        loops.start("parts", work)
        await asyncio.sleep(60.0)
        assert health.errors["parts"] > FAILING_AFTER
        assert health.failing() == ()


@pytest.mark.virtual_time
async def test_errors_are_on_the_metrics_page_of_every_process() -> None:
    """The metrics have errors by loop, and the number of failing loops."""
    async with Loops(PROCESS_HEALTH) as loops:
        loops.start("a loop of this test", Broken(ValueError("always")).run)
        await asyncio.sleep(30.0)
        page = open_without_traces("snapshotter").render_page()
    errors = PROCESS_HEALTH.errors.pop("a loop of this test")
    assert f'kelvin_loop_errors_total{{process="snapshotter",loop="a loop of this test"}} {errors}\n' in page
    assert 'kelvin_loops_failing{process="snapshotter"} 1\n' in page
