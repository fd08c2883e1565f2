"""Degradation steps of a model: valid steps, how long they are stored, and the feed row."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.degradation_rules import check_degradation
from controlplane.registry.policy.domain import Model, Version
from controlplane.registry.policy.version_lifecycle import VersionState
from kelvin.contracts.errors import Conflict, InvalidRequest, ModelNotFound, Refused
from kelvin.contracts.numbers import MAX_LIMIT
from kelvin.contracts.serving.degradation_steps import CapOutput, Fallback, Ladder
from tests.controlplane.builders import BY, NOW_S, TENANT, digest, opened_registry, registration
from tests.controlplane.control_plane_server import push, running_control_plane

CAP = CapOutput(tokens=64, wait_s=2.5)
SMALL = Fallback(model="small")
STEPS = [{"step": "cap-output", "tokens": 64, "wait_s": 2.5}, {"step": "fallback", "model": "small", "wait_s": None}]


def _model(name: str, tenant: str = TENANT, kind: Any = "generate", grantees: tuple[str, ...] = ()) -> Model:
    version = msgspec.structs.replace(registration(letter="a"), model=name, tenant=tenant, kind=kind)
    state = VersionState.READY
    aliases = {"prod": version.version}
    return Model(tenant, name, NOW_S, aliases=aliases, versions=(Version(version, NOW_S, state),), grantees=grantees)


KNOWN = {
    (each.tenant, each.model): each
    for each in (
        _model("m"),
        _model("small"),
        _model("vectors", kind="embed"),
        _model("theirs", "other"),
        _model("lent", "other", grantees=(TENANT,)),
    )
}


@pytest.mark.parametrize(
    ("steps", "want"),
    [
        pytest.param((), None, id="no steps"),
        pytest.param((CAP, SMALL), None, id="in order"),
        pytest.param((Fallback(model="other/lent"),), None, id="another tenant's granted model"),
        pytest.param((Fallback(model="other/theirs"),), ModelNotFound, id="another tenant's model"),
        pytest.param((Fallback(model="nope"),), ModelNotFound, id="an unknown model"),
        pytest.param((Fallback(model="m"),), InvalidRequest, id="itself"),
        pytest.param((Fallback(model=f"{TENANT}/m"),), InvalidRequest, id="itself, by its full name"),
        pytest.param((Fallback(model="No!"),), InvalidRequest, id="a bad name"),
        pytest.param((Fallback(model="vectors"),), Conflict, id="a model of another kind"),
        pytest.param((SMALL, CAP), InvalidRequest, id="a step without a wait before one with a wait"),
        pytest.param((CAP, CapOutput(tokens=9, wait_s=1)), InvalidRequest, id="a longer wait before a shorter one"),
        pytest.param((CAP, CAP), InvalidRequest, id="a step twice"),
        pytest.param((CapOutput(tokens=MAX_LIMIT),), None, id="the largest number of tokens"),
        pytest.param((CapOutput(tokens=MAX_LIMIT + 1),), InvalidRequest, id="too many tokens"),
    ],
)
def test_degradation_step_names_callable_models_only(steps: tuple[Any, ...], want: type[Exception] | None) -> None:
    """Steps are in the order of their waits, and name only models that the owner may call."""
    if want is None:
        check_degradation(KNOWN[TENANT, "m"], Ladder(steps=steps, plans={"free": steps}), KNOWN.get)
        return
    for ladder in (Ladder(steps=steps), Ladder(steps=(), plans={"free": steps})):
        with pytest.raises(Refused) as refused:
            check_degradation(KNOWN[TENANT, "m"], ladder, KNOWN.get)
        assert isinstance(refused.value.failure, want)


def test_repeated_step_is_refused_with_the_rule() -> None:
    """The error says what must hold."""
    with pytest.raises(Refused) as refused:
        check_degradation(KNOWN[TENANT, "m"], Ladder(steps=(CAP, CAP)), KNOWN.get)
    assert refused.value.failure == InvalidRequest("steps", "(2)", "must name each step once")


def test_degradation_requires_a_generating_model() -> None:
    """Vectors of another model are in another space."""
    with pytest.raises(Refused) as refused:
        check_degradation(KNOWN[TENANT, "vectors"], Ladder(steps=(SMALL,)), KNOWN.get)
    assert isinstance(refused.value.failure, Conflict)


@pytest.mark.usefixtures("backend")
async def test_degradation_is_published_stored_and_removed(tmp_path: Path) -> None:
    """They are in the feed and survive a restart and a deploy."""
    feed = FeedHub()
    async with opened_registry(tmp_path, feed) as registry:
        for name in ("m", "small"):
            await registry.register(registration(name), NOW_S)
        ladder = Ladder(steps=(CAP, SMALL), plans={"free": (SMALL,), "pro": ()})
        assert await registry.set_ladder(BY, TENANT, "m", ladder, NOW_S) == ladder
        published = {row.model: (row.ladder, row.plan_ladders) for row in feed.snapshot().models}
        assert published == {"m": (ladder.steps, ladder.plans), "small": ((), {})}
        before = registry.model(TENANT, "m")
        await registry.deploy(BY, TENANT, "m", digest("a"), NOW_S)
        assert registry.model(TENANT, "m").ladder, "a deploy changes nothing of it"
    async with opened_registry(tmp_path, feed) as registry:
        assert registry.model(TENANT, "m") == before
        await registry.set_ladder(BY, TENANT, "m", Ladder(steps=()), NOW_S)
        assert all(not row.ladder and not row.plan_ladders for row in feed.snapshot().models)
    async with opened_registry(tmp_path) as registry:
        assert registry.model(TENANT, "m").ladder == ()
        assert registry.model(TENANT, "m").plan_ladders == {}


@pytest.mark.parametrize(
    ("steps", "status"),
    [
        pytest.param(STEPS, 200, id="two steps"),
        pytest.param([], 200, id="no steps"),
        pytest.param([{"step": "cached", "age_s": 3600, "wait_s": None}], 200, id="a cached answer"),
        pytest.param([{"step": "cached", "age_s": 86_401}], 400, id="a cached answer that is too old"),
        pytest.param([{"step": "pray"}], 400, id="an unknown step"),
        pytest.param([{"step": "cap-output", "tokens": 0}], 400, id="an answer of zero tokens"),
        pytest.param([{"step": "cap-output", "tokens": 1, "model": "small"}], 400, id="a field of another step"),
        pytest.param([{"step": "fallback", "model": "small", "wait_s": 0}], 400, id="a wait of zero"),
        pytest.param([{"step": "fallback", "model": "small", "wait_s": 601}], 400, id="a wait that is too long"),
        pytest.param([{"step": "cap-output", "tokens": at + 1} for at in range(9)], 400, id="too many"),
        pytest.param([{"step": "fallback", "model": "nope"}], 404, id="an unknown model"),
        pytest.param(list(reversed(STEPS)), 400, id="out of order"),
    ],
)
async def test_the_route(tmp_path: Path, steps: list[dict[str, object]], status: int) -> None:
    """Accepted steps are returned, and shown in the model."""
    async with running_control_plane(tmp_path) as client:
        for name in ("m", "small"):
            await push(client, name)
        got, answer = await client.admin("PUT", "/models/m/ladder", {"steps": steps})
        assert got == status, answer
        want = steps if status == 200 else []
        if status == 200:
            assert answer == {"steps": want, "plans": {}}
        assert (await client.admin("GET", "/models/m"))[1]["ladder"] == want


@pytest.mark.parametrize(
    ("plans", "status"),
    [
        pytest.param({"free": STEPS, "pro": []}, 200, id="two plans"),
        pytest.param({"Free": STEPS}, 400, id="a bad name"),
        pytest.param({"free\n": STEPS}, 400, id="a name with a line break"),
        pytest.param({"a" * 64: STEPS}, 400, id="a name that is too long"),
        pytest.param({"free": list(reversed(STEPS))}, 400, id="out of order"),
        pytest.param({f"p{at}": [] for at in range(17)}, 400, id="too many"),
    ],
)
async def test_the_route_for_plans(tmp_path: Path, plans: dict[str, Any], status: int) -> None:
    """Plans are stored beside the steps for all tenants. An error names the plan."""
    async with running_control_plane(tmp_path) as client:
        for name in ("m", "small"):
            await push(client, name)
        got, answer = await client.admin("PUT", "/models/m/ladder", {"steps": STEPS[:1], "plans": plans})
        assert got == status, answer
        if status == 200:
            assert answer == {"steps": STEPS[:1], "plans": plans}
        elif "free" in plans:
            assert "plans.free" in answer["detail"]
        assert (await client.admin("GET", "/models/m"))[1]["plan_ladders"] == (plans if status == 200 else {})
