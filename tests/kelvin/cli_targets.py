"""Context objects for CLI commands: one over a test snapshotter, one with fixed responses."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kelvin.cli.artifacts.progress import Progress
from kelvin.cli.artifacts.push import push_directory
from kelvin.cli.base.api_client import Target, raise_for_error
from kelvin.contracts.artifacts.push_api import Committed
from kelvin.contracts.wire import encode
from snapshotter.app.app import SOCKET
from tests.snapshotter.house import House, principal_of
from tests.snapshotter.unix import unix_transport


@dataclass
class SnapshotterTarget:
    """The CLI's context object, connected to a test snapshotter."""

    house: House

    def client(self) -> httpx.Client:
        transport = unix_transport(self.house.directory.address(SOCKET))
        refuse = {"response": [lambda answer: answer.raise_for_status()]}
        return httpx.Client(transport=transport, base_url="http://x", headers=principal_of(), event_hooks=refuse)


@dataclass(frozen=True)
class Installation(Target):
    """An installation that returns `answers` in turn, then the last one again: responses, or values to encode."""

    data: Path = Path("/nowhere")
    answers: Sequence[object] = ()
    requests: list[httpx.Request] = field(default_factory=list)

    def client(self, key_file: str = "admin.key") -> httpx.Client:
        hooks = {"response": [raise_for_error]}
        return httpx.Client(transport=httpx.MockTransport(self._answer), base_url="https://door", event_hooks=hooks)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
        self.requests.append(request)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, content=encode(answer))


def installation_answering(*answers: object) -> Installation:
    return Installation(answers=answers)


def push(directory: Path, model: str, client: httpx.Client, progress: Progress) -> Committed:
    """Push `directory` as a version of `model` and return the commit response. Raises `Refused`."""
    return push_directory(directory, model, client, progress).committed
