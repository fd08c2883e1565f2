"""A fake parked standby: `/control/state`, `/control/bind` and its meter page. It imitates runtime/api/control_api.py,
runtime/lifecycle/replica.py (one version, once) and runtime/lifecycle/meter_writer.py.
"""

import asyncio
import os
import time
from pathlib import Path

from aiohttp import web

from kelvin.contracts.accounting.meter_format import Meter, Phase, encode_meter
from kelvin.contracts.artifacts.runtime_control import BindRequest, BindResponse, RuntimeReport, RuntimeState
from kelvin.contracts.errors import Conflict, Failure
from kelvin.contracts.problem import PROBLEM_CONTENT_TYPE, problem_details
from kelvin.contracts.timeline import Stage, StageSpan
from kelvin.contracts.wire import decode, encode
from tests.stub_server import StubServer


class FakeStandby:
    """A standby whose bind ends when `release` is set, with `failure` if given."""

    def __init__(self, run: Path, name: str) -> None:
        self.name = name
        self.state = RuntimeState.STANDBY
        self.bound: BindRequest | None = None
        self.binds = 0
        self.failure: Failure | None = None
        self.release = asyncio.Event()
        self._run = run
        self._page = run / "meters" / f"{os.getpid()}.{name}"
        app = web.Application()
        app.router.add_get("/control/state", self._state)
        app.router.add_post("/control/bind", self._bind)
        self._listening = StubServer(app)

    async def start(self) -> None:
        self._page.parent.mkdir(parents=True, exist_ok=True)
        self._meter(Phase.STANDBY)
        await self._listening.start(self._run / f"rt-{self.name}.sock")

    async def stop(self) -> None:
        """Break all connections and stop listening, as a killed process does."""
        await self._listening.stop()

    def _meter(self, phase: Phase) -> None:
        tenant = "" if self.bound is None else self.bound.tenant
        self._page.write_bytes(encode_meter(Meter(phase, 1, time.monotonic_ns(), tenant=tenant), 2))

    async def _state(self, request: web.Request) -> web.Response:
        bind = self.bound
        report = RuntimeReport(runtime_id=self.name, pid=os.getpid(), state=self.state)
        if bind is not None:
            report = RuntimeReport(
                runtime_id=self.name, pid=os.getpid(), state=self.state, tenant=bind.tenant, model=bind.model,
                version=bind.version, max_streams=4,
            )  # fmt: skip
        return web.Response(body=encode(report))

    async def _bind(self, request: web.Request) -> web.Response:
        bind = decode(await request.read(), BindRequest)
        self.binds += 1
        if self.state is not RuntimeState.STANDBY:
            return _refused(Conflict("state", f"is {self.state.value}"))
        self.state, self.bound = RuntimeState.RESTORING, bind
        self._meter(Phase.RESTORE)
        await self.release.wait()
        if self.failure is not None:
            self.state = RuntimeState.FAILED
            return _refused(self.failure)
        self.state = RuntimeState.READY
        self._meter(Phase.IDLE)
        return web.Response(
            body=encode(
                BindResponse(runtime_id=self.name, max_streams=4, spans=(StageSpan(Stage.READY, 9),), bytes_by_tier={})
            )
        )


def _refused(failure: Failure) -> web.Response:
    return web.Response(status=failure.status, body=problem_details(failure), content_type=PROBLEM_CONTENT_TYPE)
