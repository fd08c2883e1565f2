"""Transport: the credentials for a cluster, and how a change of them is noticed."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from yarl import URL

from controlplane.knative.apply import transport
from controlplane.knative.apply.cluster import ClusterError, Denied
from controlplane.knative.apply.kubernetes_client import kubeconfig, open_cluster, service_account_loader
from controlplane.knative.apply.transport import Transport
from tests.cluster.kube_api.api_server import ApiServer, serving
from tests.controlplane.knative.api_server_fixture import NAMESPACE, api_failure, config_map, watch_objects
from tests.controlplane.knative.api_server_fixture import server as server
from tests.eventually import eventually


async def test_credentials_that_changed_are_read_again(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read once after a refused call, at most every RELOAD_S."""
    file = server.kubeconfig(tmp_path / "config")
    good = file.read_text()
    file.write_text(good.replace("the-token-of-tests", "of-yesterday"))
    async with open_cluster(kubeconfig(file)) as it:
        file.write_text(good)
        assert isinstance(await api_failure(it.apply(config_map("a"))), Denied)
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
        applying = asyncio.create_task(it.send_request("PATCH", "/it", body={}, limit_s=10.0))
        await held.wait()
        assert await it.send_request("GET", "/it", limit_s=10.0) == {"from": "localhost"}
        assert await applying == {"from": "localhost"}
    finally:
        await it.close()
        await runner.cleanup()


async def test_service_account_credentials_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client uses the service account's files over TLS. Watches continue after the token is replaced."""
    monkeypatch.setattr(transport, "RELOAD_S", 0.0)
    with serving(tls=tmp_path) as server:
        account = server.service_account(tmp_path)
        server.namespace(NAMESPACE)
        url = URL(server.url)
        address = {"KUBERNETES_SERVICE_HOST": str(url.host), "KUBERNETES_SERVICE_PORT": str(url.port)}
        async with open_cluster(service_account_loader(account, address)) as it, watch_objects(it) as log:
            await it.apply(config_map("a"))
            await eventually(lambda: log.values == {"a": "1"})
            server.front.token = "another"
            server.service_account(tmp_path)
            await it.apply(config_map("a", "2"))
            await eventually(lambda: log.values == {"a": "2"})
            assert log.syncs == 1


async def test_missing_configuration_fails_at_start(tmp_path: Path) -> None:
    for load in (kubeconfig(tmp_path / "none"), service_account_loader(tmp_path, {})):
        with pytest.raises(ClusterError, match="no configuration of a cluster"):
            async with open_cluster(load):
                pass
