"""Serve requests with an `Idempotency-Key`: run the first, let concurrent ones join it, replay its answer to later
ones.

The request is computed by a `SharedRun`, which ends early when its last listener leaves. `idempotency_policy.py`
decides what is kept, `response_broadcast.py` holds the bytes, and `api/inference_runner.py` computes a response.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from activator.accounting.request_account import Account
from activator.answers.answer_store import MAINTAIN_S, AnswerStore, Claimed, ClaimedElsewhere, ClaimResult
from activator.answers.answers_handover import Running
from activator.answers.idempotency_policy import (
    IDEMPOTENCY_HEADER,
    AnswerKey,
    AnswerStoreLimits,
    KeptAnswer,
    RunCounts,
    derive_answer_key,
    read_key,
)
from activator.answers.idempotency_secret import Sealer, StoredResponse
from activator.answers.response_broadcast import (
    RATE_LIMIT_PREFIX,
    ByteBudget,
    Listener,
    ResponseBroadcast,
    play,
    replay,
)
from activator.http.exchange import ClientGone, Exchange, Headers, now_us
from activator.limits.concurrency_limits import SharedCapacity
from activator.request.client_response import ClientResponse
from activator.request.inference_request import InferenceRequest
from kelvin.contracts.accounting.usage import is_charged
from kelvin.contracts.errors import Refused
from kelvin.contracts.traffic_errors import DeadlineExceeded, KeyInUse, KeyReused
from kelvin.process.loops import run_every
from kelvin.telemetry.policy.instruments import MetricsPage

log = logging.getLogger(__name__)

JOINED: Final = "joined"
REPLAYED: Final = "replayed"
REPLAY_CAPACITY: Final = "the room for answers that are given again"
RETRY_S: Final = 1.0
REPLAYED_HEADER: Final = (b"idempotent-replayed", b"true")
LOCAL_ONLY_HEADER: Final[Headers] = [(b"x-kelvin-idempotency", b"local")]  # the shared store was unavailable

RequestRunner = Callable[[InferenceRequest], Awaitable[None]]
ResponseWriter = Callable[[InferenceRequest, ClientResponse], Awaitable[None]]
RunFollower = Callable[[InferenceRequest, ResponseWriter], Awaitable[None]]


@dataclass(slots=True, eq=False)
class SharedRun:
    """One request that runs for all callers who sent it."""

    answer_key: AnswerKey
    account: Account
    broadcast: ResponseBroadcast
    exchange: Exchange  # writes to the broadcast
    claim_result: "asyncio.Future[ClaimResult]"

    @property
    def is_claimed(self) -> bool:
        """Return whether this process has claimed the key."""
        return (
            self.claim_result.done()
            and not self.claim_result.cancelled()
            and isinstance(self.claim_result.result(), Claimed)
        )

    @property
    def is_replayable(self) -> bool:
        """Return whether the answer may be replayed from its beginning."""
        return self.account.is_repeatable and self.broadcast.is_complete and self.broadcast.is_whole


class Idempotency:
    """Serves requests that have an idempotency key. `close` ends the running requests."""

    def __init__(self, secret: bytes, answers: AnswerStore, limits: AnswerStoreLimits, page: MetricsPage) -> None:
        self._secret = secret
        self._sealer = Sealer(secret)
        self._answers = answers
        self._limits = limits
        self._run_counts = RunCounts()
        self._byte_budget = ByteBudget(limits.nbytes)
        # each replay holds its whole answer
        self._replay_capacity = SharedCapacity(limits.nbytes, REPLAY_CAPACITY, "bytes")
        self._runs: dict[bytes, SharedRun] = {}  # by name
        self._tasks: set[asyncio.Task[None]] = set()
        self._repeats = page.counter("kelvin_repeats_total", "Requests whose key was used before.", ("answer",))
        page.gauge(
            "kelvin_keyed_run_bytes",
            "Bytes of running answers with an idempotency key.",
            lambda: self._byte_budget.used_bytes,
        )
        page.gauge("kelvin_keyed_runs", "Running requests with an idempotency key.", lambda: len(self._tasks))

    def __repr__(self) -> str:
        return f"<Idempotency runs={len(self._runs)} tasks={len(self._tasks)}>"

    async def serve(self, request: InferenceRequest, run_request: RequestRunner, follow: RunFollower) -> None:
        """Run the request by `run_request`, or answer it by `follow` from the run of an equal request.

        `follow` gives the request an account of its own. Raises Refused for a malformed key, or if the deadline passes
        before the key is claimed; ClientGone.
        """
        header_values = [value for name, value in request.exchange.headers if name == IDEMPOTENCY_HEADER]
        answer_key = derive_answer_key(
            self._secret, request.account.principal.tenant, read_key(header_values), _fingerprint_parts(request)
        )
        run = self._runs.get(answer_key.name)
        if run is not None and run.answer_key.fingerprint != answer_key.fingerprint:
            await follow(request, self._refusal(KeyReused()))
        elif run is not None and not run.broadcast.can_be_joined:  # its beginning was dropped, or it has MAX_LISTENERS
            await follow(request, self._refusal(KeyInUse(RETRY_S)))
        else:
            is_first = run is None
            await self._serve_from_run(
                run or self._start_run(answer_key, request, run_request), request, follow, is_first=is_first
            )

    async def _serve_from_run(
        self, run: SharedRun, request: InferenceRequest, follow: RunFollower, *, is_first: bool
    ) -> None:
        outcome = REPLAYED if run.broadcast.has_ended else JOINED
        with run.broadcast.listening() as listener:
            claim = await _claim_of(run, request)
            if isinstance(claim, Claimed):
                if is_first:
                    await _stream_to_owner(run, request.exchange, listener, LOCAL_ONLY_HEADER if claim.is_alone else [])
                else:
                    await follow(request, self._stream_to_follower(listener, outcome, run.account.request_id))
                return
        await follow(request, self._answer_without_run(run.answer_key, claim))

    def list_running_keys(self) -> list[Running]:
        """Return the keys whose requests run here, for the handover."""
        runs = self._runs.values()
        return [Running(run.answer_key.name, run.answer_key.fingerprint) for run in runs if run.is_claimed]

    async def run(self) -> None:
        """Maintain kept answers and claims until cancelled."""
        await run_every(MAINTAIN_S, self._answers.maintain)

    async def close(self) -> None:
        """Cancel all runs and wait for them. Each still writes its usage record."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start_run(self, answer_key: AnswerKey, request: InferenceRequest, run_request: RequestRunner) -> SharedRun:
        account = request.account
        account.charge_id = (
            "" if self._run_counts.exceeds_free_runs(answer_key.charge_id, time.monotonic()) else answer_key.charge_id
        )

        async def publish_or_remove() -> None:
            if run.is_replayable:
                await self._publish_response(run)
            else:  # later requests must not join a failed run
                self._remove_run(run)

        broadcast = ResponseBroadcast(
            self._limits.answer_bytes,
            self._byte_budget,
            on_complete=publish_or_remove,
            on_abandoned=lambda: self._remove_run(run),
        )
        inner = msgspec.structs.replace(request, exchange=request.exchange.with_destination(broadcast.send, broadcast))
        run = SharedRun(answer_key, account, broadcast, inner.exchange, asyncio.get_running_loop().create_future())
        self._runs[answer_key.name] = run
        task = asyncio.create_task(self._run(run, inner, run_request), name=f"once-{account.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run

    async def _run(self, run: SharedRun, request: InferenceRequest, run_request: RequestRunner) -> None:
        try:
            claim = await self._answers.claim(run.answer_key)
            run.claim_result.set_result(claim)
            if isinstance(claim, Claimed):
                await self._run_claimed(run, claim, request, run_request)
        finally:
            self._remove_run(run)
            run.claim_result.cancel()  # no effect if the claim is known
            run.broadcast.close()

    async def _run_claimed(
        self, run: SharedRun, claim: Claimed, request: InferenceRequest, run_request: RequestRunner
    ) -> None:
        try:
            await run_request(request)
        finally:
            # Count successful runs, too. A caller could push the answer out of the store with others, and run the key
            # again without a charge.
            if is_charged(run.account.outcome, run.account.delivered_tokens):
                self._run_counts.record_run(run.answer_key.charge_id, time.monotonic())
            if not run.is_replayable:
                await self._answers.release(run.answer_key, claim)

    async def _publish_response(self, run: SharedRun) -> None:
        """Publish the answer before a listener sees its end, so that a client with all of it can get it again
        everywhere.
        """
        claim, head = run.claim_result.result(), run.broadcast.head
        assert isinstance(claim, Claimed)
        assert head is not None
        content = StoredResponse(run.account.request_id, head.status, head.headers, run.broadcast.complete_body())
        await self._answers.publish(run.answer_key, claim, self._sealer.seal(run.answer_key, content))

    def _remove_run(self, run: SharedRun) -> None:
        if self._runs.get(run.answer_key.name) is run:
            del self._runs[run.answer_key.name]

    def _answer_without_run(self, answer_key: AnswerKey, claim: KeptAnswer | ClaimedElsewhere) -> ResponseWriter:
        if claim.fingerprint != answer_key.fingerprint:
            return self._refusal(KeyReused())
        if isinstance(claim, ClaimedElsewhere):
            return self._refusal(KeyInUse(claim.retry_after_s))
        content = self._sealer.open(answer_key, claim.sealed)
        if content is None:  # sealed with another secret, or damaged: the answer is lost
            log.error("a kept answer can't be decrypted", extra={"tenant": answer_key.tenant})
            return self._refusal(KeyInUse(RETRY_S))
        return self._replay(content)

    def _refusal(self, failure: KeyReused | KeyInUse) -> ResponseWriter:
        async def refuse(request: InferenceRequest, client_response: ClientResponse) -> None:
            self._repeats.add((failure.code,))
            raise Refused(failure)

        return refuse

    def _replay(self, content: StoredResponse) -> ResponseWriter:
        async def send(request: InferenceRequest, client_response: ClientResponse) -> None:
            with self._replay_capacity.hold(request.account.principal.tenant, len(content.body)):
                self._repeats.add((REPLAYED,))
                await replay(
                    request.exchange,
                    content,
                    [REPLAYED_HEADER],
                    lambda status: client_response.settle_replay(REPLAYED, status),
                )

        return send

    def _stream_to_follower(self, listener: Listener, outcome: str, repeat_of: str) -> ResponseWriter:
        async def repeat(request: InferenceRequest, client_response: ClientResponse) -> None:
            extra_headers: Headers = [(b"x-kelvin-repeat-of", repeat_of.encode())]
            if outcome == REPLAYED:
                extra_headers.append(REPLAYED_HEADER)
            self._repeats.add((outcome,))
            try:
                await play(
                    request.exchange,
                    listener,
                    extra_headers,
                    lambda status: client_response.settle_replay(outcome, status),
                )
            except ClientGone:  # the client left or the run broke off: no more data
                request.exchange.connection.abort()
                raise

        return repeat


async def _stream_to_owner(run: SharedRun, exchange: Exchange, listener: Listener, extra_headers: Headers) -> None:
    """Stream the run's response to its first caller, whose account is the run's."""
    with exchange.cancel_on_disconnect():
        await listener.wait_head()
        run_rates = [line for line in run.exchange.rate_headers if line[0].startswith(RATE_LIMIT_PREFIX)]
        exchange.rate_headers = list((dict(exchange.rate_headers) | dict(run_rates)).items())
        await play(exchange, listener, extra_headers)


async def _claim_of(run: SharedRun, request: InferenceRequest) -> ClaimResult:
    """Wait for the run's claim. Raises Refused(DeadlineExceeded), ClientGone."""
    if run.claim_result.done() and not run.claim_result.cancelled():
        return run.claim_result.result()
    try:
        with request.exchange.cancel_on_disconnect(request.remaining_s()):
            await asyncio.wait((run.claim_result,))
    except TimeoutError:
        waited_s = (now_us() - request.exchange.arrived_us) / 1e6
        raise Refused(DeadlineExceeded(waited_s, "claiming its key")) from None
    if run.claim_result.cancelled():
        raise ClientGone
    return run.claim_result.result()


def _fingerprint_parts(request: InferenceRequest) -> list[bytes]:
    """Return everything that the answer depends on. Deadline and priority are not part of it."""
    entry, reference = request.entry, request.reference
    names = (
        request.path,
        entry.tenant,
        entry.model,
        reference.alias or "",
        reference.version_prefix or "",
        *request.schemas,
    )
    return [*(each.encode() for each in names), request.body]
