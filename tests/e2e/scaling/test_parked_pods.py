"""Control plane, activator and a parked pod as real processes, beside a fake cluster and autoscaler."""

import asyncio
import json
import signal
import ssl
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from coldstart_bench.harness.installation import free_port, running_installation
from controlplane.knative.policy.pool_service import LISTEN_PORT
from kelvin.contracts.roles import Role
from tests.activator.scale_link.knative_autoscaler import StrictAutoscaler
from tests.cluster.fake_knative import FEATURES, FakeKnative, make_tenant_namespace
from tests.cluster.fake_knative import SETTINGS as ON_CLUSTER
from tests.cluster.kube_api.api_server import serving
from tests.cluster.test_pools import ADDRESS, POOLS, SERVICE, appears, cost
from tests.controlplane.control_plane_server import connect_client, control_plane_process
from tests.e2e.conftest import SETTINGS
from tests.e2e.installation_processes import service
from tests.eventually import eventually
from tests.faults.s3_buckets import ENVIRONMENT, Buckets
from tests.kelvin.crypto.pki import Authority, write
from tests.kelvin.orders import Orders
from tests.runtime.processes import poll_until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(300)]

BODY: Final = {"model": "llama", "prompt": "hello", "max_tokens": 3, "temperature": 0}
NAME: Final = f"{POOLS}/{SERVICE}-00001"


def test_a_request_at_zero_takes_the_pod_that_waits(
    llama: Path, tmp_path: Path, buckets: Buckets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request at zero is answered by the parked pod, also while the control plane is dead.
    Knative sees two pods from then on. The next control plane adopts the pod, and releases it with its model."""
    data, store = tmp_path / "data", buckets.url(buckets.make())
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with running_installation(data, settings={**SETTINGS, "KELVIN_STORE": store}) as kelvin:
        kelvin.push(llama, "llama")
        want = kelvin.client.request("POST", "/v1/completions", BODY)["choices"]
    inner, authority, port = tmp_path / "inner", Authority(), free_port()
    for role in Role:
        write(inner / role, authority.of(role), authority)
    settings = ON_CLUSTER | {
        "cluster_store": store, "cluster_device_class": "cpu-1", "cluster_pools": "small=1000000000:1:4",
        "cluster_pooled": "*/*", "inner_tls": str(inner), "control_listen": f"127.0.0.1:{free_port()}",
    }  # fmt: skip
    waits = Orders(inner, LISTEN_PORT, host=ADDRESS)
    kept = ["--store", store, "--host", ADDRESS, "--port", str(port), "--data", str(tmp_path / "pod")]

    async def main(knative: FakeKnative, autoscaler: StrictAutoscaler) -> None:
        def start() -> Any:
            (data / "run" / "control.sock").unlink(missing_ok=True)
            return control_plane_process(data, **settings)

        def heard() -> float:
            found = [each.concurrency for each in autoscaler.stats if each.revision == NAME]
            return found[-1] if found else 0.0

        async def ask() -> Any:
            async with client.post(f"{url}/v1/completions", json=BODY, headers=key) as answer:
                assert answer.status == 200, await answer.text()
                return json.loads(await answer.read())["choices"]

        url = f"https://localhost:{(front := free_port())}"
        key = {"authorization": f"Bearer {(data / 'default.key').read_text().strip()}"}
        tls = ssl.create_default_context(cafile=str(data / "ca.pem"))
        with (
            start() as control,
            service(
                tmp_path / "activator.log",
                {**SETTINGS, "KELVIN_DATA": str(data), "KELVIN_PORT": str(front), "KELVIN_AUTOSCALER": autoscaler.url},
                "activator",
            ),
        ):
            await eventually(lambda: knative.services() == {SERVICE}, "the pool's Service alone")
            appears(knative, ADDRESS, port)
            await eventually(lambda: cost(knative) == "0", "it waits, and is known to")
            await autoscaler.until(lambda _: heard() == 1.0)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as client:
                assert await ask() == want
                await autoscaler.until(lambda _: heard() == 2.0)
                control.send_signal(signal.SIGKILL)
                control.wait(60)
                before = len(autoscaler.stats)
                assert await ask() == want
                await autoscaler.until(lambda _: len(autoscaler.stats) > before + 3)
                assert heard() == 2.0
                knative.forget_the_lease()
                with start():
                    await eventually(lambda: (data / "run" / "control.sock").exists(), "the next control plane")
                    assert await ask() == want
                    (name,) = {(await asyncio.to_thread(waits.state) or {})["runtime_id"]}
                    async with connect_client(data) as door:
                        assert (await door.admin("DELETE", "/models/llama?force=true"))[0] == 200
                    again = await asyncio.to_thread(poll_until, "another life waits", lambda: waits.parked(name))
                    assert again != name
                    await autoscaler.until(lambda _: heard() == 1.0)

    async def beside() -> None:
        autoscaler = StrictAutoscaler(NAME)
        await autoscaler.start()
        try:
            make_tenant_namespace(server, "-pools")
            await main(FakeKnative(server), autoscaler)
        finally:
            await autoscaler.stop()
        assert autoscaler.wrong == []

    with (
        serving() as server,
        service(
            tmp_path / "pod.log",
            {**SETTINGS, "KELVIN_STANDBY_LISTEN": f"{ADDRESS}:{LISTEN_PORT}", "KELVIN_INNER_TLS": str(inner)},
            "kelvin.cli.main", "runtime", "--standby", "cpu-1", "--threads", "1", *kept,
        ),
    ):  # fmt: skip
        server.features.update(dict.fromkeys(FEATURES, "enabled"))
        server.namespace("platform")
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
        poll_until("it waits", waits.parked)
        asyncio.run(beside())
