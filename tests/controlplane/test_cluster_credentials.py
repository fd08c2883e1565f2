"""Who we are to a cluster, and that it is noticed when that changes."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from yarl import URL

from controlplane.scaling.knative import transport
from controlplane.scaling.knative.client import in_cluster, kubeconfig, opened
from controlplane.scaling.knative.cluster import ClusterError, Denied
from controlplane.scaling.knative.transport import Transport
from tests.cluster.api_server import ApiServer, serving
from tests.controlplane.cluster_ground import SPACE, config_map, heard, trouble
from tests.controlplane.cluster_ground import server as server
from tests.eventually import eventually


async def test_credentials_that_changed_are_read_again(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for a call that is refused for them; not all the time."""
    file = server.kubeconfig(tmp_path / "config")
    good = file.read_text()
    file.write_text(good.replace("the-token-of-tests", "of-yesterday"))
    async with opened(kubeconfig(file)) as it:
        file.write_text(good)
        assert isinstance(await trouble(it.apply(config_map("a"))), Denied)
        monkeypatch.setattr(transport, "RELOAD_S", 0.0)
        await it.apply(config_map("a"))
        file.write_text(good.replace("the-token-of-tests", "of-tomorrow"))
        await it.apply(config_map("a", "2"))


async def test_apply_under_way_goes_on_with_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that are read again may name another server. The request is then sent again to that server."""
    monkeypatch.setattr(transport, "RELOAD_S", 0.0)
    held = asyncio.Event()

    async def answered(request: web.Request) -> web.Response:
        if "127.0.0.1" not in request.host:
            return web.json_response({"from": request.host.partition(":")[0]})
        if request.method == "GET":
            return web.json_response({}, status=401)
        held.set()
        await asyncio.sleep(60)
        raise AssertionError

    app = web.Application()
    app.router.add_route("*", "/it", answered)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    hosts = iter(("127.0.0.1", "localhost"))

    async def load(configuration: Configuration) -> None:
        configuration.host = f"http://{next(hosts)}:{runner.addresses[0][1]}"

    it = Transport(load)
    try:
        applying = asyncio.create_task(it.ask("PATCH", "/it", body={}, within_s=10.0))
        await held.wait()
        assert await it.ask("GET", "/it", within_s=10.0) == {"from": "localhost"}
        assert await applying == {"from": "localhost"}
    finally:
        await it.close()
        await runner.cleanup()


async def test_who_we_are_in_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the service account's files, over TLS; when its token is replaced, watches go on, too."""
    monkeypatch.setattr(transport, "RELOAD_S", 0.0)
    with serving(tls=tmp_path) as server:
        account = server.service_account(tmp_path)
        server.namespace(SPACE)
        url = URL(server.url)
        address = {"KUBERNETES_SERVICE_HOST": str(url.host), "KUBERNETES_SERVICE_PORT": str(url.port)}
        async with opened(in_cluster(account, address)) as it, heard(it) as told:
            await it.apply(config_map("a"))
            await eventually(lambda: told.values == {"a": "1"})
            server.front.token = "another"
            server.service_account(tmp_path)
            await it.apply(config_map("a", "2"))
            await eventually(lambda: told.values == {"a": "2"})
            assert told.syncs == 1


async def test_without_a_configuration(tmp_path: Path) -> None:
    """It is said at the start."""

    for load in (kubeconfig(tmp_path / "none"), in_cluster(tmp_path, {})):
        with pytest.raises(ClusterError, match="no configuration of a cluster"):
            async with opened(load):
                pass
