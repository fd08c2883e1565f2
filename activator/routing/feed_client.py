"""Follow the control plane's feed. While it is away, the last state is used as long as `last_feed.py` allows."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Final

import aiohttp
import msgspec

from activator import dependencies
from kelvin.contracts.backoff import ExponentialBackoff
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving.control_messages import READER_HEADER, Feed
from kelvin.contracts.wire import BadJson, decoder
from kelvin.ipc.service_client import ServiceClient

log = logging.getLogger(__name__)

PATH: Final = "/internal/v1/feed"
SILENCE_S: Final = dependencies.FEED.timeout_s  # three heartbeats
MAX_LINE: Final = 256 << 20
PATIENCE_S: Final = 1.0  # wait for the control plane at the start
LONGEST_BACKOFF_S: Final = 1.0
BACKOFF: Final = ExponentialBackoff(0.05, LONGEST_BACKOFF_S)


class BrokenFeed(Exception):
    """The feed ended, fell silent, or sent invalid data."""


class FeedClient:
    """Calls `apply` with every feed message, in order, on the event loop. `synced` is set by the first snapshot, or by
    a kept earlier one. `name` is unique to this process, so the control plane recognises a reader that reconnects.
    """

    def __init__(self, control: ServiceClient, apply: Callable[[Feed], None], name: str) -> None:
        self._control = control
        self._apply = apply
        self._headers = {READER_HEADER: name}
        self.synced = asyncio.Event()
        self.connected = False

    def __repr__(self) -> str:
        return f"<FeedClient {'connected' if self.connected else 'AWAY'} synced={self.synced.is_set()}>"

    async def run(self) -> None:
        """Follow the feed until cancelled; reconnect with exponential back-off."""
        failures = 0  # since the last connection
        while True:
            try:
                await self._read_feed()
            except (BrokenFeed, Refused) as error:
                if self.connected or not failures:
                    log.warning("the feed is away; the last table stands", extra={"error": str(error)})
                failures = 0 if self.connected else failures + 1
            finally:
                self.connected = False
            await asyncio.sleep(BACKOFF.delay_s(failures + 1, random.random()))  # noqa: S311 (spreads load, keeps no secret)

    async def start_from_last_feed(self, load: Callable[[], Feed | None], apply: Callable[[Feed], None]) -> None:
        """Apply the feed that `load` finds, if the control plane is silent for PATIENCE_S. A snapshot replaces it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self.synced.wait()
        if not self.synced.is_set() and (message := load()) is not None:
            apply(message)
            self.synced.set()

    async def _read_feed(self) -> None:
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(SILENCE_S):
                    opening = self._control.open("GET", PATH, headers=self._headers)
                    response = await stack.enter_async_context(opening)
            except TimeoutError:
                raise BrokenFeed(f"no answer for {SILENCE_S:g} s") from None
            has_snapshot = False
            async for raw in _read_lines(response.content):
                try:
                    message = decoder(Feed).decode(raw)
                except BadJson as error:
                    raise BrokenFeed(f"a line does not decode: {error}") from error
                has_snapshot = has_snapshot or message.full
                if not has_snapshot:
                    raise BrokenFeed("the first line is no snapshot")
                self._apply(message)
                self.connected = True
                self.synced.set()
        raise BrokenFeed("it ended")


def with_remote_addresses(message: Feed) -> Feed:
    """Return the message for an activator on another host, with the replicas that other hosts can reach, by URL."""
    reached = (msgspec.structs.replace(row, address=row.url) for row in message.replicas if row.url)
    return msgspec.structs.replace(message, replicas=tuple(reached))


def with_pod_addresses(message: Feed) -> Feed:
    """Return the message for an activator on the control plane's host: replicas without a local socket are pods."""
    reached = (row if row.address else msgspec.structs.replace(row, address=row.url) for row in message.replicas)
    return msgspec.structs.replace(message, replicas=tuple(reached))


async def _read_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines without their newline. Raises BrokenFeed if the stream breaks or is silent for SILENCE_S."""
    buffer = bytearray()
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                data = await content.readany()
        except TimeoutError:
            raise BrokenFeed(f"silent for {SILENCE_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenFeed(repr(error)) from error
        if not data:
            return
        buffer += data
        if b"\n" in data:
            *lines, remainder = bytes(buffer).split(b"\n")
            buffer = bytearray(remainder)
            for line in lines:
                yield line
        elif len(buffer) > MAX_LINE:
            raise BrokenFeed(f"a line is over {MAX_LINE} bytes")
