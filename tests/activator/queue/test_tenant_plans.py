"""What operators set for a tenant: a weight, the highest priority of its requests, and a plan, for which models have
other degradation steps. Over TLS.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest

from kelvin.contracts.serving.control_messages import Priority
from kelvin.contracts.serving.degradation_steps import DegradationStep
from tests.activator.api.test_grants import grant
from tests.activator.control import KEY, STRANGER, limited
from tests.activator.degradation.test_degradation import DEGRADED, SMALL, full, row, small
from tests.activator.replica import Held
from tests.activator.world import CHAT, ActivatorWorld, ReceivedResponse, world


async def _order(here: ActivatorWorld, *sent: tuple[str, str, str]) -> list[str]:
    """Send requests by name, key and priority while a guest's standard request holds the slot, after a batch one.
    Return the order of service.
    """
    replica = await here.replica("a", max_streams=1)
    await grant(here, "stranger")

    def ask(name: str, key: str, priority: str) -> asyncio.Task[ReceivedResponse]:
        body = CHAT | {"model": "default/m" if key == STRANGER else "m", "user": name, "max_tokens": 10}
        return asyncio.create_task(here.post(body=body, key=key, x_kelvin_priority=priority))

    assert (await ask("before", STRANGER, "batch")).status == 200
    replica.script = held = Held()
    tasks = [ask("holds", STRANGER, "standard")]
    await replica.until(lambda r: len(r.calls) == 2)
    for count, each in enumerate(sent, 1):
        tasks.append(ask(*each))
        await here.wait_for_queued(count)
    held.release()
    assert {got.status for got in await asyncio.gather(*tasks)} == {200}
    return [str(call.wanted["user"]) for call in replica.calls[2:]]


@pytest.mark.parametrize(
    ("highest", "want"),
    [
        pytest.param("batch", ["guest", "own"], id="the owner is capped to batch"),
        pytest.param("interactive", ["own", "guest"], id="control: no cap"),
    ],
)
async def test_plan_caps_the_priority_class(tmp_path: Path, highest: Priority, want: list[str]) -> None:
    """The owner's interactive request is capped to batch and waits for a standard one, because batch has used more."""

    async with world(tmp_path) as here:
        await here.limit(priority=highest)
        assert await _order(here, ("guest", STRANGER, "standard"), ("own", KEY, "interactive")) == want


@pytest.mark.parametrize(
    ("weight", "want"),
    [
        pytest.param(None, range(1, 3), id="equal weights"),
        pytest.param(3, range(4, 7), id="a weight of three"),
    ],
)
async def test_slots_follow_the_plan_weights(tmp_path: Path, weight: int | None, want: range) -> None:
    """Three requests of the owner and seven of the guest wait, all standard. Counted are the guest's served before the
    owner's last. The guest has a weight, and had one request more.
    """

    async with world(tmp_path) as here:
        await here.limit("stranger", weight=weight)
        sent = [("o", KEY, "standard")] * 3 + [("g", STRANGER, "standard")] * 7
        order = "".join(await _order(here, *sent))
        assert order.rindex("o") - 2 in want


@pytest.mark.parametrize(
    ("of_all", "of_free", "plan", "degraded"),
    [
        pytest.param((), (SMALL,), "free", "fallback=small", id="a plan with a step"),
        pytest.param((), (SMALL,), "pro", None, id="another plan has the model's steps"),
        pytest.param((), (SMALL,), None, None, id="no plan has the model's steps"),
        pytest.param((SMALL,), (), "free", None, id="a plan without steps"),
        pytest.param((SMALL,), (), None, "fallback=small", id="a plan without steps affects no other"),
    ],
)
async def test_plan_has_its_own_degradation_steps(
    tmp_path: Path,
    of_all: tuple[DegradationStep, ...],
    of_free: tuple[DegradationStep, ...],
    plan: str | None,
    degraded: str | None,
) -> None:
    """The plan's steps replace the model's own."""

    async with full(tmp_path) as (here, _):
        await small(here)
        model = msgspec.structs.replace(row("m", *of_all), plan_ladders={"free": of_free})
        await here.publish(tenants=(limited(plan=plan),), models=(model,))
        got = await here.post()
        assert (got.status, got.headers.get(DEGRADED)) == (503 if degraded is None else 200, degraded)
