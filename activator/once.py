"""Requests with an `Idempotency-Key`: the first one runs, those beside it join it, those after it get its answer.

The work belongs to a run, and lives as long as anybody listens to it. What may be kept is `policy/once`'s, the bytes
are the `tape`'s, and how a request is answered is `completions`'.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from activator.account import Account
from activator.answer import Answer
from activator.answers_handover import Running
from activator.asking import each
from activator.budgets import is_charged
from activator.call import Call
from activator.exchange import ClientGone, Exchange, Headers, now_us
from activator.kept_answers import TEND_S, AnswerStore, Claim, Elsewhere, Mine
from activator.once_key import Content, Sealer
from activator.policy.once import HEADER, Asked, Kept, OnceLimits, RunCounts, asked, read_key
from activator.shares import Room as SharedRoom
from activator.tape import OF_THE_MOMENT, Listener, Room, Tape, play, replay
from contracts.errors import Refused
from contracts.traffic_errors import DeadlineExceeded, KeyInUse, KeyReused
from telemetry.policy.instruments import Page

log = logging.getLogger(__name__)

JOINED: Final = "joined"
REPLAYED: Final = "replayed"
GIVEN: Final = "the room for answers that are given again"
RETRY_S: Final = 1.0
AGAIN: Final = (b"idempotent-replayed", b"true")
ALONE: Final[Headers] = [(b"x-kelvin-idempotency", b"local")]  # other activators could not be asked

Work = Callable[[Call], Awaitable[None]]
Body = Callable[[Call, Answer], Awaitable[None]]
Follow = Callable[[Call, Body], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Run:
    """One request that runs for all callers who sent it."""

    asked: Asked
    account: Account
    tape: Tape
    exchange: Exchange  # with the tape
    claimed: "asyncio.Future[Claim]"

    @property
    def is_claimed(self) -> bool:
        """Return whether its key is ours to run."""
        return self.claimed.done() and not self.claimed.cancelled() and isinstance(self.claimed.result(), Mine)

    @property
    def is_good(self) -> bool:
        """Return whether its answer may be replayed from its beginning."""
        return self.account.is_repeatable and self.tape.is_complete and self.tape.is_whole


class Once:
    """Serves requests that have a key. `close` ends what runs."""

    def __init__(self, secret: bytes, answers: AnswerStore, limits: OnceLimits, page: Page) -> None:
        self._secret = secret
        self._sealer = Sealer(secret)
        self._answers = answers
        self._limits = limits
        self._run_counts = RunCounts()
        self._room = Room(limits.nbytes)
        self._given = SharedRoom(limits.nbytes, GIVEN, "bytes")  # each replay holds its whole answer
        self._runs: dict[bytes, Run] = {}  # by name
        self._tasks: set[asyncio.Task[None]] = set()
        self._repeats = page.counter("kelvin_repeats_total", "Requests whose key was used before.", ("answer",))
        page.gauge("kelvin_keyed_run_bytes", "Bytes of keyed runs' answers so far.", lambda: self._room.used_bytes)
        page.gauge("kelvin_keyed_runs", "Requests with an Idempotency-Key that run.", lambda: len(self._tasks))

    def __repr__(self) -> str:
        return f"<Once runs={len(self._runs)} tasks={len(self._tasks)}>"

    async def serve(self, call: Call, work: Work, follow: Follow) -> None:
        """Run the request by `work`, or answer it from the run of an equal one by `follow`, which has an account of its
        own. Raises Refused for a malformed key, or if the deadline passes before the key is claimed; ClientGone.
        """
        given = [value for name, value in call.exchange.headers if name == HEADER]
        what = asked(self._secret, call.account.principal.tenant, read_key(given), _parts(call))
        run = self._runs.get(what.name)
        if run is not None and run.asked.fingerprint != what.fingerprint:
            await follow(call, self._refusal(KeyReused()))
        elif run is not None and not run.tape.can_be_joined:  # too large to be kept, or MAX_LISTENERS listen
            await follow(call, self._refusal(KeyInUse(RETRY_S)))
        else:
            is_first = run is None
            await self._listen(run or self._begin(what, call, work), call, follow, is_first=is_first)

    async def _listen(self, run: Run, call: Call, follow: Follow, *, is_first: bool) -> None:
        how = REPLAYED if run.tape.ended else JOINED
        with run.tape.listening() as listener:
            claim = await _claim_of(run, call)
            if isinstance(claim, Mine):
                if is_first:
                    await _lead(run, call.exchange, listener, ALONE if claim.is_alone else [])
                else:
                    await follow(call, self._repeat(listener, how, run.account.request_id))
                return
        await follow(call, self._without_running(run.asked, claim))

    def running(self) -> list[Running]:
        """Return the keys whose requests run here."""
        runs = self._runs.values()
        return [Running(run.asked.name, run.asked.fingerprint) for run in runs if run.is_claimed]

    async def run(self) -> None:
        """Tend the kept answers and the claims, until cancelled."""
        await each(TEND_S, self._answers.tend)

    async def close(self) -> None:
        """End what runs; each still writes its record."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, what: Asked, call: Call, work: Work) -> Run:
        account = call.account
        account.once = "" if self._run_counts.are_enough(what.once, time.monotonic()) else what.once

        async def ended() -> None:
            if run.is_good:
                await self._keep(run)
            else:  # who comes from now on does not join a failure
                self._forget(run)

        tape = Tape(self._limits.answer_bytes, self._room, ended=ended, deserted=lambda: self._forget(run))
        inner = msgspec.structs.replace(call, exchange=call.exchange.through(tape.send, tape))
        run = Run(what, account, tape, inner.exchange, asyncio.get_running_loop().create_future())
        self._runs[what.name] = run
        task = asyncio.create_task(self._run(run, inner, work), name=f"once-{account.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run

    async def _run(self, run: Run, call: Call, work: Work) -> None:
        try:
            claim = await self._answers.claim(run.asked)
            run.claimed.set_result(claim)
            if isinstance(claim, Mine):
                await self._work(run, claim, call, work)
        finally:
            self._forget(run)
            run.claimed.cancel()  # of nobody who knows it already
            run.tape.close()

    async def _work(self, run: Run, claim: Mine, call: Call, work: Work) -> None:
        try:
            await work(call)
        finally:
            # A right answer counts as well: its caller can have it forgotten by asking for others, and run it again.
            if is_charged(run.account.outcome, run.account.delivered_tokens):
                self._run_counts.note(run.asked.once, time.monotonic())
            if not run.is_good:
                await self._answers.release(run.asked, claim)

    async def _keep(self, run: Run) -> None:
        """Before anybody hears the end: who has the whole answer can have it again, everywhere."""
        claim, head = run.claimed.result(), run.tape.head
        assert isinstance(claim, Mine)
        assert head is not None
        content = Content(run.account.request_id, head.status, head.headers, run.tape.content())
        await self._answers.publish(run.asked, claim, self._sealer.seal(run.asked, content))

    def _forget(self, run: Run) -> None:
        if self._runs.get(run.asked.name) is run:
            del self._runs[run.asked.name]

    def _without_running(self, what: Asked, claim: Kept | Elsewhere) -> Body:
        if claim.fingerprint != what.fingerprint:
            return self._refusal(KeyReused())
        if isinstance(claim, Elsewhere):
            return self._refusal(KeyInUse(claim.retry_after_s))
        content = self._sealer.open(what, claim.sealed)
        if content is None:  # of another secret, or damaged: nobody can say what was answered
            log.error("a kept answer can't be opened", extra={"tenant": what.tenant})
            return self._refusal(KeyInUse(RETRY_S))
        return self._replay(content)

    def _refusal(self, failure: KeyReused | KeyInUse) -> Body:
        async def refuse(call: Call, answer: Answer) -> None:
            self._repeats.add((failure.code,))
            raise Refused(failure)

        return refuse

    def _replay(self, content: Content) -> Body:
        async def send(call: Call, answer: Answer) -> None:
            with self._given.take(call.account.principal.tenant, len(content.body)):
                self._repeats.add((REPLAYED,))
                await replay(call.exchange, content, [AGAIN], lambda status: answer.repeated(REPLAYED, status))

        return send

    def _repeat(self, listener: Listener, how: str, of: str) -> Body:
        async def repeat(call: Call, answer: Answer) -> None:
            marks: Headers = [(b"x-kelvin-repeat-of", of.encode())]
            if how == REPLAYED:
                marks.append(AGAIN)
            self._repeats.add((how,))
            try:
                await play(call.exchange, listener, marks, lambda status: answer.repeated(how, status))
            except ClientGone:  # the client, or the run: either way nothing more comes
                call.exchange.connection.abort()
                raise

        return repeat


async def _lead(run: Run, exchange: Exchange, listener: Listener, marks: Headers) -> None:
    """The first one's answer: its account is the run's, and so is what comes of it."""
    with exchange.leaving_ends():
        await listener.head()
        known = [line for line in run.exchange.rates if line[0].startswith(OF_THE_MOMENT)]
        exchange.rates = list((dict(exchange.rates) | dict(known)).items())
        await play(exchange, listener, marks)


async def _claim_of(run: Run, call: Call) -> Claim:
    """Wait for the run's claim. Raises Refused(DeadlineExceeded), ClientGone."""
    if run.claimed.done() and not run.claimed.cancelled():
        return run.claimed.result()
    try:
        with call.exchange.leaving_ends(call.remaining_s()):
            await asyncio.wait((run.claimed,))
    except TimeoutError:
        waited_s = (now_us() - call.exchange.arrived_us) / 1e6
        raise Refused(DeadlineExceeded(waited_s, "claiming its key")) from None
    if run.claimed.cancelled():
        raise ClientGone
    return run.claimed.result()


def _parts(call: Call) -> list[bytes]:
    """All that an answer depends on. Not when it must be there, nor who goes first."""
    entry, reference = call.entry, call.reference
    named = (call.path, entry.tenant, entry.model, reference.alias or "", reference.version_prefix or "", *call.schemas)
    return [*(each.encode() for each in named), call.body]
