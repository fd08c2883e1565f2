"""A client for one other node: query its chunks, and read a chunk's bytes. Callers decide whether to use it.

A node that did not answer, was busy, or sent wrong bytes is not used for a while.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp

from kelvin.contracts.backoff import ExponentialBackoff
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.numbers import parse_whole_number
from kelvin.contracts.wire import decode, encode
from kelvin.process.request_context import context_headers as request_headers
from weightcache.dependencies import PEER_ANSWERS, PEERS
from weightcache.peers.ownership_policy import ChunkState
from weightcache.peers.peer_protocol import ChunkQuery, ChunkStates, chunk_path, query_path
from weightcache.sources.policy.bdp_window import ThroughputMeter
from weightcache.sources.policy.healing import ReadOutcome

log = logging.getLogger(__name__)

CONNECT_S: Final = PEERS.timeout_s
ANSWER_S: Final = PEER_ANSWERS.timeout_s  # for a query without a wait
SILENCE_S: Final = PEER_ANSWERS.timeout_s
SLOWEST_BYTES_PER_S: Final = 1 << 20
AWAY_BACKOFF: Final = ExponentialBackoff(2.0, 60.0)
WRONG_BYTES_PAUSE_S: Final = 60.0  # after wrong bytes
MIN_BUSY_S: Final = 0.1
MAX_BUSY_S: Final = 5.0
MAX_BUSY_ANSWERS: Final = 4  # consecutive busy answers that count like no answer
QUERY: Final = "question"
CHUNK: Final = "chunk"
MAX_RESUMES: Final = 1  # resumed reads of a chunk whose response was cut


class PeerBusy(Exception):
    """The peer answers, but asks for a pause."""


class _ResponseCut(Exception):
    """The peer's response ended early. The first `done` bytes are in place."""

    def __init__(self, done: int) -> None:
        super().__init__(f"cut after {done} bytes")
        self.received_bytes = done


class Peer:
    """The node at `url`. `node` is the name that it gave itself, once it has answered. `clock` is monotonic."""

    def __init__(self, url: str, session: aiohttp.ClientSession, clock: Callable[[], float]) -> None:
        self.url = url
        self.node: str | None = None
        self.throughput = ThroughputMeter()
        self.progress_at_s = clock()  # when bytes last arrived there, as far as it reported
        self.busy_until_s = 0.0
        self._progress_count = -1
        self._session = session
        self._clock = clock
        self._away_until_s = 0.0
        self._failure_counts: Counter[str] = Counter()  # consecutive failed calls, by kind of call
        self._busy_count = 0  # consecutive busy answers

    def __repr__(self) -> str:
        return f"<Peer {self.url} {'available' if self.is_available else 'away'} {self.throughput!r}>"

    @property
    def is_available(self) -> bool:
        """Return whether the peer may be called now. True for a peer that was never called."""
        return self._clock() >= self._away_until_s

    @property
    def is_busy(self) -> bool:
        """Return whether the peer has asked for a pause."""
        return self._clock() < self.busy_until_s

    async def query_chunks(
        self, tenant: str, digests: Sequence[str], node: str | None, wait_s: float
    ) -> list[ChunkState] | None:
        """Return the peer's state of each chunk; None if it does not answer."""
        body = encode(ChunkQuery(digests=tuple(digests), node=node, wait_s=wait_s))
        timeout = aiohttp.ClientTimeout(total=wait_s + ANSWER_S, sock_connect=CONNECT_S)
        try:
            async with self._session.post(
                self.url + query_path(tenant), data=body, headers=request_headers(), timeout=timeout
            ) as response:
                raw = await response.read()
                if response.status != 200:
                    raise Refused(Unavailable("a peer"))
            answer = decode(raw, ChunkStates, field="answer of a peer")
            if len(answer.standings) != len(digests):
                raise Refused(Unavailable("a peer"))
            states = [ChunkState(letter) for letter in answer.standings]
        except (aiohttp.ClientError, TimeoutError, OSError, Refused, ValueError) as error:
            self._record_failure(error)
            return None
        self._failure_counts[QUERY] = 0  # this answer does not prove that chunks arrive
        self.node = answer.node
        if answer.moved != self._progress_count:
            self._progress_count, self.progress_at_s = answer.moved, self._clock()
        return states

    async def fetch(self, tenant: str, digest: str, into: memoryview) -> ReadOutcome:
        """Fill `into`. Return `WHOLE`, `ABSENT` or `LENGTH`. Raises PeerBusy, and `Refused(Unavailable)` if the peer is
        away. Once this returns, raises or is cancelled, nothing writes to `into`.
        """
        transfer = self.throughput.begin(self._clock())
        received_bytes = 0
        try:
            for resumed in range(MAX_RESUMES + 1):
                try:
                    outcome = await self._read(tenant, digest, into, received_bytes)
                except _ResponseCut as cut:
                    if cut.received_bytes == received_bytes or resumed == MAX_RESUMES:
                        raise
                    received_bytes = cut.received_bytes
                    continue
                if outcome is ReadOutcome.WHOLE:
                    received_bytes = into.nbytes
                self._failure_counts.clear()
                self._busy_count = 0
                return outcome
            raise AssertionError("unreachable")
        except (aiohttp.ClientError, TimeoutError, OSError, _ResponseCut) as error:
            self._record_failure(error, CHUNK)
            raise Refused(Unavailable("a peer of the weight cache")) from error
        finally:
            self.throughput.end(transfer, received_bytes, self._clock())

    def set_aside(self) -> None:
        """Don't use this peer for a while, because it sent wrong bytes."""
        if self.is_available:  # otherwise another chunk was wrong a moment ago
            fields = {"peer": self.url, "for_s": WRONG_BYTES_PAUSE_S}
            log.error("a peer sent wrong bytes and is put aside", extra=fields)
        self._away_until_s = self._clock() + WRONG_BYTES_PAUSE_S

    async def _read(self, tenant: str, digest: str, into: memoryview, first_byte: int) -> ReadOutcome:
        length = into.nbytes
        timeout = aiohttp.ClientTimeout(
            total=SILENCE_S + length / SLOWEST_BYTES_PER_S, sock_connect=CONNECT_S, sock_read=SILENCE_S
        )
        headers = request_headers({"range": f"bytes={first_byte}-"})
        url = self.url + chunk_path(tenant, digest)
        async with self._session.get(url, headers=headers, timeout=timeout) as response:
            if response.status == 404:
                return ReadOutcome.ABSENT
            if response.status == 503:
                self._record_busy(_busy_s(response.headers.get("retry-after")))
                raise PeerBusy
            if response.status not in (206, 416):
                raise aiohttp.ClientPayloadError(f"status {response.status}")
            if response.headers.get("content-range") != f"bytes {first_byte}-{length - 1}/{length}":
                return ReadOutcome.LENGTH
            received_bytes = first_byte
            try:
                async for piece in response.content.iter_any():
                    if received_bytes + len(piece) > length:
                        return ReadOutcome.LENGTH
                    into[received_bytes : received_bytes + len(piece)] = piece
                    received_bytes += len(piece)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise _ResponseCut(received_bytes) from error
            if received_bytes < length:
                raise _ResponseCut(received_bytes)
            return ReadOutcome.WHOLE

    def _record_busy(self, wait_s: float) -> None:
        if not self.is_busy:  # otherwise another running read was counted
            self._busy_count += 1
            self.busy_until_s = self._clock() + wait_s
        if self._busy_count >= MAX_BUSY_ANSWERS:
            self._busy_count = 0
            self._record_failure(PeerBusy("busy again and again"))

    def _record_failure(self, error: Exception, call: str = QUERY) -> None:
        if not self.is_available:
            return  # running calls also fail when another one has failed
        self._failure_counts[call] += 1
        wait_s = AWAY_BACKOFF.delay_s(self._failure_counts[call])
        self._away_until_s = self._clock() + wait_s
        fields = {"peer": self.url, "error": str(error) or type(error).__name__, "for_s": wait_s}
        log.warning("a peer does not answer", extra=fields)


def _busy_s(retry_after: str | None) -> float:
    """Return the seconds of a Retry-After header, within bounds; 1 for any other value."""
    seconds = parse_whole_number(retry_after or "")
    return 1.0 if seconds is None else min(max(float(seconds), MIN_BUSY_S), MAX_BUSY_S)
