"""Explain what Kelvin expects of a model's next start, with the figures behind it."""

from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.scaling.policy.breakeven import Level
from controlplane.scaling.policy.eta import PastForecast
from controlplane.scaling.policy.replica_lifecycle import ReplicaState
from controlplane.scaling.replicas import Replica, ReplicaTable
from controlplane.scaling.warmth.start_forecasts import StartForecaster
from kelvin.contracts.serving.start_forecast import TierPlacement, TierRate
from kelvin.contracts.wire import Wire


class Expected(Wire, frozen=True):
    """Expected seconds of a start. `ready_s` is the larger of `process_s` and `bytes_s`, plus `lease_s` and `bind_s`;
    `first_token_s` adds `answer_s`. `known` is the source of the steps: starts of the `version` itself, starts of its
    `size`, or a `guess`.
    """

    known: str
    process_s: float
    bytes_s: float
    lease_s: float
    bind_s: float
    answer_s: float
    ready_s: float
    first_token_s: float
    bytes_by_tier: dict[str, int]
    rates: dict[str, TierRate]


class StartForecast(Wire, frozen=True):
    """Forecast of a start of the version.

    `expected` is for a start now, with that many `standbys` parked; null while the cache does not answer. `wake_s` is
    for waking a sleeping replica. `past` are the forecasts of its last starts, the oldest first.
    """

    version: str
    aliases: tuple[str, ...]
    standbys: int
    expected: Expected | None
    wake_s: float | None
    past: tuple[PastForecast, ...]


class Starts(Wire, frozen=True):
    """Answer of `GET /admin/v1/models/{model}/starts`: each version that is not deleted."""

    model: str
    versions: tuple[StartForecast, ...]


async def forecast_starts(model: Model, table: ReplicaTable, forecasts: StartForecaster) -> Starts:
    """Return the forecasts of the model's versions. Asks the cache agent once per version."""
    versions = tuple([await _start(model, each, table, forecasts) for each in model.live_versions])
    return Starts(model=model.model, versions=versions)


async def _start(model: Model, version: Version, table: ReplicaTable, forecasts: StartForecaster) -> StartForecast:
    key, standbys = version.key, table.count(ReplicaState.STANDBY)
    placement = await forecasts.find_placement(key)
    return StartForecast(
        version=key.version,
        aliases=model.aliases_of(key.version),
        standbys=standbys,
        expected=None if placement is None else _expected(key, placement, forecasts, parked=standbys > 0),
        wake_s=next((_wake_time_s(each, version, forecasts) for each in table.sleepers(key)), None),
        past=forecasts.history.forecast_errors(key),
    )


def _wake_time_s(sleeper: Replica, version: Version, forecasts: StartForecaster) -> float:
    return forecasts.estimate_wake_s(version.key, version.registration.total_bytes, Level(sleeper.state))


def _expected(key: VersionKey, placement: TierPlacement, forecasts: StartForecaster, *, parked: bool) -> Expected:
    estimate = forecasts.estimate(key, placement, parked=parked)
    return Expected(
        known=estimate.basis,
        process_s=estimate.process_s,
        bytes_s=estimate.bytes_s,
        lease_s=estimate.steps.lease_s,
        bind_s=estimate.steps.bind_s,
        answer_s=estimate.steps.answer_s,
        ready_s=estimate.ready_s,
        first_token_s=estimate.first_token_s,
        bytes_by_tier=placement.bytes_by_tier,
        rates=placement.rates,
    )
