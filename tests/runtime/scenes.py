"""How tests of the serving routes are written: a scene on a bench, and what its frames say."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from contracts.frames import Frame, FrameKind
from contracts.problem import WireFailure
from tests.runtime.engine.scripted import ScriptedEngine
from tests.runtime.fakes import Bench, bench

TEXT = "naïve 中文 text"


def play(tmp_path: Path, engine: ScriptedEngine, scene: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with bench(tmp_path, engine, **options) as each:
            await scene(each)

    asyncio.run(main())


def data_of(frames: list[Frame]) -> bytes:
    return b"".join(frame.payload for frame in frames if frame.kind is FrameKind.DATA)


def events_of(frames: list[Frame]) -> list[Any]:
    return [json.loads(line[6:]) for line in data_of(frames).decode().splitlines() if line.startswith("data: {")]


def failure_of(frame: Frame) -> WireFailure:
    assert frame.kind is FrameKind.FAILED
    return msgspec.json.decode(frame.payload, type=WireFailure)
