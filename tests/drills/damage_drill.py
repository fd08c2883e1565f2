"""Start an installation with one damaged file in its data directory, and compare the outcome with the matrix.

The directory comes from an installation that was killed with all its processes, so a start has everything to repair.
Other damage is tested elsewhere: chunks, packs and staged pushes in `tests/snapshotter` and `tests/weightcache`,
segments in `tests/kelvin/spool`, the journal in `tests/controlplane`, meter pages in `tests/kelvin`.
"""

import shlex
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from coldstart_bench.harness.request_outcome import BillTotals, bill_totals_of
from tests.drills.drill_installation import DrillInstallation, running_drill_installation, wait
from tests.drills.matrix import DamageKind, StartOutcome, start_expected
from tests.drills.operations import ROOT, PreconditionFailed
from tests.drills.stage_drill import DrillContext, kill, run_cell

SECRETS: Final = ("ca.pem", "tls/ca.key", "once.key", "attest.key", "admin.key", "default.key")
KEYS: Final = ("admin.key", "default.key")  # of the drill's own client
FRIEND: Final = "trust/friend.pem"
PRICES: Final = "prices.toml"  # KELVIN_PRICE_BOOK
# Text of warnings that do not name the file.
WARNING_TEXTS: Final = {"run/feed": "the feed that was kept can't be read"}


@dataclass(frozen=True, slots=True)
class KilledInstallation:
    """The data directory of an installation that had pushed, answered and billed, and was then killed as a whole."""

    data: Path
    totals: BillTotals  # totals of its bill


def drill_damage(context: DrillContext, cells: Collection[tuple[str, DamageKind]]) -> None:
    """Start with each of these damages, each on its own copy of the data directory."""
    killed = _killed(context)
    for number, (file, damage) in enumerate(cells):
        cell = partial(_start_over, killed, context.work / f"damaged-{number}", file, damage)
        context.tell(run_cell(f"{file}/{damage}", cell))


def _killed(context: DrillContext) -> KilledInstallation:
    data = context.work / "damage" / "data"
    data.mkdir(parents=True)
    shutil.copyfile(ROOT / "controlplane" / "price_book.toml", data / PRICES)
    installation = DrillInstallation(data, settings=_settings(data))
    with running_drill_installation(installation, context.models.served):
        installation.expect_answer()
        if wrong := installation.settle_bill([]):
            raise PreconditionFailed(f"before the damage: {wrong}")
        totals = bill_totals_of(installation.bill())
        wait((data / "run" / "feed").exists, "the feed is kept")
        installation.record_processes()
        kill(installation.all_processes())
        installation.wait_processes_gone()
    (data / FRIEND).parent.mkdir()
    shutil.copyfile(data / "attest.pub", data / FRIEND)
    for name in ("exits.json", "succession", "decider"):
        with (data / "run" / name).open("a") as file:
            file.write("[]\n")
    return KilledInstallation(data, totals)


def _settings(data: Path) -> dict[str, str]:
    return {"KELVIN_PRICE_BOOK": str(data / PRICES), "KELVIN_BACKUP": str(data.parent / f"{data.name}-backup")}


def _start_over(killed: KilledInstallation, place: Path, file: str, damage: DamageKind) -> tuple[None, list[str]]:
    """Start with the damaged file. Return the differences from the matrix."""
    data = place / "data"
    shutil.copytree(killed.data, data, ignore=lambda _, names: [name for name in names if name.endswith(".sock")])
    shutil.copytree(_settings(killed.data)["KELVIN_BACKUP"], _settings(data)["KELVIN_BACKUP"])
    shutil.rmtree(data / "logs")
    _damage(data / file, damage)
    before = {name: (data / name).read_bytes() for name in SECRETS}
    expected = start_expected(file, damage)
    installation = DrillInstallation(data, settings=_settings(data))
    try:
        installation.begin()
        is_ready = installation.wait_ready()
        wrong = [f"{name} was overwritten" for name in SECRETS if (data / name).read_bytes() != before[name]]
        if is_ready:
            seen, more = _started(installation, killed, file)
        elif expected is StartOutcome.RESTORED:
            seen, more = _restored(installation, killed)
        else:
            seen, more = _refused(installation, file)
    finally:
        installation.abandon()
    wrong += more + ([] if seen is expected else [f"expected: {expected}; seen: {seen}"])
    logs = (installation.errors, *(data / "logs").iterdir())
    return None, wrong + [f"{log.name} has a traceback" for log in logs if "Traceback" in log.read_text()]


def _damage(path: Path, damage: DamageKind) -> None:
    content = path.read_bytes()
    match damage:
        case DamageKind.EMPTY:
            path.write_bytes(b"")
        case DamageKind.TORN:
            path.write_bytes(content[: len(content) // 2])
        case DamageKind.ZEROED:
            path.write_bytes(bytes(len(content)))


def _refused(installation: DrillInstallation, file: str) -> tuple[StartOutcome, list[str]]:
    status, last = installation.wait_exit(), _last_line(installation)
    is_named = last.startswith("Error: ") and Path(file).name in last
    return StartOutcome.REFUSED, [] if (status, is_named) == (1, True) else [f"`kelvin up` ended with {status}: {last}"]


def _last_line(installation: DrillInstallation) -> str:
    """Return the last line of its standard error, or an empty text."""
    return "".join(installation.errors.read_text().strip().splitlines()[-1:])


def _restored(installation: DrillInstallation, killed: KilledInstallation) -> tuple[StartOutcome, list[str]]:
    """Run the restore that the error names. Return the problems of the restore and of the bill after it."""
    restore = ("restore", _settings(installation.data)["KELVIN_BACKUP"], "--data", str(installation.data), "--replace")
    refusal = _last_line(installation)
    if shlex.join(("kelvin", *restore)) not in refusal:
        return StartOutcome.REFUSED, [refusal]
    status, _, said = installation.kelvin(*restore)
    installation.begin()
    if status != 0 or not installation.wait_ready():
        return StartOutcome.REFUSED, [said]
    for key in KEYS:
        shutil.copyfile(killed.data / key, installation.data / key)
    installation.connect()
    bill = bill_totals_of(installation.bill())
    return StartOutcome.RESTORED, [] if bill == killed.totals else [f"the bill was {killed.totals}, and is {bill}"]


def _started(installation: DrillInstallation, killed: KilledInstallation, file: str) -> tuple[StartOutcome, list[str]]:
    """Check the next request and the bill. Return whether a log names the file, and all problems."""
    for key in KEYS:  # a client with a copy of the keys can continue
        shutil.copyfile(killed.data / key, installation.data / key)
    installation.connect()
    installation.wait_until_whole()
    installation.count_from(killed.totals)
    installation.expect_answer()
    wrong = installation.settle_bill([])
    lines = [line for log in (installation.data / "logs").iterdir() for line in log.read_text().splitlines()]
    said = WARNING_TEXTS.get(file, Path(file).name)
    is_named = any('"warning"' in line and said in line for line in lines)
    return StartOutcome.WARNED if is_named else StartOutcome.WHOLE, wrong
