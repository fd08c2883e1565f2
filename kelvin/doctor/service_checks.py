"""Ask each service whether it could start with these settings.

Each service runs as a program with `--check`: it reads its settings and serves nothing. The snapshotter also tests the
store; the control plane also reports usage records that its ledger set aside.
"""

import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kelvin.contracts.setting_parser import BadSetting
from kelvin.doctor.finding_policy import Finding, FindingLevel
from kelvin.process.python_command import python_command
from kelvin.process.startup import BAD_SETTING_STATUS, CHECK, STORE_STATUS
from kelvin.supervisor.settings import load_up

CHECK_S: Final = 30.0
SERVICES: Final = {  # service name to module
    "activator": "activator",
    "controlplane": "controlplane",
    "snapshotter": "snapshotter",
    "weightcache": "weightcache",
    "zygote": "runtime.app.zygote",
}
FILTERS: Final = {"filters": "kelvin.filters"}  # only if KELVIN_FILTERS is on
_COST: Final = "`kelvin up` would not start"
_MEND: Final = "correct the setting that it names"


def check_services(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each refusal, and one for the store. All services run at once, for at most CHECK_S."""
    services = SERVICES | FILTERS if environment.get("KELVIN_FILTERS") == "on" else SERVICES
    processes = [
        (
            name,
            subprocess.Popen(
                python_command(module, CHECK),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            ),
        )
        for name, module in services.items()
    ]
    limit = time.monotonic() + CHECK_S
    is_certain = True  # every service accepted its settings
    try:
        load_up(Path(), None, None, environment)
    except BadSetting as bad:
        is_certain = False
        yield Finding("service", FindingLevel.FAIL, f"kelvin up: {bad}", _COST, _MEND)
    for name, process in processes:
        try:
            _, output = process.communicate(timeout=max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            is_certain = False
            cost, mend = "whether `kelvin up` would start is not known", "run it again when the machine is less busy"
            yield Finding("service", FindingLevel.WARN, f"{name}: no answer in {CHECK_S:.0f} s", cost, mend)
            continue
        last = (output.strip().splitlines() or [f"it ended with {process.returncode} and printed nothing"])[-1]
        if name == "snapshotter" and process.returncode in (0, STORE_STATUS):
            yield _store_finding(process.returncode, last)
        elif name == "controlplane" and process.returncode == 0 and output:
            mend = "`kelvin billing reconcile` names each"
            yield Finding("usage records", FindingLevel.WARN, last, "no bill has them", mend)
        elif process.returncode != 0:
            is_certain = False
            mend = _MEND if process.returncode == BAD_SETTING_STATUS else ""
            yield Finding("service", FindingLevel.FAIL, f"{name}: {last}", _COST, mend)
    if is_certain:
        yield Finding("services", FindingLevel.OK, "every service accepts these settings")


def _store_finding(status: int, output: str) -> Finding:
    if status == 0:
        return Finding("store", FindingLevel.OK, "it can be used")
    cost = "uncached versions can't start and pushes fail; running replicas go on"
    return Finding("store", FindingLevel.FAIL, output, cost, "check its address, network and credentials")
