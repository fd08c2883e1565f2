"""Make a command's options from a struct of settings. `kelvin/contracts/patches.py` describes such structs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click
import msgspec

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a settings struct. A number is at least `low`, greater than `above`, and at most `high`."""

    name: str
    sentence: str
    kind: type
    choices: tuple[str, ...] = ()
    low: int | None = None
    above: int | None = None
    high: int | None = None


def setting_options(
    settings: type[msgspec.Struct],
    option: Callable[[str], str],
    kind_of: Callable[[Setting], click.ParamType[Any]],
) -> Callable[[F], F]:
    """Return a decorator that adds an option for each setting, with the setting's description as help. `option` returns
    the option's name for a setting, `kind_of` the click type of its value.
    """

    def decorated(command: F) -> F:
        for each in reversed(list(_settings(settings))):
            command = click.option(option(each.name), each.name, type=kind_of(each), help=each.sentence)(command)
        return command

    return decorated


def _settings(settings: type[msgspec.Struct]) -> Iterator[Setting]:
    for name, hint in get_type_hints(settings, include_extras=True).items():
        # Each hint is Annotated[TYPE, Meta, ...], or a union of that and None.
        annotated = hint if get_origin(hint) is Annotated else next(t for t in get_args(hint) if t is not NoneType)
        kind, *metas = get_args(annotated)
        is_choice = get_origin(kind) is Literal

        def meta_value(attribute: str, metas: list[msgspec.Meta] = metas) -> Any:
            return next((value for meta in metas if (value := getattr(meta, attribute)) is not None), None)

        yield Setting(
            name, meta_value("description"), str if is_choice else kind, get_args(kind) if is_choice else (),
            meta_value("ge"), meta_value("gt"), meta_value("le"),
        )  # fmt: skip
