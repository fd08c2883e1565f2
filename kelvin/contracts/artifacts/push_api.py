"""What the command line and the snapshotter say to each other, to push, check and collect.

Of a push headers and small files come first, bytes only after that.
"""

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from kelvin.contracts.artifacts.manifest import Digest
from kelvin.contracts.artifacts.runtime_control import GateFacts, SealAttestation
from kelvin.contracts.problem import WireFailure
from kelvin.contracts.wire import Fact, Wire

# A query parameter of a commit: the client's name for itself, which tells it from the client of an equal push.
CLIENT_PHRASE: Final = "client"


class SmallFile(Wire, frozen=True):
    """A file that travels whole in the plan request: config, tokenizer, template."""

    path: str
    content: bytes  # base64 in JSON


class WholeFile(Wire, frozen=True):
    """What makes a tensorizer file one that the store keeps as it is: the BLAKE3 of all of it, and the bytes after its
    header that belong to no tensor, in order.
    """

    digest: Digest
    between: bytes


class WeightsFile(Wire, frozen=True):
    """A safetensors or tensorizer file; only its header travels now: length and JSON, or all up to the index's end."""

    path: str
    size: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # what a file's offset can be
    header: bytes
    whole: WholeFile | None = None  # where it is to be kept as it is; else only its tensors are


class PlanRequest(Wire, frozen=True):
    """`POST /push/v1/plans`."""

    model: str
    small_files: tuple[SmallFile, ...]
    weights: tuple[WeightsFile, ...]
    other_paths: tuple[str, ...] = ()  # everything else that the directory holds, so that a pickle can be refused
    dry_run: bool = False  # the plan is kept in memory for one `missing`, and takes no chunk


class Piece(Wire, frozen=True):
    """`length` bytes at `offset` of a pushed file, then `pad` zero bytes."""

    path: str
    offset: int
    length: int
    pad: int


class PlannedChunk(Wire, frozen=True):
    """A chunk is these pieces in order; the client computes its BLAKE3."""

    length: int
    pieces: tuple[Piece, ...]


class Plan(Wire, frozen=True):
    """What to read, in order. `plan_id` names it when asking what is missing; equal requests have the same."""

    plan_id: str
    total_bytes: int
    chunks: tuple[PlannedChunk, ...]
    gate: GateFacts | None


class MissingRequest(Wire, frozen=True):
    """`POST /push/v1/plans/ID/missing`: digests of all chunks of the plan, in order."""

    digests: tuple[Digest, ...]


class Missing(Wire, frozen=True):
    """Which of them this tenant does not have; `PUT /push/v1/plans/ID/chunks/DIGEST` each, with this `plan_id`.

    The id stands for the plan and its digests: an equal push, repeated or beside this one, goes on with the same.
    """

    plan_id: str
    digests: tuple[Digest, ...]
    version: str  # what they make
    exists: bool  # the version is there already


class AttestRequest(Wire, frozen=True):
    """`POST /push/v1/plans/ID/attestations`, before the commit: a publisher's signed statement about what it makes.

    `bundle` is an OpenSSF signature of an export of the version, whose digest the statement names.
    """

    envelope: bytes
    bundle: bytes | None = None


class AttestationEntry(Wire, frozen=True):
    """An attestation as it lies beside a manifest. `fault` says why it is worth nothing, in words."""

    name: str
    content: bytes
    key_id: str | None = None  # whose signature it has
    trusted_as: str | None = None  # by this installation: the name of a trust root, or "installation"
    fault: str | None = None


class AttestationList(Wire, frozen=True):
    """`GET /push/v1/versions/VERSION/attestations`."""

    attestations: tuple[AttestationEntry, ...]


class KeepSeal(Wire, frozen=True):
    """`POST /internal/v1/seals`: a replica found no known answers of its engine, recorded them, and gave them again."""

    tenant: str
    seal: SealAttestation


class CommitRequest(Wire, frozen=True):
    """`POST /push/v1/plans/ID/commit`, after every missing chunk was accepted."""

    digests: tuple[Digest, ...]


class Committed(Fact, frozen=True):
    """The version exists, was read back, and may serve. Of equal pushes at once one is told that it created it."""

    model: str
    version: str
    created: bool  # False where the same version was there already
    total_bytes: int
    new_chunks: int
    restored: bool = False  # the model had deleted it, and has it again
    start_problem: str | None = None  # a sentence: why it could not start now, where that is known


class Original(Wire, frozen=True):
    """`GET /push/v1/originals/VERSION`: a pushed file that is kept as it is, and holds the tensors of this version.

    `spans` say where in it each chunk lies, in the manifest's order, beginning after the pinned files' chunks; `rest`
    are the bytes that belong to no chunk, in order.
    """

    digest: Digest
    size: int
    spans: tuple[tuple[tuple[int, int], ...], ...]
    rest: bytes


class CommitStep(StrEnum):
    """Where a commit stands, in order."""

    WAITING = "waiting"  # another commit of the same tenant or version goes first
    PACKING = "packing"
    VERIFYING = "verifying"  # what was written is read back
    SEALING = "sealing"  # a runtime binds the draft and records the known answers
    PUBLISHING = "publishing"


class Committing(Wire, frozen=True):
    """The commit's answer (202) while it still runs: ask again, with the same request."""

    step: CommitStep


class FsckFinding(Wire, frozen=True, tag="finding"):
    """A line of `POST /push/v1/fsck`: a fault of the tenant's objects, and what mends it."""

    key: str
    fault: str
    mend: str


class FsckProgress(Wire, frozen=True, tag="progress"):
    """A line that says how far it is."""

    checked_bytes: int
    total_bytes: int


class FsckSummary(Wire, frozen=True, tag="summary", omit_defaults=True):
    """The last line of a check that came to its end.

    Unreferenced chunks belong to no manifest, and unnamed versions to no model; they are no fault. Nor are leftovers:
    objects that a collection which did not end has left, and the next one frees.
    """

    versions: int
    unnamed_versions: int
    packs: int
    chunks: int
    checked_bytes: int
    unreferenced_chunks: int
    unreferenced_bytes: int
    findings: int
    pushes_running: bool  # then what looks unfinished was not counted as a fault
    leftovers: int = 0


class FsckBroken(Wire, frozen=True, tag="broken"):
    """The last line of a check that could not go on: nothing is known of what it had not reached."""

    failure: WireFailure


FsckLine = FsckFinding | FsckProgress | FsckSummary | FsckBroken


class CollectRequest(Wire, frozen=True):
    """`POST /push/v1/collect`. Without `run` nothing changes."""

    run: bool


class Freed(Wire, frozen=True):
    """An object that nothing needs. It is gone where the collection ran, and would be where it did not."""

    key: str
    nbytes: int
    reason: str


class Condemned(Wire, frozen=True):
    """A version that no model names: kept until the grace period is over, counted from the collection that found it."""

    version: Digest
    kept_s: int  # from now on


class CollectReport(Wire, frozen=True, omit_defaults=True):
    """The answer. `unreferenced_bytes` lie in packs that are kept for their other chunks, or for their age."""

    ran: bool
    grace_s: int
    freed: tuple[Freed, ...]  # in the order in which they go: what refers before what is referred to
    condemned: tuple[Condemned, ...]
    versions: int  # that are kept, condemned ones included
    packs: int  # that are kept
    unreferenced_bytes: int
    dropped_pushes: int  # that stood still for longer than the grace period and for more than ten minutes
    pushes_running: bool
    lost: int = 0  # chunks of kept versions that are in no pack: while there is one, no pack is freed
