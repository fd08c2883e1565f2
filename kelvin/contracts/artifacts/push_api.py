"""Messages between the command line and the snapshotter: push, check and collect.

A push sends headers and small files first, and other bytes only after that.
"""

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from kelvin.contracts.artifacts.manifest import Digest
from kelvin.contracts.artifacts.runtime_control import GateFacts, SealAttestation
from kelvin.contracts.problem import WireFailure
from kelvin.contracts.wire import Fact, Wire

# A query parameter of a commit: a name that the client chooses for itself. It distinguishes clients of equal pushes.
CLIENT_PHRASE: Final = "client"


class SmallFile(Wire, frozen=True):
    """A small file that the plan request contains whole: config, tokenizer, template."""

    path: str
    content: bytes  # base64 in JSON


class WholeFile(Wire, frozen=True):
    """Facts with which the store can keep a tensorizer file unchanged.

    They are the BLAKE3 digest of the whole file, and the bytes after its header that belong to no tensor, in order.
    """

    digest: Digest
    between: bytes


class WeightsFile(Wire, frozen=True):
    """A safetensors or tensorizer file. The plan request has only its header.

    `header` is length and JSON for safetensors, and everything up to the end of the index for tensorizer.
    """

    path: str
    size: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # the range of a file offset
    header: bytes
    whole: WholeFile | None = None  # set to keep the file unchanged; otherwise only its tensors are kept


class PlanRequest(Wire, frozen=True):
    """Body of `POST /push/v1/plans`."""

    model: str
    small_files: tuple[SmallFile, ...]
    weights: tuple[WeightsFile, ...]
    other_paths: tuple[str, ...] = ()  # all other files of the directory, so that a pickle can be refused
    dry_run: bool = False  # the plan stays in memory for one `missing` request, and accepts no chunk


class Piece(Wire, frozen=True):
    """`length` bytes at `offset` of a pushed file, then `pad` zero bytes."""

    path: str
    offset: int
    length: int
    pad: int


class PlannedChunk(Wire, frozen=True):
    """A chunk that consists of these pieces in order. The client computes its BLAKE3 digest."""

    length: int
    pieces: tuple[Piece, ...]


class Plan(Wire, frozen=True):
    """The pieces that the client reads, in order. Equal requests get the same `plan_id`."""

    plan_id: str
    total_bytes: int
    chunks: tuple[PlannedChunk, ...]
    gate: GateFacts | None


class MissingRequest(Wire, frozen=True):
    """Body of `POST /push/v1/plans/ID/missing`: digests of all chunks of the plan, in order."""

    digests: tuple[Digest, ...]


class Missing(Wire, frozen=True):
    """The chunks that the tenant lacks. Send each with `PUT /push/v1/plans/ID/chunks/DIGEST` and this `plan_id`.

    The id stands for the plan and its digests. A repeated or concurrent equal push continues under the same id.
    """

    plan_id: str
    digests: tuple[Digest, ...]
    version: str  # the version that the chunks form
    exists: bool  # whether the version exists already


class AttestRequest(Wire, frozen=True):
    """Body of `POST /push/v1/plans/ID/attestations`, sent before the commit: a publisher's signed statement.

    `bundle` is an OpenSSF signature of an export of the version. The statement contains the bundle's digest.
    """

    envelope: bytes
    bundle: bytes | None = None


class AttestationEntry(Wire, frozen=True):
    """An attestation as stored. `fault` is a sentence that says why it is invalid."""

    name: str
    content: bytes
    key_id: str | None = None  # the key that signed it
    trusted_as: str | None = None  # name of a trust root of this installation, or "installation"
    fault: str | None = None


class AttestationList(Wire, frozen=True):
    """Response of `GET /push/v1/versions/VERSION/attestations`."""

    attestations: tuple[AttestationEntry, ...]


class KeepSeal(Wire, frozen=True):
    """Body of `POST /internal/v1/seals`: known answers that a replica recorded and then reproduced.

    A replica sends this if the version has no known answers for the replica's engine.
    """

    tenant: str
    seal: SealAttestation


class CommitRequest(Wire, frozen=True):
    """Body of `POST /push/v1/plans/ID/commit`, sent after every missing chunk was accepted."""

    digests: tuple[Digest, ...]


class Committed(Fact, frozen=True):
    """The version exists, was read back, and may serve. Of concurrent equal pushes, one gets `created`."""

    model: str
    version: str
    created: bool  # False: the version existed already
    total_bytes: int
    new_chunks: int
    restored: bool = False  # the model had deleted the version, and has it again
    start_problem: str | None = None  # a sentence that says why the version can't start now, if known


class Original(Wire, frozen=True):
    """Response of `GET /push/v1/originals/VERSION`: the unchanged pushed file that holds the version's tensors.

    `spans` locates each chunk in the file, in the manifest's order, starting after the pinned files' chunks. `rest` is
    the bytes that belong to no chunk, in order.
    """

    digest: Digest
    size: int
    spans: tuple[tuple[tuple[int, int], ...], ...]
    rest: bytes


class CommitStep(StrEnum):
    """The steps of a commit, in order."""

    WAITING = "waiting"  # another commit of the same tenant or version goes first
    PACKING = "packing"
    VERIFYING = "verifying"  # the written objects are read back
    SEALING = "sealing"  # a runtime binds the draft and records the known answers
    PUBLISHING = "publishing"


class Committing(Wire, frozen=True):
    """Response 202 of a commit that still runs. Repeat the same request."""

    step: CommitStep


class FsckFinding(Wire, frozen=True, tag="finding"):
    """A line of `POST /push/v1/fsck`: a fault of the tenant's objects, and how to repair it."""

    key: str
    fault: str
    mend: str


class FsckProgress(Wire, frozen=True, tag="progress"):
    """A line that reports progress."""

    checked_bytes: int
    total_bytes: int


class FsckSummary(Wire, frozen=True, tag="summary", omit_defaults=True):
    """The last line of a completed check.

    Unreferenced chunks belong to no manifest, and unnamed versions to no model. Neither is a fault. Leftovers are
    objects of an interrupted collection. They are no fault either: the next collection frees them.
    """

    versions: int
    unnamed_versions: int
    packs: int
    chunks: int
    checked_bytes: int
    unreferenced_chunks: int
    unreferenced_bytes: int
    findings: int
    pushes_running: bool  # if True, unfinished objects were not counted as faults
    leftovers: int = 0


class FsckBroken(Wire, frozen=True, tag="broken"):
    """The last line of a check that was aborted. Objects that it had not reached are unchecked."""

    failure: WireFailure


FsckLine = FsckFinding | FsckProgress | FsckSummary | FsckBroken


class CollectRequest(Wire, frozen=True):
    """Body of `POST /push/v1/collect`. Without `run`, nothing is deleted."""

    run: bool


class Freed(Wire, frozen=True):
    """An object that nothing needs. A real run has deleted it, a dry run would delete it."""

    key: str
    nbytes: int
    reason: str


class Condemned(Wire, frozen=True):
    """A version without a model. It is kept for the grace period, which starts at the collection that found it."""

    version: Digest
    kept_s: int  # seconds from now


class CollectReport(Wire, frozen=True, omit_defaults=True):
    """Response of a collection. `unreferenced_bytes` are in packs that stay because of other chunks or their age."""

    ran: bool
    grace_s: int
    freed: tuple[Freed, ...]  # in deletion order: a referring object before the object that it refers to
    condemned: tuple[Condemned, ...]
    versions: int  # versions that are kept, condemned ones included
    packs: int  # packs that are kept
    unreferenced_bytes: int
    dropped_pushes: int  # pushes without progress for longer than the grace period and for more than ten minutes
    pushes_running: bool
    lost: int = 0  # chunks of kept versions that are in no pack; if there is one, no pack is freed
