"""What a parked pod is told, by the control plane alone: to take a version, and to let go of it.

Each process takes one, once: who asks for the same again is answered as before, and another one is refused until a
fresh process waits.
"""

import asyncio
from typing import TypeVar

from fastapi import FastAPI, Request, Response

from contracts.errors import CapacityExceeded, Conflict, InvalidRequest, Refused, Unavailable
from contracts.jobs import Bind, Bound, Parked, RuntimeState, Take
from contracts.traffic_errors import DeadlineExceeded
from contracts.wire import decode, encode
from runtime.replica import Replica
from service.failures import install_failure_handlers

T = TypeVar("T")


class Orders:
    """Of one process. A bind goes on when who asked for it is gone; it has ended after `within_s`, one way or the
    other, so that no pod is between the two for ever.
    """

    def __init__(self, parked: Parked, replica: Replica, end: asyncio.Event, within_s: float) -> None:
        """`end` has the process drain and end; what keeps it begins a fresh one in its place."""
        self._parked = parked
        self._replica = replica
        self._end = end
        self._within_s = within_s
        self._taken: Take | None = None
        self._binding: asyncio.Task[Bound] | None = None

    def __repr__(self) -> str:
        return f"<Orders {'parked' if self._taken is None else self._taken.version[:12]} {self._replica!r}>"

    async def bind(self, take: Take) -> Bound:
        """Serve that version. Raises `Refused`: InvalidRequest or CapacityExceeded for what would not fit here,
        Conflict for another one than is bound, Unavailable while the process ends. All of these change nothing. Any
        other failure is why the process has failed.
        """
        if self._taken is None:
            self._check(take)
            if self._end.is_set():
                raise Refused(Unavailable("this pod"))
            self._taken = take
            self._binding = asyncio.create_task(self._bind(take), name="bind")
            self._binding.add_done_callback(_seen)
        elif not _is_same(self._taken, take):
            raise Refused(Conflict("version", "another one is bound here; it must be released first"))
        elif self._replica.state is RuntimeState.DRAINING:
            raise Refused(Unavailable("this pod"))
        assert self._binding is not None
        return await asyncio.shield(self._binding)

    def release(self, take: Take) -> bool:
        """Have the process drain and end. False where nothing is bound. Raises `Refused(Conflict)` for another one."""
        if self._taken is None:
            return False
        if not _is_same(self._taken, take):
            raise Refused(Conflict("version", "another one is bound here"))
        self._end.set()
        return True

    async def _bind(self, take: Take) -> Bound:
        parked = self._parked
        bind = Bind(
            tenant=take.tenant,
            model=take.model,
            version=take.version,
            device_class=parked.device_class,
            threads=parked.threads,
            kv_bytes=parked.kv_bytes,
        )
        try:
            async with asyncio.timeout(self._within_s):
                return await self._replica.bind(bind)
        except TimeoutError:
            failure = DeadlineExceeded(self._within_s, "restoring the version")
            self._replica.fail(failure)
            raise Refused(failure) from None

    def _check(self, take: Take) -> None:
        parked = self._parked
        if take.device_class != parked.device_class:
            raise Refused(InvalidRequest("device_class", take.device_class[:80], f"must be {parked.device_class} here"))
        if take.store != parked.store:
            raise Refused(InvalidRequest("store", take.store[:200], "must be the store that this pod reads"))
        if parked.weight_bytes and take.weight_bytes > parked.weight_bytes:
            raise Refused(CapacityExceeded("this pod", take.weight_bytes, parked.weight_bytes))


def build_orders(orders: Orders, replica: Replica) -> FastAPI:
    """The routes, for a listener that knows who asks."""
    app = FastAPI(openapi_url=None)
    install_failure_handlers(app)

    @app.post("/control/bind")
    async def bind(request: Request) -> Response:
        return _json(await orders.bind(await _body(request, Take)))

    @app.post("/control/release")
    async def release(request: Request) -> Response:
        return Response(status_code=202 if orders.release(await _body(request, Take)) else 204)

    @app.get("/control/state")
    async def state() -> Response:
        return _json(replica.report())

    return app


def _is_same(one: Take, other: Take) -> bool:
    """The rest says what it needs, and that it has."""
    return (one.tenant, one.model, one.version) == (other.tenant, other.model, other.version)


def _seen(task: "asyncio.Task[Bound]") -> None:
    """Who asked may be gone: the replica keeps what went wrong."""
    if not task.cancelled():
        task.exception()


async def _body(request: Request, kind: type[T]) -> T:
    return decode(await request.body(), kind)


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")
