"""A WebSocket to Knative's autoscaler, over which load reports are sent. The autoscaler sends nothing back.

Source: knative/serving, pkg/autoscaler/statserver, pkg/websocket (98e5ef9). The autoscaler silently drops reports that
it can't read or whose Revision it does not know. So a report must be correct, and counts as delivered if the connection
is open.
"""

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

import aiohttp

from activator import dependencies
from activator.routing.policy.version_key import VersionKey, key_of
from activator.scale_link.stat_encoding import RevisionStat, encode_stats, message_class
from kelvin.contracts.serving.control_messages import ConcurrencyStat, RevisionRow
from kelvin.ipc.connector import HostConnector

log = logging.getLogger(__name__)

TIMEOUT_S: Final = dependencies.AUTOSCALER.timeout_s  # for the handshake, for sending, for closing
SILENCE_S: Final = 10.0  # without a pong for so long it is away; as in Knative's own activator
FIRST_BACKOFF_S: Final = 0.1
LONGEST_BACKOFF_S: Final = 2.0
BACKOFF_FACTOR: Final = 1.3
STATS_PER_MESSAGE: Final = 1000  # stats per message
_CONNECTION_ERRORS: Final = (aiohttp.ClientError, OSError, TimeoutError)


class AutoscalerLink:
    """A report sink for Knative's autoscaler. `revision_of` returns a version's Revision; versions without one are
    skipped.

    Unsent reports are dropped, except zeros. Without its zero, an idle version's last value would count until the end
    of the autoscaler's window.
    """

    def __init__(self, url: str, pod: str, revision_of: Callable[[VersionKey], RevisionRow | None]) -> None:
        self._url = url
        self._pod = pod
        self._revision_of = revision_of
        self._open: _Connection | None = None
        self.was_open = False  # whether it was ever open
        self._unsent_zeros: dict[VersionKey, ConcurrencyStat] = {}  # unsent reports of idle versions
        self._without_revision: set[VersionKey] = set()  # requested versions without a Revision
        message_class()  # load the message class now instead of during a request

    def __repr__(self) -> str:
        return f"<AutoscalerLink {self._url} {'connected' if self.is_open else 'AWAY'} owed={len(self._unsent_zeros)}>"

    @property
    def is_open(self) -> bool:
        """Whether the autoscaler is connected."""
        return self._open is not None and not self._open.stream.closed

    @property
    def session(self) -> object | None:
        """The open connection, or None."""
        return None if self._open is None or self._open.stream.closed else self._open.stream

    async def send(self, stats: tuple[ConcurrencyStat, ...]) -> bool:
        """Send reports. Return False if one of them was not sent, or its version has no known Revision."""
        if not self.is_open:
            self._keep_zeros(stats)
            return False
        revision_stats = list(self._to_revision_stats(stats))
        is_sent = False
        try:
            is_sent = await self.send_revision_stats(revision_stats)
        finally:
            if not is_sent:
                self._keep_zeros(stats)
        return is_sent and len(revision_stats) == len(stats)

    async def send_revision_stats(self, revision_stats: Iterable[RevisionStat]) -> bool:
        """Send reports of Revisions. Return whether they were sent. Unsent ones are dropped."""
        connection, left = self._open, iter(revision_stats)
        if connection is None or connection.stream.closed:
            return False
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while batch := list(islice(left, STATS_PER_MESSAGE)):
                    await connection.stream.send_bytes(encode_stats(self._pod, batch))
        except _CONNECTION_ERRORS as error:
            log.warning("sending to Knative's autoscaler failed", extra={"error": repr(error)})
            if self._open is connection:
                self._open = None
            connection.abort()
            return False
        return True

    async def run(self) -> None:
        """Stay connected until cancelled."""
        pause_s, sockets = FIRST_BACKOFF_S, list[socket.socket]()
        connector = HostConnector(self._url, None).aiohttp_connector(0, sockets.append)
        async with aiohttp.ClientSession(connector=connector) as session:
            while True:
                was_open = False
                try:
                    was_open = await self._follow(session, sockets)
                except _CONNECTION_ERRORS as error:
                    if pause_s == FIRST_BACKOFF_S:
                        log.warning("Knative's autoscaler is away", extra={"url": self._url, "error": repr(error)})
                pause_s = FIRST_BACKOFF_S if was_open else min(LONGEST_BACKOFF_S, pause_s * BACKOFF_FACTOR)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 (spreads load, keeps no secret)

    async def _follow(self, session: aiohttp.ClientSession, sockets: list[socket.socket]) -> bool:
        """Connect, and return when the connection ends. Raises if it can't connect. `sockets` receives the sockets of
        the attempts. All but the connected one are closed then.
        """
        sockets.clear()
        async with asyncio.timeout(TIMEOUT_S):
            websocket = await session.ws_connect(
                self._url,
                heartbeat=SILENCE_S * 2 / 3,  # plus half of that for the pong
                timeout=aiohttp.ClientWSTimeout(ws_close=TIMEOUT_S),
            )
        connection = self._open = _Connection(websocket, tuple(sockets))
        self.was_open = True
        log.info("connected to Knative's autoscaler", extra={"url": self._url})
        try:
            unsent, self._unsent_zeros = tuple(self._unsent_zeros.values()), {}
            if unsent:
                await self.send(unsent)
            async for _ in websocket:
                pass  # the autoscaler sends nothing
        finally:
            self._open = None
            await connection.close()
        log.warning("Knative's autoscaler ended the connection", extra={"url": self._url, "code": websocket.close_code})
        return True

    def _keep_zeros(self, stats: tuple[ConcurrencyStat, ...]) -> None:
        """Keep reports of idle versions that were possibly not delivered."""
        for stat in stats:
            key = key_of(stat)
            if stat.concurrency or stat.requests:
                self._unsent_zeros.pop(key, None)
            else:
                self._unsent_zeros[key] = stat

    def _to_revision_stats(self, stats: Iterable[ConcurrencyStat]) -> Iterable[RevisionStat]:
        for stat in stats:
            key = key_of(stat)
            row = self._revision_of(key)
            if row is not None:
                self._without_revision.discard(key)
                yield RevisionStat(row.namespace, row.name, stat.concurrency, stat.requests)
            elif not stat.concurrency:
                self._without_revision.discard(key)
            elif key not in self._without_revision:  # log once, however often the version is reported
                self._without_revision.add(key)
                log.warning("a version is asked for that has no Revision", extra={"version": str(key)})


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    """A connection that can be aborted. aiohttp only closes, and then waits for ever if the peer does not read."""

    stream: aiohttp.ClientWebSocketResponse
    sockets: tuple[socket.socket, ...]

    def abort(self) -> None:
        """Close the sockets now. Unsent data is lost. Idempotent."""
        for line in self.sockets:
            with suppress(OSError):  # closed already, or never connected
                line.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Close in order within TIMEOUT_S, else abort. Leaves nothing open, also if cancelled."""
        try:
            with suppress(*_CONNECTION_ERRORS):
                async with asyncio.timeout(TIMEOUT_S):
                    await self.stream.close()
        finally:
            self.abort()
