"""A scripted engine in a replica on a real socket, for tests of the engine's surroundings."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from fastapi import FastAPI

from kelvin.contracts.accounting.usage import RequestRecord
from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.artifacts.runtime_control import BindRequest, GateFacts, GateJob, SealAttestation, SealJob
from kelvin.contracts.errors import Failure, Internal, Refused
from kelvin.contracts.problem import WireFailure
from kelvin.contracts.serving.stream_frames import Frame, FrameDecoder, FrameKind
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.wire import decode
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.process.service_lifecycle import serve_until
from runtime.api.control_api import attach_replica, build_control_app
from runtime.api.inference_api import ServingApi
from runtime.api.orphan_records import OrphanRecords
from runtime.drivers.engine_thread import EngineThread
from runtime.drivers.interface import GenerationRequest
from runtime.lifecycle.meter_writer import MeterWriter, create_meter_page
from runtime.lifecycle.replica import ReplicaOperations, RuntimeReplica
from runtime.models.pinned_files import SamplingDefaults
from runtime.surface.filter_pipeline import FilterPipeline
from runtime.surface.served_version import EngineCallbacks, ServedDecoder, SuspendHandle
from runtime.text.tokenizer import TextCodec
from tests.runtime.scripted_engine import BLOCKS, ScriptedEngine
from tests.runtime.vocabularies import files

DEADLINE_S = 20.0
LIMITS = Limits(max_input_tokens=300, max_output_tokens=20_000, max_streams=8, max_body_bytes=100_000)
BIND = BindRequest(tenant="acme", model="m", version="ab" * 32, device_class="cpu-1", threads=1, kv_bytes=1 << 20)
TEXT = "naïve 中文 text"
CODEC = TextCodec(files())


def script_of(text: str) -> Callable[[GenerationRequest], Sequence[int]]:
    """Return a script that says this text for every request."""
    ids = CODEC._tokenizer.encode(text, add_special_tokens=False).ids
    return lambda _: ids


@dataclass
class MemoryRecords:
    """Usage records in memory instead of a spool."""

    records: list[RequestRecord] = field(default_factory=list)
    written: asyncio.Event = field(default_factory=asyncio.Event)

    async def append(self, make: Callable[[int], bytes], /) -> int:
        self.records.append(decode(make(len(self.records) + 1), RequestRecord))
        self.written.set()
        return len(self.records)


def fake_work(
    engine: ScriptedEngine,
    *,
    failure: Failure | None = None,
    resume: Callable[[BindRequest, EngineCallbacks], ServedDecoder] | None = None,
    release_weights: Callable[[], None] = lambda: None,
    suspend: Callable[[], None] = lambda: None,
    filter_pipeline: FilterPipeline | None = None,
) -> ReplicaOperations:
    """Return operations that restore this engine at once, or fail. A resume restores it too, or calls `resume`."""

    def restore(request: BindRequest, callbacks: EngineCallbacks) -> ServedDecoder:
        if failure is not None:
            raise Refused(failure)
        thread = EngineThread(
            engine, on_events=callbacks.on_events, on_busy=callbacks.on_busy, max_requests=2 * LIMITS.max_streams
        )
        thread.start()
        spans = (StageSpan(Stage.LEASED, 1), StageSpan(Stage.BOUND, 2), StageSpan(Stage.READY, 3))
        return ServedDecoder(
            bind=request, limits=LIMITS, context_tokens=30_000, codec=CODEC, defaults=SamplingDefaults(),
            engine=engine, thread=thread, spans=spans, filter_pipeline=filter_pipeline,
            suspend_handle=SuspendHandle(suspend, resume or restore, release_weights),
        )  # fmt: skip

    def gate(job: GateJob) -> GateFacts:
        raise Refused(Internal())

    def seal(job: SealJob) -> SealAttestation:
        raise Refused(Internal())

    return ReplicaOperations(restore, gate, seal)


def replica_of(tmp_path: Path, work: ReplicaOperations | None = None, failure: Failure | None = None) -> RuntimeReplica:
    """Return a parked replica without surroundings."""
    work = work or fake_work(ScriptedEngine(script_of("hello")), failure=failure)
    return RuntimeReplica("rt1", create_meter_page(tmp_path, "rt1"), work)


LIVE_ACTIVATOR = "activator-lives"  # any other activator is dead


@dataclass
class ReplicaServer:
    """A replica served on a socket, and its client."""

    replica: RuntimeReplica
    api: ServingApi
    engine: ScriptedEngine
    meter: MeterWriter
    orphans: OrphanRecords
    records: MemoryRecords
    session: aiohttp.ClientSession
    directory: SocketDirectory

    async def until(self, wish: str, condition: Callable[[], bool]) -> None:
        """Wait for a change by other threads and tasks, up to DEADLINE_S."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition():
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise AssertionError(f"never came true: {wish}") from None

    async def wait_until_idle(self) -> None:
        """Let the engine run freely, and wait until nothing of any request is left."""
        await self.until("no exchange", lambda: self.api.served_requests == 0)
        self.engine.run_freely()
        await self.until("nothing runs", lambda: self.engine.running == 0 and not self.engine.has_work)
        await self.until("no stream", lambda: self.replica._streams is not None and len(self.replica._streams) == 0)
        assert self.replica._streams is not None
        self.replica._streams.check_integrity()
        await self.until("no request is inside", lambda: self.replica.credits.active_requests == 0)
        self.replica.credits.check_integrity()
        assert self.engine.kv_blocks_free == BLOCKS

    def open(self, path: str = "/v1/completions", body: Mapping[str, Any] | bytes | None = None, **headers: str) -> Any:
        """Send a request like the activator. Keyword arguments are `x-kelvin-` headers with underscores."""
        lines = {"x-kelvin-request-id": "r1", "x-kelvin-source": LIVE_ACTIVATOR}
        lines |= {f"x-kelvin-{name.replace('_', '-')}": value for name, value in headers.items()}
        content = body if isinstance(body, bytes) else json.dumps({"prompt": "Once"} | dict(body or {})).encode()
        return self.session.post(f"http://rt{path}", data=content, headers=lines)

    async def send_receipt(self, request_id: str, tokens: int, *, recorded: bool = False) -> None:
        """Send a receipt for a request."""
        receipt = {"request_id": request_id, "completion_tokens": tokens, "recorded": recorded}
        async with self.session.post("http://rt/v1/receipts", json={"receipts": [receipt]}) as answer:
            assert answer.status == 204, await answer.text()

    async def frames(self, *args: Any, **kwargs: Any) -> list[Frame]:
        """Return all frames of an answer that must be 200."""
        async with self.open(*args, **kwargs) as answer:
            assert answer.status == 200, await answer.text()
            decoder = FrameDecoder()
            frames = decoder.feed(await answer.read())
            assert decoder.is_clean
            return frames


async def frames_until(answer: aiohttp.ClientResponse, decoder: FrameDecoder, tokens: int) -> list[Frame]:
    """Read frames until the first that counts this many tokens."""
    frames: list[Frame] = []
    async with asyncio.timeout(DEADLINE_S):
        while not frames or frames[-1].counts.completion_tokens < tokens:
            chunk = await answer.content.readany()
            assert chunk, "the answer ended"
            frames += decoder.feed(chunk)
    return frames


@asynccontextmanager
async def serve_replica(
    tmp_path: Path,
    engine: ScriptedEngine,
    *,
    bound: bool = True,
    failure: Failure | None = None,
    grace_s: float = 0.05,
    filter_pipeline: FilterPipeline | None = None,
    probes: FastAPI | None = None,
    step_s: float = math.inf,
) -> AsyncIterator[ReplicaServer]:
    """Run everything of `app.serve` except the restore and the spool; with `probes`, as in a pod."""
    directory = SocketDirectory(tmp_path / "run")
    listener = directory.listen("rt-x.sock")
    meter = create_meter_page(tmp_path / "meters", "x")
    replica = RuntimeReplica(
        "x", meter, fake_work(engine, failure=failure, filter_pipeline=filter_pipeline), step_s=step_s
    )
    records = MemoryRecords()
    orphans = OrphanRecords("x", records.append, lambda source: source == LIVE_ACTIVATOR, grace_s)
    control = probes or build_control_app()
    attach_replica(control, replica)
    api = ServingApi(replica, orphans, control, in_pod=probes is not None)
    connector = aiohttp.UnixConnector(path=directory.address("rt-x.sock"), limit=0)
    session = aiohttp.ClientSession(connector=connector)
    stop = asyncio.Event()
    server = asyncio.create_task(serve_until(api, listener, stop, drain_s=5))
    watcher = asyncio.create_task(replica.watch())
    try:
        if bound:
            await replica.bind(BIND)
        each = ReplicaServer(replica, api, engine, meter, orphans, records, session, directory)
        try:
            yield each
        finally:
            await each.session.close()
    finally:
        engine.run_freely()
        await session.close()
        stop.set()
        watcher.cancel()
        await asyncio.wait_for(server, DEADLINE_S)
        await orphans.flush()
        await replica.close()
        directory.close()


def data_of(frames: list[Frame]) -> bytes:
    return b"".join(frame.payload for frame in frames if frame.kind is FrameKind.DATA)


def events_of(frames: list[Frame]) -> list[Any]:
    return [json.loads(line[6:]) for line in data_of(frames).decode().splitlines() if line.startswith("data: {")]


def failure_of(frame: Frame) -> WireFailure:
    assert frame.kind is FrameKind.FAILED
    return msgspec.json.decode(frame.payload, type=WireFailure)
