"""10,000 models on one control plane: a version at zero costs no work per tick and little memory."""

import tracemalloc
from collections import Counter

from controlplane.registry.feed_hub import FeedHub
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.registry.policy.version_lifecycle import VersionState
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.serving.control_messages import Feed
from tests.controlplane.builders import registration
from tests.controlplane.scaling.autoscaler_fixture import (
    FAST,
    AutoscalerScenario,
    FakeVersions,
    replace_scale,
    running_autoscaler,
    wake_version,
)

MODELS = 10_000
IN_USE = 20
IDLE_BYTES = 4096
LETTERS = "0123456789ab"


def count_lookups(w: AutoscalerScenario) -> Counter[VersionKey]:
    """Return how often one tick looks up each version."""
    found: Counter[VersionKey] = Counter()
    find = w.catalogue.find

    def counted(which: VersionKey) -> tuple[Model, Version] | None:
        found[which] += 1
        return find(which)

    w.catalogue.find = counted  # type: ignore[method-assign]
    w.scaler.tick()
    w.catalogue.find = find  # type: ignore[method-assign]
    return found


def add_models(catalogue: FakeVersions, scale: ScaleSettings) -> list[VersionKey]:
    """Add 10,000 models at zero."""
    return [catalogue.add(f"m{number}", scale) for number in range(MODELS)]


async def test_tick_evaluates_only_active_versions() -> None:
    """A tick looks up each active version once and no other, before and after the active ones come and go."""
    async with running_autoscaler(slots=IN_USE) as w:
        used = add_models(w.catalogue, FAST)[:: MODELS // IN_USE]
        assert not count_lookups(w)
        for which in used:
            await wake_version(w, which)
        seen = count_lookups(w)
        assert set(seen) == set(used)
        assert max(seen.values()) == 1
        await w.pass_seconds(30)
        for which in used:
            w.actuator.drained(which)
        await w.pass_seconds(4)
        assert not count_lookups(w), "versions at zero again are forgotten"


async def test_minimum_on_all_models_evaluates_all() -> None:
    """Negative control: with a minimum, every model is looked up. A lack of slots does not make each look up the
    others.
    """
    async with running_autoscaler(slots=0) as w:
        every = add_models(w.catalogue, replace_scale(FAST, min=1))
        seen = count_lookups(w)
        assert set(seen) == set(every)
        assert max(seen.values()) < 4


async def test_waiting_versions_check_only_slot_holders() -> None:
    """1,000 versions get requests while busy replicas hold all slots. Each looks only at the slot holders."""
    async with running_autoscaler(slots=IN_USE) as w:
        every = add_models(w.catalogue, FAST)[:1000]
        for which in every[:IN_USE]:
            await wake_version(w, which)
        live_calls: Counter[VersionKey] = Counter()
        live = w.actuator.live_count

        def counted(which: VersionKey) -> int:
            live_calls[which] += 1
            return live(which)

        w.actuator.live_count = counted  # type: ignore[method-assign]
        for which in every[IN_USE:]:
            w.report(which)
        assert len(w.actuator.refused) == len(every) - IN_USE
        holders = sum(live_calls[which] for which in every[:IN_USE])
        assert sum(live_calls.values()) - holders < 10 * len(every), "waiting versions do not look at each other"


def bytes_of_each(count: int, versions: int) -> float:
    """Return the memory per model in the registry and the feed, with `versions` versions each."""
    tracemalloc.start()
    try:
        hub, models = FeedHub(), {}
        for number in range(count):
            name = f"model-{number}"
            every = tuple(
                Version(registration(name, letter), 1_700_000_000, VersionState.READY) for letter in LETTERS[:versions]
            )
            aliases = {"prod": every[0].registration.version}
            model = Model("default", name, 1_700_000_000, ScaleSettings(), aliases, every)
            models[model.tenant, model.model] = model
            hub.publish(Feed(models=(model.row(),), versions=tuple(each.row() for each in every)))
        return tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()


def test_idle_model_takes_under_4_kilobytes() -> None:
    """A model with one version takes less than 4 KB. Control: a model with twelve takes more."""
    assert bytes_of_each(2000, versions=1) < IDLE_BYTES < bytes_of_each(500, versions=12)
