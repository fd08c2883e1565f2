"""API keys at a real activator: scopes, models, expiry, suspension, revocation, and rate-limited guesses."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from activator.auth.authenticator import find_key_holder
from activator.routing.routing_table import RoutingTable
from kelvin.contracts.serving.control_messages import Scope, TenantRow
from tests.activator.control import ADMIN, KEY, STRANGER, key_row, snapshot
from tests.activator.replica import DONE, ReceivedRequest, chunk
from tests.activator.world import CHAT, ActivatorWorld, world
from tests.eventually import eventually

WRONG = "kv-abcdefghijkl-" + "w" * 43


@pytest.mark.parametrize(
    ("authorization", "is_good"),
    [
        pytest.param(b"Bearer " + KEY.encode(), True, id="a key"),
        pytest.param(b"bearer  " + KEY.encode(), True, id="case and spaces do not matter"),
        pytest.param(None, False, id="no header"),
        pytest.param(b"", False, id="an empty header"),
        pytest.param(KEY.encode(), False, id="no scheme"),
        pytest.param(b"Basic " + KEY.encode(), False, id="another scheme"),
        pytest.param(b"Bearer", False, id="no key"),
        pytest.param(b"Bearer " + KEY[:-1].encode(), False, id="a character less"),
        pytest.param(b"Bearer " + KEY.upper().encode(), False, id="another case"),
        pytest.param(b"Bearer \xff" * 999, False, id="a long invalid header"),
    ],
)
def test_bearer_key_is_found_in_the_table(authorization: bytes | None, is_good: bool) -> None:
    """Only the whole key after the Bearer scheme matches."""
    table = RoutingTable()
    table.apply(snapshot())
    assert (find_key_holder(table, authorization, 0) is not None) == is_good


async def check_scopes(here: ActivatorWorld) -> None:
    """Check each key at three APIs. Push and billing keys need no admin scope."""
    rows = {"kv-push": (Scope.PUSH,), "kv-bill": (Scope.BILLING_READ,), "kv-oper": (Scope.OPERATOR,)}
    await here.publish(keys=tuple(key_row(key, key, "default", *scopes) for key, scopes in rows.items()))
    doors = ("/v1/models", "/push/v1/plans", "/admin/v1/status")
    want = {
        KEY: (200, 403, 403), ADMIN: (200, 503, 201),  # nothing listens behind /push; /admin echoes
        "kv-push": (403, 503, 403), "kv-bill": (403, 403, 201), "kv-oper": (403, 503, 201),
    }  # fmt: skip
    for key, statuses in want.items():
        assert tuple([(await here.get(door, key)).status for door in doors]) == statuses, key


async def check_models(here: ActivatorWorld) -> None:
    """Check a key restricted to one model: other models are not listed, found or called. Their timelines are 404."""
    rows = [("kv-m", ("m",)), ("kv-other", ("other",))]
    await here.publish(
        keys=tuple(
            msgspec.structs.replace(key_row(key, key, "default", Scope.INFER), models=models) for key, models in rows
        )
    )
    answered = await here.post(key="kv-m")
    assert answered.status == 200
    timeline = f"/v1/requests/{answered.headers['x-request-id']}/timeline"
    assert (await here.get(timeline, "kv-m")).status == 200
    assert b'"m"' in (await here.get("/v1/models", "kv-m")).body
    assert (await here.get("/v1/models", "kv-other")).json["data"] == []
    for path in ("/v1/models/m", "/v1/models/none", timeline):
        refused, unknown = await here.get(path, "kv-other"), await here.get(path, STRANGER)
        assert (refused.status, refused.code) == (unknown.status, unknown.code)
        assert refused.status == 404
    refused, unknown = await here.post(key="kv-other"), await here.post(body={**CHAT, "model": "none"})
    assert (refused.status, refused.code) == (unknown.status, unknown.code) == (404, "model_not_found")


async def check_bad_keys(here: ActivatorWorld) -> None:
    """Check that unknown, expired and revoked keys get equal answers, except for the request id."""
    late = msgspec.structs.replace(key_row("late", "kv-late", "default", Scope.INFER), expires_at_s=1)
    await here.publish(keys=(late, key_row("gone", "kv-gone", "default", Scope.INFER)))
    assert (await here.get("/v1/models", "kv-gone")).status == 200
    await here.publish(removed_keys=("gone",))
    answers = []
    for key in ("kv-late", "kv-gone", WRONG):
        got = await here.get("/v1/models", key)
        request_id = got.headers.pop("x-request-id")
        answers.append((got.status, got.headers, got.body.replace(request_id.encode(), b"")))
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] == 401
    assert {"late", "gone"} & set(here.control.used_at_s) <= {"gone"}  # the revoked key was valid once


async def check_suspension(here: ActivatorWorld) -> None:
    """Check that a suspended tenant gets 403 and that other tenants are served."""
    for suspended, want in ((True, (403, "tenant_suspended")), (False, (200, None))):
        await here.publish(tenants=(TenantRow(tenant="default", suspended=suspended),))
        got = await here.get("/v1/models")
        assert (got.status, None if want[1] is None else got.code) == want
        assert (await here.get("/v1/models", STRANGER)).status == 200


@pytest.mark.parametrize(
    "check", [check_scopes, check_models, check_bad_keys, check_suspension], ids=lambda check: check.__name__
)
async def test_key_opens_its_scopes_models_and_tenant(
    tmp_path: Path, check: Callable[[ActivatorWorld], Awaitable[None]]
) -> None:
    """The key's scopes, models, expiry and tenant decide. Each check says what it expects."""
    async with world(tmp_path) as here:
        await here.replica("r1")
        await check(here)


async def test_last_use_of_a_key_is_reported_to_the_minute(tmp_path: Path) -> None:
    """The control plane gets the minute in which the key was last used."""
    async with world(tmp_path) as here:
        before_s = int(time.time()) // 60 * 60
        assert (await here.get("/v1/models")).status == 200
        assert before_s <= await here.control.wait_for_used("k1") <= time.time()
        assert {at_s % 60 for at_s in here.control.used_at_s.values()} == {0}


async def test_revocation_does_not_cut_a_running_response(tmp_path: Path) -> None:
    """A stream that runs when its key is revoked ends normally. The next request is 401."""

    async with world(tmp_path) as here:
        half, rest = asyncio.Event(), asyncio.Event()

        async def in_halves(call: ReceivedRequest) -> None:
            await call.data(chunk("one "), 1)
            half.set()
            await rest.wait()
            await call.data(chunk("two"), 2)
            await call.data(DONE, 2)
            await call.end(2)

        await here.replica("r1", in_halves)
        stream = asyncio.create_task(here.post(body={**CHAT, "stream": True}))
        await half.wait()
        await here.publish(removed_keys=("k1",))
        assert (await here.post()).status == 401
        rest.set()
        got = await stream
        assert (got.status, got.body.count(b"[DONE]")) == (200, 1)
        (record,) = await here.control.wait_for_records(1)
        assert (record.key_id, record.outcome) == ("k1", "ok")


async def test_key_guessing_slows_only_the_guesser(tmp_path: Path) -> None:
    """A burst of wrong keys gets 401; later ones are delayed and get 429 with a time. A valid key of the same address
    is served at once.
    """

    async with world(tmp_path) as here:
        assert [(await here.get("/v1/models", WRONG)).status for _ in range(20)] == [401] * 20
        began = time.monotonic()
        while (got := await here.get("/v1/models", WRONG)).status == 401:  # some failures leaked meanwhile
            began = time.monotonic()
        assert time.monotonic() - began >= 0.09  # delayed; a failure within the burst is not
        assert (got.status, got.code) == (429, "too_many_failures")
        assert int(got.headers["retry-after"]) >= 1
        waiting = [asyncio.create_task(here.get("/v1/models", WRONG)) for _ in range(12)]
        await eventually(lambda: any(task.done() for task in waiting))
        assert (await here.get("/v1/models")).status == 200
        assert not all(task.done() for task in waiting), "the neighbour was served while the guesser waits"
        async with here.client.get(here.url + "/v1/models") as keyless:
            assert keyless.status == 401  # a request without a key is not a guess
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        log = (here.data / "log").read_text()
        assert "many keys that are not good" in log
        assert "127.0.0.1" in log
