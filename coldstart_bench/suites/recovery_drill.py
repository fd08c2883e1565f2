"""`kelvin drill recovery`: kill a real installation that then loses its database, and later its whole data directory.

A client counts its answers. After each restore the bill must agree with that count, the ledger's chains must end where
they ended, and old API keys must work. The documented objectives are in `STATED`.
"""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from coldstart_bench.harness.installation import (
    HttpsClient,
    Installation,
    InstallationFailed,
    run_command,
    running_installation,
)
from coldstart_bench.harness.program_runner import make_model
from coldstart_bench.harness.request_outcome import BillTotals, bill_totals_of
from coldstart_bench.report.bench_report import ClaimVerdict, Figures, at_most, cell
from coldstart_bench.suites.bench_runner import Bench, BenchPlan, option
from kelvin.spool.source_directory import has_owner

TENANT: Final = "default"
MODEL_BYTES: Final = 60_000_000
PROMPT: Final = "w1 w2 w3 w4"
TOKENS: Final = 8
PATIENCE_S: Final = 120.0
SETTLE_S: Final = 20.0
REQUESTS_AFTER_BACKUP: Final = 3  # requests after the newest backup
TRIES: Final = 10
EVERY_S: Final = 8.0  # interval of backups in the drill


class StatedObjectives(msgspec.Struct, frozen=True):
    """Documented recovery objectives: how much may be lost (RPO), and how long recovery may take (RTO)."""

    ledger_rpo_records: int = 0
    ledger_rto_s: float = 900.0
    registry_rpo_s: float = 300.0
    registry_rto_s: float = 1800.0


STATED: Final = StatedObjectives()


class RecoveryCase(msgspec.Struct):
    """One loss and its recovery. `failures` are sentences about differences from before. A time is None if the recovery
    did not get so far.
    """

    lost: str
    exposed_s: float  # from the last answer until every record was also outside of the data directory
    registry_age_s: float  # of the newest backup when the installation was killed
    answered: int = 0  # requests, by the client's count
    billed: int = 0
    tokens_answered: int = 0
    tokens_billed: int = 0
    restore_s: float | None = None
    ready_s: float | None = None  # from the start of the restore to the ready line of `kelvin up`
    answer_s: float | None = None  # from the start of the restore to the first correct answer
    failures: list[str] = []


class DrillFigures(Figures, frozen=True):
    """All losses. A backup was made every `every_s` seconds."""

    stated: StatedObjectives
    every_s: float
    cases: tuple[RecoveryCase, ...]


def judge(figures: DrillFigures) -> tuple[ClaimVerdict, ...]:
    """Judge all losses. The state is what was lost."""
    return tuple(verdict for case in figures.cases for verdict in _judged(case, figures.stated, figures.every_s))


def _judged(case: RecoveryCase, stated: StatedObjectives, every_s: float) -> tuple[ClaimVerdict, ...]:
    """Judge one loss. A backup may take a fifth of the stated RPO, in addition to the drill's interval."""
    records, tokens = abs(case.answered - case.billed), abs(case.tokens_answered - case.tokens_billed)
    age_s = every_s + stated.registry_rpo_s / 5
    return (
        at_most("requests by which the bill is off the client's count", records, stated.ledger_rpo_records, case.lost),
        at_most("tokens by which the bill is off the client's count", tokens, 0, case.lost),
        at_most("seconds until the ledger was back", case.answer_s, stated.ledger_rto_s, case.lost),
        at_most("seconds until the registry was back", case.ready_s, stated.registry_rto_s, case.lost),
        at_most("seconds since the newest backup", case.registry_age_s, age_s, case.lost),
        at_most("other differences from before", len(case.failures), 0, case.lost),
    )


def table(figures: DrillFigures) -> str:
    """Return the figures as text for people."""
    lines = []
    for case in figures.cases:
        restored, ready, right = (cell(each, "{:.1f} s") for each in (case.restore_s, case.ready_s, case.answer_s))
        lines += [
            f"{case.lost} is lost",
            f"  ledger: {case.answered} requests answered, {case.billed} billed; {case.tokens_answered} tokens, "
            f"{case.tokens_billed} billed; records were in the data directory alone for {case.exposed_s:.2f} s",
            f"  registry: the newest backup was {case.registry_age_s:.1f} s old",
            f"  back: restored after {restored}, ready after {ready}, right answer after {right}",
            *(f"  {failure}" for failure in case.failures),
        ]
    return "\n".join(lines)


@dataclass(slots=True)
class CountingClient:
    """Sends requests and counts answers and tokens. The tiny tokenizer has one word per token."""

    model: str
    began_s: float = field(default_factory=time.time)
    answered: int = 0
    tokens: int = 0
    text: str = ""

    def send_requests(self, https_client: HttpsClient, times: int) -> None:
        """Send requests. Raises InstallationFailed."""
        for _ in range(times):
            self.text = https_client.complete(self.model, PROMPT, TOKENS)
            self.answered += 1
            self.tokens += len(self.text.split())


def _lose_database(data: Path) -> None:
    for path in data.glob("kelvin.db*"):
        path.unlink()


LOSSES: Final[dict[str, Callable[[Path], None]]] = {
    "the database": _lose_database,
    "the data directory": shutil.rmtree,
}


@dataclass(frozen=True, slots=True)
class DrillPlan(BenchPlan):
    """Options of the drill: the number of requests before each backup."""

    requests: int


def drill(
    plan: DrillPlan,
    scratch: Path,
    losses: Sequence[str] = tuple(LOSSES),
    damage_backups: Callable[[Path], None] | None = None,
) -> DrillFigures:
    """Run all losses, one after the other. A negative control damages the backups first with `damage_backups`."""
    backups, store, data = scratch / "backups", scratch / "store", scratch / "data"
    settings = {
        "KELVIN_BACKUP": str(backups),
        "KELVIN_BACKUP_S": str(EVERY_S),
        "KELVIN_HOST_BYTES": str(512 << 20),
        "KELVIN_SLAB_BYTES": str(64 << 20),
    }
    plan.tell("making and pushing a model")
    make_model(scratch / "model", MODEL_BYTES, 1)
    client, cases = CountingClient("drill"), list[RecoveryCase]()
    with _running_installation(data, store, settings) as kelvin:
        kelvin.push(scratch / "model", client.model)
        key = _new_key(kelvin)
        state = _run_until_kill(kelvin, backups, client, plan.requests)
    for lost in losses:
        plan.tell(f"{lost} is lost")
        if damage_backups is not None:
            damage_backups(backups)
        LOSSES[lost](data)
        case = RecoveryCase(lost, state.exposed_s, state.registry_age_s)
        cases.append(case)
        began = time.monotonic()
        if not _restore_and_compare(backups, data, state, case):
            break
        case.restore_s = time.monotonic() - began
        with _running_installation(data, store, settings) as kelvin:
            case.ready_s = time.monotonic() - began
            _check_answer(kelvin, client, key, case)
            case.answer_s = time.monotonic() - began
            _compare(kelvin, client, case)
            if lost != losses[-1]:
                state = _run_until_kill(kelvin, backups, client, plan.requests)
    return DrillFigures(STATED, EVERY_S, tuple(cases))


@dataclass(frozen=True, slots=True)
class StateBeforeKill:
    """The state when the installation was killed."""

    exposed_s: float
    registry_age_s: float
    chains: dict[str, tuple[int, str]]  # by month: number of links, and the last digest


def _run_until_kill(kelvin: Installation, backups: Path, client: CountingClient, requests: int) -> StateBeforeKill:
    """Send requests, wait for a backup, send more, kill. The last records are then only in the journal. Raises
    InstallationFailed.
    """
    client.send_requests(kelvin.client, requests)
    for _ in range(TRIES):
        before = _newest_s(backups)
        kelvin.wait(lambda before=before: _newest_s(backups) > before, "a backup is made", PATIENCE_S)  # type: ignore[misc]
        newest = _newest_s(backups)
        client.send_requests(kelvin.client, REQUESTS_AFTER_BACKUP)
        last = time.monotonic()
        kelvin.wait(lambda: _backlog(kelvin) == 0, "the ledger has every record", PATIENCE_S)
        exposed_s = time.monotonic() - last
        chains = {month["month"]: (month["links"], month["chain"]) for month in _verified(kelvin)["months"]}
        if _newest_s(backups) == newest:
            break  # a newer backup would hold the last records, and the journal would not be tested
    else:
        raise InstallationFailed(f"{TRIES} times a backup was made while the last requests were entered")
    age_s = time.time() - _newest_s(backups)
    _kill(kelvin, backups)
    return StateBeforeKill(exposed_s, age_s, chains)


def _restore_and_compare(backups: Path, data: Path, state: StateBeforeKill, case: RecoveryCase) -> bool:
    """Restore, and compare the ends of the chains with those before. Return False if nothing was restored."""
    code, out, err = run_command(data, "restore", str(backups), "--replace", "--json")
    if code != 0:
        case.failures.append(f"kelvin restore exited with {code}: {err.strip()}")
    if not out:
        return False
    back = {each["month"]: each for each in json.loads(out)["chains"] if each["tenant"] == TENANT}
    for month, (links, chain) in state.chains.items():
        found = back.get(month, {"links": 0, "chain": ""})
        if found["links"] < links or (found["links"] == links and found["chain"] != chain):
            case.failures.append(f"the chain of {month} had {links} rows; restored are {found['links']}, or others")
    return True


def _check_answer(kelvin: Installation, client: CountingClient, key: str, case: RecoveryCase) -> None:
    """Send a request from zero with the old key, and one with a key that was created while it ran."""
    before = client.text
    client.send_requests(kelvin.client, 1)
    if client.text != before:
        case.failures.append(f"the model answers {client.text!r}; before it was {before!r}")
    path = kelvin.data.parent / "drill.key"
    path.write_text(key)
    made = HttpsClient(kelvin.port, kelvin.data / "ca.pem", path)
    try:
        made.request("GET", "/v1/models")
    except InstallationFailed as failed:
        case.failures.append(f"a key that was made before the newest backup is not good: {failed}")
    finally:
        made.close()


def _compare(kelvin: Installation, client: CountingClient, case: RecoveryCase) -> None:
    with contextlib.suppress(InstallationFailed):  # a missing request fails a claim instead
        kelvin.wait(lambda: _billed(kelvin, client).requests >= client.answered, "the bill has every request", SETTLE_S)
    case.answered, case.tokens_answered = client.answered, client.tokens
    billed = _billed(kelvin, client)
    case.billed, case.tokens_billed = billed.requests, billed.tokens
    if not _verified(kelvin)["sound"]:
        case.failures.append("the ledger's chain does not hold")


def _billed(kelvin: Installation, client: CountingClient) -> BillTotals:
    return sum(map(bill_totals_of, kelvin.bills(client.began_s)), BillTotals())


def _verified(kelvin: Installation) -> Any:
    """Return the ledger's verification. Poll until a long one has finished."""
    found: list[Any] = []

    def is_done() -> bool:
        found.append(kelvin.admin.request("GET", "/admin/v1/billing/verify"))
        return "months" in found[-1]

    kelvin.wait(is_done, "the ledger is verified", PATIENCE_S)
    return found[-1]


def _backlog(kelvin: Installation) -> float:
    """Return the number of usage records that the ledger has not acknowledged."""
    lines = kelvin.admin.text("/admin/v1/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("kelvin_spool_backlog_records"))


def _new_key(kelvin: Installation) -> str:
    body = {"name": "drill", "scopes": ["infer"], "models": [], "expires_in_s": None}
    return str(kelvin.admin.request("POST", "/admin/v1/keys", body)["secret"])


def _newest_s(backups: Path) -> float:
    """Return when the newest backup was completed (Unix time). 0 before the first one."""
    return max((path.stat().st_mtime for path in backups.glob("kelvin-*.backup")), default=0.0)


def _kill(kelvin: Installation, backups: Path) -> None:
    """Kill the supervisor with SIGKILL. Return once all its processes are gone."""
    os.kill(int((kelvin.data / "lock").read_text()), signal.SIGKILL)

    def is_gone() -> bool:
        held = (backups / "journal", *(kelvin.data / "spool").iterdir())
        return not any(has_owner(path.parent, path.name) for path in held)

    kelvin.wait(is_gone, "every process is gone", PATIENCE_S)


@contextlib.contextmanager
def _running_installation(data: Path, store: Path, settings: dict[str, str]) -> Iterator[Installation]:
    with running_installation(data, settings=settings, options=("--store", store.as_uri())) as kelvin:
        yield kelvin


BENCH: Final = Bench(
    "recovery",
    """Lose the database, then the whole data directory, of a temporary installation, and restore it. Exits with 1 if
    more is lost, or it takes longer, than the documentation states.""",
    (option("--requests", 20, click.IntRange(1, 100_000), "Requests before each backup."),),
    DrillPlan,
    drill,
    table,
    judge,
)
