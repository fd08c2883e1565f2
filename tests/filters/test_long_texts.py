"""Long texts wait for one another no longer than who asked waits, and nobody looks for who has gone."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import httpx
import pytest

from contracts.errors import Refused
from contracts.filters import CHECK, DEADLINE, Looked, Question, Rule
from contracts.wire import encode
from filters import long_texts
from filters.app import INLINE_CHARACTERS, make_app
from filters.long_texts import LongTexts, look_at_all
from filters.look import look
from filters.meters import Meters
from telemetry.policy.instruments import Page

RULES = (Rule(filter="pii", actions={"EMAIL_ADDRESS": "redact"}),)
LONG = "a@b.example " * INLINE_CHARACTERS


def _question(text: str) -> bytes:
    return encode(Question(direction="input", rules=RULES, texts=(text,), whole=True))


class Held:
    """The one thread of long texts, which is kept busy until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executor = ThreadPoolExecutor(1)
        self.gate = threading.Event()
        self.looked: list[str] = []
        self.executor.submit(self.gate.wait)
        monkeypatch.setattr(long_texts, "look", self._look)

    def _look(self, text: str, rules: Sequence[Rule], whole: bool, check: Callable[[], None]) -> Looked:
        self.looked.append(text)
        return look(text, rules, whole, check)

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[httpx.AsyncClient]:
        """Who asks the application."""
        app = make_app(Meters(Page("filters")), LongTexts(self.executor))
        transport = httpx.ASGITransport(app=app)
        async with asyncio.timeout(60), httpx.AsyncClient(transport=transport, base_url="http://filters") as client:
            yield client


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(monkeypatch)
    yield made
    made.gate.set()
    made.executor.shutdown()


def test_nobody_looks_for_who_has_given_up(held: Held) -> None:
    """Fifty ask in vain; once the thread is free, it is there for who asks then, also for one of a build that says
    nothing of its time. Short texts never waited.
    """

    async def scenario() -> None:
        async with held.asked() as client:
            late = [client.post(CHECK, content=_question(LONG), headers={DEADLINE: "50"}) for _ in range(50)]
            assert {answer.status_code for answer in await asyncio.gather(*late)} <= {503, 504}
            assert (await client.post(CHECK, content=_question("short"))).status_code == 200
            assert held.looked == ["short"]
            held.gate.set()
            for headers in ({DEADLINE: "10000"}, {}):
                assert (await client.post(CHECK, content=_question(LONG), headers=headers)).status_code == 200
            assert held.looked == ["short", LONG, LONG]

    asyncio.run(scenario())


def test_one_too_many_is_refused_at_once(held: Held) -> None:
    """And those before it are not: each is looked at in its turn. Nothing is left of any."""

    async def scenario() -> None:
        texts = LongTexts(held.executor, max_waiting=2)
        question = Question(direction="input", rules=RULES, texts=("a",), whole=True)
        waiting = [asyncio.create_task(texts.look(question, 30.0)) for _ in range(3)]
        await asyncio.sleep(0)
        assert repr(texts) == "<LongTexts inside=3/3>"
        with pytest.raises(Refused, match="filters' queue is full"):
            await texts.look(question, 30.0)
        held.gate.set()
        assert await asyncio.gather(*waiting) == [(Looked(decided=1),)] * 3
        assert repr(texts) == "<LongTexts inside=0/3>"

    asyncio.run(scenario())


@pytest.mark.parametrize(("checks", "ends"), [(3, True), (10**9, False)])
def test_looking_ends_between_two_segments(checks: int, ends: bool) -> None:
    """Where whoever looks has no time left; the control has."""
    left = iter(range(checks))

    def check() -> None:
        if next(left, None) is None:
            raise TimeoutError

    if ends:
        with pytest.raises(TimeoutError):
            look(LONG, RULES, True, check)
    else:
        assert len(look(LONG, RULES, True, check).spans) == INLINE_CHARACTERS


def test_what_is_begun_too_late_is_not_looked_at() -> None:
    """The time is that of who asked, and not of one text."""
    question = Question(direction="input", rules=RULES, texts=("a", "b"), whole=True)
    with pytest.raises(TimeoutError):
        look_at_all(question, time.monotonic())
    assert len(look_at_all(question)) == 2


@pytest.mark.parametrize("said", ["soon", "-1", "1.5"])
def test_a_time_that_is_none(held: Held, said: str) -> None:
    """Is refused by its name."""

    async def scenario() -> None:
        async with held.asked() as client:
            answer = await client.post(CHECK, content=_question(LONG), headers={DEADLINE: said})
            assert (answer.status_code, answer.json()["param"]) == (400, DEADLINE)

    asyncio.run(scenario())
