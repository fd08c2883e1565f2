"""The routes of restarts over the control plane's socket."""

import asyncio
from pathlib import Path
from typing import Any

from tests.controlplane.door import Door, becomes, opened, poke, push
from tests.controlplane.ground import Run, fake_zygote


async def _restart(door: Door, method: str = "GET", model: str = "m") -> tuple[int, Any]:
    return await door.admin(method, f"/models/{model}/restart")


async def _ended(door: Door, model: str = "m") -> Any:
    async with asyncio.timeout(20):
        while (found := (await _restart(door, model=model))[1])["state"] == "running":
            await asyncio.sleep(0.005)
    return found


async def _noted(door: Door) -> int:
    """Entries of the audit about restarts."""
    _, found = await door.admin("GET", "/audit")
    return sum(each["action"] == "model.restarted" for each in found["events"])


def test_an_order_as_an_operator_sees_it(tmp_path: Path) -> None:
    """None, accepted, running and refused twice, done; of a model at zero done at once, of no model 404."""
    data = tmp_path / "data"

    async def main() -> None:
        async with opened(data) as door:
            await push(door)
            assert (await _restart(door))[1]["state"] == "none"
            _, nothing = await _restart(door, "POST")
            assert nothing["replicas"] == 0
            assert (await _ended(door))["state"] == "done"
            await poke(door)
            before = await becomes(door, "ready")
            status, ordered = await _restart(door, "POST")
            assert (status, ordered["state"], ordered["replicas"], ordered["replaced"]) == (202, "running", 1, 0)
            status, problem = await _restart(door, "POST")
            assert (status, problem["code"]) == (409, "conflict")
            assert "0 of 1 replicas are replaced" in problem["detail"]
            assert await _ended(door) == {**ordered, "state": "done", "replaced": 1}
            after = await becomes(door, "ready")
            (old,), (new,) = (found["versions"][0]["replicas"] for found in (before, after))
            assert old["runtime_id"] != new["runtime_id"]
            for method in ("GET", "POST"):
                assert (await _restart(door, method, "nothing"))[0] == 404

    with fake_zygote(Run(data / "run")):
        asyncio.run(main())


def test_the_audit_has_the_orders_that_were_taken(tmp_path: Path) -> None:
    """Of several at once one is, and has its entry; those that are refused have none."""
    run = Run(tmp_path / "data" / "run")

    async def main() -> None:
        async with opened(tmp_path / "data") as door:
            await push(door, "held")
            run.tell("release")
            await poke(door, "held")
            await becomes(door, "ready", "held")
            (run.path / "release").unlink()  # the new replica is not there before it is let go
            answers = await asyncio.gather(*(_restart(door, "POST", "held") for _ in range(4)))
            assert sorted(status for status, _ in answers) == [202, 409, 409, 409]
            assert await _noted(door) == 1
            run.tell("release")
            assert (await _ended(door, "held"))["state"] == "done"

    with fake_zygote(run):
        asyncio.run(main())
