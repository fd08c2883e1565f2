"""Hand over what is known of idempotency keys to the activator that takes this one's place.

During a planned change two activators accept from one socket, and each keeps answers in its own memory. So that a key
still runs once:

1. The new activator connects to the old one before it accepts, and decides on no key yet.
2. When the old one is told to end, it hands over all answers that it keeps and the keys whose requests run. From then
   on it begins no request with a key, and tells how those that run end.
3. The new one decides from then on, or once the old one has gone. A key whose request runs at the old one is in use
   elsewhere.

An activator that died hands nothing over. Where activators share a Redis they need none of this.

Messages are MessagePack behind their length. The socket is reached by the installation's own user only; answers are
sealed as everywhere.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from activator.kept_answers import OwnAnswers
from activator.policy.once import Kept
from service.first import first
from service.unix import SocketDirectory

log = logging.getLogger(__name__)

SOCKET: Final = "once.sock"
FORMAT: Final = 1
MAX_MESSAGE: Final = 64 << 20  # over any answer that may be kept
FLUSH_S: Final = 2.0
_LENGTH: Final = 4


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message of a handover."""

    format: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An answer that is kept."""

    tenant: str
    name: bytes
    fingerprint: bytes
    sealed: bytes
    age_s: float


class Running(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A key whose request runs at the old activator."""

    name: bytes
    fingerprint: bytes


class Freed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """It does not run there any more, and has no answer that is kept."""

    name: bytes


class Complete(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """All that was known has been handed over; what follows is news."""


Message = Hello | Answer | Running | Freed | Complete
_Queue: TypeAlias = "asyncio.Queue[Message | None]"  # None: nothing follows
_decoder: Final = msgspec.msgpack.Decoder(Message)
_encoder: Final = msgspec.msgpack.Encoder()


class Handover:
    """The old activator's side. Used on one event loop. `running` lists keys whose requests run here."""

    def __init__(self, answers: OwnAnswers, running: Callable[[], list[Running]]) -> None:
        self._answers = answers
        self._running = running
        self._successors: dict[_Queue, asyncio.StreamWriter] = {}
        self._nobody = asyncio.Event()  # no successor is connected
        self._nobody.set()
        self._server: asyncio.Server | None = None

    def __repr__(self) -> str:
        return f"<Handover successors={len(self._successors)}>"

    async def listen(self, directory: SocketDirectory) -> None:
        """Let the next activator connect, in place of whoever listened before."""
        self._server = await asyncio.start_unix_server(self._serve, sock=directory.listen(SOCKET))

    def give(self) -> None:
        """Hand over to the activator that has connected. Does nothing where none has."""
        if not self._successors or self._answers.heir is not None:
            return
        known: list[Message] = [
            *(Answer(each.tenant, each.name, each.kept.fingerprint, each.kept.sealed, each.age_s)
              for each in self._answers.all()),
            *self._running(),
            Complete(),
        ]  # fmt: skip
        self._answers.heir = self
        for message in known:
            self._tell(message)

    def published(self, tenant: str, name: bytes, kept: Kept) -> None:
        """A request that ran has an answer that is kept."""
        self._tell(Answer(tenant, name, kept.fingerprint, kept.sealed, 0.0))

    def released(self, name: bytes) -> None:
        """A request that ran has none."""
        self._tell(Freed(name))

    async def close(self) -> None:
        """Send what is left, as far as that is quick."""
        if self._server is not None:
            self._server.close()
        self._tell(None)
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._nobody.wait()
        except TimeoutError:
            log.warning("the next activator did not take all that is known of keys")
            for writer in self._successors.values():
                writer.transport.abort()
            await self._nobody.wait()

    def _tell(self, message: Message | None) -> None:
        for queue in self._successors:
            queue.put_nowait(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: _Queue = asyncio.Queue()
        queue.put_nowait(Hello(FORMAT))
        self._successors[queue] = writer
        self._nobody.clear()
        try:
            await first(_send(queue, writer), reader.read(1))  # a successor says nothing but that it has gone
        except OSError as error:
            log.warning("the next activator has gone", extra={"error": repr(error)})
        finally:
            del self._successors[queue]
            if not self._successors:
                self._nobody.set()
            writer.close()


async def _send(queue: _Queue, writer: asyncio.StreamWriter) -> None:
    """Send what is in the queue until a None ends it."""
    while (message := await queue.get()) is not None:
        data = _encoder.encode(message)
        writer.write(len(data).to_bytes(_LENGTH, "big") + data)
        await writer.drain()


class Inheritance:
    """The new activator's side: what the one before it knows. Make it before anything is accepted."""

    def __init__(self, answers: OwnAnswers, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answers = answers
        self._reader = reader
        self._writer = writer
        answers.decides.clear()

    @classmethod
    async def connect(cls, answers: OwnAnswers, directory: SocketDirectory) -> "Inheritance | None":
        """None where no activator is there that could hand anything over."""
        try:
            reader, writer = await asyncio.open_unix_connection(directory.address(SOCKET))
        except OSError:
            return None
        return cls(answers, reader, writer)

    async def take(self) -> None:
        """Take over all that is handed over, until the old activator has ended."""
        try:
            while (message := await self._next()) is not None:
                match message:
                    case Hello(version):
                        if version != FORMAT:
                            log.warning("the activator before this one hands over otherwise", extra={"is": version})
                            break
                    case Answer(tenant, name, fingerprint, sealed, age_s):
                        self._answers.inherit(tenant, name, Kept(fingerprint, sealed), age_s)
                    case Running(name, fingerprint):
                        self._answers.runs_elsewhere(name, fingerprint)
                    case Freed(name):
                        self._answers.freed_elsewhere(name)
                    case Complete():
                        self._answers.decides.set()
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("not all that is known of keys was handed over", extra={"error": repr(error)[:400]})
        finally:
            self._answers.end_inheritance()
            self._writer.close()

    async def _next(self) -> Message | None:
        """None at the end."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
            if length > MAX_MESSAGE:
                raise ValueError(f"a message of {length} bytes: {MAX_MESSAGE} at most")
            message: Message = _decoder.decode(await self._reader.readexactly(length))
            return message
        except asyncio.IncompleteReadError:
            return None
