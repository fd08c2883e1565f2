"""Derive a patch from the struct that states some settings.

The struct states each setting once: its name, type, bounds, default and one sentence. The bodies of the admin API, the
specs of a cluster's objects and the options of commands have the same settings, because they are made from it.
"""

from collections.abc import Callable, Collection
from typing import Any, Union, get_type_hints

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kelvin.contracts.wire import Wire


class Patch(Wire, frozen=True):
    """Base of patches. A setting that is left out stays as it is; null is a value, of a setting that may be null."""

    def given(self) -> dict[str, Any]:
        """Return the values to set, by the names of the settings."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET}


def patch_of(
    settings: type[Struct],
    name: str,
    about: str,
    *,
    bounded: bool = True,
    without: Collection[str] = (),
    rename: Callable[[str], str] | None = None,
) -> type[Patch]:
    """Return a patch of that class name and docstring for the settings, except those `without`.

    A patch that is not `bounded` takes any value of a setting's type. `rename` gives the names that it is decoded by.
    """
    types = get_type_hints(settings, include_extras=bounded)
    fields = [
        (field, Union[types[field], UnsetType], UNSET)  # noqa: UP007
        for field in settings.__struct_fields__
        if field not in without
    ]
    made = msgspec.defstruct(
        name, fields, bases=(Patch,), namespace={"__doc__": about}, module=settings.__module__, frozen=True,
        kw_only=True, rename=rename,
    )  # fmt: skip
    assert issubclass(made, Patch)
    return made
