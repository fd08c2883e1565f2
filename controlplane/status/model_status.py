"""Build the status of models for operators: the registry's facts, the replicas, the last restores."""

from collections.abc import Mapping

from controlplane.api.types.admin_types import (
    Memory,
    ModelStatus,
    PendingReplicas,
    PodPool,
    PoolStatus,
    ReplicaStatus,
    RestoreStatus,
    VersionStatus,
)
from controlplane.knative.policy.pending_replicas import Pending
from controlplane.registry.policy.domain import Model, Version, VersionKey
from controlplane.scaling.interfaces import ReplicaLookup
from controlplane.scaling.local.footprints import Footprint
from controlplane.scaling.local.standby_pool import StandbyPool
from controlplane.scaling.policy.replica_lifecycle import SERVING, ReplicaState
from controlplane.scaling.replicas import Replica
from controlplane.scaling.start_outcomes import LastRestore, StartOutcomes
from kelvin.contracts.names import DEFAULT_ALIAS

_SERVING = SERVING | {ReplicaState.DRAINING}


def model_status(model: Model, replicas: ReplicaLookup, outcomes: StartOutcomes) -> ModelStatus:
    """Return the status of the model with all of its versions."""
    versions = tuple(_version_status(model, version, replicas, outcomes) for version in model.versions)
    prod = model.aliases.get(DEFAULT_ALIAS)
    shown = next((each for each in versions if each.version == prod), None)
    return ModelStatus(
        model=model.model,
        aliases=model.aliases,
        version=prod,
        state=shown.state if shown is not None else "zero",
        replicas=sum(replica.state in _SERVING for each in versions for replica in each.replicas),
        scale=model.scale,
        created_at_s=model.created_at_s,
        last_restore=shown.last_restore if shown is not None else None,
        versions=versions,
        grantees=model.grantees,
        split=model.split,
        ladder=model.ladder,
        plan_ladders=model.plan_ladders,
        meanwhile=model.meanwhile,
    )


def pool_status(pool: StandbyPool) -> PoolStatus:
    """Return the status of the pool, with the last measured memory."""
    seen = pool.state()
    return PoolStatus(
        device=seen.device,
        wanted=seen.size.wanted,
        why=seen.size.reason,
        kept=seen.kept_count,
        parked=seen.parked,
        forking=seen.forked,
        target=pool.sizing.target,
        probability=round(seen.size.probability, 6),
        starts_per_s=round(seen.takes.per_s, 6),
        replaced_in_s=round(seen.takes.replace_s, 6),
        hits=seen.counts.get(("start", "hit"), 0),
        misses=seen.counts.get(("start", "miss"), 0),
        memory=memory(pool.footprints.standbys),
        budget_bytes=pool.sizing.budget_bytes,
    )


def pending_replicas(row: Pending, now_s: float) -> PendingReplicas:
    """Return the pending replicas of a class, at `now_s` of the cluster's clock."""
    return PendingReplicas(
        device=row.node.device,
        zone=row.node.zone,
        spot=row.node.spot,
        replicas=row.replicas,
        waited_s=None if row.since_s is None else max(0.0, now_s - row.since_s),
        node_s=row.node_s,
        measured=row.measured,
    )


def pod_pools(counts: Mapping[tuple[str, ...], float]) -> tuple[PodPool, ...]:
    """Return the pools from counts by (pool, state). The state `wanted` is not a state of pods."""
    pools: dict[str, dict[str, int]] = {}
    for (name, state), count in sorted(counts.items()):
        pools.setdefault(name, {})[state] = int(count)
    return tuple(PodPool(name=name, wanted=states.pop("wanted", 0), pods=states) for name, states in pools.items())


def memory(seen: Footprint) -> Memory:
    """Return the footprint as a body of the API."""
    return Memory(pss=seen.pss_bytes, private=seen.private_bytes)


def _version_status(model: Model, version: Version, replicas: ReplicaLookup, outcomes: StartOutcomes) -> VersionStatus:
    registration, key = version.registration, version.key
    return VersionStatus(
        version=registration.version,
        aliases=model.aliases_of(registration.version),
        state=_state(replicas, key),
        health=version.state,
        fault=version.fault,
        created_at_s=version.created_at_s,
        architecture=registration.architecture,
        weight_bytes=registration.weight_bytes,
        total_bytes=registration.total_bytes,
        kv_bytes_per_token=registration.kv_bytes_per_token,
        replicas=tuple(_replica_status(replica) for replica in replicas.replicas_of(key)),
        last_restore=_restore_status(outcomes.last_attempt(key)),
        start_problem=outcomes.problem(key),
        last_death=outcomes.last_death(key),
        image_behind=outcomes.images_behind.get(key),
    )


def _state(replicas: ReplicaLookup, key: VersionKey) -> str:
    if replicas.ready_count(key):
        return "ready"
    if replicas.live_count(key):
        return "restoring"
    return next((replica.state.value for replica in replicas.sleepers(key)), "zero")


def _replica_status(replica: Replica) -> ReplicaStatus:
    return ReplicaStatus(
        runtime_id=replica.runtime_id,
        pid=replica.pid,
        state=replica.state,
        device_class=replica.device_class,
        max_streams=replica.max_streams,
    )


def _restore_status(last_attempt: LastRestore | None) -> RestoreStatus | None:
    if last_attempt is None:
        return None
    code, sentence = last_attempt.failure or (None, None)
    return RestoreStatus(spans=last_attempt.spans, failure_code=code, failure=sentence)
