"""Explain why an idle model is as warm as it is: prices, measured restores, break-even, and the cost of its pauses."""

from collections.abc import Sequence

from controlplane.clock import Clock
from controlplane.ledger.policy.rating import ANY_CLASS
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.scaling.kpa.autoscaler import Autoscaler
from controlplane.scaling.policy.breakeven import (
    Level,
    LevelChange,
    LevelPrice,
    gap_histogram,
    next_level_change,
    optimal_pause_cost,
    pause_cost,
    plan_levels,
)
from controlplane.scaling.policy.eta import RestoreTime
from controlplane.scaling.policy.replica_lifecycle import SERVING, SLEEPING, ReplicaState
from controlplane.scaling.replicas import ReplicaTable
from controlplane.scaling.warmth.warmth_cost import WarmthCost
from kelvin.contracts.wire import Wire


class IdlePrices(Wire, frozen=True):
    """Prices in micro-units per second, and the host memory in bytes that a replica takes at each level.

    `device_idle` and `device_restore` are the prices of a device, `memory_gib` of a GiB of host memory, `wait` of a
    waiting caller.
    """

    currency: str
    device_idle: float
    device_restore: float
    memory_gib: float
    wait: float
    warm_bytes: int
    asleep_bytes: int
    asleep2_bytes: int


class LevelCost(Wire, frozen=True):
    """Costs of an idle level in micro-units: `hold` per second, `wake` once.

    `wake` is `wake_s` at the prices of waiting and of the device. `wake_s` is a mean of `seen` restores (0: a guess).
    From `from_s` idle seconds on the level is the cheapest; null if it never is.
    """

    level: str
    hold: float
    wake_s: float
    seen: int
    wake: float
    from_s: float | None


class Fetch(Wire, frozen=True):
    """Mean duration of the lease step in `seen` starts from zero or `asleep2` whose slowest tier was `tier`.

    It is part of `wake_s`, which is one mean over all tiers.
    """

    tier: str
    seconds: float
    seen: int


class Pauses(Wire, frozen=True):
    """The last pauses of at least two seconds between requests: their number, mean and count by length (up to so many
    seconds). Then what they would have cost by break-even, at each level throughout, and with foresight.
    """

    count: int
    mean_s: float | None
    by_length: dict[str, int]
    by_break_even: float
    throughout: dict[str, float]
    with_foresight: float


class IdleVersion(Wire, frozen=True):
    """One version: its idle level, for how long it has had it (`level_s`, null at zero), and what follows. `idle_s` is
    the time since the last request; null if this process has seen none.
    """

    version: str
    aliases: tuple[str, ...]
    level: str
    level_s: float | None
    idle_s: float | None
    next_level: str | None
    next_in_s: float | None
    prices: IdlePrices
    levels: tuple[LevelCost, ...]
    fetches: tuple[Fetch, ...]
    pauses: Pauses


class IdleModel(Wire, frozen=True):
    """Answer of `GET /admin/v1/models/{model}/idle`. Break-even decides only if the setting is `auto`."""

    model: str
    setting: str
    versions: tuple[IdleVersion, ...]


def explain_idle(
    model: Model,
    table: ReplicaTable,
    autoscaler: Autoscaler,
    warmth_cost: WarmthCost,
    clock: Clock,
) -> IdleModel:
    """Explain each version that is not deleted."""
    now_us = clock.monotonic_us()
    return IdleModel(
        model=model.model,
        setting=model.scale.idle,
        versions=tuple(_version(model, each, table, autoscaler, warmth_cost, now_us) for each in model.live_versions),
    )


def _version(
    model: Model,
    version: Version,
    table: ReplicaTable,
    autoscaler: Autoscaler,
    warmth_cost: WarmthCost,
    now_us: int,
) -> IdleVersion:
    key = version.key
    level, since_us, device_class = _level(table, key)
    find_prices = warmth_cost.find_prices(model, version, device_class)
    steps, idle_s = plan_levels(find_prices.level_prices), autoscaler.idle_gaps.idle_s(key, now_us / 1e6)
    minimum = autoscaler.effective_minimum(model, version)
    after = None if idle_s is None else _next_level(model, version, minimum, level, steps, idle_s)
    restores = {
        Level.WARM: RestoreTime(0.0, 0),
        Level.ASLEEP: find_prices.wake,
        Level.DEEP_SLEEP: find_prices.refill,
        Level.ZERO: find_prices.start,
    }
    from_s = {step.level: step.from_s for step in steps}
    return IdleVersion(
        version=key.version,
        aliases=model.aliases_of(key.version),
        level=level,
        level_s=None if since_us is None else (now_us - since_us) / 1e6,
        idle_s=idle_s,
        next_level=None if after is None else after.level,
        next_in_s=None if after is None or idle_s is None else max(0.0, after.from_s - idle_s),
        prices=IdlePrices(
            currency=warmth_cost.currency,
            device_idle=find_prices.idle,
            device_restore=find_prices.restore,
            memory_gib=find_prices.memory,
            wait=find_prices.wait,
            warm_bytes=find_prices.warm_bytes,
            asleep_bytes=find_prices.asleep_bytes,
            asleep2_bytes=find_prices.asleep2_bytes,
        ),
        levels=tuple(
            LevelCost(
                level=rung.level,
                hold=rung.hold,
                wake_s=restores[rung.level].seconds,
                seen=restores[rung.level].samples,
                wake=rung.wake,
                from_s=from_s.get(rung.level),
            )
            for rung in find_prices.level_prices
        ),
        fetches=tuple(
            Fetch(tier=tier, seconds=mean.seconds, seen=mean.samples)
            for tier, mean in warmth_cost.fetch_times(key).items()
        ),
        pauses=_pauses(autoscaler.idle_gaps.gaps_of(key), find_prices.level_prices, steps),
    )


def _level(table: ReplicaTable, key: VersionKey) -> tuple[Level, int | None, str]:
    """Return the current level, since when (None: unknown), and the device class."""
    awake = [r for r in table.replicas_of(key) if r.state in SERVING | {ReplicaState.RESTORING, ReplicaState.DOZING}]
    found = next(iter((*awake, *table.sleepers(key))), None)
    if found is None:
        return Level.ZERO, None, ANY_CLASS
    level = Level(found.state) if found.state in SLEEPING else Level.WARM
    return level, found.since_us, found.device_class or ANY_CLASS


def _next_level(
    model: Model, version: Version, minimum: int, level: Level, steps: Sequence[LevelChange], idle_s: float
) -> LevelChange | None:
    """Return the level that follows without further requests; None for none. `minimum` is the one that holds now."""
    if level is Level.ZERO or minimum:
        return None
    patience_s = model.scale.window_s + model.scale.grace_s
    if version.registration.version not in model.named:
        return LevelChange(Level.ZERO, patience_s)
    match model.scale.idle:
        case "auto":
            return next_level_change(steps, idle_s)
        case "zero":
            return LevelChange(Level.ZERO, patience_s)
        case "sleep" if level is Level.WARM:
            return LevelChange(Level.ASLEEP, patience_s)
        case "sleep2" if level is not Level.DEEP_SLEEP:
            return LevelChange(Level.DEEP_SLEEP, patience_s)
        case _:
            return None


def _pauses(idle_gaps: Sequence[float], level_prices: Sequence[LevelPrice], steps: Sequence[LevelChange]) -> Pauses:
    return Pauses(
        count=len(idle_gaps),
        mean_s=sum(idle_gaps) / len(idle_gaps) if idle_gaps else None,
        by_length={str(bound): count for bound, count in gap_histogram(idle_gaps).items()},
        by_break_even=sum(pause_cost(level_prices, steps, gap_s) for gap_s in idle_gaps),
        throughout={rung.level: sum(rung.hold * gap_s + rung.wake for gap_s in idle_gaps) for rung in level_prices},
        with_foresight=sum(optimal_pause_cost(level_prices, gap_s) for gap_s in idle_gaps),
    )
