"""Fake replicas for activators: they answer, stall, drain, reject, send garbage, and die."""

import asyncio
import json
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal

from kelvin.contracts.artifact_errors import ProbeFailed, WeightsDamaged
from kelvin.contracts.errors import Failure, InvalidRequest, Unavailable
from kelvin.contracts.problem import openai_error, to_wire
from kelvin.contracts.serving.stream_frames import CONTENT_TYPE, Counts, Frame, FrameKind, encode_frame, failed_frame
from tests.simulation.core.fake_network import FakeConnection, ReceivedRequest

ReplicaBehaviour = Literal["well", "slow", "stalls", "rejects", "garbage", "foreign", "breaks", "damaged", "fails"]

FAULTY_BEHAVIOURS: Final[tuple[ReplicaBehaviour, ...]] = (
    "slow",
    "stalls",
    "rejects",
    "garbage",
    "foreign",
    "breaks",
    "damaged",
    "fails",
)
DONE: Final = b"data: [DONE]\n\n"


@dataclass(eq=False)
class FakeReplica:
    """A replica at one address of the fake network. Its responses name the request, the replica and the run."""

    name: str
    random: Random
    max_streams: int
    behaviour: ReplicaBehaviour = "well"
    ignores_connections: bool = False
    is_draining: bool = False
    runs: int = 0
    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by request id

    async def serve(self, asked: ReceivedRequest, connection: FakeConnection) -> None:
        if self.behaviour == "stalls":
            await asyncio.Event().wait()
        await asyncio.sleep(self.random.uniform(0.0, 0.002))
        if asked.method == "DELETE":
            if (task := self.running.get(asked.path.rsplit("/", 1)[1])) is not None:
                task.cancel()
            connection.respond(204)
        elif asked.path == "/v1/receipts":
            connection.respond(204)
        else:
            await self._complete(asked, connection)

    async def _complete(self, asked: ReceivedRequest, connection: FakeConnection) -> None:
        request_id = asked.fields["x-kelvin-request-id"]
        if self.behaviour == "garbage" and self.random.random() < 0.5:
            connection.send(b"\x00\x01 this is not HTTP\r\n\r\n")
            return
        if self.behaviour == "foreign":  # a proxy in between answers instead
            status = self.random.choice((500, 502, 503, 504))
            body = self.random.choice((b"<html>upstream connect error</html>", b"no healthy upstream", b'{"error": 5}'))
            connection.respond(status, body, [("content-type", "text/html")])
            return
        if self.is_draining or self.behaviour == "rejects":
            self._refuse(connection, request_id, Unavailable("this replica"))
            return
        if self.behaviour == "fails":
            self._refuse(connection, request_id, InvalidRequest("messages", "[]", "must not be empty"))
            return
        if request_id in self.running:
            self._refuse(connection, request_id, Unavailable("this request's other attempt"))
            return
        task = asyncio.current_task()
        assert task is not None
        self.running[request_id] = task
        try:
            await self._answer(asked, connection)
        finally:
            if self.running.get(request_id) is task:
                del self.running[request_id]

    def _refuse(self, connection: FakeConnection, request_id: str, failure: Failure) -> None:
        connection.respond(failure.status, openai_error(failure, request_id))

    async def _answer(self, asked: ReceivedRequest, connection: FakeConnection) -> None:
        self.runs += 1
        wanted = json.loads(asked.body)
        tag, count = f"{wanted['user']}/{self.name}/{self.runs}", wanted["max_tokens"]
        pause_s = self.random.uniform(0.002, 0.2) * (10 if self.behaviour == "slow" else 1)
        await asyncio.sleep(pause_s)
        connection.begin(200, [("content-type", CONTENT_TYPE), ("x-kelvin-runtime", self.name)])
        breaks_at = self.random.randrange(count + 1)
        for number in range(1, count + 1):
            await asyncio.sleep(pause_s)
            counts = Counts(3, 0, number, number * 1000)
            if number > breaks_at and self.behaviour == "breaks":
                connection.abort_by_peer()
                return
            if number > breaks_at and self.behaviour == "damaged":
                connection.chunk(failed_frame(to_wire(WeightsDamaged("aa" * 32)), counts))
                connection.chunk(b"")
                return
            if number > breaks_at and self.behaviour == "garbage":
                connection.chunk(b"\xff" * 40)
                return
            if wanted["stream"]:
                data = b"data: " + json.dumps({"tag": tag, "number": number}).encode() + b"\n\n"
                kind = FrameKind.DATA
            else:
                data, kind = b"", FrameKind.HEARTBEAT
            connection.chunk(encode_frame(Frame(kind, counts, data)))
        counts = Counts(3, 0, count, count * 1000)
        last = DONE if wanted["stream"] else json.dumps({"tag": tag, "number": count}).encode()
        connection.chunk(
            encode_frame(Frame(FrameKind.DATA, counts, last))
            + encode_frame(Frame(FrameKind.END, counts, b'{"finish_reason":"stop"}'))
        )
        connection.chunk(b"")


def start_failure(random: Random) -> Failure:
    """Return a reason for a failed start."""
    return random.choice((ProbeFailed("aa" * 32, "it said something else"), Unavailable("the runtime")))
