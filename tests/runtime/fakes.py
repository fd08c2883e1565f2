"""An engine that follows a script, and a replica around it on a real socket: for tests of what surrounds the engine."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from contracts.control import Bind, GateFacts, GateJob, SealAttestation, SealJob
from contracts.errors import Failure, Internal, Refused
from contracts.frames import Counts, Frame, FrameDecoder
from contracts.manifest import Limits
from contracts.timeline import Span, Stage
from contracts.usage import RequestRecord
from contracts.wire import decode
from runtime.api import ServingApi
from runtime.control_api import attach, build_control_app
from runtime.engine.interface import Cancelled, Event, Failed, Finished, Generated, GenerationRequest
from runtime.engine.thread import EngineThread
from runtime.metering import MeterPage, create_meter_page
from runtime.orphans import Orphans
from runtime.pinned import SamplingDefaults
from runtime.replica import Replica, Wiring, Work
from runtime.serving import Serving
from runtime.tokenizer import TextCodec
from service.run import serve_until
from service.unix import SocketDirectory
from tests.runtime.vocabularies import files

DEADLINE_S = 20.0
BLOCKS = 64
LIMITS = Limits(max_input_tokens=300, max_output_tokens=20_000, max_streams=8, max_body_bytes=100_000)
BIND = Bind(tenant="acme", model="m", version="ab" * 32, device_class="cpu-1", threads=1, kv_bytes=1 << 20)


@dataclass
class _Sequence:
    request: GenerationRequest
    script: list[int]
    done: int = 0

    @property
    def counts(self) -> Counts:
        return Counts(len(self.request.prompt_ids), 0, self.done, self.done * 10)


class ScriptedEngine:
    """Each step says one token more of each request's script, a block each; then Finished as `stop` or `length`.

    `allow(n)` lets n steps happen where `paced`; a step takes `step_s`. `refuse`, `break_with` and `poisoned` say how
    it fails.
    """

    def __init__(
        self, script: Callable[[GenerationRequest], Sequence[int]], *, paced: bool = False, step_s: float = 0.0
    ) -> None:
        self._script = script
        self._step_s = step_s
        self._paced = paced
        self._permits = threading.Semaphore(0)
        self._live: dict[str, _Sequence] = {}
        self._pending: list[Event] = []
        self.refuse: Failure | None = None
        self.break_with: Failure | None = None
        self.poisoned: Failure | None = None
        self.needs_probe = False
        self.admitted: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.busy_ns = 0

    def allow(self, steps: int = 1) -> None:
        self._permits.release(steps)

    def free_running(self) -> None:
        self._paced = False
        self._permits.release(1)

    def admit(self, request: GenerationRequest) -> Failure | None:
        if self.refuse is not None:
            return self.refuse
        self.admitted.append(request)
        script = list(self._script(request))[: request.sampling.max_tokens]
        self._live[request.request_id] = _Sequence(request, script)
        return None

    def cancel(self, request_id: str) -> None:
        if (sequence := self._live.pop(request_id, None)) is not None:
            self.cancelled.append(request_id)
            self._pending.append(Cancelled(request_id, sequence.counts))

    def fail_all(self, failure: Failure) -> None:
        self._pending += [Failed(request_id, failure, each.counts) for request_id, each in self._live.items()]
        self._live.clear()

    def step(self) -> tuple[Event, ...]:
        if self._paced and self._live:
            assert self._permits.acquire(timeout=DEADLINE_S), "no step was allowed"
        threading.Event().wait(self._step_s)  # as long as it computes
        if self.break_with is not None:
            self.fail_all(self.break_with)
        for request_id, sequence in list(self._live.items()):
            if sequence.done < len(sequence.script):
                token = sequence.script[sequence.done]
                sequence.done += 1
                self._pending.append(Generated(request_id, token, sequence.counts))
            if sequence.done == len(sequence.script):
                del self._live[request_id]
                full = sequence.done == sequence.request.sampling.max_tokens
                self._pending.append(Finished(request_id, "length" if full else "stop", sequence.counts))
        events, self._pending = self._pending, []
        return tuple(events)

    def run_probe_alone(self) -> Failure | None:
        self.needs_probe = False
        return self.poisoned

    def check_integrity(self) -> None:
        """Nothing to check."""

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._pending)

    @property
    def running(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> int:
        return 0

    @property
    def kv_blocks_free(self) -> int:
        return BLOCKS - len(self._live)

    @property
    def kv_blocks_total(self) -> int:
        return BLOCKS


CODEC = TextCodec(files())


def saying(text: str) -> Callable[[GenerationRequest], Sequence[int]]:
    """A script that says this text to everybody."""
    ids = CODEC._tokenizer.encode(text, add_special_tokens=False).ids
    return lambda _: ids


@dataclass
class MemoryRecords:
    """Records as a spool would have them."""

    records: list[RequestRecord] = field(default_factory=list)
    written: asyncio.Event = field(default_factory=asyncio.Event)

    async def append(self, make: Callable[[int], bytes], /) -> int:
        self.records.append(decode(make(len(self.records) + 1), RequestRecord))
        self.written.set()
        return len(self.records)


def fake_work(engine: ScriptedEngine, *, failure: Failure | None = None) -> Work:
    """A restore that gives this engine at once, or fails."""

    def restore(request: Bind, wiring: Wiring) -> Serving:
        if failure is not None:
            raise Refused(failure)
        thread = EngineThread(engine, on_events=wiring.on_events, on_busy=wiring.on_busy, limit=2 * LIMITS.max_streams)
        thread.start()
        spans = (Span(Stage.LEASED, 1), Span(Stage.BOUND, 2), Span(Stage.READY, 3))
        return Serving(
            bind=request, limits=LIMITS, context_tokens=30_000, codec=CODEC, defaults=SamplingDefaults(),
            engine=engine, thread=thread, spans=spans,
        )  # fmt: skip

    def gate(job: GateJob) -> GateFacts:
        raise Refused(Internal())

    def seal(job: SealJob) -> SealAttestation:
        raise Refused(Internal())

    return Work(restore, gate, seal)


@dataclass
class Bench:
    """A replica that is served on a socket, and a client of it."""

    replica: Replica
    api: ServingApi
    engine: ScriptedEngine
    meter: MeterPage
    orphans: Orphans
    records: MemoryRecords
    session: aiohttp.ClientSession
    directory: SocketDirectory

    async def until(self, wish: str, condition: Callable[[], bool]) -> None:
        """For what happens in other threads and tasks; bounded."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition():
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise AssertionError(f"never came true: {wish}") from None

    async def quiet(self) -> None:
        """Once every answer has ended, nothing of any request is left anywhere. Lifts the engine's pace."""
        await self.until("no exchange", lambda: self.api.exchanges == 0)
        self.engine.free_running()
        await self.until("nothing runs", lambda: self.engine.running == 0 and not self.engine.has_work)
        await self.until("no stream", lambda: self.replica._streams is not None and len(self.replica._streams) == 0)
        assert self.replica._streams is not None
        self.replica._streams.check_integrity()
        assert self.engine.kv_blocks_free == BLOCKS

    def open(self, path: str = "/v1/completions", body: Mapping[str, Any] | bytes | None = None, **headers: str) -> Any:
        """A request as the activator sends it; headers by `request_id`, `deadline_ms`, `key_id`."""
        lines = {"x-kelvin-request-id": "r1"}
        lines |= {f"x-kelvin-{name.replace('_', '-')}": value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else json.dumps({"prompt": "Once"} | dict(body or {})).encode()
        return self.session.post(f"http://rt{path}", data=content, headers=lines)

    async def frames(self, *args: Any, **kwargs: Any) -> list[Frame]:
        """All frames of an answer that must be 200."""
        async with self.open(*args, **kwargs) as answer:
            assert answer.status == 200, await answer.text()
            decoder = FrameDecoder()
            frames = decoder.feed(await answer.read())
            assert decoder.is_clean
            return frames


async def frames_until(answer: aiohttp.ClientResponse, decoder: FrameDecoder, tokens: int) -> list[Frame]:
    """Frames of an answer that is being read, up to the first that counts as many tokens."""
    frames: list[Frame] = []
    async with asyncio.timeout(DEADLINE_S):
        while not frames or frames[-1].counts.completion_tokens < tokens:
            chunk = await answer.content.readany()
            assert chunk, "the answer ended"
            frames += decoder.feed(chunk)
    return frames


@asynccontextmanager
async def bench(
    tmp_path: Path, engine: ScriptedEngine, *, bound: bool = True, failure: Failure | None = None, grace_s: float = 0.05
) -> AsyncIterator[Bench]:
    """Everything of `app.serve` but the restore and the spool."""
    directory = SocketDirectory(tmp_path / "run")
    listener = directory.listen("rt-x.sock")
    meter = create_meter_page(tmp_path / "meters", "x")
    replica = Replica("x", meter, fake_work(engine, failure=failure))
    records = MemoryRecords()
    orphans = Orphans("x", lambda: records, grace_s)
    control = build_control_app()
    attach(control, replica)
    api = ServingApi(replica, orphans, control)
    connector = aiohttp.UnixConnector(path=directory.address("rt-x.sock"), limit=0)
    session = aiohttp.ClientSession(connector=connector)
    stop = asyncio.Event()
    server = asyncio.create_task(serve_until(api, listener, stop, drain_s=5))
    watcher = asyncio.create_task(replica.watch())
    try:
        if bound:
            await replica.bind(BIND)
        each = Bench(replica, api, engine, meter, orphans, records, session, directory)
        try:
            yield each
        finally:
            await each.session.close()
    finally:
        engine.free_running()
        await session.close()
        stop.set()
        watcher.cancel()
        await asyncio.wait_for(server, DEADLINE_S)
        await orphans.flush()
        await replica.close()
        directory.close()
