"""Each thing that the activator depends on is taken away: requests are answered without it, as the table says."""

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


class Taken:
    """A world, and what else can be taken away."""

    def __init__(self, here: ActivatorWorld, redis: RedisServer | None, issuer: KeyServer | None) -> None:
        self.here = here
        self.redis = redis
        self.issuer = issuer


Scenario = Callable[[Taken], Awaitable[None]]


async def replica(taken: Taken) -> None:
    """One of two is killed, and the feed does not say so."""
    await taken.here.replica("b")
    await taken.here.replicas[0].kill()
    async with asyncio.timeout(30):
        while not await taken.here.metric_value("kelvin_retries_total"):  # which of the two is asked first is drawn
            assert (await taken.here.post()).status == 200


async def receipts(taken: Taken) -> None:
    """It answers requests, and takes no receipts."""
    taken.here.replicas[0].deaf = True
    for _ in range(8):
        assert (await taken.here.post()).status == 200
    assert len(await taken.here.control.wait_for_records(8)) == 8


async def feed(taken: Taken) -> None:
    """The last word stands."""
    taken.here.control.fall_silent("/internal/v1/feed")
    await taken.here.wait_for_metric("kelvin_feed_connected", 0)


async def stats(taken: Taken) -> None:
    """What runs serves on."""
    taken.here.control.fall_silent("/internal/v1/stats")


async def ledger(taken: Taken) -> None:
    """Records wait, and are there when it is back."""
    taken.here.control.refuse_usage = True
    assert (await taken.here.post()).status == 200
    await taken.here.wait_for_metric("kelvin_spool_backlog_records", 1)
    taken.here.control.refuse_usage = False
    await taken.here.control.wait_for_records(1)


async def key_uses(taken: Taken) -> None:
    """Nobody waits for it."""
    taken.here.control.fall_silent("/internal/v1/keys/uses")


async def timelines(taken: Taken) -> None:
    """One's own are shown; what only the control plane may have is unavailable."""
    got = await taken.here.post()
    taken.here.control.fall_silent("/internal/v1/requests")
    assert (await taken.here.get(f"/v1/requests/{got.headers['x-request-id']}/timeline")).status == 200
    other = await taken.here.get("/v1/requests/req_0123456789abcdef0123456789abcdef/timeline")
    assert (other.status, other.code) == (503, "unavailable")


async def admin(taken: Taken) -> None:
    """Nobody listens there any more: the process is gone."""
    await taken.here.control.stop()
    _unavailable(await taken.here.get("/admin/v1/models", ADMIN))
    assert (await taken.here.post()).status == 200
    await taken.here.control.start(taken.here.data / "run")


async def push(taken: Taken) -> None:
    """No snapshotter is there."""
    await taken.here.publish(keys=(key_row("k9", PUSH_KEY, "default", Scope.PUSH),))
    _unavailable(await taken.here.get("/push/v1/pushes", PUSH_KEY))


async def issuer(taken: Taken) -> None:
    """Its keys count on; one that it has not said yet is unknown, and not waited for twice."""
    assert taken.issuer is not None
    token = SIGNER.token(claims(time.time()))
    assert (await taken.here.get("/v1/models", token)).status == 200
    taken.issuer.status = 503
    assert (await taken.here.get("/v1/models", token)).status == 200


async def redis(taken: Taken) -> None:
    """It hangs."""
    assert taken.redis is not None
    await taken.here.limit(rpm=1_000_000)
    assert (await taken.here.post()).status == 200
    assert await taken.here.metric_value("kelvin_redis_connected") == 1
    taken.redis.pause()
    assert (await taken.here.post()).status == 200
    await taken.here.wait_for_metric("kelvin_redis_connected", 0)


async def firewall(taken: Taken) -> None:
    """Nobody listens, and what nobody speaks of may pass."""
    assert (await taken.here.post()).status == 200
    assert await taken.here.metric_value("kelvin_firewall_total") > 0


async def spool(taken: Taken) -> None:
    """The disk takes no more: nothing is answered that is not recorded."""
    pid = taken.here.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for _ in range(3):
            got = await taken.here.post()
            assert (got.status, got.code) == (503, "unavailable")
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
    async with asyncio.timeout(30):
        while (await taken.here.post()).status != 200:
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
    """What the table says holds; and while it is away, and after it, requests are answered."""

    with RedisServer() if dependency.name == "redis" else nullcontext() as server:
        async with key_server(tmp_path / "idp", SIGNER) as keys:
            given: dict[str, Any] = {} if server is None else {"redis": server.url}
            if dependency.name == "firewall":
                given = {"waf_socket": tmp_path / "waf.sock", "waf_unanswered": "allow"}
            if dependency.name == "issuer":
                given["oidc"] = keys.file(tmp_path / "issuers.toml", 'scopes = ["infer"]\n')
            async with world(tmp_path, **given) as here:
                await here.replica("a")
                await SCENARIOS[dependency.name](Taken(here, server, keys))
                for _ in range(4):
                    assert (await here.post()).status == 200
                if server is not None:
                    server.resume()


async def test_the_control_sees_a_request_that_fails(tmp_path: Path) -> None:
    """What nothing makes up for, a replica that is lost within its answer, is seen by the same question."""

    async with world(tmp_path) as here:
        await here.replica("a", lost)
        assert (await here.post()).status != 200


def test_each_dependency_has_an_outage_scenario() -> None:
    """And there is none for what is no dependency."""
    assert set(SCENARIOS) == {each.name for each in SERVING}
