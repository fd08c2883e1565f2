"""The pool of a whole control plane, as an operator sets it and sees it."""

import asyncio
from pathlib import Path

from tests.controlplane.door import becomes, opened, poke, push


async def test_standbys_keep_to_their_settings(data: Path) -> None:
    """None fits the budget: none is kept, the operator is told why, and a model starts from zero all the same."""

    async with opened(data, standbys="2", standby_bytes=str(1 << 20), standby_target="0.9") as door:
        await push(door)
        await poke(door)
        await becomes(door, "ready")
        (pool,) = (await door.admin("GET", "/status"))[1]["device"]["pools"]
        assert (pool["wanted"], pool["why"], pool["parked"], pool["hits"], pool["misses"]) == (0, "budget", 0, 0, 1)
        assert (pool["target"], pool["budget_bytes"], pool["probability"]) == (0.9, 1 << 20, 0.0)
    async with opened(data, standby_share="1") as door:
        await push(door, "n")
        await poke(door, "n")
        await becomes(door, "ready", "n")
        async with asyncio.timeout(20):  # one for each replica that runs, an adopted one too
            while (pool["wanted"], pool["why"]) != (2, "share"):
                (pool,) = (await door.admin("GET", "/status"))[1]["device"]["pools"]
