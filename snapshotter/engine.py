"""Who judges a push: the control plane, or a `kelvin engine` whose directory is shared with us."""

from contextlib import closing
from pathlib import Path
from typing import Final, Protocol, TypeVar

from contracts.errors import Refused, Unavailable
from contracts.jobs import ENGINE
from service.client import ServiceClient
from service.unix import SocketDirectory

T = TypeVar("T")
PEER: Final = "the engine"


class Judge(Protocol):
    """Takes the jobs of a push, at the same paths whoever it is."""

    async def call(self, method: str, path: str, kind: type[T], *, body: object | None = None, timeout_s: float) -> T:
        """Raises `Refused`: the job's own refusal, or Unavailable."""
        ...


class EngineBeside:
    """An engine in `run`, which may come, go and be another one at any time: a connection for each job."""

    def __init__(self, run: Path) -> None:
        self._run = run

    def __repr__(self) -> str:
        return f"<EngineBeside {self._run}>"

    async def call(self, method: str, path: str, kind: type[T], *, body: object | None = None, timeout_s: float) -> T:
        """See `Judge`."""
        try:
            directory = SocketDirectory(self._run, is_ours=False)
        except OSError as error:
            raise Refused(Unavailable(PEER)) from error
        with closing(directory):
            client = ServiceClient(directory, ENGINE, PEER, limit=1)
            try:
                return await client.call(method, path, kind, body=body, timeout_s=timeout_s)
            finally:
                await client.close()
