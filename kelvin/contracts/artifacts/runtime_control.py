"""What the control plane asks of a standby or a runtime, and what each says it did or is: the bodies of `/control`."""

from enum import StrEnum
from typing import Final

import msgspec

from kelvin.contracts.artifacts.manifest import Kind
from kelvin.contracts.artifacts.tensor_schema import Value
from kelvin.contracts.timeline import StageSpan
from kelvin.contracts.wire import Fact, Wire

ENGINE_SOCKET: Final = "engine.sock"  # of a `kelvin engine`, which takes the jobs of a push as the control plane does


class BindRequest(Fact, frozen=True):
    """`POST /control/bind` to a standby: take this version. Answered by `BindResponse` when ready, or an error.

    `POST /control/wake` to a runtime that sleeps takes the same of the version that it has, and is answered likewise.
    `POST /control/sleep`, without a body, is refused while anything is in flight; `POST /control/drop` to one that
    sleeps has it give its weights back, too.
    """

    tenant: str
    model: str
    version: str
    device_class: str
    threads: int
    kv_bytes: int


class ParkedSpec(Wire, frozen=True):
    """What a pod that waits for a version would take: what computes on its class, lies in its store, and fits it."""

    device_class: str
    threads: int
    kv_bytes: int
    store: str
    weight_bytes: int = 0  # of a version, at most; 0: whatever there is memory for


class Pod(Wire, frozen=True):
    """What `kelvin runtime` tells the process that it starts: what to take, or as what to wait for it, and where to be
    asked for it.
    """

    runtime_id: str
    host: str
    port: int
    bind: BindRequest | None = None
    parked: ParkedSpec | None = None
    agent: str = ""  # the directory of a cache agent's sockets; "": our own is beside us

    @property
    def device_class(self) -> str:
        """What it computes on. One of `bind` and `parked` is there."""
        said = self.bind or self.parked
        return "" if said is None else said.device_class


class BindPodRequest(Fact, frozen=True):
    """`POST /control/bind` to a pod that is parked. Answered by `BindResponse` when ready; so is the same again.

    `POST /control/release` takes the same, and is answered 202 before the drain has ended, 204 where nothing is bound.
    """

    tenant: str
    model: str
    version: str
    device_class: str
    store: str
    weight_bytes: int


class BindResponse(Fact, frozen=True):
    """The standby is a runtime now."""

    runtime_id: str
    max_streams: int
    spans: tuple[StageSpan, ...]
    bytes_by_tier: dict[str, int]  # where its bytes came from
    url: str = ""  # where other hosts reach it, if they do


class RuntimeState(StrEnum):
    """Life of a runtime process."""

    STANDBY = "standby"
    RESTORING = "restoring"
    READY = "ready"
    ASLEEP = "asleep"  # KV and engine are gone, the version's weights are kept
    ASLEEP2 = "asleep2"  # the weights are gone, too
    DRAINING = "draining"
    FAILED = "failed"


class RuntimeReport(Fact, frozen=True):
    """`GET /control/state`: lets a restarted control plane adopt it, and an operator look inside."""

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
    url: str = ""  # where other hosts reach it, if they do


class GateJob(Fact, frozen=True):
    """`POST /control/gate` to a standby: may this architecture be served? Needs no weights."""

    config_json: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype, shape) as in the safetensors headers
    # Path -> text of the files that say how an embedding is made of an encoder's output.
    recipe: dict[str, str] = msgspec.field(default_factory=dict)
    tenant: str = ""  # whose turn it is; "" of an older build


class GateFacts(Wire, frozen=True):
    """What a forward on the meta device found."""

    architecture: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    vocab_size: int
    max_positions: int
    kv_bytes_per_token: int
    first_use: tuple[str, ...]  # parameter names in the order in which a forward touches them
    kind: Kind = "generate"
    dimensions: int = 0  # of an embedding


class SealJob(Fact, frozen=True):
    """`POST /control/seal` to a standby: bind the draft both ways, compare, record the known answers."""

    tenant: str
    version: str
    total_bytes: int = 0  # of the draft, which bound what the job may take; 0 of an older build
    distinct_bytes: int = 0  # of its distinct chunks, which its pusher really sent; 0: as many as `total_bytes`


class KnownTensor(Wire, frozen=True):
    """A tensor that was given to a model, or that it gave: row-major."""

    name: str
    shape: tuple[int, ...]
    data: tuple[Value, ...]


class Probe(Wire, frozen=True):
    """Known answers: teacher-forced `token_ids`, and per position the reference's leading logits, or an embedding.

    Of what predicts: inputs and the outputs that it gave for them.
    """

    token_ids: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]  # per position, the highest logits' token ids, descending
    top_logits: tuple[tuple[float, ...], ...]
    tolerance: float
    vector: tuple[float, ...] = ()  # of an encoder, which has no logits
    inputs: tuple[KnownTensor, ...] = ()
    outputs: tuple[KnownTensor, ...] = ()


class Fingerprint(Wire, frozen=True):
    """What the known answers depend on. Threads are recorded beside it, not part of the key."""

    torch: str  # its version; of what predicts, the name and version of the library that computes instead
    dtype: str
    device_class: str


class SealAttestation(Wire, frozen=True):
    """What a sealing job found about a version under one fingerprint; kept beside the manifest."""

    version: str
    fingerprint: Fingerprint
    threads: int
    fast_bind: bool  # whether the hand-made bind gave exactly the library's module
    probe: Probe
    gate: GateFacts
    device_checksum: str | None = None  # 128 bits over the linear space; None: no device was there to be given it
