"""Record how the processes of an installation ended. The supervisor writes the log, the control plane shows it.

It is a file in the run directory. Billing does not use it, and each supervisor starts a new one.
"""

from pathlib import Path
from typing import Final

from kelvin.contracts.wire import Wire, decode, encode
from kelvin.process.atomic_file import write_atomic

_FILE: Final = "exits.json"
REPLICAS: Final = "replicas"  # the common name of replicas and standbys that were killed because they hung


class ProcessExits(Wire, frozen=True):
    """How often a process has ended since the supervisor started, and how it ended last."""

    name: str
    count: int
    last_at_s: int  # Unix time
    last: str  # such as `killed by signal 9: it did not answer for 18 s`


class ExitLog:
    """Writes the log. Its constructor removes the log of an earlier supervisor."""

    def __init__(self, run: Path) -> None:
        self._path = run / _FILE
        self._exits: dict[str, ProcessExits] = {}
        self._path.unlink(missing_ok=True)

    def add(self, name: str, status: int, at_s: int, why: str | None = None) -> None:
        """Record that a process ended. Raises OSError.

        `status` is as in `Popen.returncode`; `why` is the reason if the supervisor killed it. The file is not synced:
        this runs on the supervisor's event loop, and nothing needs it after a power cut.
        """
        how = describe_exit(status)
        before = self._exits.get(name)
        self._exits[name] = ProcessExits(
            name=name,
            count=1 if before is None else before.count + 1,
            last_at_s=at_s,
            last=how if why is None else f"{how}: {why}",
        )
        write_atomic(self._path, encode(tuple(self._exits.values())), 0o600, durable=False)


def describe_exit(status: int) -> str:
    """Describe how a process ended. `status` is as in `Popen.returncode`."""
    return f"killed by signal {-status}" if status < 0 else f"ended with status {status}"


def read_exits(run: Path) -> dict[str, ProcessExits]:
    """Return how processes ended, by name. Empty if none was recorded. Raises OSError, Refused."""
    try:
        raw = (run / _FILE).read_bytes()
    except FileNotFoundError:
        return {}
    return {each.name: each for each in decode(raw, tuple[ProcessExits, ...], field=_FILE)}
