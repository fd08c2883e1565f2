"""What operators give a tenant: a weight, by which it is served where others wait, and the highest priority that its
requests may have; and a plan, for which models give up other things before they refuse. From outside, over TLS.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest

from kelvin.contracts.serving.control_messages import Priority
from kelvin.contracts.serving.degradation_steps import DegradationStep
from tests.activator.api.test_grants import grant
from tests.activator.control import KEY, STRANGER, limited
from tests.activator.degradation.test_degradation import SMALL, TOLD, full, row, small
from tests.activator.replica import Held
from tests.activator.world import CHAT, ActivatorWorld, ReceivedResponse, world


async def _order(here: ActivatorWorld, *sent: tuple[str, str, str]) -> list[str]:
    """Requests by name, key and priority come one after the other while a guest's holds the slot, which is standard;
    one of batch was before it. How they were served.
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
        pytest.param("batch", ["guest", "own"], id="the owner's is batch"),
        pytest.param("interactive", ["own", "guest"], id="the control: nobody's is"),
    ],
)
async def test_plan_caps_the_priority_class(tmp_path: Path, highest: Priority, want: list[str]) -> None:
    """It says that it is interactive, and waits for one that is standard, as batch was given more than that."""

    async with world(tmp_path) as here:
        await here.limit(priority=highest)
        assert await _order(here, ("guest", STRANGER, "standard"), ("own", KEY, "interactive")) == want


@pytest.mark.parametrize(
    ("weight", "want"),
    [
        pytest.param(None, range(1, 3), id="as many of both"),
        pytest.param(3, range(4, 7), id="three for one"),
    ],
)
async def test_slots_follow_the_plan_weights(tmp_path: Path, weight: int | None, want: range) -> None:
    """Three of the owner's and seven of the guest's wait, all standard: how many of the guest's are served before the
    owner's last. The guest has a weight, and had a request more.
    """

    async with world(tmp_path) as here:
        await here.limit("stranger", weight=weight)
        sent = [("o", KEY, "standard")] * 3 + [("g", STRANGER, "standard")] * 7
        order = "".join(await _order(here, *sent))
        assert order.rindex("o") - 2 in want


@pytest.mark.parametrize(
    ("of_all", "of_free", "plan", "told"),
    [
        pytest.param((), (SMALL,), "free", "fallback=small", id="more than the others"),
        pytest.param((), (SMALL,), "pro", None, id="another plan is as the others"),
        pytest.param((), (SMALL,), None, None, id="and so is none"),
        pytest.param((SMALL,), (), "free", None, id="nothing at all"),
        pytest.param((SMALL,), (), None, "fallback=small", id="which is nobody else's"),
    ],
)
async def test_plan_has_its_own_degradation_steps(
    tmp_path: Path,
    of_all: tuple[DegradationStep, ...],
    of_free: tuple[DegradationStep, ...],
    plan: str | None,
    told: str | None,
) -> None:
    """In the place of those that all others have."""

    async with full(tmp_path) as (here, _):
        await small(here)
        model = msgspec.structs.replace(row("m", *of_all), plan_ladders={"free": of_free})
        await here.publish(tenants=(limited(plan=plan),), models=(model,))
        got = await here.post()
        assert (got.status, got.headers.get(TOLD)) == (503 if told is None else 200, told)
