"""All worlds, by name."""

from typing import Final

from tests.simulation.activator.activator_world import ActivatorWorld
from tests.simulation.cache_world import CacheWorld
from tests.simulation.core.world import World
from tests.simulation.ledger_world import LedgerWorld
from tests.simulation.machine_world import MachineWorld

WORLDS: Final[dict[str, type[World]]] = {
    each.name: each for each in (CacheWorld, ActivatorWorld, LedgerWorld, MachineWorld)
}
