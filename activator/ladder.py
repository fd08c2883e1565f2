"""The ladder of a model: what a request gets of less quality where it would be late, or refused. Which steps are tried,
and when, is `policy/ladder`'s.

Nothing changes once the client has a head, which says what was given up, or a replica has begun.
"""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, NamedTuple

from activator.account import Degraded
from activator.answer import Answer
from activator.cache import Answers, Caching
from activator.call import Call
from activator.keys import VersionKey, key_of
from activator.policy.ask import Rank
from activator.policy.body import estimate
from activator.policy.ladder import Waits, reached, relieved, spares
from activator.policy.traffic import ModelEntry, resolve
from activator.reporter import Reporter
from activator.table import Table
from activator.throttler import Throttler
from contracts.control import VersionRow
from contracts.errors import InvalidRequest, Refused
from contracts.kinds import PATHS
from contracts.ladder import HEADER, Cached, CapOutput, Fallback, Rung
from contracts.names import DEFAULT_ALIAS, ModelReference, owner_of

_HEADER: Final = HEADER.encode()
_NEVER: Final = b"never"

At = Callable[[VersionRow], Awaitable[None]]  # answer the call at that version, as the call says by now


class _Job(NamedTuple):
    call: Call
    row: VersionRow  # of what was asked
    answer: Answer
    at: At
    last: Caching | None


class Ladders:
    """Of all models that have one. `last`: answers that a step may give again. `clock` is monotonic seconds."""

    def __init__(
        self,
        table: Table,
        throttler: Throttler,
        reporter: Reporter,
        last: Answers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._throttler = throttler
        self._reporter = reporter
        self._last = last
        self._clock = clock
        self._waits: Waits[tuple[VersionKey, str, Rank]] = Waits()

    def __repr__(self) -> str:
        return f"<Ladders waits={len(self._waits)}>"

    def holds(self, call: Call) -> bool:
        """Whether the request may get less than it asks for. Raises Refused(InvalidRequest) for a bad header."""
        value = call.exchange.header(_HEADER)
        if value is not None:
            if value != _NEVER:
                raise Refused(InvalidRequest(HEADER, f"({len(value)} bytes)", "must be never"))
            return False
        return call.reference.alias == DEFAULT_ALIAS and bool(self._ladder(call))

    async def serve(self, call: Call, row: VersionRow, answer: Answer, at: At) -> None:
        """Answer it: as it is, or by a step. Raises Refused, with what came of the request as it is."""
        ladder, key = self._ladder(call), key_of(row)
        last = self._last_of(call, row, ladder)
        job = _Job(call, row, answer, at, last)
        wait_s, is_start = self._wait_s(call, key)
        tried = reached(ladder, wait_s, call.rank, is_start=is_start)
        for rung in tried:
            if await self._try(rung, job, wait_s):
                return
        try:
            await at(row)
        except Refused as refused:
            code = refused.failure.code
            if not relieved(refused.failure.status, code):
                raise
            for rung in ladder:
                if _is_untouched(call) and rung not in tried and spares(rung, code) and await self._try(rung, job):
                    return
            raise
        if last is not None:
            last.keep(call)

    def _ladder(self, call: Call) -> tuple[Rung, ...]:
        """The model's, for the plan of the tenant that asks."""
        entry = call.entry
        if not entry.plan_ladders:
            return entry.ladder
        return entry.ladder_for(self._table.limits(call.account.principal.tenant).plan)

    def _last_of(self, call: Call, row: VersionRow, ladder: tuple[Rung, ...]) -> Caching | None:
        """What a step of this ladder may answer the request with, and to which it adds what it is answered."""
        if not any(isinstance(rung, Cached) for rung in ladder):
            return None
        what = self._last.name(call, row.version)
        if what is None:
            return None
        caching = Caching(self._last, what)
        caching.listen(call.exchange, [])
        return caching

    async def _try(self, rung: Rung, job: _Job, wait_s: float | None = None) -> bool:
        """Whether that step answered it, which is to spare it a wait, or a refusal; else the call is as it was."""
        call, row, account = job.call, job.row, job.call.account
        before = call.entry, call.ceiling, call.key, call.ask, account.model, account.version
        match rung:
            case CapOutput(tokens=tokens):
                if estimate(call.wanted, 0, row, call.ceiling).output <= tokens:
                    return False
                call.ceiling = replace(call.ceiling, cap_tokens=tokens)
                told = f"cap-output={tokens}"
                account.degraded = Degraded("cap-output", told, told, account.model)
            case Fallback(model=model):
                found = self._other(call, model, wait_s)
                if found is None:
                    return False
                call.entry, row = found
                asked = account.model
                account.model, account.version = call.entry.name_for(account.principal.tenant), row.version
                account.degraded = Degraded("fallback", f"fallback={account.model}", f"fallback-of={asked}", asked)
            case Cached(age_s=age_s):
                with self._passing_over(job, wait_s):
                    return job.last is not None and await job.last.try_last(call, job.answer, age_s)
        try:
            with self._passing_over(job, None if row is job.row else wait_s):
                await job.at(row)
        except Refused:
            if not _is_untouched(call):
                raise
            call.entry, call.ceiling, call.key, call.ask, account.model, account.version = before
            account.degraded = None
            return False
        return True

    @contextmanager
    def _passing_over(self, job: _Job, wait_s: float | None) -> Iterator[None]:
        """The decider hears of a request for the version that it does not wait for: who is spared a wait wanted it."""
        if wait_s is None:  # it was told when the request was refused
            yield
            return
        key = key_of(job.row)
        self._reporter.began(key, lambda _: True)
        self._throttler.want(key, wait_s)  # says at once that it was asked for, where it is at zero
        try:
            yield
        finally:
            self._reporter.ended(key)

    def _other(self, call: Call, named: str, wait_s: float | None) -> tuple[ModelEntry, VersionRow] | None:
        """The model that is asked instead, and its version; None where this caller or this request may not be answered
        by it, or where it is not known to be sooner than `wait_s`.
        """
        who = call.account.principal
        owner, model = owner_of(call.entry.tenant, named)
        entry = self._table.callable(who.tenant, owner, model)
        if entry is None or not who.may_call(entry.name_for(who.tenant)):
            return None
        try:
            row = resolve(ModelReference(model, DEFAULT_ALIAS, None), entry, call.who_of(entry))
        except Refused:
            return None
        wanted, limits = call.wanted.output_tokens, row.limits
        if call.path not in PATHS[row.kind] or len(call.body) > limits.max_body_bytes:
            return None
        if wanted is not None and wanted > limits.max_output_tokens:
            return None
        if wait_s is not None:
            key = key_of(row)
            other_s, is_start = self._throttler.wait_of(key, who.tenant, call.rank)
            if (is_start and other_s is None) or (other_s or 0.0) >= wait_s:
                return None
        return entry, row

    def _wait_s(self, call: Call, key: VersionKey) -> tuple[float, bool]:
        """That the request may expect, and whether it is for a start: that only gets less, and is taken as it is."""
        tenant = call.account.principal.tenant
        wait_s, is_start = self._throttler.wait_of(key, tenant, call.rank)
        if is_start:
            return wait_s or 0.0, True
        return self._waits.seen((key, tenant, call.rank), wait_s or 0.0, self._clock()), False


def _is_untouched(call: Call) -> bool:
    """Whether no replica has begun, the client has nothing, and there is time."""
    return call.account.runtime_id is None and not call.exchange.started and call.remaining_s() > 0
