"""Which connector an address gives. Plain http:// is only allowed to processes that reach pods."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
from aiohttp import web

from kelvin.contracts.roles import Role
from kelvin.ipc.connector import ConnectorFactory, HostConnector
from kelvin.ipc.peer_settings import is_remote
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory
from tests.stub_server import StubServer


async def test_plain_http_is_for_pods_alone(tmp_path: Path) -> None:
    """Only a factory with `pods=True` accepts http://. Others refuse it and name the address."""
    app = web.Application()
    app.router.add_get("/name", _name)
    listening = StubServer(app)
    url = f"http://127.0.0.1:{await listening.start_at()}"
    with closing(SocketDirectory(tmp_path)) as directory:
        client = ServiceClient.from_connector(
            ConnectorFactory(directory, pods=True).connector_to(url, Role.RUNTIME), "the pod"
        )
        try:
            assert await client.call("GET", "/name", str, timeout_s=10) == "pod"
        finally:
            await client.close()
        with pytest.raises(ValueError, match=f"^{url}: must be https://$"):
            ConnectorFactory(directory).connector_to(url, Role.RUNTIME)
    await listening.stop()


async def _name(_: web.Request) -> web.Response:
    return web.json_response("pod")


@pytest.mark.parametrize(
    ("address", "want"),
    [("rt-r1.sock", False), ("https://h:1", True), ("http://192.0.2.1:8012", True), ("https.sock", False)],
)
def test_remote_address_is_told_by_its_prefix(address: str, want: bool) -> None:
    assert is_remote(address) is want


async def test_invalid_host_name_is_an_oserror() -> None:
    """Like other connection failures, it is an OSError, so that a retrying caller needs no special case."""
    with pytest.raises(OSError, match=r"^http://a\.\.b:80: "):
        await HostConnector("http://a..b:80", None).connect(asyncio.Protocol)
