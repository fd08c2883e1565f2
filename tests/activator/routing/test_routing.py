"""Choice of replica and version over HTTP: sessions and prefixes keep their replica, other requests spread."""

import asyncio
from pathlib import Path

import msgspec

from activator.routing.policy.affinity import PREFIX_BYTES
from tests.activator.control import OTHER, VERSION, replica_row, snapshot
from tests.activator.replica import Held
from tests.activator.world import CHAT, ActivatorWorld, world

PROMPT = "x" * 2 * PREFIX_BYTES


def _long(ending: str) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": ending}]}


def _call_counts(here: ActivatorWorld) -> list[int]:
    return [len(replica.calls) for replica in here.replicas]


async def test_sessions_and_prefixes_keep_their_replica(tmp_path: Path) -> None:
    """Of four replicas each session uses one, and so does each prompt prefix. If the replica drains, they move to
    another. Control: unrelated requests use all.
    """

    async with world(tmp_path) as here:
        for name in "abcd":
            await here.replica(name)
        for number in range(8):
            assert (await here.post(x_kelvin_session="s-1")).status == 200
            assert (await here.post(body=_long(f"question {number}"), x_kelvin_session="s-1")).status == 200
        at = _call_counts(here).index(16)
        await here.publish(replica_row("abcd"[at], draining=True))
        for _ in range(4):
            assert (await here.post(x_kelvin_session="s-1")).status == 200
        assert sorted(_call_counts(here)) == [0, 0, 4, 16]
        await here.publish(replica_row("abcd"[at]))

        before = _call_counts(here)
        for number in range(8):
            assert (await here.post(body=_long(f"question {number}"))).status == 200
        assert sorted(now - then for now, then in zip(_call_counts(here), before, strict=True)) == [0, 0, 0, 8]

        before = _call_counts(here)
        for _ in range(64):
            assert (await here.post()).status == 200
        assert all(now > then for now, then in zip(_call_counts(here), before, strict=True))

        refused = await here.post(x_kelvin_session="x" * 129)
        assert (refused.status, refused.code) == (400, "invalid_request")


async def test_a_split_gives_each_session_one_version(tmp_path: Path) -> None:
    """Both versions answer, and each session and each key keeps one. A pinned version gets its own requests. Without
    the split prod answers all.
    """
    row = snapshot().models[0]

    async def answering(here: ActivatorWorld, name: str = "m", **headers: str) -> str:
        got = await here.post(body=CHAT | {"model": name}, **headers)
        assert got.status == 200
        return got.headers["x-kelvin-version"]

    async with world(tmp_path) as here:
        await here.replica("old")
        await here.replica("new", version=OTHER)
        await here.publish(models=(msgspec.structs.replace(row, split={VERSION: 1, OTHER: 1}),))
        sessions = [f"s-{number}" for number in range(24)]
        first = [await answering(here, x_kelvin_session=session) for session in sessions]
        assert set(first) == {VERSION, OTHER}
        assert first == [await answering(here, x_kelvin_session=session) for session in sessions]
        assert len({await answering(here) for _ in range(8)}) == 1, "the split uses the API key"
        assert {await answering(here, "m@" + VERSION[:12], x_kelvin_session=each) for each in sessions} == {VERSION}
        await here.publish(models=(row,))
        assert {await answering(here, x_kelvin_session=session) for session in sessions} == {VERSION}


async def test_previous_version_answers_until_the_new_is_ready(tmp_path: Path) -> None:
    """The previous version answers while the new one has no replica or slot. Requests for the new version by digest
    wait for it. If both are full, requests wait for the new one. Control: without a previous version they wait.
    """
    before = snapshot().models[0]
    named = msgspec.structs.replace(before, aliases={"prod": OTHER})
    deployed = msgspec.structs.replace(named, meanwhile={OTHER: VERSION})
    held = Held()

    async with world(tmp_path) as here:
        old = await here.replica("old", max_streams=2)
        await here.replica("new", held, is_published=False)
        await here.publish(models=(deployed,))
        got = await here.post()
        assert (got.status, got.headers["x-kelvin-version"]) == (200, VERSION)
        pinned = asyncio.create_task(here.post(body=CHAT | {"model": "m@" + OTHER[:12]}))
        await here.wait_for_queued(1)
        await here.publish(replica_row("new", version=OTHER, max_streams=1))
        await here.wait_for_queued(0)
        assert (await here.post()).headers["x-kelvin-version"] == VERSION

        old.script = held
        others = [asyncio.create_task(here.post()) for _ in range(2)]
        await old.until(lambda replica: len(replica.calls) == 4)
        waiting = asyncio.create_task(here.post())
        await here.wait_for_queued(1)
        held.release()
        assert (await waiting).headers["x-kelvin-version"] == OTHER
        assert {(await each).headers["x-kelvin-version"] for each in others} == {VERSION}
        assert (await pinned).status == 200
        assert (await here.post()).headers["x-kelvin-version"] == OTHER, "the new version has room again"

        await here.publish(models=(named,), removed=("new",))
        late = asyncio.create_task(here.post())
        await here.wait_for_queued(1)
        late.cancel()
