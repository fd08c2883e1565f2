"""A call is repeated while that may help and its time lasts, and a failure reads the same whoever wrote it."""

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import pytest

from contracts.errors import Conflict, Failure, NotFound, Refused, Unauthenticated, Unavailable
from contracts.problem import openai_error, problem_details
from contracts.push import CommitStep, Committing, Missing
from contracts.traffic_errors import Overloaded
from contracts.wire import encode
from kelvin.client import failure_of
from kelvin.push_calls import Patience, PushCalls

Answer = httpx.Response | Exception


class ScriptedDoor(httpx.Client):
    """Answers in order; the last one stays."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__(transport=httpx.MockTransport(self._answer), base_url="https://door")
        self.answers, self.calls = answers, 0

    def _answer(self, request: httpx.Request) -> httpx.Response:
        assert request.extensions["timeout"]["read"] is not None
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class Clock:
    """Virtual time: sleeping is what moves it."""

    now: float = 1000.0
    pauses: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def patience(self, chance: float = 1.0) -> Patience:
        return Patience(clock=lambda: self.now, sleep=self.sleep, chance=lambda: chance)


def problem(failure: Failure) -> httpx.Response:
    return httpx.Response(failure.status, content=problem_details(failure))


NOTHING = Missing(plan_id="0" * 32, digests=(), version="f" * 64, exists=True)
GOOD = httpx.Response(200, content=encode(NOTHING))
CUT = httpx.ReadError("cut")


def missing(calls: PushCalls) -> Missing:
    return calls.missing("0" * 32, ())


@pytest.mark.parametrize(
    ("before", "calls"),
    [
        pytest.param([], 1, id="at once"),
        pytest.param([CUT, CUT], 3, id="after two cuts"),
        pytest.param([httpx.ConnectError("refused")], 2, id="after a refused connection"),
        pytest.param([httpx.ReadTimeout("slow")], 2, id="after a timeout"),
        pytest.param([problem(Unavailable("the control plane"))], 2, id="after a 503"),
        pytest.param([httpx.Response(502, content=b"<html>")], 2, id="after a 502 of whoever stands between"),
        pytest.param([httpx.Response(503, content=openai_error(Unavailable("x")))], 2, id="after a 503 of the door"),
    ],
)
def test_repeats(before: list[Answer], calls: int) -> None:
    """What passes is waited out."""
    door, clock = ScriptedDoor([*before, GOOD]), Clock()
    assert missing(PushCalls(door, clock.patience())) == NOTHING
    assert door.calls == calls
    assert len(clock.pauses) == calls - 1


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(NotFound("plan", "x"), id="an unknown plan"),
        pytest.param(Conflict("commit", "no"), id="a conflict"),
        pytest.param(Unauthenticated(), id="a wrong key"),
    ],
)
def test_does_not_repeat(failure: Failure) -> None:
    """What stays is told at once, with its code and status."""
    door = ScriptedDoor([problem(failure)])
    with pytest.raises(Refused) as caught:
        missing(PushCalls(door, Clock().patience()))
    assert door.calls == 1
    assert (caught.value.failure.code, caught.value.failure.status) == (failure.code, failure.status)
    assert caught.value.failure.message == failure.message


def test_redirect_is_no_success() -> None:
    """A login proxy at the URL sends the chunk elsewhere: it was not stored."""
    door = ScriptedDoor([httpx.Response(302, headers={"location": "https://login"})])
    with pytest.raises(Refused, match=r"https://door/push/v1/plans/0+/chunks/f+ answered 302: is the URL Kelvin's\?"):
        PushCalls(door, Clock().patience()).put_chunk("0" * 32, "f" * 64, b"bytes")
    assert door.calls == 1


def test_gives_up() -> None:
    """Before the first answer soon, after it late; pauses grow to a cap."""
    clock = Clock()
    door = ScriptedDoor([CUT])
    with pytest.raises(Refused, match="the installation is not available"):
        missing(PushCalls(door, clock.patience()))
    assert 5 < clock.now - 1000 <= 10
    door, clock = ScriptedDoor([GOOD, CUT]), Clock()
    calls = PushCalls(door, clock.patience())
    missing(calls)
    with pytest.raises(Refused):
        missing(calls)
    assert 100 < clock.now - 1000 <= 120
    assert clock.pauses == sorted(clock.pauses)
    assert max(clock.pauses) == 5.0


def test_one_that_is_full_is_there() -> None:
    """Its answer counts as its first: who is told to wait for a turn is as patient as later on."""
    clock = Clock()
    with pytest.raises(Refused, match="turn"):
        missing(PushCalls(ScriptedDoor([problem(Overloaded("a turn", 1, 5.0))]), clock.patience()))
    assert 100 < clock.now - 1000 <= 120


def test_waits_as_asked() -> None:
    """A time to wait that the answer names is kept, whatever chance says."""
    clock = Clock()
    missing(PushCalls(ScriptedDoor([problem(Overloaded("x", 1, 7.0)), GOOD]), clock.patience(chance=0.0)))
    assert clock.pauses == [7.0]


def test_distrust() -> None:
    """A certificate that does not verify won't verify by repeating."""

    def untrusted() -> Exception:
        try:
            try:
                reason = ssl.SSLCertVerificationError()
                reason.verify_message = "self-signed certificate"
                raise reason
            except ssl.SSLError as cause:
                raise httpx.ConnectError("tls") from cause
        except httpx.ConnectError as error:
            return error

    door = ScriptedDoor([untrusted()])
    with pytest.raises(Refused, match="not trusted: self-signed certificate"):
        missing(PushCalls(door, Clock().patience()))
    assert door.calls == 1


def test_a_commit_that_runs_on() -> None:
    """202 is not yet a version."""
    running = httpx.Response(202, content=encode(Committing(step=CommitStep.SEALING)))
    calls = PushCalls(ScriptedDoor([running]), Clock().patience())
    assert calls.commit("0" * 32, ()) == Committing(step=CommitStep.SEALING)


@pytest.mark.parametrize(
    ("content", "code", "after_s"),
    [
        pytest.param(problem_details, "overloaded", 3.0, id="a problem"),
        pytest.param(openai_error, "overloaded", 4.0, id="an error of the door"),
        pytest.param(lambda failure: b"<html>", "unavailable", 4.0, id="a page of whoever stands between"),
        pytest.param(lambda failure: b'{"a": 1}', "unavailable", 4.0, id="other JSON"),
    ],
)
def test_failure_of(content: Callable[[Failure], bytes], code: str, after_s: float) -> None:
    """Code, retry and time to wait, from any of these forms."""
    answer = httpx.Response(503, content=content(Overloaded("x", 1, 3.0)), headers={"retry-after": "4"})
    found = failure_of(answer)
    assert found.message
    assert (found.remote_code, found.remote_status, found.remote_retryable) == (code, 503, True)
    assert found.retry_after_s == after_s


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"title": "Too Many Requests", "status": 429, "detail": "slow down"}', id="problem details"),
        pytest.param(b'{"error": {"message": "slow down", "code": 429}}', id="an error with a number for its code"),
        pytest.param(b'{"error": {"message": "slow down"}}', id="an error without a code"),
    ],
)
def test_words_of_another_server_on_the_way(content: bytes) -> None:
    """Are passed on, and the request may be repeated."""
    found = failure_of(httpx.Response(429, content=content))
    assert (found.message, found.remote_retryable) == ("slow down", True)
