"""Patches that each undo one repair and bring its defect back. The simulation has to find every one of them.

A module has the name of the world that finds its defects. The docstring of a patch describes the defect for a user.
"""

import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock


class Undoing:
    """Replaces functions until `stack` is closed. Fails if a repaired function no longer exists."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def method(self, owner: type, name: str, substitute: Callable[..., Any]) -> None:
        """Replace a method or a property of a class of the product."""
        assert name in vars(owner), f"{owner.__name__} has no {name} of its own"
        self._stack.enter_context(mock.patch.object(owner, name, substitute))

    def name(self, module: ModuleType, name: str, substitute: object) -> None:
        """Replace a name in one module of the product."""
        assert hasattr(module, name), f"{module.__name__} has no {name}"
        self._stack.enter_context(mock.patch.object(module, name, substitute))

    def function(self, repaired: Callable[..., Any], substitute: Callable[..., Any]) -> None:
        """Replace a function in its module and in all modules that import it by name. The patch itself may call it."""
        found = 0
        for module in list(sys.modules.values()):
            for name, value in list(vars(module).items()):
                if value is repaired and module.__name__ != substitute.__module__:
                    self._stack.enter_context(mock.patch.object(module, name, substitute))
                    found += 1
        assert found, f"{repaired} is nowhere"


@dataclass(frozen=True, slots=True)
class Repair:
    """A repair that can be undone. The world `world` then fails with a message that the pattern `sign` matches.

    If few histories find the defect, `seed` is the seed of one that does.
    """

    world: str
    sign: str
    seed: int | None
    undo: Callable[[Undoing], None]

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Bring the defect back inside the block."""
        with ExitStack() as stack:
            self.undo(Undoing(stack))
            yield


def repair(sign: str, seed: int | None = None) -> Callable[[Callable[[Undoing], None]], Repair]:
    """Decorate a function that undoes a repair. The function's module has the name of the repair's world."""
    return lambda undo: Repair(undo.__module__.rpartition(".")[2], sign, seed, undo)


def repairs() -> dict[str, Repair]:
    """Return all repairs by name."""
    modules = [import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__)]
    return {name: each for module in modules for name, each in vars(module).items() if isinstance(each, Repair)}
