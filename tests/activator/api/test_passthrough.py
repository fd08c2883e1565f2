"""The admin and push APIs: scopes, forwarded headers, upload bounds, and paths that are not forwarded."""

import asyncio
import json
import ssl
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import web

from activator.api import passthrough
from activator.api.passthrough import CALLS_OF_TENANT, Passthrough
from activator.app.settings import read_settings
from activator.auth.authenticator import Authenticator
from kelvin.contracts.errors import Refused, Unavailable
from kelvin.contracts.serving.control_messages import Principal, Scope
from kelvin.ipc.connector import HostConnector
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.tcp_listener import listen
from tests.activator.control import ADMIN, KEY, FakeControl, key_row
from tests.activator.exchanges import exchange
from tests.activator.world import ActivatorWorld, world
from tests.eventually import eventually
from tests.stub_server import StubServer

PUSHER = "kv-pusherpusher-" + "p" * 43


def _problem(body: bytes) -> str:
    found = json.loads(body)
    assert set(found) >= {"type", "title", "status", "detail"}
    code: str = found["code"]
    return code


async def test_principal_header_is_set_by_the_activator_only(tmp_path: Path) -> None:
    """The principal comes from the key. The client's principal header, key and hop-by-hop headers are dropped."""

    async with world(tmp_path) as here:
        got = await here.request(
            "PUT", "/admin/v1/models/m@x/scale?a=1&b=%2F", b'{"min":1}', ADMIN,
            x_kelvin_principal='{"key_id":"k","tenant":"stranger","scopes":["admin"]}', x_kelvin_else="1",
            x_request_id="mine", connection="x-hop", x_hop="1", content_type="application/json",
        )  # fmt: skip
        assert (got.status, got.body) == (201, b'echo:{"min":1}')
        assert got.headers["x-client-request-id"] == "mine"
        assert got.headers["x-request-id"].startswith("req_")
        assert "x-kelvin-secret" not in got.headers
        assert got.headers["x-fine"] == "yes"
        method, path, headers, _ = here.control.forwarded_requests[-1]
        assert (method, path) == ("PUT", "/admin/v1/models/m@x/scale?a=1&b=%2F")
        lower = {name.lower(): value for name, value in headers.items()}
        assert json.loads(lower["x-kelvin-principal"]) == {
            "key_id": "k2", "tenant": "default", "scopes": ["infer", "admin"],
        }  # fmt: skip
        assert lower["x-request-id"] == got.headers["x-request-id"]
        assert not {"authorization", "x-kelvin-else", "x-hop"} & set(lower)


async def test_refusals_are_problem_details(tmp_path: Path) -> None:
    """A missing key or scope or an absent service gives RFC 9457 problem details. Nothing reaches the service."""

    async with world(tmp_path) as here:
        got = await here.get("/admin/v1/status", key="wrong")
        assert (got.status, _problem(got.body)) == (401, "invalid_api_key")
        assert got.headers["www-authenticate"] == "Bearer"
        got = await here.get("/admin/v1/status", key=KEY)
        assert (got.status, _problem(got.body)) == (403, "insufficient_scope")
        got = await here.get("/push/v1/plans", key=ADMIN)
        assert (got.status, _problem(got.body)) == (503, "unavailable")
        assert here.control.forwarded_requests == []
        assert (await here.get("/admin/v1/status", key=ADMIN)).status == 201  # control


@pytest.mark.parametrize(
    ("path", "detail"),
    [
        pytest.param(
            "/admin/v1/billing/report?month=2026-11", "has none of the scopes 'admin', 'billing:read'", id="the bill"
        ),
        pytest.param(
            "/admin/v1/billing/report/",
            "has none of the scopes 'admin', 'billing:read'",
            id="the bill with a trailing slash",
        ),
        pytest.param("/push/v1/plans", "lacks the scope 'push'", id="a push"),
    ],
)
async def test_refusal_names_every_scope_of_the_api(tmp_path: Path, path: str, detail: str) -> None:
    """The activator knows the scopes of the API. The service behind it checks the scope of the route."""
    async with world(tmp_path) as here:
        got = await here.get(path, key=KEY)
        assert (got.status, json.loads(got.body)["detail"]) == (403, f"this key {detail}")
        assert (await here.get(path, key=ADMIN)).status != 403


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/internal/v1/usage/requests", id="the plain path"),
        pytest.param("/admin/v1/../../internal/v1/stats", id="parent folders"),
        pytest.param("/admin/v1/%2e%2e/%2e%2e/internal/v1/stats", id="escaped"),
        pytest.param("/admin/v1/..%2f..%2finternal/v1/stats", id="escaped slashes"),
        pytest.param("/default/internal/v1/stats", id="below a tenant"),
    ],
)
async def test_internal_routes_have_no_way_in(tmp_path: Path, path: str) -> None:
    """No spelling of a path reaches an internal route."""

    async with world(tmp_path) as here:
        reader, writer = await here.raw(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN}\r\n\r\n".encode()
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
        writer.transport.abort()
        assert here.control.forwarded_requests == []


async def test_uploads_are_streamed_and_bounded(tmp_path: Path) -> None:
    """A chunk of 8 MiB passes. A body over the bound is refused by its length or while it is received."""

    async with world(tmp_path, upload_bytes=9 << 20) as here:
        body = bytes(range(256)) * (8 << 12)
        snapshotter = await _snapshotter(here)
        got = await here.request("PUT", "/push/v1/plans/p/chunks/d", body, ADMIN)
        assert got.body == b"echo:" + body
        got = await here.request("PUT", "/push/v1/plans/p/chunks/d", body + body, ADMIN)
        assert (got.status, _problem(got.body)) == (413, "request_too_large")

        async def growing() -> object:
            for _ in range(20):
                yield bytes(1 << 20)

        headers = {"authorization": f"Bearer {ADMIN}"}
        try:
            async with here.client.put(here.url + "/push/v1/x", data=growing(), headers=headers) as answer:
                assert answer.status == 413
        except ConnectionError:
            pass  # refused while the client was still sending
        assert len(snapshotter.forwarded_requests) == 1
        await snapshotter.stop()


async def _snapshotter(here: ActivatorWorld) -> FakeControl:
    """Start the same echo service as the snapshotter."""
    run = here.data / "run"
    (run / "control.sock").rename(run / "kept.sock")
    fake = FakeControl()
    await fake.start(run)
    (run / "control.sock").rename(run / "snapshotter.sock")
    (run / "kept.sock").rename(run / "control.sock")
    return fake


@pytest.mark.parametrize("service", ["admin", "push"])
async def test_slow_uploads_hold_up_no_other_tenant(tmp_path: Path, service: str) -> None:
    """One tenant has all its uploads stalled. Another tenant's call is served; one more of its own gets 503."""

    async with world(tmp_path, body_rate=0) as here:
        snapshotter = await _snapshotter(here)
        here.control.publish(keys=(key_row("k8", PUSHER, "other", Scope.PUSH, Scope.ADMIN),))
        head = f"PUT /{service}/v1/x HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN}\r\n"
        stalled = []
        for _ in range(CALLS_OF_TENANT):
            _, writer = await here.raw(f"{head}Content-Length: 10000\r\n\r\n.".encode())
            stalled.append(writer)
        behind = here.control if service == "admin" else snapshotter
        await eventually(lambda: behind.started_requests >= CALLS_OF_TENANT, "they are being received")
        async with asyncio.timeout(5):
            assert (await here.request("PUT", f"/{service}/v1/x", b"1", PUSHER)).status == 201
            refused = await here.request("PUT", f"/{service}/v1/x", b"1", ADMIN)
            assert (refused.status, _problem(refused.body)) == (503, "overloaded")
        for writer in stalled:
            writer.transport.abort()
        await snapshotter.stop()


async def test_client_deadline_limits_internal_calls(tmp_path: Path) -> None:
    """The client's deadline gives 504 though the service is slow. An invalid deadline is refused at once."""
    held = asyncio.Event()

    async def hold(request: web.Request) -> web.Response:
        await held.wait()
        return web.Response(body=b"late")

    async with world(tmp_path) as here:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", hold)
        snapshotter = StubServer(app)
        await snapshotter.start(here.data / "run" / "snapshotter.sock")
        try:
            key = {"key": PUSHER, "x_kelvin_deadline_ms": "200"}
            await here.publish(keys=(key_row("k8", PUSHER, "default", Scope.PUSH),))
            got = await here.get("/push/v1/plans", **key)
            assert (got.status, _problem(got.body)) == (504, "deadline_exceeded")
            got = await here.get("/push/v1/plans", **(key | {"x_kelvin_deadline_ms": "soon"}))
            assert (got.status, _problem(got.body)) == (400, "invalid_request")
            held.set()
            got = await here.get("/push/v1/plans", **(key | {"x_kelvin_deadline_ms": "60000"}))
            assert (got.status, got.body) == (200, b"late")
        finally:
            held.set()
            await snapshotter.stop()


class _Admin(Authenticator):
    """Let every request in."""

    def __init__(self) -> None: ...

    async def authenticate(self, *_: object) -> Principal:
        return Principal(key_id="k", tenant="default", scopes=(Scope.ADMIN,))


async def test_host_without_tls_handshake_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connect timeout includes the handshake. The answer names no deadline, because none has passed."""
    monkeypatch.setattr(passthrough, "CONNECT_S", {"admin": 0.05})
    limits = read_settings({"KELVIN_DATA": "/unused"}).request
    with closing(listen("127.0.0.1", 0)) as listener:
        way = HostConnector(f"https://127.0.0.1:{listener.getsockname()[1]}", ssl.create_default_context())
        service = ServiceClient.from_connector(way, "the control plane", limit=0)
        try:
            with pytest.raises(Refused) as refused:
                await Passthrough(_Admin(), {"admin": service}, limits).serve(exchange(), "admin")
        finally:
            await service.close()
    assert refused.value.failure == Unavailable("the admin service")
