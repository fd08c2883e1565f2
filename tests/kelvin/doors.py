"""What a command of the command line finds in its context: a house of the tests, or fixed answers."""

from dataclasses import dataclass
from pathlib import Path

import httpx

from contracts.wire import encode
from kelvin.client import Target
from snapshotter.app import SOCKET
from tests.snapshotter.house import House, principal
from tests.snapshotter.unix import unix_transport


@dataclass
class Doors:
    """The context object of the command line."""

    house: House

    def door(self) -> httpx.Client:
        transport = unix_transport(self.house.directory.address(SOCKET))
        refuse = {"response": [lambda answer: answer.raise_for_status()]}
        return httpx.Client(transport=transport, base_url="http://x", headers=principal(), event_hooks=refuse)


@dataclass(frozen=True)
class Installation(Target):
    """An installation that answers every request with `answer`."""

    data: Path = Path("/nowhere")
    answer: object = None

    def door(self, key_file: str = "admin.key") -> httpx.Client:
        response = httpx.Response(200, content=encode(self.answer))
        return httpx.Client(transport=httpx.MockTransport(lambda _: response), base_url="https://door")
