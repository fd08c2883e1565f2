"""Define the bodies of the admin API's routes of models and status. The command line renders them."""

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
    """Body of `POST /admin/v1/models/M/deploy`. `version` is 12 or more hex digits of the version."""

    version: str


class Deployed(Wire, frozen=True):
    """The version that `prod` names now."""

    model: str
    version: str


class Split(Wire, frozen=True):
    """Body of `PUT /admin/v1/models/M/split`, and its answer: the versions that share requests to `prod`, by weight.

    The body names each version by 12 or more hex digits, the answer by all digits. Empty: `prod` gets all requests.
    """

    weights: Annotated[dict[str, Annotated[int, Meta(ge=1, le=1000)]], Meta(max_length=16)]


class Deleted(Wire, frozen=True):
    """The version that is no longer served."""

    model: str
    version: str


class DeletedModel(Wire, frozen=True):
    """The deleted model, and the versions that it had."""

    model: str
    versions: tuple[str, ...]


class Renewal(Wire, frozen=True):
    """An order to replace all replicas of a model: the last one since the control plane started, else `none`.

    `replicas` is how many there were when the order came, `replaced` how many of them are gone. Each was replaced after
    a new one served, except sleeping and surplus ones. `reason` tells why the order failed; replicas not replaced serve
    on.
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
    state: str  # as in controlplane/scaling/policy/replica_lifecycle.py
    device_class: str
    max_streams: int


class RestoreStatus(Wire, frozen=True):
    """Result of the last restore: its stages in microseconds since the request for it, or why it failed."""

    spans: tuple[StageSpan, ...]
    failure_code: str | None = None
    failure: str | None = None


class ReplicaDeath(Wire, frozen=True):
    """A replica that ended without an order to end. `exit_status` is as in `Popen.returncode`."""

    runtime_id: str
    at_s: int  # Unix time
    exit_status: int


class VersionStatus(Wire, frozen=True):
    """A version and its replicas."""

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
    start_problem: StartProblem | None = None  # why no replica starts although one is wanted
    last_death: ReplicaDeath | None = None  # since the control plane started
    image_behind: ImageBehind | None = None


class ModelStatus(Wire, frozen=True):
    """A model. `version`, `state` and `last_restore` are those of its alias `prod`."""

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
    split: dict[str, int]  # versions that share requests to `prod`, by weight
    ladder: tuple[DegradationStep, ...]  # degradation steps, tried before a request is refused
    plan_ladders: dict[str, tuple[DegradationStep, ...]]  # by the caller's plan, instead of `ladder`
    meanwhile: dict[str, str]  # newly named version -> its predecessor, which answers until the new one can


class ModelGrant(Wire, frozen=True):
    """A tenant's model and another tenant that may call it. `told`: every activator that follows the feed knows it."""

    owner: str
    model: str
    grantee: str
    told: bool = True


class ModelGrants(Wire, frozen=True):
    """Answer of `GET /admin/v1/grants`: grants that the tenant gave, and grants that it has."""

    given: tuple[ModelGrant, ...]
    had: tuple[ModelGrant, ...]


class Models(Wire, frozen=True):
    """Answer of `GET /admin/v1/models`."""

    models: tuple[ModelStatus, ...]


class ProcessStatus(Wire, frozen=True):
    """A process of the installation: whether it answers, and whether it is ready to work."""

    name: str
    healthy: bool
    ready: bool
    exits: int = 0  # since the installation started
    last_exit_at_s: int | None = None  # Unix time
    last_exit: str | None = None  # such as `killed by signal 9: it did not answer for 18 s`


class Memory(Wire, frozen=True):
    """Memory of processes in bytes. `pss` includes their share of shared pages, `private` excludes shared pages."""

    pss: int
    private: int


class PoolStatus(Wire, frozen=True):
    """The standbys of one device class: how many there are and should be, why, and what they cost."""

    device: str
    wanted: int
    why: str  # off, least, rate, bursts, share; or the limit that capped it: most, budget
    kept: int  # follows `wanted`; goes down with a delay
    parked: int
    forking: int
    target: float
    probability: float  # that the next start finds a parked standby if `wanted` are parked
    starts_per_s: float  # jobs included
    replaced_in_s: float
    hits: int  # starts that found a parked standby, since the control plane started
    misses: int
    memory: Memory
    budget_bytes: int  # limit of their private memory


class DeviceStatus(Wire, frozen=True):
    """Device slots and standbys of this machine. The platform pays for zygote and standbys, no tenant does."""

    slots: int
    held: int
    standbys: int
    pools: tuple[PoolStatus, ...]
    zygote: Memory


class CacheDamage(msgspec.Struct, frozen=True):
    """A damaged chunk in memory, and the processes that have it mapped."""

    tenant: str
    chunk: str
    pids: tuple[int, ...]


class CacheStatus(msgspec.Struct, frozen=True):
    """Faults that the weight cache has found since it started.

    Faults of chunks, manifests and attestations are counted by tier and kind. `healed_*` are counted by the tier that
    had a good copy, `refused_chunks` by the failure's code. `unverified_versions`: loads without a trusted signature
    while one is required. `examined_chunks` were hashed again, by tier, in `sweeps` passes over all of them. `damaged`:
    wrong chunks in memory that live processes have mapped.
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
    """A damaged chunk of a tier. The tier has dropped it."""

    tier: str
    tenant: str
    chunk: str
    kind: str


class CacheCheck(Wire, frozen=True):
    """Result of hashing all of the weight cache: chunks and bytes by tier, the first 1000 faults and contradictions."""

    chunks: dict[str, int]
    bytes: dict[str, int]
    faults: tuple[CacheFault, ...]
    contradictions: tuple[str, ...]


class PendingReplicas(Wire, frozen=True):
    """Wanted replicas of one class that have no node, or no device slot of this machine.

    `device` is `cpu`, `gpu` or a slice (`mig-1g.10gb`) of a cluster's nodes, or a device class of a machine. `zone` is
    one zone, or `any`. `spot` is `only` (for capacity that may be taken away), `may`, or `no`.
    """

    device: str
    zone: str
    spot: str
    replicas: int
    waited_s: float | None = None  # the longest wait; null if unknown
    node_s: float | None = None  # expected length of the whole wait
    measured: int = 0  # waits that `node_s` is computed from; 0: it is a guess


class PodPool(Wire, frozen=True):
    """Pods that versions share. Knative's autoscaler wants `wanted` of them; `pods` counts existing ones by state."""

    name: str
    wanted: int
    pods: dict[str, int]


class DiskStatus(Wire, frozen=True):
    """The disk of the data directory. `free_inodes` is null if the file system does not count inodes."""

    free_bytes: int
    total_bytes: int
    free_inodes: int | None


class Status(Wire, frozen=True):
    """Answer of `GET /admin/v1/status`. All but the models describes the installation, and only operators see it.

    `cache`, `device` and `disk` are null on a cluster; `cache` also while the cache does not answer. `pools` exist only
    on a cluster. `replica_exits` counts replicas and standbys that were killed because they hung; null if there were
    none.
    """

    processes: tuple[ProcessStatus, ...]
    cache: CacheStatus | None
    device: DeviceStatus | None
    models: tuple[ModelStatus, ...]
    pending: tuple[PendingReplicas, ...] = ()
    pools: tuple[PodPool, ...] = ()
    replica_exits: ProcessExits | None = None
    disk: DiskStatus | None = None
