"""Repairs, each undone by a small patch that brings its defect back: the simulation has to find every one of them.

A patch is a module with `WORLD`, the world that finds it, `SIGN`, a pattern of what breaks there, and `undo(Undoing)`,
which replaces repaired functions by defective ones. Its docstring names the defect as a user met it. Where it is rare,
`SEED` is that of a history which meets it.
"""

import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock


class Undoing:
    """Replaces functions for as long as its block lasts. Fails where the repaired one is not there any more."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def method(self, owner: type, name: str, substitute: Callable[..., Any]) -> None:
        """Replace a method, or a property, of a class of the product."""
        assert name in vars(owner), f"{owner.__name__} has no {name} of its own"
        self._stack.enter_context(mock.patch.object(owner, name, substitute))

    def name(self, module: ModuleType, name: str, substitute: object) -> None:
        """Replace what one module of the product calls by that name."""
        assert hasattr(module, name), f"{module.__name__} has no {name}"
        self._stack.enter_context(mock.patch.object(module, name, substitute))

    def function(self, repaired: Callable[..., Any], substitute: Callable[..., Any]) -> None:
        """Replace a function in its module and wherever it was imported by name. The patch itself may call it."""
        found = 0
        for module in list(sys.modules.values()):
            for name, value in list(vars(module).items()):
                if value is repaired and module.__name__ != substitute.__module__:
                    self._stack.enter_context(mock.patch.object(module, name, substitute))
                    found += 1
        assert found, f"{repaired} is nowhere"


def names() -> list[str]:
    """All patches."""
    return sorted(each.name for each in pkgutil.iter_modules(__path__))


def seed_of(name: str) -> int | None:
    """Return the seed of a history that meets a rare defect; None for a defect that is met often."""
    found: int | None = getattr(import_module(f"{__name__}.{name}"), "SEED", None)
    return found


@contextmanager
def undone(name: str) -> Iterator[tuple[str, str]]:
    """Undo that repair while the block lasts. Yields the world that should find it, and the sign by which."""
    patch = import_module(f"{__name__}.{name}")
    with ExitStack() as stack:
        patch.undo(Undoing(stack))
        yield patch.WORLD, patch.SIGN
