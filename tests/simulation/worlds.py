"""All worlds, by name."""

from typing import Final

from tests.simulation.cache import CacheWorld
from tests.simulation.door import ActivatorWorld
from tests.simulation.ledger import LedgerWorld
from tests.simulation.machine import MachineWorld
from tests.simulation.world import World

WORLDS: Final[dict[str, type[World]]] = {
    each.name: each for each in (CacheWorld, ActivatorWorld, LedgerWorld, MachineWorld)
}
