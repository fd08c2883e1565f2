"""What the admin API answers with, and what it takes. Rendering is the command line's."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from controlplane.knative.policy.rollout_waves import ImageBehind
from controlplane.scaling.policy.scale_settings import ScaleSettings
from kelvin.contracts.serving.control_messages import StartProblem
from kelvin.contracts.serving.degradation_steps import DegradationStep
from kelvin.contracts.timeline import StageSpan
from kelvin.contracts.wire import Wire
from kelvin.process.exit_log import ProcessExits


class Deploy(Wire, frozen=True):
    """Body of `POST /admin/v1/models/M/deploy`: 12 or more hex digits of the version."""

    version: str


class Deployed(Wire, frozen=True):
    """The version that `prod` names now."""

    model: str
    version: str


class Split(Wire, frozen=True):
    """Body of `PUT /admin/v1/models/M/split`, by 12 or more hex digits of each version, and its answer, by all of them:
    the versions that share what is asked of `prod`, by weight. Empty: it has all.
    """

    weights: Annotated[dict[str, Annotated[int, Meta(ge=1, le=1000)]], Meta(max_length=16)]


class Deleted(Wire, frozen=True):
    """The version that is no longer served."""

    model: str
    version: str


class DeletedModel(Wire, frozen=True):
    """The model that is gone, and the versions that it had."""

    model: str
    versions: tuple[str, ...]


class Renewal(Wire, frozen=True):
    """An order to replace all replicas of a model: the last one since the control plane began, else `none`.

    `replicas` were there when it came, `replaced` are gone, each after another one served in its place, but for those
    that slept or were no longer wanted. `reason` is why it failed: who was not replaced serves on.
    """

    order: str
    state: Literal["none", "running", "done", "failed"]
    replicas: int
    replaced: int
    reason: str | None = None


class ReplicaStatus(Wire, frozen=True):
    """One process of a version."""

    runtime_id: str
    pid: int
    state: str  # as in policy/replica_life
    device_class: str
    max_streams: int


class RestoreStatus(Wire, frozen=True):
    """How the last restore went: its spans in microseconds after it was asked for, or why it failed."""

    spans: tuple[StageSpan, ...]
    failure_code: str | None = None
    failure: str | None = None


class ReplicaDeath(Wire, frozen=True):
    """A replica that ended although nobody had told it to. `exit_status` is as in `Popen.returncode`."""

    runtime_id: str
    at_s: int  # Unix time
    exit_status: int


class VersionStatus(Wire, frozen=True):
    """A version and what runs of it."""

    version: str
    aliases: tuple[str, ...]
    state: str  # "zero", "asleep2", "asleep", "restoring" or "ready"
    health: str  # "ready", "faulty" or "deleted"
    fault: str | None
    created_at_s: int
    architecture: str
    weight_bytes: int
    total_bytes: int
    kv_bytes_per_token: int
    replicas: tuple[ReplicaStatus, ...]
    last_restore: RestoreStatus | None
    start_problem: StartProblem | None = None  # why no replica comes, where one is wanted
    last_death: ReplicaDeath | None = None  # since the control plane started
    image_behind: ImageBehind | None = None


class ModelStatus(Wire, frozen=True):
    """A model; `version`, `state` and `last_restore` are those of its alias `prod`."""

    model: str
    aliases: dict[str, str]
    version: str | None
    state: str
    replicas: int  # of all versions, ready or draining
    scale: ScaleSettings
    created_at_s: int
    last_restore: RestoreStatus | None
    versions: tuple[VersionStatus, ...]
    grantees: tuple[str, ...]  # other tenants that may call it
    split: dict[str, int]  # versions that share what is asked of `prod`, by weight
    ladder: tuple[DegradationStep, ...]  # what it gives up before it refuses
    plan_ladders: dict[str, tuple[DegradationStep, ...]]  # in its place, by the plan of who asks
    meanwhile: dict[str, str]  # version that was only just named -> the one before it, which answers what it can't yet


class ModelGrant(Wire, frozen=True):
    """A tenant's model, and another tenant that may call it. `told`: every activator that follows the feed knows."""

    owner: str
    model: str
    grantee: str
    told: bool = True


class ModelGrants(Wire, frozen=True):
    """`GET /admin/v1/grants`: what the tenant gave, and what it was given."""

    given: tuple[ModelGrant, ...]
    had: tuple[ModelGrant, ...]


class Models(Wire, frozen=True):
    """`GET /admin/v1/models`."""

    models: tuple[ModelStatus, ...]


class ProcessStatus(Wire, frozen=True):
    """A process of the installation: whether it answers, and whether it can do its work."""

    name: str
    healthy: bool
    ready: bool
    exits: int = 0  # how often it ended since the installation began
    last_exit_at_s: int | None = None  # Unix time
    last_exit: str | None = None  # such as `killed by signal 9: it did not answer for 18 s`


class Memory(Wire, frozen=True):
    """What processes take, in bytes: `pss` with their part of what they share, `private` what is theirs alone."""

    pss: int
    private: int


class PoolStatus(Wire, frozen=True):
    """The standbys of one device class: how many there are and should be, why, and what they cost."""

    device: str
    wanted: int
    why: str  # off, least, rate, bursts, share; or the bound that cut it: most, budget
    kept: int  # follows `wanted`, down with a delay
    parked: int
    forking: int
    target: float
    probability: float  # that the next start finds one, with as many as are wanted
    starts_per_s: float  # jobs included
    replaced_in_s: float
    hits: int  # starts that found one, since the control plane began
    misses: int
    memory: Memory
    budget_bytes: int  # for their private memory


class DeviceStatus(Wire, frozen=True):
    """Device slots and parked standbys of this machine. Zygote and standbys are the platform's cost, no tenant's."""

    slots: int
    held: int
    standbys: int
    pools: tuple[PoolStatus, ...]
    zygote: Memory


class CacheDamage(msgspec.Struct, frozen=True):
    """A chunk in memory that was found wrong, and the processes that have it mapped."""

    tenant: str
    chunk: str
    pids: tuple[int, ...]


class CacheStatus(msgspec.Struct, frozen=True):
    """What the weight cache found faulty since it started, of all that it says of itself: by tier and kind; healed by
    the tier that had a good copy, refused by the failure's code. Unverified: loads of versions without a trusted
    signature, where one is asked for. Chunks that were hashed anew by tier, passes over all of them, and the wrong ones
    in memory that living processes have mapped.
    """

    chunk_faults: dict[str, dict[str, int]]
    manifest_faults: dict[str, dict[str, int]]
    attestation_faults: dict[str, dict[str, int]]
    unverified_versions: int
    healed_chunks: dict[str, int]
    healed_manifests: dict[str, int]
    refused_chunks: dict[str, int]
    examined_chunks: dict[str, int]
    sweeps: int
    damaged: tuple[CacheDamage, ...]


class CacheFault(Wire, frozen=True):
    """A chunk that a tier kept and that was wrong; it was dropped."""

    tier: str
    tenant: str
    chunk: str
    kind: str


class CacheCheck(Wire, frozen=True):
    """What the weight cache saw when it hashed all that it keeps: chunks and bytes by tier, the first 1000 faults and
    contradictions.
    """

    chunks: dict[str, int]
    bytes: dict[str, int]
    faults: tuple[CacheFault, ...]
    contradictions: tuple[str, ...]


class PendingReplicas(Wire, frozen=True):
    """Replicas of one class that are wanted and have no node, or no device slot of this machine.

    `device` is what they ask for: `cpu`, `gpu` or a slice (`mig-1g.10gb`) of a cluster's nodes, a device class of a
    machine. `zone` is one, or `any`. `spot`: `only` for capacity that may be taken away, `may`, or `no`.
    """

    device: str
    zone: str
    spot: str
    replicas: int
    waited_s: float | None = None  # the longest; null where nobody knows
    node_s: float | None = None  # what such a wait is expected to last in all
    measured: int = 0  # waits that say so; 0: a guess


class PodPool(Wire, frozen=True):
    """Pods of a cluster that versions share. `wanted` is what Knative's autoscaler is told of them; `pods` how many
    there are, by state.
    """

    name: str
    wanted: int
    pods: dict[str, int]


class DiskStatus(Wire, frozen=True):
    """The disk of the data directory. `free_inodes` is null where the file system counts none."""

    free_bytes: int
    total_bytes: int
    free_inodes: int | None


class Status(Wire, frozen=True):
    """`GET /admin/v1/status`. All but the models is the installation's, and told to operators.

    `cache`, `device` and `disk` are null on a cluster; `cache` also while the cache does not answer. `pools` are of a
    cluster alone.
    `replica_exits` counts replicas and standbys that were killed because they hung; null if there were none.
    """

    processes: tuple[ProcessStatus, ...]
    cache: CacheStatus | None
    device: DeviceStatus | None
    models: tuple[ModelStatus, ...]
    pending: tuple[PendingReplicas, ...] = ()
    pools: tuple[PodPool, ...] = ()
    replica_exits: ProcessExits | None = None
    disk: DiskStatus | None = None
