"""Tenant isolation of all stored answers: idempotency keys, the cache, and the degradation step. Tenants send the same
requests to the same models in any order, while versions, aliases and grants change. Each gets its own answers only.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from activator.answers.idempotency_secret import ensure_idempotency_secret
from tests.activator.answers.isolation_world import (
    BODIES,
    KEYS,
    MODELS,
    VERSIONS,
    Busy,
    ConcurrentRequests,
    Deploy,
    Grant,
    IsolationWorld,
    Step,
    TenantLeak,
    TenantRequest,
)
from tests.activator.redis_server import RedisServer
from tests.activator.world import world

STORES = [pytest.param(False, id="in process"), pytest.param(True, id="in a Redis that two activators share")]

_models = st.sampled_from((MODELS[0], MODELS[0], *MODELS))
_questions = st.builds(
    TenantRequest,
    who=st.just(""),
    model=_models,
    named=st.sampled_from(("", "", "next")),
    body=st.sampled_from(("good", *BODIES)),
    stream=st.sampled_from((False, False, True)),
    greedy=st.sampled_from((True, True, True, False)),
)


@st.composite
def _plays(draw: st.DrawFn) -> list[Step]:
    """Draw a sequence of few questions, so that they repeat. The tenant, activator and options vary."""
    asks = st.builds(
        replace,
        st.sampled_from(draw(st.lists(_questions, min_size=1, max_size=3))),
        who=st.sampled_from(list(KEYS)),
        cache=st.booleans(),
        key=st.sampled_from(("", "", "1", "2")),
        never=st.sampled_from((False, False, False, True)),
        door=st.integers(0, 1),
    )
    together = st.builds(ConcurrentRequests, st.lists(asks, min_size=1, max_size=3).map(tuple))
    change = st.one_of(
        st.builds(Busy, st.booleans()),
        st.builds(Deploy, _models, st.sampled_from(("prod", "next")), st.sampled_from(VERSIONS)),
        st.builds(Grant, _models, st.sets(st.sampled_from(list(KEYS))).map(lambda found: tuple(sorted(found)))),
    )
    some = st.lists(st.one_of(together, together, together, change), min_size=3, max_size=10)
    first = draw(st.lists(together, min_size=3, max_size=8))
    return [*first, Busy(True), *draw(some), Busy(False), *draw(some)]


Run = Callable[[Coroutine[Any, Any, None]], None]


@contextmanager
def kept(
    tmp_path: Path, shared: bool, program: str = "activator", **given: object
) -> Iterator[tuple[IsolationWorld, Run]]:
    """Start one activator, or two with one Redis. Yield their IsolationWorld, and a function that runs coroutines."""
    with asyncio.Runner() as runner:

        async def start(stack: AsyncExitStack) -> IsolationWorld:
            doors = []
            if shared:
                given["redis"] = stack.enter_context(RedisServer()).url
            secret = ensure_idempotency_secret(tmp_path / "once.key")
            for name in ("a", "b") if shared else ("a",):
                (tmp_path / name / "data").mkdir(parents=True)
                (tmp_path / name / "data" / "once.key").write_text(secret.hex())
                here = world(tmp_path / name, program=program, **given)  # type: ignore[arg-type]
                doors.append(await stack.enter_async_context(here))
            made = IsolationWorld(doors)
            await made.start()
            return made

        stack = AsyncExitStack()
        try:
            made = runner.run(start(stack))
            yield made, runner.run
        finally:
            runner.run(stack.aclose())


def play_many(here: IsolationWorld, run: Run, examples: int, phases: tuple[Phase, ...]) -> None:
    """Play `examples` random sequences, the same ones each time. Raises TenantLeak."""

    @settings(
        max_examples=examples, derandomize=True, database=None, phases=phases,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(_plays())
    def played(steps: list[Step]) -> None:
        run(here.play(steps))

    played()


@pytest.mark.parametrize("shared", STORES)
def test_no_answer_reaches_another_tenant(tmp_path: Path, shared: bool) -> None:
    """Nor does another question, model or version get it. A tenant whose grant was revoked gets nothing stored."""
    with kept(tmp_path, shared) as (here, run):
        play_many(here, run, 20, (Phase.generate, Phase.shrink))
        assert min(here.seen[how] for how in ("once", "cache", "ladder")) > 0, here.seen


def test_models_of_one_version_are_told_apart(tmp_path: Path) -> None:
    """The URL alone names the model here. A cached answer is found for its own model only."""
    asks = [TenantRequest("default", model) for model in ("default/m", "default/twin", "default/m")]
    with kept(tmp_path, shared=False) as (here, run):
        run(here.play([ConcurrentRequests((ask,)) for ask in asks]))
        assert here.seen == {"cache": 1}


@pytest.mark.parametrize("shared", STORES)
def test_control_store_without_tenants_is_detected(tmp_path: Path, shared: bool) -> None:
    """Negative control: for each store, the same sequences find a leak when its names leave the tenant out."""
    leaks = tmp_path / "leaks"
    leaks.write_text("")
    with kept(tmp_path, shared, "tests.activator.tenant_leak", leaks=leaks) as (here, run):
        for store in ("once", "cache", "ladder"):
            leaks.write_text(store)
            with pytest.raises(TenantLeak):
                play_many(here, run, 100, (Phase.generate,))
