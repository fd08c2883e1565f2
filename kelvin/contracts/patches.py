"""Derive a patch type from the struct that defines some settings.

The struct defines each setting once: name, type, bounds, default and one sentence. Bodies of the admin API, specs of
cluster objects and command options are made from it, so all have the same settings.
"""

from collections.abc import Callable, Collection
from typing import Any, Union, get_type_hints

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kelvin.contracts.wire import Wire


class Patch(Wire, frozen=True):
    """Base of patches. An omitted setting stays as it is. null is a value, for a setting that may be null."""

    def stated_values(self) -> dict[str, Any]:
        """Return the values to set, by setting name."""
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
    """Return a patch type with this class name and docstring for all settings except those in `without`. Without
    `bounded`, a patch accepts any value of a setting's type. `rename` maps field names to JSON names.
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
