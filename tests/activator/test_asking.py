"""Questions under way: one for a name at a time, for all who wait, whoever of them ends; and an end that is quick."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from activator.asking import Asking, each
from tests.virtual_loop import run_virtually


def play(scenario: Callable[[Asking[str], asyncio.Event], Awaitable[None]]) -> None:
    """On virtual time; the event is for a question to wait for."""

    async def main() -> None:
        asking: Asking[str] = Asking()
        await scenario(asking, asyncio.Event())
        assert len(asking) == 0
        assert not asking.waiting

    run_virtually(main())


def test_who_waits_may_leave() -> None:
    """Two wait for one answer, and one gives up: the question goes on, and the other one has its answer."""

    async def scenario(asking: Asking[str], answer: asyncio.Event) -> None:
        async def question() -> None:
            await answer.wait()

        task = asking.start("a", question())
        assert "a" in asking
        assert asking.of("a") is task
        assert asking.of("b") is None
        one, two = (asyncio.create_task(asking.wait("a", task, units)) for units in (3, 4))
        await asyncio.sleep(0)
        assert asking.waiting == {"a": 7}
        one.cancel()
        await asyncio.wait((one,))
        assert asking.waiting == {"a": 4}
        assert not task.done()
        answer.set()
        await two
        assert asking.of("a") is None, "the next one may be asked"

    play(scenario)


def test_a_question_that_fails_is_over() -> None:
    """Its name is free, and who waited goes on."""

    async def scenario(asking: Asking[str], answer: asyncio.Event) -> None:
        async def question() -> None:
            raise KeyError("a")

        task = asking.start("a", question())
        await asking.wait("a", task)
        assert isinstance(task.exception(), KeyError)

    play(scenario)


def test_an_end_is_quick_and_waits_for_what_is_asked() -> None:
    """What gives back has a second; what was asked before is waited for, as it ends by itself."""

    async def scenario(asking: Asking[str], answer: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        asking.start("a", asyncio.sleep(3.0))
        began_s = loop.time()
        await asking.close(asyncio.sleep(60.0))
        assert loop.time() - began_s == pytest.approx(3.0)

    play(scenario)


def test_it_tends_until_it_is_cancelled() -> None:
    """So often, and not at once."""

    async def scenario(asking: Asking[str], answer: asyncio.Event) -> None:
        seen: list[float] = []
        loop = asyncio.get_running_loop()

        async def tend() -> None:
            seen.append(loop.time())

        began_s = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await each(1.0, tend)
        assert [at_s - began_s for at_s in seen] == pytest.approx([1.0, 2.0])

    play(scenario)
