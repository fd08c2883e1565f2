"""How the processes of an installation ended last. Its supervisor writes it down, the control plane tells operators.

A note in the run directory, not a record: nothing is billed by it, and the next start begins anew.
"""

from pathlib import Path
from typing import Final

from contracts.wire import Wire, decode, encode
from service.whole_file import write_whole

_FILE: Final = "exits.json"


class ProcessExits(Wire, frozen=True):
    """How often a process ended since the installation began, and how the last time."""

    name: str
    count: int
    last_at_s: int  # Unix time
    last: str  # such as `killed by signal 9: it did not answer for 18 s`


class ExitNotes:
    """The supervisor's side."""

    def __init__(self, run: Path) -> None:
        self._path = run / _FILE
        self._exits: dict[str, ProcessExits] = {}
        self._path.unlink(missing_ok=True)

    def add(self, name: str, status: int, at_s: int, why: str | None = None) -> None:
        """Write down one end. `status` is as Popen has it; `why` tells why the supervisor killed it. Raises OSError.

        Without a sync: it is called on the supervisor's event loop, and a power cut ends what the note is for.
        """
        how = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        before = self._exits.get(name)
        self._exits[name] = ProcessExits(
            name=name,
            count=1 if before is None else before.count + 1,
            last_at_s=at_s,
            last=how if why is None else f"{how}: {why}",
        )
        write_whole(self._path, encode(tuple(self._exits.values())), 0o600, durable=False)


def read_exits(run: Path) -> dict[str, ProcessExits]:
    """Return them by name; none where no supervisor wrote any. Raises OSError, Refused."""
    try:
        raw = (run / _FILE).read_bytes()
    except FileNotFoundError:
        return {}
    return {each.name: each for each in decode(raw, tuple[ProcessExits, ...], what=_FILE)}
