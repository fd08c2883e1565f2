"""What is expected of each process killed at each stage, and of each fault: the matrix as data. Pure.

An outcome is what the client whose operation was under way sees. Whatever it is, the bill is that client's own count
and the next operation is answered; that is checked after every cell and not repeated here.
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
    """Who is killed."""

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
    """Where in an upload, a request or its record."""

    UPLOAD = "upload"
    SEAL = "seal"
    RESTORE = "restore"
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    LAST_BYTE = "last-byte"
    REPORT = "report"


class FirstStage(StrEnum):
    """Where in the first minute of an installation, or of a month."""

    START = "first-start"
    BEFORE_PUSH = "before-push"
    PUSH = "first-push"
    BEFORE_LEASE = "before-lease"
    REQUEST = "first-request"
    RECORD = "first-record"
    CLOSING = "first-closing"


class FaultKind(StrEnum):
    """What else goes wrong."""

    DISK_FULL = "disk-full"
    READ_ONLY = "read-only"
    SLOW_CLIENT = "slow-client"
    HALF_OPEN = "half-open"
    CLOCK_STEP = "clock-step"
    STORE_AWAY = "store-away"
    LOCKED = "sqlite-locked"


class Operation(StrEnum):
    """What a client does while the fault lasts."""

    WARM = "warm"  # a request for a model at work
    COLD = "cold"  # for one at zero, whose bytes are in the host tier
    PUSH = "push"


class DamageKind(StrEnum):
    """What a file system leaves of a file after a power cut."""

    EMPTY = "empty"
    TORN = "torn"  # its first half
    ZEROED = "zeroed"  # as long as it was


class StartOutcome(StrEnum):
    """What `kelvin up` makes of a damaged file. It never overwrites a secret, and never ends in a traceback."""

    WHOLE = "starts"  # the file is made again, or was not needed
    WARNED = "starts, and names it in a log"
    RESTORED = "refused; the restore that it names brings the whole bill back"
    REFUSED = "refused, by its name"


# One outcome for each stage, in their order. A restart of the installation is a pause to a push; a request that lost
# the door is cut; one that lost its replica before its first byte gets another; when the supervisor is gone, the others
# finish within a second or tell that they can't.
KILLS: Final[Mapping[VictimProcess, tuple[RequestOutcome, ...]]] = {
    VictimProcess.SUPERVISOR: (
        ANSWERED,
        ANSWERED,
        refused_with("unavailable"),
        refused_with("unavailable"),
        ANSWERED,  # ten tokens: they are there within the second that is left
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

# One outcome for each of the first stages, in their order. At `first-start` the operation is `kelvin up` itself; at a
# stage that is before something, it begins right after the kill, or once the installation was started again.
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

# One outcome for each operation, in their order.
FAULTS: Final[Mapping[FaultKind, tuple[RequestOutcome, ...]]] = {
    FaultKind.DISK_FULL: (ANSWERED, ANSWERED, refused_with("capacity_exceeded")),
    FaultKind.READ_ONLY: (ANSWERED, ANSWERED, ANSWERED),
    FaultKind.SLOW_CLIENT: (ANSWERED, ANSWERED, NOT_CONCERNED),
    FaultKind.HALF_OPEN: (CUT, CUT, NOT_CONCERNED),
    FaultKind.CLOCK_STEP: (ANSWERED, ANSWERED, ANSWERED),
    FaultKind.STORE_AWAY: (ANSWERED, ANSWERED, ANSWERED),
    FaultKind.LOCKED: (ANSWERED, ANSWERED, ANSWERED),
}

# How a start ends over each file of the data directory, in the order of `DamageKind`.
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

# Who takes part in an operation at that stage: the others' deaths are not to be noticed.
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

# Which indicator an operation counts in: while it is answered, by its time; otherwise, by having failed.
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
    """Of a cell of the first matrix."""
    return KILLS[process][list(Stage).index(stage)]


def first_expected(process: VictimProcess, stage: FirstStage) -> RequestOutcome:
    """Of a cell of the matrix of first stages."""
    return FIRST[process][list(FirstStage).index(stage)]


def start_expected(file: str, damage: DamageKind) -> StartOutcome:
    """Of a cell of the matrix of damaged files. Raises KeyError for a file that is not in it."""
    return DAMAGED[file][list(DamageKind).index(damage)]


def fault_expected(fault: FaultKind, operation: Operation) -> RequestOutcome:
    """Of a cell of the second."""
    return FAULTS[fault][list(Operation).index(operation)]


def kill_indicator(process: VictimProcess, stage: Stage) -> str:
    """The indicator that the death shows in: none where it had no part, or was the client's own."""
    outcome = kill_expected(process, stage)
    if outcome.way is EndKind.GONE or (outcome.way is EndKind.ANSWERED and process not in PART[stage]):
        return NONE
    return _dings(stage, outcome)


def fault_indicator(fault: FaultKind, operation: Operation) -> str:
    """Likewise of a fault. What a client does to itself counts against nobody; a model at work needs no disk."""
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
    """Cells that state nothing."""
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
    """All matrices, as `docs/drills.md` has them: outcome, and in brackets the indicator that it dings."""
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
