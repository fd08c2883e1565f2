"""The matrix as data: the expected outcome of each kill at each stage, and of each fault. Pure.

An outcome is what the operation's client sees. In every cell, the bill must also match the client's own count, and the
next operation must succeed.
"""

from collections.abc import Mapping
from enum import StrEnum
from itertools import product
from typing import Final

from coldstart_bench.harness.request_outcome import (
    ANSWERED,
    CUT,
    FAILED,
    GONE,
    NOT_CONCERNED,
    EndKind,
    RequestOutcome,
    refused_with,
)


class VictimProcess(StrEnum):
    """The process that is killed."""

    SUPERVISOR = "supervisor"
    EVERYTHING = "everything"  # the supervisor and all processes of the installation at once
    ACTIVATOR = "activator"
    CONTROL_PLANE = "controlplane"
    SNAPSHOTTER = "snapshotter"
    CACHE = "cache"
    ZYGOTE = "zygote"
    STANDBY = "standby"
    RUNTIME = "runtime"
    FILTERS = "filters"
    CLIENT = "client"


class Stage(StrEnum):
    """A stage of an upload, of a request, or of its record."""

    UPLOAD = "upload"
    SEAL = "seal"
    RESTORE = "restore"
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    LAST_BYTE = "last-byte"
    REPORT = "report"


class FirstStage(StrEnum):
    """A stage of the first minute of an installation or of a month."""

    START = "first-start"
    BEFORE_PUSH = "before-push"
    PUSH = "first-push"
    BEFORE_LEASE = "before-lease"
    REQUEST = "first-request"
    RECORD = "first-record"
    CLOSING = "first-closing"


class FaultKind(StrEnum):
    """A fault other than a kill."""

    DISK_FULL = "disk-full"
    READ_ONLY = "read-only"
    SLOW_CLIENT = "slow-client"
    HALF_OPEN = "half-open"
    CLOCK_STEP = "clock-step"
    STORE_AWAY = "store-away"
    LOCKED = "sqlite-locked"


class Operation(StrEnum):
    """A client's operation during the fault."""

    WARM = "warm"  # a request for a model with a ready replica
    COLD = "cold"  # a request for a model at zero with its bytes in the host tier
    PUSH = "push"


class DamageKind(StrEnum):
    """The damage of a file by a power cut."""

    EMPTY = "empty"
    TORN = "torn"  # only its first half is left
    ZEROED = "zeroed"  # its length is unchanged


class StartOutcome(StrEnum):
    """The outcome of `kelvin up` with a damaged file. It never overwrites a secret, and never prints a traceback."""

    WHOLE = "starts"  # the file is created again, or was not needed
    WARNED = "starts, and names it in a log"
    RESTORED = "refused; the restore that it names brings the whole bill back"
    REFUSED = "refused, by its name"


# One outcome for each stage, in order. A restart of the installation only delays a push. A request is cut if the
# activator dies. It goes to another replica if its replica dies before the first byte. Without a supervisor, requests
# finish within a second or fail.
KILLS: Final[Mapping[VictimProcess, tuple[RequestOutcome, ...]]] = {
    VictimProcess.SUPERVISOR: (
        ANSWERED,
        ANSWERED,
        refused_with("unavailable"),
        refused_with("unavailable"),
        ANSWERED,  # ten tokens: they arrive within the last second
        refused_with("unavailable"),
        ANSWERED,
        ANSWERED,
    ),
    VictimProcess.EVERYTHING: (ANSWERED, ANSWERED, CUT, CUT, CUT, CUT, CUT, FAILED),
    VictimProcess.ACTIVATOR: (ANSWERED, ANSWERED, CUT, CUT, CUT, CUT, CUT, FAILED),
    VictimProcess.CONTROL_PLANE: (ANSWERED, ANSWERED, ANSWERED, ANSWERED, ANSWERED, ANSWERED, ANSWERED, FAILED),
    VictimProcess.SNAPSHOTTER: (ANSWERED,) * 8,
    VictimProcess.CACHE: (ANSWERED,) * 8,
    VictimProcess.ZYGOTE: (ANSWERED,) * 8,
    VictimProcess.STANDBY: (ANSWERED,) * 8,
    VictimProcess.RUNTIME: (
        ANSWERED,
        ANSWERED,
        ANSWERED,
        ANSWERED,
        ANSWERED,
        refused_with("replica_lost"),
        ANSWERED,
        ANSWERED,
    ),
    VictimProcess.FILTERS: (ANSWERED,) * 8,
    VictimProcess.CLIENT: (GONE,) * 8,
}

# One outcome for each first stage, in order. At `first-start`, the operation is `kelvin up` itself. At a stage before
# something, the operation starts right after the kill, or once the installation runs again.
FIRST: Final[Mapping[VictimProcess, tuple[RequestOutcome, ...]]] = {
    VictimProcess.SUPERVISOR: (
        GONE, ANSWERED, ANSWERED, ANSWERED, refused_with("unavailable"), refused_with("unavailable"), FAILED,
    ),
    VictimProcess.EVERYTHING: (GONE, ANSWERED, ANSWERED, ANSWERED, CUT, CUT, FAILED),
    VictimProcess.ACTIVATOR: (ANSWERED, ANSWERED, ANSWERED, ANSWERED, CUT, CUT, FAILED),
    VictimProcess.CONTROL_PLANE: (ANSWERED, ANSWERED, ANSWERED, ANSWERED, ANSWERED, ANSWERED, FAILED),
    VictimProcess.SNAPSHOTTER: (ANSWERED,) * 7,
    VictimProcess.CACHE: (ANSWERED,) * 7,
    VictimProcess.ZYGOTE: (ANSWERED,) * 7,
    VictimProcess.STANDBY: (ANSWERED,) * 7,
    VictimProcess.RUNTIME: (
        NOT_CONCERNED, NOT_CONCERNED, NOT_CONCERNED, NOT_CONCERNED, ANSWERED, refused_with("replica_lost"), ANSWERED,
    ),
    VictimProcess.FILTERS: (ANSWERED,) * 7,
    VictimProcess.CLIENT: (NOT_CONCERNED, NOT_CONCERNED, GONE, NOT_CONCERNED, GONE, GONE, GONE),
}  # fmt: skip

# One outcome for each operation, in order.
FAULTS: Final[Mapping[FaultKind, tuple[RequestOutcome, ...]]] = {
    FaultKind.DISK_FULL: (ANSWERED, ANSWERED, refused_with("capacity_exceeded")),
    FaultKind.READ_ONLY: (ANSWERED, ANSWERED, ANSWERED),
    FaultKind.SLOW_CLIENT: (ANSWERED, ANSWERED, NOT_CONCERNED),
    FaultKind.HALF_OPEN: (CUT, CUT, NOT_CONCERNED),
    FaultKind.CLOCK_STEP: (ANSWERED, ANSWERED, ANSWERED),
    FaultKind.STORE_AWAY: (ANSWERED, ANSWERED, ANSWERED),
    FaultKind.LOCKED: (ANSWERED, ANSWERED, ANSWERED),
}

# The outcome of a start for each damaged file of the data directory, in the order of `DamageKind`.
DAMAGED: Final[Mapping[str, tuple[StartOutcome, StartOutcome, StartOutcome]]] = {
    "ca.pem": (StartOutcome.REFUSED,) * 3,
    "tls/ca.key": (StartOutcome.REFUSED,) * 3,
    "once.key": (StartOutcome.REFUSED,) * 3,
    "attest.key": (StartOutcome.REFUSED,) * 3,
    "attest.pub": (StartOutcome.WHOLE,) * 3,
    "admin.key": (StartOutcome.WARNED,) * 3,
    "default.key": (StartOutcome.WARNED,) * 3,
    "trust/friend.pem": (StartOutcome.REFUSED,) * 3,
    "installation": (StartOutcome.REFUSED,) * 3,
    "kelvin.db": (StartOutcome.REFUSED,) * 3,
    "kelvin.db-wal": (StartOutcome.REFUSED, StartOutcome.RESTORED, StartOutcome.REFUSED),
    "kelvin.db-shm": (StartOutcome.WHOLE,) * 3,
    "prices.toml": (StartOutcome.REFUSED,) * 3,
    "lock": (StartOutcome.WHOLE,) * 3,
    "url": (StartOutcome.WHOLE,) * 3,
    "run/feed": (StartOutcome.WARNED,) * 3,
    "run/exits.json": (StartOutcome.WHOLE,) * 3,
    "run/succession": (StartOutcome.WHOLE,) * 3,
    "run/decider": (StartOutcome.WHOLE,) * 3,
}

# The processes that take part in an operation at that stage. The death of any other process must not be noticed.
PART: Final[Mapping[Stage, frozenset[VictimProcess]]] = {
    Stage.UPLOAD: frozenset(
        {VictimProcess.SUPERVISOR, VictimProcess.EVERYTHING, VictimProcess.ACTIVATOR, VictimProcess.SNAPSHOTTER}
    ),
    Stage.SEAL: frozenset(VictimProcess)
    - {VictimProcess.RUNTIME, VictimProcess.ZYGOTE, VictimProcess.FILTERS, VictimProcess.CLIENT},
    Stage.RESTORE: frozenset(VictimProcess)
    - {VictimProcess.SNAPSHOTTER, VictimProcess.STANDBY, VictimProcess.FILTERS, VictimProcess.CLIENT},
    Stage.QUEUED: frozenset(
        {VictimProcess.SUPERVISOR, VictimProcess.EVERYTHING, VictimProcess.ACTIVATOR, VictimProcess.RUNTIME}
    ),
    Stage.PREFILL: frozenset(
        {VictimProcess.SUPERVISOR, VictimProcess.EVERYTHING, VictimProcess.ACTIVATOR, VictimProcess.RUNTIME}
    ),
    Stage.DECODE: frozenset(
        {VictimProcess.SUPERVISOR, VictimProcess.EVERYTHING, VictimProcess.ACTIVATOR, VictimProcess.RUNTIME}
    ),
    Stage.LAST_BYTE: frozenset({VictimProcess.SUPERVISOR, VictimProcess.EVERYTHING, VictimProcess.ACTIVATOR}),
    Stage.REPORT: frozenset(
        {VictimProcess.SUPERVISOR, VictimProcess.EVERYTHING, VictimProcess.ACTIVATOR, VictimProcess.CONTROL_PLANE}
    ),
}

# The indicators of an operation: the first one is its time if it is answered, the second one counts its failures.
INDICATORS: Final[Mapping[Stage | Operation, tuple[str, str]]] = {
    Stage.UPLOAD: ("push time", "push success"),
    Stage.SEAL: ("push time", "push success"),
    Stage.RESTORE: ("first token, cold", "availability"),
    Stage.QUEUED: ("first token", "availability"),
    Stage.PREFILL: ("first token", "availability"),
    Stage.DECODE: ("time per token", "stream completion"),
    Stage.LAST_BYTE: ("time per token", "stream completion"),
    Stage.REPORT: ("age of the bill", "admin availability"),
    Operation.WARM: ("first token", "stream completion"),
    Operation.COLD: ("first token, cold", "availability"),
    Operation.PUSH: ("push time", "push success"),
}
NONE: Final = "none"


def kill_expected(process: VictimProcess, stage: Stage) -> RequestOutcome:
    """Return the expected outcome of a kill."""
    return KILLS[process][list(Stage).index(stage)]


def first_expected(process: VictimProcess, stage: FirstStage) -> RequestOutcome:
    """Return the expected outcome of a kill at a first stage."""
    return FIRST[process][list(FirstStage).index(stage)]


def start_expected(file: str, damage: DamageKind) -> StartOutcome:
    """Return the expected outcome of a start with a damaged file. Raises KeyError for an unknown file."""
    return DAMAGED[file][list(DamageKind).index(damage)]


def fault_expected(fault: FaultKind, operation: Operation) -> RequestOutcome:
    """Return the expected outcome of an operation under a fault."""
    return FAULTS[fault][list(Operation).index(operation)]


def kill_indicator(process: VictimProcess, stage: Stage) -> str:
    """Return the indicator that shows the death, or NONE if the process had no part or was the client."""
    outcome = kill_expected(process, stage)
    if outcome.way is EndKind.GONE or (outcome.way is EndKind.ANSWERED and process not in PART[stage]):
        return NONE
    return _dings(stage, outcome)


def fault_indicator(fault: FaultKind, operation: Operation) -> str:
    """Return the indicator that shows the fault. A client's own fault shows nowhere, and a warm model needs no disk."""
    outcome = fault_expected(fault, operation)
    if fault in (FaultKind.SLOW_CLIENT, FaultKind.HALF_OPEN) or (operation is Operation.WARM and outcome == ANSWERED):
        return NONE
    return _dings(operation, outcome)


def _dings(at: Stage | Operation, outcome: RequestOutcome) -> str:
    late, failed = INDICATORS[at]
    return late if outcome.way is EndKind.ANSWERED else failed


def find_empty_cells(
    kills: Mapping[VictimProcess, tuple[RequestOutcome, ...]],
    first: Mapping[VictimProcess, tuple[RequestOutcome, ...]],
    faults: Mapping[FaultKind, tuple[RequestOutcome, ...]],
) -> list[str]:
    """Return the cells without an outcome."""
    empty = [
        f"{process}/{stage}"
        for stages, table in ((Stage, kills), (FirstStage, first))
        for process, (number, stage) in product(VictimProcess, enumerate(stages))
        if number >= len(table.get(process, ()))
    ]
    return empty + [
        f"{fault}/{operation}"
        for fault, (number, operation) in product(FaultKind, enumerate(Operation))
        if number >= len(faults.get(fault, ()))
    ]


def markdown() -> str:
    """Return all matrices as in `docs/drills.md`: outcomes, and in parentheses the indicators that they affect."""
    return f"{_kills()}\n\n{_first()}\n\n{_damaged()}\n\n{_faults()}\n"


def _damaged() -> str:
    head = ["file", *(str(damage) for damage in DamageKind)]
    return _table([head, *([f"`{file}`", *map(str, starts)] for file, starts in DAMAGED.items())])


def _first() -> str:
    head = ["killed", *(str(stage) for stage in FirstStage)]
    return _table([head, *([f"`{process}`", *map(_outcome, FIRST[process])] for process in VictimProcess)])


def _kills() -> str:
    rows = [["killed", *(str(stage) for stage in Stage)]]
    for process in VictimProcess:
        cells = [(kill_expected(process, stage), kill_indicator(process, stage)) for stage in Stage]
        rows.append([f"`{process}`", *(_cell(outcome, dings) for outcome, dings in cells)])
    return _table(rows)


def _faults() -> str:
    rows = [["fault", *(str(operation) for operation in Operation)]]
    for fault in FaultKind:
        cells = [(fault_expected(fault, operation), fault_indicator(fault, operation)) for operation in Operation]
        rows.append([f"`{fault}`", *(_cell(outcome, dings) for outcome, dings in cells)])
    return _table(rows)


def _outcome(outcome: RequestOutcome) -> str:
    return f"{outcome.way} `{outcome.code}`" if outcome.code else str(outcome.way)


def _cell(outcome: RequestOutcome, dings: str) -> str:
    text = _outcome(outcome)
    return text if dings == NONE else f"{text} ({dings})"


def _table(rows: list[list[str]]) -> str:
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
