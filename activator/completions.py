"""Serve one completion, from its key to its last byte. A request that names no model of the caller leaves no record."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from activator.allowances import Allowances
from activator.answer import Answer, internal
from activator.attempts import Attempts
from activator.authenticate import Authenticator
from activator.cache import HEADER as CACHE
from activator.cache import ResponseCache
from activator.call import WAITING, Call, open_call
from activator.exchange import ClientGone, Exchange, RequestLimits, now_us
from activator.keys import VersionKey, key_of
from activator.ladder import Ladders
from activator.once import Once
from activator.policy.ask import Ask
from activator.policy.body import ceiling_of, estimate
from activator.policy.expected import UNKNOWN, Outlook, for_caller
from activator.policy.once import HEADER
from activator.policy.traffic import ModelEntry, Standing, answering, find_version, resolve
from activator.reporter import Reporter
from activator.routes import Complete
from activator.shares import Room
from activator.table import Table
from activator.throttler import Throttler
from activator.under_way import UnderWay
from activator.usage import Usage
from contracts.control import Scope, StartProblem, VersionRow
from contracts.errors import BodyTooLarge, ModelNotFound, Refused, Unavailable
from contracts.kinds import INFER, PATHS, other_kind
from contracts.problem import open_inference_error, openai_error
from contracts.signature import check_schema
from contracts.timeline import Stage
from contracts.traffic_errors import Cancelled, DeadlineExceeded


class Completions:
    """Serves completions, chats, embeddings and predictions."""

    def __init__(
        self,
        authenticator: Authenticator,
        table: Table,
        throttler: Throttler,
        reporter: Reporter,
        attempts: Attempts,
        usage: Usage,
        limits: RequestLimits,
        allowances: Allowances,
        under_way: UnderWay,
        once: Once,
        cache: ResponseCache,
        ladders: Ladders,
        unread: Room,
    ) -> None:
        """`unread` has a place for each request that waits for its body."""
        self._authenticator = authenticator
        self._table = table
        self._throttler = throttler
        self._reporter = reporter
        self._attempts = attempts
        self._usage = usage
        self._limits = limits
        self._allowances = allowances
        self._under_way = under_way
        self._once = once
        self._cache = cache
        self._ladders = ladders
        self._unread = unread
        self._room = Room(limits.body_bytes_in_all, "the room for request bodies", "bytes")

    async def serve(self, exchange: Exchange, asked: Complete) -> None:
        """Answer it. Raises Refused for what names no model of the caller's: such a request leaves no record."""
        principal = await self._authenticator.authenticate(exchange, Scope.INFER)
        own = self._table.limits(principal.tenant)
        body_bytes = self._limits.body_bytes if own.body_bytes is None else own.body_bytes
        place = await self._allowances.place(principal.tenant, own)
        with place, self._room.take(principal.tenant, exchange.body_bound(body_bytes)) as taken:
            await self._allowances.enter(exchange, principal.tenant, own)
            raw = await exchange.read_body(body_bytes, self._limits.body_s, self._unread, principal.tenant)
            taken.shrink(len(raw))
            call = open_call(exchange, asked, raw, principal, own, self._table, self._limits.deadline_s)
            if exchange.header(HEADER) is None:
                await self._work(call)
            else:
                await self._once.serve(call, self._work, self._serve)

    async def _work(self, call: Call) -> None:
        """Run it, whoever hears the answer."""
        try:
            await self._serve(call, self._run)
        finally:
            self._allowances.settle(call)
            if call.upstream is not None and call.account.is_recorded:
                call.upstream.recorded()

    async def _serve(self, call: Call, body: Callable[[Call, Answer], Awaitable[None]]) -> None:
        """Answer it with what `body` says; however that ends, there is an answer and a record."""
        exchange = call.exchange
        form = open_inference_error if call.path == INFER else openai_error

        def outlook() -> Outlook:
            if call.key is None or call.ask is None or call.stage not in WAITING:
                return UNKNOWN
            return self._throttler.outlook(call.key, call.ask, call.deadline)

        answer = Answer(exchange, call.account, self._usage, self._limits.hold_s, lambda: call.stage, form, outlook)
        entry = self._under_way.enter(call.account, exchange.own_id)
        try:
            with exchange.leaving_ends(call.remaining_s()) as task, entry.on(task):
                await body(call, answer)
        except Refused as refused:
            self._note_problem(call, outlook())
            await answer.fail(refused.failure)
        except TimeoutError:
            waited_s = (now_us() - exchange.arrived_us) / 1e6
            problem = self._note_problem(call, outlook())
            await answer.fail(DeadlineExceeded(waited_s, call.stage, "" if problem is None else problem.message))
        except ClientGone:
            await answer.leave(Cancelled())
        except asyncio.CancelledError:  # the drain's time is over; what is left to do is bounded, and must be done
            if (current := asyncio.current_task()) is not None:
                current.uncancel()
            await answer.fail(Unavailable("this activator"))
        except Exception as error:
            await answer.fail(internal(error, exchange.request_id))
        finally:
            self._under_way.leave(entry)

    def _note_problem(self, call: Call, seen: Outlook) -> StartProblem | None:
        """Record for the timeline why no replica started, as far as the caller may read it."""
        if seen.problem is not None and call.key is not None:
            is_owner = call.account.principal.tenant == call.key.tenant
            call.account.start_problem = for_caller(seen.problem, is_owner)
        return call.account.start_problem

    async def _run(self, call: Call, answer: Answer) -> None:
        """Answer the request at the version that its reference names.

        While the request waits, the version may be deleted or the alias moved. Then the reference is resolved again,
        unless the client already has the head, which names the version.
        """
        while True:
            try:
                row = self._resolve(call)
                caching = None if call.exchange.header(CACHE) is None else self._cache.open(call, row.version)
                if caching is not None and await caching.try_answer(call.exchange, call, answer):
                    return
                if self._ladders.holds(call):
                    await self._ladders.serve(call, row, answer, lambda row: self._at(row, call, answer))
                else:
                    await self._at(row, call, answer)
                if caching is not None and call.account.degraded is None:
                    caching.keep(call)
                return
            except Refused as refused:
                if not isinstance(refused.failure, ModelNotFound) or not self._try_update(call):
                    raise

    def _try_update(self, call: Call) -> bool:
        """Update the model's entry. Return whether the reference names another version now."""
        entry = self._table.callable(call.account.principal.tenant, call.entry.tenant, call.entry.model)
        if entry is None or call.exchange.started or _named(call, entry) in (None, _named(call, call.entry)):
            return False
        call.entry = entry
        return True

    def _is_current(self, call: Call, key: VersionKey) -> bool:
        """Return whether the request still goes to that version: it exists, and the reference still names it.

        Once the client has the head, the version only has to exist.
        """
        entry = self._table.callable(call.account.principal.tenant, call.entry.tenant, call.entry.model)
        if entry is call.entry:
            return True
        if entry is None or find_version(entry, key.version) is None:
            return False
        return call.exchange.started or _named(call, entry) == _named(call, call.entry)

    def _resolve(self, call: Call) -> VersionRow:
        """Return the version that answers. Raises Refused if it doesn't take such a request."""
        row = resolve(call.reference, call.entry, call.who_of(call.entry))
        if call.entry.meanwhile and call.reference.alias is not None:
            row = answering(row, call.entry, self._standing)
        call.account.version = row.version
        if call.path not in PATHS[row.kind]:
            raise Refused(other_kind(call.reference.model, row.kind))
        if row.signature is not None:
            for given in call.schemas:
                check_schema(given, row.signature)
        if len(call.body) > row.limits.max_body_bytes:
            raise Refused(BodyTooLarge(row.limits.max_body_bytes))
        if (refusal := self._usage.refusal) is not None:  # take on nothing that could not be recorded
            raise Refused(refusal)
        call.ceiling = ceiling_of(call.wanted, call.own)
        return row

    def _standing(self, row: VersionRow) -> Standing:
        return self._throttler.standing(key_of(row))

    async def _at(self, row: VersionRow, call: Call, answer: Answer) -> None:
        """Answer it at that version. Raises Refused."""
        key = call.key = key_of(row)
        nbytes = len(call.body)
        tenant, most = call.account.principal.tenant, estimate(call.wanted, nbytes, row, call.ceiling)
        ask = call.ask = Ask(tenant, nbytes, most.tokens, call.rank, call.affinity, call.own.weight or 1)
        await self._allowances.reserve(call, most)
        call.account.timeline.stamp(Stage.ROUTED, now_us())
        # A version at zero is told by waking it: two stats would be added up.
        self._reporter.began(key, self._throttler.is_asleep, call)
        try:
            answer.hold()
            await self._attempts.serve(key, ask, call, answer, partial(self._is_current, call, key))
            await answer.complete()
        finally:
            self._reporter.ended(key, call)


def _named(call: Call, entry: ModelEntry) -> str | None:
    """Return the version that the request's reference names in `entry`, or None."""
    try:
        return resolve(call.reference, entry, call.who_of(entry)).version
    except Refused:
        return None
