"""Bodies of `/control`: requests of the control plane to a standby or a runtime, and their responses."""

from enum import StrEnum
from typing import Final

import msgspec

from kelvin.contracts.artifacts.manifest import Kind
from kelvin.contracts.artifacts.tensor_schema import Value
from kelvin.contracts.timeline import StageSpan
from kelvin.contracts.wire import Fact, Wire

# Socket of a `kelvin engine`, which runs the jobs of a push, as the control plane does
ENGINE_SOCKET: Final = "engine.sock"


class BindRequest(Fact, frozen=True):
    """Body of `POST /control/bind` to a standby: bind this version. Answered by `BindResponse` once ready.

    `POST /control/wake` to a sleeping runtime takes the same body, for the version that it has, and responds in the
    same way. `POST /control/sleep` has no body and is refused while a request is in flight. `POST /control/drop` makes
    a sleeping runtime release its weights too.
    """

    tenant: str
    model: str
    version: str
    device_class: str
    threads: int
    kv_bytes: int


class ParkedSpec(Wire, frozen=True):
    """Which versions a parked pod can take: those for its device class, in its store, that fit into its memory."""

    device_class: str
    threads: int
    kv_bytes: int
    store: str
    weight_bytes: int = 0  # largest version, in bytes; 0: limited only by memory


class Pod(Wire, frozen=True):
    """Settings that `kelvin runtime` passes to the process that it starts.

    They are the version to bind or the spec of a parked pod, and the address of the control API.
    """

    runtime_id: str
    host: str
    port: int
    bind: BindRequest | None = None
    parked: ParkedSpec | None = None
    agent: str = ""  # directory of a cache agent's sockets; "": the pod has its own cache

    @property
    def device_class(self) -> str:
        """Return the device class of `bind` or `parked`; one of them is set."""
        binding = self.bind or self.parked
        return "" if binding is None else binding.device_class


class BindPodRequest(Fact, frozen=True):
    """Body of `POST /control/bind` to a parked pod. Answered by `BindResponse` once ready, also if it is repeated.

    `POST /control/release` takes the same body. It responds 202 before the drain has ended, or 204 if nothing is bound.
    """

    tenant: str
    model: str
    version: str
    device_class: str
    store: str
    weight_bytes: int


class BindResponse(Fact, frozen=True):
    """Response of a successful bind: the standby is a runtime now."""

    runtime_id: str
    max_streams: int
    spans: tuple[StageSpan, ...]
    bytes_by_tier: dict[str, int]  # bytes read from each tier
    url: str = ""  # URL for other hosts, if they can reach it


class RuntimeState(StrEnum):
    """Life cycle states of a runtime process."""

    STANDBY = "standby"
    RESTORING = "restoring"
    READY = "ready"
    ASLEEP = "asleep"  # KV cache and engine are freed, the version's weights are kept
    DEEP_SLEEP = "asleep2"  # the weights are released, too
    DRAINING = "draining"
    FAILED = "failed"


class RuntimeReport(Fact, frozen=True):
    """Response of `GET /control/state`. A restarted control plane uses it to adopt the runtime."""

    runtime_id: str
    pid: int
    state: RuntimeState
    tenant: str | None = None
    model: str | None = None
    version: str | None = None
    device_class: str | None = None
    threads: int = 1
    max_streams: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    leases: int = 0
    open_files: int = 0
    spans: tuple[StageSpan, ...] = ()
    url: str = ""  # URL for other hosts, if they can reach it


class GateJob(Fact, frozen=True):
    """Body of `POST /control/gate` to a standby: check whether an architecture can be served. Needs no weights."""

    config_json: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape) as in the safetensors headers
    # Path -> text of the files that define how an encoder's output becomes an embedding.
    recipe: dict[str, str] = msgspec.field(default_factory=dict)
    tenant: str = ""  # the tenant whose fair share the job uses; "" from an older build


class GateFacts(Wire, frozen=True):
    """Findings of a forward pass on the meta device."""

    architecture: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    vocab_size: int
    max_positions: int
    kv_bytes_per_token: int
    first_use: tuple[str, ...]  # parameter names in the order in which a forward pass uses them
    kind: Kind = "generate"
    dimensions: int = 0  # length of an embedding


class SealJob(Fact, frozen=True):
    """Body of `POST /control/seal` to a standby: bind the draft both ways, compare, record the known answers."""

    tenant: str
    version: str
    total_bytes: int = 0  # bytes of the draft, which limit the job's resources; 0 from an older build
    distinct_bytes: int = 0  # bytes of its distinct chunks, which the client really sent; 0: same as `total_bytes`


class KnownTensor(Wire, frozen=True):
    """An input or output tensor of a model, row-major."""

    name: str
    shape: tuple[int, ...]
    data: tuple[Value, ...]


class Probe(Wire, frozen=True):
    """Known answers: teacher-forced `token_ids` with the reference's top logits per position, or with an embedding.

    For a `predict` version: inputs, and the outputs that the model computed from them.
    """

    token_ids: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]  # per position, the highest logits' token ids, descending
    top_logits: tuple[tuple[float, ...], ...]
    tolerance: float
    vector: tuple[float, ...] = ()  # embedding of an encoder, which has no logits
    inputs: tuple[KnownTensor, ...] = ()
    outputs: tuple[KnownTensor, ...] = ()


class Fingerprint(Wire, frozen=True):
    """The environment that known answers depend on. Threads are recorded separately and are not part of the key."""

    torch: str  # version of torch; for a `predict` version, name and version of the library that computes instead
    dtype: str
    device_class: str


class SealAttestation(Wire, frozen=True):
    """Findings of a sealing job about a version under one fingerprint, stored beside the manifest."""

    version: str
    fingerprint: Fingerprint
    threads: int
    fast_bind: bool  # whether the fast bind produced exactly the same module as the library
    probe: Probe
    gate: GateFacts
    device_checksum: str | None = None  # 128 bits over the linear space; None: the sealing job had no device
