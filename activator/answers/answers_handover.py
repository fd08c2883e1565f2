"""Hand over kept answers and idempotency keys to the next activator process.

During a planned restart two activators accept from one socket, and each keeps answers in its own memory. A key must
still run only once. So at any moment one of them decides on keys that it does not know:

1. The new activator connects to the old one before it accepts requests. The old one decides.
2. When it is told to end, the old activator sends all kept answers and all running keys. From then on the new one
   decides. The old one starts no request with a key, and reports how its running requests end.
3. For the new activator, a key that still runs at the old one is in use elsewhere. Once the connection ends, no key is.

An activator that crashes hands nothing over. Activators that share a Redis do not need a handover.

Messages are MessagePack with a length prefix. Only the installation's own user can reach the socket, and answers are
sealed here as everywhere.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

from activator.answers.answer_store import LocalAnswerStore
from activator.answers.idempotency_policy import AnswerKey, KeptAnswer
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.race import first_completed

log = logging.getLogger(__name__)

SOCKET: Final = "once.sock"
FORMAT: Final = 1
FLUSH_S: Final = 2.0
_LENGTH: Final = 4


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message of a connection: the format of all later messages."""

    format: int


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An answer kept for its idempotency key, sealed. `age_s` is its age at the time of sending."""

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
    """A key whose request has ended without an answer to keep."""

    name: bytes


class Complete(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The end of the initial transfer. From here on the new activator decides on keys."""


Message = Hello | Answer | Running | Freed | Complete
_Queue: TypeAlias = "asyncio.Queue[Message | None]"  # None ends the stream
_decoder: Final = msgspec.msgpack.Decoder(Message)
_encoder: Final = msgspec.msgpack.Encoder()


class HandoverSender:
    """The old activator's side. Use from one event loop. `list_running_keys` returns the keys that run here."""

    def __init__(self, answers: LocalAnswerStore, list_running_keys: Callable[[], list[Running]]) -> None:
        self._answers = answers
        self._list_running_keys = list_running_keys
        self._successors: dict[_Queue, asyncio.StreamWriter] = {}  # the next activator, and failed attempts at one
        self._all_gone = asyncio.Event()  # no successor is connected
        self._all_gone.set()
        self._is_ending = False
        self._server: asyncio.Server | None = None

    def __repr__(self) -> str:
        return f"<HandoverSender successors={len(self._successors)}>"

    async def listen(self, directory: SocketDirectory) -> None:
        """Let the next activator connect. Replaces the socket of the activator before this one."""
        self._server = await asyncio.start_unix_server(self._serve, sock=directory.listen(SOCKET))

    def hand_over(self) -> None:
        """Send everything, and let the next activator decide on keys. Also applies to one that connects later."""
        self._is_ending = True
        for queue in self._successors:
            self._hand_over_to(queue)

    def _hand_over_to(self, queue: _Queue) -> None:
        for tenant, name, answer in self._answers.list_answers():
            queue.put_nowait(Answer(tenant, name, answer.fingerprint, answer.sealed, answer.age_s))
        for running in self._list_running_keys():
            queue.put_nowait(running)
        queue.put_nowait(Complete())
        self._answers.on_claim_ended = self._report_end

    def _report_end(self, answer_key: AnswerKey, answer: KeptAnswer | None) -> None:
        if answer is None:
            self._send(Freed(answer_key.name))
        else:
            self._send(Answer(answer_key.tenant, answer_key.name, answer.fingerprint, answer.sealed, answer.age_s))

    async def close(self) -> None:
        """Send what is queued, for at most FLUSH_S."""
        if self._server is not None:
            self._server.close()
        self._send(None)
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._all_gone.wait()
        except TimeoutError:
            log.warning("the next activator did not receive all idempotency keys")
            for writer in self._successors.values():
                writer.transport.abort()
            await self._all_gone.wait()

    def _send(self, message: Message | None) -> None:
        for queue in self._successors:
            queue.put_nowait(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: _Queue = asyncio.Queue()
        queue.put_nowait(Hello(FORMAT))
        self._successors[queue] = writer
        self._all_gone.clear()
        if self._is_ending:
            self._hand_over_to(queue)
        try:
            await first_completed(
                _write_all(queue, writer), reader.read(1)
            )  # the read ends when the successor disconnects
            writer.close()
            await writer.wait_closed()  # returns when the socket has accepted the rest
        except OSError as error:
            log.warning("the next activator disconnected", extra={"error": repr(error)})
        finally:
            del self._successors[queue]
            if not self._successors:
                self._all_gone.set()
            writer.close()


async def _write_all(queue: _Queue, writer: asyncio.StreamWriter) -> None:
    while (message := await queue.get()) is not None:
        data = _encoder.encode(message)
        writer.write(len(data).to_bytes(_LENGTH, "big") + data)
        await writer.drain()


class HandoverReceiver:
    """The new activator's side. Connect before accepting requests: from then on the old activator decides on keys."""

    def __init__(self, answers: LocalAnswerStore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._answers = answers
        self._reader = reader
        self._writer = writer
        answers.has_authority.clear()

    @classmethod
    async def connect(cls, answers: LocalAnswerStore, directory: SocketDirectory) -> "HandoverReceiver | None":
        """Connect to the old activator. Return None if there is none."""
        try:
            reader, writer = await asyncio.open_unix_connection(directory.address(SOCKET))
        except OSError:
            return None
        return cls(answers, reader, writer)

    async def receive(self) -> None:
        """Receive until the old activator has ended. After that this activator decides in any case."""
        try:
            while (message := await self._next()) is not None:
                match message:
                    case Hello(version):
                        if version != FORMAT:
                            log.warning("the old activator hands over in another format", extra={"is": version})
                            break
                    case Answer(tenant, name, fingerprint, sealed, age_s):
                        self._answers.inherit(tenant, name, KeptAnswer(fingerprint, sealed, age_s))
                    case Running(name, fingerprint):
                        self._answers.add_old_run(name, fingerprint)
                    case Freed(name):
                        self._answers.remove_old_run(name)
                    case Complete():
                        self._answers.has_authority.set()
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("the handover of idempotency keys broke off", extra={"error": repr(error)[:400]})
        finally:
            self._answers.end_handover()
            self._writer.close()

    async def _next(self) -> Message | None:
        """Return the next message, or None at the end of the stream. Raises OSError, msgspec.MsgspecError."""
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
            message: Message = _decoder.decode(await self._reader.readexactly(length))
            return message
        except asyncio.IncompleteReadError:
            return None
