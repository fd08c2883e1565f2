"""What a version's filters make of a request and of its answer, over the replica's own socket."""

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from contracts.artifact_errors import ArtifactRejected
from contracts.errors import Failure, InvalidRequest, Refused, Unavailable
from contracts.filters import DEADLINE, FILE, TENANT, FilterPolicy, Findings, Looked, Pii, Question
from contracts.frames import End, FrameDecoder
from contracts.manifest import Kind
from contracts.problem import from_wire, to_wire
from contracts.traffic_errors import Overloaded
from contracts.wire import decode
from filters.pii import look, unknown_region
from runtime.openai_requests import TextPrompt
from runtime.screening import AT_ONCE, FilterProcess, Screen, check_filters, screen_of
from service.client import ServiceClient
from tests.runtime.engine.scripted import ScriptedEngine
from tests.runtime.fakes import CODEC, bench, data_of, events_of, failure_of, saying

T = TypeVar("T")


@dataclass
class Looking(FilterProcess):
    """The filters in this process: the same looking, without a socket. `away` is how many questions get no answer."""

    away: int = 0
    asked: list[Question] = field(default_factory=list)
    guests: list[str] = field(default_factory=list)  # for whom
    unseen: int = 0

    def passed_unseen(self, texts: int) -> None:
        self.unseen += texts

    async def ask(self, question: Question, timeout_s: float, guest: str = "") -> Findings:
        self.asked.append(question)
        self.guests.append(guest)
        if len(self.asked) <= self.away:
            raise Refused(Unavailable("the filters"))
        return self.ask_from_thread(question, timeout_s)

    def ask_from_thread(self, question: Question, timeout_s: float) -> Findings:
        return Findings(looked=tuple(look(text, question.rules, question.whole) for text in question.texts))


@dataclass
class Skipping(Looking):
    """As above, after `skip` questions that get their answer."""

    skip: int = 0

    async def ask(self, question: Question, timeout_s: float, guest: str = "") -> Findings:
        if self.skip:
            self.skip -= 1
            return self.ask_from_thread(question, timeout_s)
        return await super().ask(question, timeout_s, guest)


class Hanging(Looking):
    """Answers nothing until it is told to, or its time is over."""

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()

    async def ask(self, question: Question, timeout_s: float, guest: str = "") -> Findings:
        self.asked.append(question)
        async with asyncio.timeout(timeout_s):
            await self.told.wait()
        raise Refused(Unavailable("the filters"))


AWAY = Unavailable("the filters")
FULL = from_wire(to_wire(Overloaded("the filters' queue", 256, 1.0)))  # as their process says it
SECRET = "I am jo@example.org, card 4111 1111 1111 1111, thanks"
TEXT = "one two " + "and so on, " * 5 + "twenty"
REDACTED = "I am <EMAIL_ADDRESS>, card <CREDIT_CARD>, thanks"
BOTH = Pii(input={"EMAIL_ADDRESS": "redact"}, output={"EMAIL_ADDRESS": "redact", "CREDIT_CARD": "redact"})
STOPS = Pii(input={"CREDIT_CARD": "stop"}, output={"CREDIT_CARD": "stop"})


def _screen(pii: Pii = BOTH, filters: Looking | None = None, **more: Any) -> Screen:
    return Screen(FilterPolicy(format=1, filters=(pii,), **more), filters or Looking())


def _steps(text: str) -> int:
    """That say so much, or a little more."""
    return len(CODEC.encode(text)) + 2


async def _some(answer: Any) -> bytes:
    chunk: bytes = await answer.content.readany()
    assert chunk, "the answer ended"
    return chunk


def _text(frames: Any) -> str:
    return "".join(event["choices"][0]["text"] for event in events_of(frames) if event["choices"])


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_an_answer_is_redacted(tmp_path: Path, stream: bool) -> None:
    """The same text in either form; what was computed is what is counted."""
    async with bench(tmp_path, ScriptedEngine(saying(SECRET)), screen=_screen()) as each:
        frames = await each.frames(body={"max_tokens": 100, "stream": stream})
        text = _text(frames) if stream else json.loads(data_of(frames))["choices"][0]["text"]
        assert text == REDACTED
        assert frames[-1].counts.completion_tokens == len(saying(SECRET)(each.engine.admitted[0]))
        assert decode(frames[-1].payload, End).finish_reason == "stop"


async def test_without_a_policy_nothing_is_touched(tmp_path: Path) -> None:
    """The control: the same model, as it was pushed without the file."""
    async with bench(tmp_path, ScriptedEngine(saying(SECRET))) as each:
        assert _text(await each.frames(body={"max_tokens": 100, "stream": True})) == SECRET


async def test_text_is_not_held_back_for_long(tmp_path: Path) -> None:
    """A word leaves with the next one: the client has the first while the engine has yet to make the others."""
    async with bench(tmp_path, ScriptedEngine(saying(TEXT), paced=True), screen=_screen()) as each:
        async with each.open(body={"max_tokens": 200, "stream": True}) as answer:
            said, decoder = "", FrameDecoder()
            each.engine.allow(_steps("one two and so "))
            while not said.startswith("one two "):
                said += _text(decoder.feed(await _some(answer)))
            assert "twenty" not in said
            each.engine.free_running()
            said += _text(decoder.feed(await answer.read()))
        assert said == TEXT


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_an_answer_is_stopped(tmp_path: Path, stream: bool) -> None:
    """It ends before what was found, as `content_filter`, and the engine is told."""
    async with bench(tmp_path, ScriptedEngine(saying(SECRET + " and more" * 20)), screen=_screen(STOPS)) as each:
        frames = await each.frames(body={"max_tokens": 200, "stream": stream})
        choices = [event["choices"][0] for event in events_of(frames)] or json.loads(data_of(frames))["choices"]
        assert "".join(choice["text"] for choice in choices) == "I am jo@example.org, card "
        assert choices[-1]["finish_reason"] == "content_filter"
        assert decode(frames[-1].payload, End).finish_reason == "content_filter"
        await each.quiet()


async def test_prompt_too_long_by_its_characters_is_refused_before_filters(tmp_path: Path) -> None:
    """No token is longer than the longest one: neither filters nor the tokenizer work on a text that can't fit."""
    filters = Looking()
    async with bench(tmp_path, ScriptedEngine(saying("ok")), screen=_screen(filters=filters)) as each:
        chat = {"messages": [{"role": "user", "content": "z" * 90_000}]}
        for path, body in (("/v1/completions", {"prompt": "z" * 90_000}), ("/v1/chat/completions", chat)):
            async with each.open(path, body) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["code"]) == (400, "context_length_exceeded")
                assert "characters; this model allows at most" in error["message"]
        assert filters.asked == []
        assert each.engine.admitted == []


async def test_a_prompt_is_redacted_before_it_is_tokens(tmp_path: Path) -> None:
    """A text, and each message of a chat with the name of who speaks."""
    async with bench(tmp_path, ScriptedEngine(saying("ok")), screen=_screen()) as each:
        await each.frames(body={"prompt": "ask jo@example.org", "max_tokens": 1})
        said = {"role": "user", "name": "jo@example.org", "content": [{"type": "text", "text": "jo@example.org?"}]}
        await each.frames("/v1/chat/completions", {"messages": [said], "max_tokens": 1})
        text, chat = each.engine.admitted
        assert text.prompt_ids == CODEC.encode("ask <EMAIL_ADDRESS>")
        plain = {"role": "user", "name": "<EMAIL_ADDRESS>", "content": "<EMAIL_ADDRESS>?"}
        assert chat.prompt_ids == CODEC.encode_chat([plain])


@pytest.mark.parametrize(
    ("prompt", "code", "said"),
    [
        pytest.param(SECRET, "content_filter", "(CREDIT_CARD)", id="what stops it"),
        pytest.param([5, 6], "invalid_request", "must be text", id="tokens, which nobody can read"),
    ],
)
async def test_a_prompt_is_refused_before_compute(tmp_path: Path, prompt: Any, code: str, said: str) -> None:
    """With a 400, and without what was found."""
    async with bench(tmp_path, ScriptedEngine(saying("ok")), screen=_screen(STOPS)) as each:
        async with each.open(body={"prompt": prompt}) as answer:
            error = json.loads(await answer.read())["error"]
            assert (answer.status, error["code"], error["param"]) == (400, code, "prompt")
            assert said in error["message"]
            assert "4111" not in error["message"]
        assert each.engine.admitted == []


async def test_no_answer_of_a_filter_refuses(tmp_path: Path) -> None:
    """A prompt with a 503 that may be repeated; an answer before its first byte likewise; later it is cut, and the
    client has nothing that was not looked at."""
    looking = Skipping(away=1)
    async with bench(tmp_path, ScriptedEngine(saying(SECRET)), screen=_screen(filters=looking)) as each:
        for _ in range(2):  # the prompt is not seen, then the answer is not
            async with each.open(body={"prompt": "x", "max_tokens": 100, "stream": True}) as answer:
                assert answer.status == 503
                assert json.loads(await answer.read())["error"]["code"] == "filter_failed"
            looking.asked.clear()
            looking.away, looking.skip = 1, 1


async def test_a_filter_that_fails_later_cuts_the_answer(tmp_path: Path) -> None:
    """As a failure that is told, with the counts so far; all that was said had been looked at."""
    looking = Looking()
    async with bench(tmp_path, ScriptedEngine(saying(SECRET), paced=True), screen=_screen(filters=looking)) as each:
        async with each.open(body={"prompt": "x", "max_tokens": 100, "stream": True}) as answer:
            said, decoder = "", FrameDecoder()
            each.engine.allow(_steps(SECRET[:24]))
            while REDACTED[:21] not in said:
                said += _text(decoder.feed(await _some(answer)))
            looking.asked.clear()
            looking.away = 1
            each.engine.free_running()
            frames = decoder.feed(await answer.read())
        assert failure_of(frames[-1]).code == "filter_failed"
        assert REDACTED.startswith(said + _text(frames))
        assert frames[-1].counts.completion_tokens > 0
        await each.quiet()


async def test_a_policy_may_let_pass_what_was_not_looked_at(tmp_path: Path) -> None:
    """Where it says so in words; how much that was is counted."""
    looking = Looking(away=10_000)
    async with bench(
        tmp_path, ScriptedEngine(saying(SECRET)), screen=_screen(filters=looking, on_failure="allow")
    ) as each:
        assert _text(await each.frames(body={"prompt": "x", "max_tokens": 100, "stream": True})) == SECRET
    assert looking.unseen == len(looking.asked) > 0


@pytest.mark.parametrize(
    ("filters", "want"),
    [
        pytest.param(Looking, False, id="all was looked at"),
        pytest.param(partial(Looking, away=1), True, id="the prompt passed unseen"),
        pytest.param(partial(Skipping, away=1, skip=1), True, id="the beginning of the answer passed unseen"),
    ],
)
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_end_says_whether_something_passed_unseen(
    tmp_path: Path, filters: Callable[[], Looking], want: bool, stream: bool
) -> None:
    """The activator gives no such answer again: by then the filters may be back."""
    async with bench(
        tmp_path, ScriptedEngine(saying(SECRET)), screen=_screen(filters=filters(), on_failure="allow")
    ) as each:
        frames = await each.frames(body={"prompt": "x", "max_tokens": 100, "stream": stream})
        assert decode(frames[-1].payload, End).unfiltered is want


def test_a_version_with_filters_is_not_served_without() -> None:
    """An installation that runs none refuses it by name, whatever its policy says of failures."""
    raw = b'{"format": 1, "on_failure": "allow", "filters": [{"filter": "pii", "output": {"US_SSN": "stop"}}]}'
    with pytest.raises(Refused, match=r"kelvin-filters\.json: .*KELVIN_FILTERS=off"):
        screen_of({FILE: raw}, None)
    assert screen_of({FILE: raw}, Looking()) is not None
    assert screen_of({}, None) is None


def test_filters_that_are_full_are_not_the_artifacts_fault() -> None:
    """A push may come again: it is not told that its file is wrong."""

    class Full(Looking):
        def ask_from_thread(self, question: Question, timeout_s: float) -> Findings:
            raise Refused(FULL)

    raw = b'{"format": 1, "filters": [{"filter": "pii", "output": {"US_SSN": "stop"}}]}'
    with pytest.raises(Refused, match=r"^overloaded: the filters' queue is full"):
        check_filters({FILE: raw}, "generate", Full())


class Away(ServiceClient):
    """A process that can't be reached, or refuses; knows what it would have been told."""

    def __init__(self, failure: Failure = AWAY) -> None:
        self._failure = failure
        self.told: list[Mapping[str, str]] = []

    async def call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: object | None = None,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        self.told.append(headers or {})
        raise Refused(self._failure)


@pytest.mark.virtual_time
@pytest.mark.parametrize("failure", [pytest.param(AWAY, id="away"), pytest.param(FULL, id="full")])
async def test_who_asks_says_how_long_it_waits(failure: Failure) -> None:
    """Of its time what is left with each try: what comes later nobody needs to look for."""
    away, question = Away(failure), Question(direction="output", rules=(), texts=("x",), whole=True)

    with pytest.raises(Refused, match=failure.code):
        await FilterProcess(away, asyncio.get_running_loop()).ask(question, 0.05)
    assert [int(each[DEADLINE]) for each in away.told] == pytest.approx([50, 30, 10], abs=1)


@pytest.mark.virtual_time
async def test_guests_texts_are_filtered_in_turns_of_the_guest() -> None:
    """Not in those of the owner, who would wait behind all guests' texts."""
    away, question = Away(), Question(direction="output", rules=(), texts=("x",), whole=True)

    filters = FilterProcess(away, asyncio.get_running_loop())
    filters.tenant = "acme"
    for guest in ("", "other"):
        with pytest.raises(Refused, match="unavailable"):
            await filters.ask(question, 0.01, guest)
    assert [each[TENANT] for each in away.told] == ["acme", "other"]


@pytest.mark.virtual_time
async def test_guests_that_ask_no_more_are_forgotten() -> None:
    """A public model has any number of guests, and a replica runs for months."""
    question = Question(direction="output", rules=(), texts=("x",), whole=True)
    filters = FilterProcess(Away(), asyncio.get_running_loop())
    for number in range(10):
        with pytest.raises(Refused, match="unavailable"):
            await filters.ask(question, 0.01, f"guest-{number}")
    gc.collect()
    assert repr(filters) == "<FilterProcess tenants=0>"


class Slow(Away):
    """Answers nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = asyncio.Event()

    async def call(self, *_: Any, headers: Mapping[str, str] | None = None, **__: Any) -> Any:
        self.told.append(headers or {})
        await self.may_answer.wait()
        return Findings(looked=())


@pytest.mark.virtual_time
async def test_questions_of_one_tenant_wait_at_the_replica() -> None:
    """Not at the filters, which all tenants share: there AT_ONCE of them are at a time. They wait until their deadline,
    and another tenant's question does not wait behind them.
    """
    slow, question = Slow(), Question(direction="output", rules=(), texts=("x",), whole=True)
    filters = FilterProcess(slow, asyncio.get_running_loop())
    filters.tenant = "acme"
    asking = [asyncio.create_task(filters.ask(question, 60.0, "guest")) for _ in range(64)]
    late = asyncio.create_task(filters.ask(question, 0.5, "guest"))
    await asyncio.sleep(0.4)
    own = asyncio.create_task(filters.ask(question, 0.5))
    with pytest.raises(Refused, match=r"0\.5 s"):
        await late
    assert Counter(each[TENANT] for each in slow.told) == {"guest": AT_ONCE, "acme": 1}
    asking.pop(0).cancel()  # leaves its place to the next one
    await asyncio.sleep(0.1)
    assert len(slow.told) == 1 + AT_ONCE + 1
    slow.may_answer.set()
    assert await own == Findings(looked=())
    assert await asyncio.gather(*asking) == [Findings(looked=())] * 63


async def test_prompt_and_answer_are_filtered_for_their_caller(tmp_path: Path) -> None:
    """A guest's are asked about as the guest's."""
    looking = Looking()
    screen = _screen(Pii(input={"US_SSN": "stop"}, output={"US_SSN": "stop"}), looking)
    async with bench(tmp_path, ScriptedEngine(saying("x y")), screen=screen) as each:
        await each.frames(body={"prompt": "x"})
        assert set(looking.guests) == {""}
        looking.guests.clear()
        await each.frames(body={"prompt": "x"}, guest="other")
        assert len(looking.guests) >= 2
        assert set(looking.guests) == {"other"}


async def test_who_leaves_while_a_filter_is_asked(tmp_path: Path) -> None:
    """The engine is let go of at once, not when the filter has answered."""
    hanging = Hanging()
    screen = _screen(Pii(output={"US_SSN": "stop"}), hanging, deadline_ms=5000)
    async with bench(tmp_path, ScriptedEngine(saying("x " * 2000)), screen=screen) as each:
        asking = asyncio.create_task(each.frames(body={"prompt": "x", "max_tokens": 20_000, "stream": True}))
        await each.until("a question about the answer", lambda: len(hanging.asked) > 0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await each.until("the engine is told", lambda: len(each.engine.cancelled) == 1)
        hanging.told.set()
        await each.quiet()


def test_a_prompt_is_as_long_as_can_be_looked_at() -> None:
    """Beyond it is refused before anybody looks."""
    looking = Looking()
    with pytest.raises(Refused, match="at most 262144"):
        asyncio.run(_screen(filters=looking).prompt(TextPrompt("a" * 262_145), "prompt"))
    assert looking.asked == []


async def test_an_answer_that_leaves_too_much_undecided() -> None:
    """Is none: what a filter holds back is bounded."""

    class Undecided(Looking):
        async def ask(self, question: Question, timeout_s: float, guest: str = "") -> Findings:
            return Findings(looked=(Looked(decided=0),))

    output = _screen(filters=Undecided()).output()
    assert output is not None
    assert (await output.push("a" * 60_000, last=False)).text == ""
    with pytest.raises(Refused, match="filter_failed"):
        await output.push("a" * 60_000, last=False)


@pytest.mark.parametrize(
    ("pii", "kind", "said"),
    [
        pytest.param('"output": {"US_SSN": "stop"}', "embed", "for models that generate", id="another kind of model"),
        pytest.param(
            '"output": {"PHONE_NUMBER": "stop"}, "phone_regions": ["XX"]', "generate", "'XX'", id="an unknown region"
        ),
    ],
)
def test_a_policy_is_tried_before_there_is_a_version(pii: str, kind: Kind, said: str) -> None:
    """What only the filters know is refused as the file's fault; a good one is not."""

    class Strict(Looking):
        def ask_from_thread(self, question: Question, timeout_s: float) -> Findings:
            for rule in question.rules:
                if (region := unknown_region(rule)) is not None:
                    raise Refused(InvalidRequest("phone_regions", repr(region), "must be a region"))
            return super().ask_from_thread(question, timeout_s)

    raw = f'{{"format": 1, "filters": [{{"filter": "pii", {pii}}}]}}'
    with pytest.raises(Refused, match=said) as refused:
        check_filters({FILE: raw.encode()}, kind, Strict())
    assert isinstance(refused.value.failure, ArtifactRejected)
    check_filters({FILE: raw.replace("XX", "DE").encode()}, "generate", Strict())
    check_filters({}, kind, None)
