"""Each dependency of the activator fails in turn: requests are served as the dependency table declares."""

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import pytest

from activator.dependencies import SERVING
from kelvin.contracts.dependency import Dependency
from kelvin.contracts.serving.control_messages import Scope
from tests.activator.auth.token_issuer import KeyServer, Signer, claims, key_server
from tests.activator.control import ADMIN, key_row
from tests.activator.redis_server import RedisServer
from tests.activator.replica import lost
from tests.activator.world import ActivatorWorld, ReceivedResponse, world

PUSH_KEY: Final = "kv-push"
SIGNER: Final = Signer("one")


class OutageWorld:
    """A running activator, and the services that a scenario can take away."""

    def __init__(self, here: ActivatorWorld, redis: RedisServer | None, issuer: KeyServer | None) -> None:
        self.here = here
        self.redis = redis
        self.issuer = issuer


Scenario = Callable[[OutageWorld], Awaitable[None]]


async def replica(outage: OutageWorld) -> None:
    """One of two replicas is killed, and the feed does not say so."""
    await outage.here.replica("b")
    await outage.here.replicas[0].kill()
    async with asyncio.timeout(30):
        while not await outage.here.metric_value("kelvin_retries_total"):  # the first choice is random
            assert (await outage.here.post()).status == 200


async def receipts(outage: OutageWorld) -> None:
    """The replica answers requests but no receipts."""
    outage.here.replicas[0].ignores_receipts = True
    for _ in range(8):
        assert (await outage.here.post()).status == 200
    assert len(await outage.here.control.wait_for_records(8)) == 8


async def feed(outage: OutageWorld) -> None:
    """The last feed line stays valid."""
    outage.here.control.fall_silent("/internal/v1/feed")
    await outage.here.wait_for_metric("kelvin_feed_connected", 0)


async def stats(outage: OutageWorld) -> None:
    """Running replicas serve on."""
    outage.here.control.fall_silent("/internal/v1/stats")


async def ledger(outage: OutageWorld) -> None:
    """Records wait and are shipped when it is back."""
    outage.here.control.refuse_usage = True
    assert (await outage.here.post()).status == 200
    await outage.here.wait_for_metric("kelvin_spool_backlog_records", 1)
    outage.here.control.refuse_usage = False
    await outage.here.control.wait_for_records(1)


async def key_uses(outage: OutageWorld) -> None:
    """No request waits for it."""
    outage.here.control.fall_silent("/internal/v1/keys/uses")


async def timelines(outage: OutageWorld) -> None:
    """The activator's own timelines are shown. Others are unavailable."""
    got = await outage.here.post()
    outage.here.control.fall_silent("/internal/v1/requests")
    assert (await outage.here.get(f"/v1/requests/{got.headers['x-request-id']}/timeline")).status == 200
    other = await outage.here.get("/v1/requests/req_0123456789abcdef0123456789abcdef/timeline")
    assert (other.status, other.code) == (503, "unavailable")


async def admin(outage: OutageWorld) -> None:
    """The process is gone."""
    await outage.here.control.stop()
    _unavailable(await outage.here.get("/admin/v1/models", ADMIN))
    assert (await outage.here.post()).status == 200
    await outage.here.control.start(outage.here.data / "run")


async def push(outage: OutageWorld) -> None:
    """There is no snapshotter."""
    await outage.here.publish(keys=(key_row("k9", PUSH_KEY, "default", Scope.PUSH),))
    _unavailable(await outage.here.get("/push/v1/pushes", PUSH_KEY))


async def issuer(outage: OutageWorld) -> None:
    """Its known keys stay valid."""
    assert outage.issuer is not None
    token = SIGNER.token(claims(time.time()))
    assert (await outage.here.get("/v1/models", token)).status == 200
    outage.issuer.status = 503
    assert (await outage.here.get("/v1/models", token)).status == 200


async def redis(outage: OutageWorld) -> None:
    """Redis hangs."""
    assert outage.redis is not None
    await outage.here.limit(rpm=1_000_000)
    assert (await outage.here.post()).status == 200
    assert await outage.here.metric_value("kelvin_redis_connected") == 1
    outage.redis.pause()
    assert (await outage.here.post()).status == 200
    await outage.here.wait_for_metric("kelvin_redis_connected", 0)


async def firewall(outage: OutageWorld) -> None:
    """The firewall does not listen, and the setting lets requests pass."""
    assert (await outage.here.post()).status == 200
    assert await outage.here.metric_value("kelvin_firewall_total") > 0


async def spool(outage: OutageWorld) -> None:
    """The disk is full: no response is sent without its record."""
    pid = outage.here.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for _ in range(3):
            got = await outage.here.post()
            assert (got.status, got.code) == (503, "unavailable")
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    async with asyncio.timeout(30):
        while (await outage.here.post()).status != 200:
            await asyncio.sleep(0.05)


SCENARIOS: Final[dict[str, Scenario]] = {
    each.__name__.replace("_", " "): each
    for each in (
        replica,
        receipts,
        feed,
        stats,
        ledger,
        key_uses,
        timelines,
        admin,
        push,
        issuer,
        redis,
        firewall,
        spool,
    )
}


def _unavailable(got: ReceivedResponse) -> None:
    assert got.status == 503
    assert b"unavailable" in got.body


@pytest.mark.parametrize("dependency", SERVING, ids=lambda each: each.name)
async def test_dependency_outage_behaves_as_declared(tmp_path: Path, dependency: Dependency) -> None:
    """The outage behaves as the table says. During and after it requests are served."""

    with RedisServer() if dependency.name == "redis" else nullcontext() as server:
        async with key_server(tmp_path / "idp", SIGNER) as keys:
            given: dict[str, Any] = {} if server is None else {"redis": server.url}
            if dependency.name == "firewall":
                given = {"waf_socket": tmp_path / "waf.sock", "waf_unanswered": "allow"}
            if dependency.name == "issuer":
                given["oidc"] = keys.file(tmp_path / "issuers.toml", 'scopes = ["infer"]\n')
            async with world(tmp_path, **given) as here:
                await here.replica("a")
                await SCENARIOS[dependency.name](OutageWorld(here, server, keys))
                for _ in range(4):
                    assert (await here.post()).status == 200
                if server is not None:
                    server.resume()


async def test_control_failed_request_is_detected(tmp_path: Path) -> None:
    """Negative control: a replica lost within its answer can't be replaced, and the same check detects it."""

    async with world(tmp_path) as here:
        await here.replica("a", lost)
        assert (await here.post()).status != 200


def test_each_dependency_has_an_outage_scenario() -> None:
    """No scenario exists for anything else."""
    assert set(SCENARIOS) == {each.name for each in SERVING}
