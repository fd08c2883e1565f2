"""Which replica has a request, over HTTP: what belongs together meets, and all else goes to where there is room."""

import asyncio
from pathlib import Path

from activator.policy.affinity import PREFIX_BYTES
from tests.activator.control import replica_row
from tests.activator.world import World, world

PROMPT = "x" * 2 * PREFIX_BYTES


def _long(ending: str) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": ending}]}


def _served(here: World) -> list[int]:
    return [len(replica.calls) for replica in here.replicas]


def test_sessions_and_beginnings_meet_at_one_replica(tmp_path: Path) -> None:
    """One after another, of four: each session at one, likewise what begins alike; with the replica gone, at another.

    The control: requests that have nothing in common do not.
    """

    async def scenario() -> None:
        async with world(tmp_path) as here:
            for name in "abcd":
                await here.replica(name)
            for number in range(8):
                assert (await here.post(x_kelvin_session="s-1")).status == 200
                assert (await here.post(body=_long(f"question {number}"), x_kelvin_session="s-1")).status == 200
            at = _served(here).index(16)
            here.control.publish(replica_row("abcd"[at], draining=True))
            await here.settled()
            for _ in range(4):
                assert (await here.post(x_kelvin_session="s-1")).status == 200
            assert sorted(_served(here)) == [0, 0, 4, 16]
            here.control.publish(replica_row("abcd"[at]))
            await here.settled()

            before = _served(here)
            for number in range(8):
                assert (await here.post(body=_long(f"question {number}"))).status == 200
            assert sorted(now - then for now, then in zip(_served(here), before, strict=True)) == [0, 0, 0, 8]

            before = _served(here)
            for _ in range(64):
                assert (await here.post()).status == 200
            assert all(now > then for now, then in zip(_served(here), before, strict=True))

            refused = await here.post(x_kelvin_session="x" * 129)
            assert (refused.status, refused.code) == (400, "invalid_request")

    asyncio.run(scenario())
