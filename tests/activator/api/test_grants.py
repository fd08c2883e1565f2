"""A tenant calls a model of another tenant, over TLS. It is limited and billed as itself."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kelvin.contracts.serving.control_messages import ModelRow, Scope, TenantRow
from tests.activator.control import KEY, OTHER, STRANGER, VERSION, key_row
from tests.activator.replica import Held
from tests.activator.world import CHAT, ActivatorWorld, ReceivedResponse, world

NARROW = "kv-narrownarrow-" + "n" * 43


async def grant(here: ActivatorWorld, *grantees: str) -> None:
    """Replace the grantees of the owner's model."""
    row = ModelRow(
        tenant="default", model="m", aliases={"prod": VERSION, "next": OTHER}, created_at_s=7, grantees=grantees
    )
    await here.publish(models=(row,))


def _ids(got: ReceivedResponse) -> list[Any]:
    found: Any = got.json["data"]
    return [(row["id"], row["owned_by"]) for row in found]


@pytest.mark.parametrize(
    ("path", "model"),
    [
        pytest.param("/v1/chat/completions", "default/m", id="the owner in the body"),
        pytest.param("/default/m/v1/chat/completions", "m", id="the owner in the path"),
        pytest.param("/default/m/v1/chat/completions", "default/m@prod", id="in both"),
        pytest.param("/v1/chat/completions", "default/m@" + VERSION[:12], id="a version of it"),
    ],
)
async def test_granted_model_is_callable_until_revoked(tmp_path: Path, path: str, model: str) -> None:
    """The model is 404 before the grant and after its end. The usage record names the caller and the full model name,
    and the replica is told the caller's tenant.
    """

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        body = CHAT | {"model": model}
        refused = await here.post(path, body, STRANGER)
        assert (refused.status, refused.code) == (404, "model_not_found")
        await grant(here, "stranger")
        got = await here.post(path, body, STRANGER)
        assert got.status == 200, got
        (record,) = await here.control.wait_for_records(1)
        assert (record.tenant, record.model, record.key_id) == ("stranger", "default/m", "k3")
        assert (record.version, record.runtime_id, record.outcome) == (VERSION, "a", "ok")
        assert replica.calls[0].headers["x-kelvin-guest"] == "stranger"
        timeline = f"/v1/requests/{record.request_id}/timeline"
        assert (await here.get(timeline, STRANGER)).json["model"] == "default/m"
        assert (await here.get("/default/m" + timeline, STRANGER)).status == 200
        assert (await here.get("/other/m" + timeline, STRANGER)).status == 404
        assert (await here.get(timeline, KEY)).status == 404  # the owner can't see the request
        assert (await here.post(key=KEY)).status == 200
        assert "x-kelvin-guest" not in replica.calls[1].headers
        await grant(here)
        again = await here.post(path, body, STRANGER)
        assert (again.status, again.code) == (404, "model_not_found")
        assert len(replica.calls) == 2


async def test_granted_model_is_listed(tmp_path: Path) -> None:
    """Granted models are listed last, by their full name. A key restricted to some models sees and calls those only."""

    async with world(tmp_path) as here:
        await here.replica("a")
        await grant(here, "stranger")
        await here.publish(
            keys=(
                msgspec.structs.replace(key_row("k9", NARROW, "stranger", Scope.INFER), models=("default/m", "gone")),
            )
        )
        own, granted = ("theirs", "stranger"), ("default/m", "default")
        assert _ids(await here.get("/v1/models", STRANGER)) == [own, granted]
        assert _ids(await here.get("/v1/models", NARROW)) == [granted]
        assert _ids(await here.get("/v1/models", KEY)) == [("m", "default")]
        assert _ids(await here.get("/default/m/v1/models", STRANGER)) == [("m", "default")]
        for path in ("/v1/models/default/m", "/v1/models/default%2Fm", "/v1/models/default/m%40next"):
            found = await here.get(path, STRANGER)
            assert (found.status, found.json["owned_by"]) == (200, "default")
        for path in ("/v1/models/default/secret", "/v1/models/nobody/m", "/v1/models/default/m@gone"):
            assert (await here.get(path, STRANGER)).status == 404
        assert (await here.post(body=CHAT | {"model": "default/m"}, key=NARROW)).status == 200
        assert (await here.post(body=CHAT | {"model": "theirs"}, key=NARROW)).status == 404


async def test_guest_is_held_to_its_own_limits(tmp_path: Path) -> None:
    """The caller's own limit holds: its second request is refused, and the owner's request goes on."""

    held = Held()

    async with world(tmp_path) as here:
        replica = await here.replica("a", held)
        await grant(here, "stranger")
        await here.limit("stranger", requests=1)
        body = CHAT | {"model": "default/m"}
        first = asyncio.create_task(here.post(body=body, key=STRANGER))
        await replica.until(lambda r: len(r.calls) == 1)
        assert (await here.post(body=body, key=STRANGER)).code == "tenant_busy"
        own = asyncio.create_task(here.post(key=KEY))
        await replica.until(lambda r: len(r.calls) == 2)
        held.release()
        assert [(await each).status for each in (first, own)] == [200, 200]


@pytest.mark.parametrize(("loud", "quiet"), [(KEY, STRANGER), (STRANGER, KEY)], ids=["the owner's", "the guest's"])
async def test_flood_of_guest_requests_delays_only_the_guest(tmp_path: Path, loud: str, quiet: str) -> None:
    """Twenty requests of one tenant wait for one slot. The other tenant's request came last and is served next."""

    held = Held()

    async with world(tmp_path) as here:
        replica = await here.replica("a", held, max_streams=1)
        await grant(here, "stranger")
        sent: list[asyncio.Task[ReceivedResponse]] = []

        def send(key: str, name: str) -> None:
            body = CHAT | {"model": "m" if key == KEY else "default/m", "user": name}
            sent.append(asyncio.create_task(here.post(body=body, key=key)))

        send(loud, "loud")
        await replica.until(lambda r: len(r.calls) == 1)
        for _ in range(20):
            send(loud, "loud")
        await here.wait_for_queued(20)
        send(quiet, "quiet")
        await here.wait_for_queued(21)
        held.release()
        assert {got.status for got in await asyncio.gather(*sent)} == {200}
        assert [call.wanted["user"] for call in replica.calls].index("quiet") == 1


async def test_kept_answer_is_private_to_its_caller(tmp_path: Path) -> None:
    """Owner and grantee send the same request with the same `Idempotency-Key`. Each gets its own run, once."""

    async with world(tmp_path) as here:
        replica = await here.replica("a")
        await grant(here, "stranger")
        for _ in range(2):
            for key, path in ((KEY, "/v1"), (STRANGER, "/default/m/v1")):
                got = await here.post(f"{path}/chat/completions", CHAT, key, idempotency_key="same")
                assert got.status == 200
        assert [call.headers.get("x-kelvin-guest") for call in replica.calls] == [None, "stranger"]
        await grant(here)
        got = await here.post("/default/m/v1/chat/completions", CHAT, STRANGER, idempotency_key="same")
        assert got.status == 404


async def test_model_of_a_suspended_owner_is_not_found(tmp_path: Path) -> None:
    """The grantee gets the same 404 as for a model that was not granted."""

    async with world(tmp_path) as here:
        await grant(here, "stranger")
        await here.publish(tenants=(TenantRow(tenant="default", suspended=True),))
        got = await here.post(body=CHAT | {"model": "default/m"}, key=STRANGER)
        assert (got.status, got.code) == (404, "model_not_found")
        assert _ids(await here.get("/v1/models", STRANGER)) == [("theirs", "stranger")]
