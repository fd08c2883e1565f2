"""The command line's way in, to a house of the tests: what a command finds in its context."""

from dataclasses import dataclass

import httpx

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
