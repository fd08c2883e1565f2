"""The work budget of a chat template, and the cost of each operation. `template_sandbox.py` makes Jinja spend it.

Work is counted, not timed, so whether a template renders never depends on the machine's load. An operation is paid for
before it runs. If it can produce much from little, its cost is the size of its result. The result of a call or filter
is also paid for afterwards.
"""

import re
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Final, NoReturn

from jinja2.exceptions import TemplateRuntimeError
from jinja2.utils import Namespace
from markupsafe import Markup

MAX_UNITS: Final = 2_000_000  # for compiling, and for one rendering; about one second of one core
CHARACTERS_PER_UNIT: Final = 8
MAX_WIDTH: Final = 9_999  # limit of padding, indentation and batches
_MAX_BITS: Final = 4096  # limit of a whole number
_MAX_DECIMALS: Final = 300
# Filters that take items lazily (each item is paid for when taken), and filters that don't look inside their value.
_LAZY: Final = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
_SHALLOW: Final = frozenset({"abs", "attr", "count", "d", "default", "first", "items", "last", "length", "reverse",
                             "round"})  # fmt: skip
_CONTAINERS: Final = (list, tuple, dict, range, set, KeysView, ValuesView, ItemsView, MappingProxyType)
_WIDE_PERCENT: Final = re.compile(r"%[^a-zA-Z%]*(?:[0-9]{5}|\*)")
_PADDED_PERCENT: Final = re.compile(r"%[^a-zA-Z%]*[0-9]{2}")
# A conversion may have a key of any characters before its width: `%(key)5d`. A width `*` is then an error.
_WIDE_KEYED: Final = re.compile(r"\)[-#0 +]*(?:[0-9]*\.)?[0-9]{5}")
_PADDED_KEYED: Final = re.compile(r"\)[-#0 +]*(?:[0-9]*\.)?[0-9]{2}")
# Widths may use any Unicode decimal digits. A brace in a field's index does not end the field: `{0[}]:5}`.
_WIDE_FIELD: Final = re.compile(r"\{[^{}]*(?:\{|\d{5}|\[[^\[\]{}]*\})")


class TemplateBudgetExceeded(TemplateRuntimeError):
    """A template does more work than its budget allows."""


class _Budget:
    __slots__ = ("left",)

    def __init__(self, units: int) -> None:
        self.left = units


_budget: ContextVar[_Budget | None] = ContextVar("budget of a template", default=None)


@contextmanager
def work_budget() -> Iterator[None]:
    """Give templates that are compiled or rendered in this block MAX_UNITS. Beyond that they raise
    TemplateBudgetExceeded.
    """
    token = _budget.set(_Budget(MAX_UNITS))
    try:
        yield
    finally:
        _budget.reset(token)


def _current_budget() -> _Budget:
    current = _budget.get()
    assert current is not None, "templates are compiled and rendered within a budget"
    return current


def spend(units: int) -> bool:
    """Pay for the work that follows. Always returns True, for use in a condition. Raises TemplateBudgetExceeded."""
    current = _current_budget()
    current.left -= units
    if current.left < 0:
        _refuse_more()
    return True


def charge_text(characters: int) -> None:
    """Pay for a text of that many characters, or a list of that many entries. Raises TemplateBudgetExceeded."""
    spend(1 + characters // CHARACTERS_PER_UNIT)


def charged_items(items: Iterator[Any]) -> Iterator[Any]:
    """Yield the items, and pay for each one."""
    for item in items:
        spend(1)
        yield item


def _refuse_more() -> NoReturn:
    raise TemplateBudgetExceeded(f"it needs more than the {MAX_UNITS} steps that one conversation may take")


def _refuse_bits() -> NoReturn:
    raise TemplateBudgetExceeded(f"a number of more than {_MAX_BITS} bits")


def _refuse_width(name: str) -> NoReturn:
    raise TemplateBudgetExceeded(f"{name!r} with a width or count of more than {MAX_WIDTH}")


def size(value: object) -> int:
    """Return the characters of a text or the entries of a container, without looking inside; 1 for anything else."""
    return len(value) if isinstance(value, (str, bytes, *_CONTAINERS)) else 1


def charge_result(value: object) -> None:
    """Pay for the result of a call or filter. Raises TemplateBudgetExceeded."""
    charge_text(size(value))
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        _refuse_bits()


def rendered_size(value: object) -> int:
    """Return about how many characters `value` has when written out, at any depth.

    A list that holds another list twice counts it twice, as its text does. Raises TemplateBudgetExceeded as soon as the
    size exceeds the budget.
    """
    if isinstance(value, str):
        return len(value)
    max_characters = _current_budget().left * CHARACTERS_PER_UNIT
    total, pending = 0, [value]
    while pending:
        match pending.pop():
            case str() | bytes() as text:
                total += len(text)
            case int() as number:
                total += number.bit_length() // 3
            case dict() | MappingProxyType() as members:  # a view's `mapping` is a proxy
                pending += members.keys()
                pending += members.values()
            case range() as numbers:
                total += len(numbers) * CHARACTERS_PER_UNIT
            case list() | tuple() | set() | KeysView() | ValuesView() | ItemsView() as items:
                pending += items
            case Namespace() as namespace:
                pending.append(object.__getattribute__(namespace, "_Namespace__attrs"))
        total += CHARACTERS_PER_UNIT
        if total + len(pending) > max_characters:
            _refuse_more()
    return total


def charge_comparison(value: Any) -> None:
    """Pay for an operand of a comparison, or a key. Comparing nested lists takes as long as writing them out."""
    # Comparing texts is about eight times faster than making them.
    charge_text(rendered_size(value) if isinstance(value, _CONTAINERS) else size(value) // 8)


def charge_test(name: str, value: Any, args: Sequence[Any]) -> None:
    """Pay for `value is name(*args)`. A test with an argument compares; other tests don't look inside the value."""
    if args or name in ("lower", "upper"):
        for each in (value, *args):
            charge_comparison(each)


def charge_operator(operator: str, left: Any, right: Any) -> None:
    """Pay for `left operator right`: one of `+`, `-`, `*`, `**`, `%`. Raises TemplateBudgetExceeded."""
    if operator == "+":
        charge_text(size(left) + size(right))
    elif operator == "%" and isinstance(left, str | bytes):
        _charge_percent(left, right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and bits > _MAX_BITS:
            _refuse_bits()
        spend(bits // 64)
    elif operator == "-":  # a difference of keys or items, which are hashed
        charge_text(rendered_size(left) + rendered_size(right))
    elif operator == "*":
        times, repeated = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int):
            charge_text(max(times, 0) * size(repeated))


def charge_method(owner: object, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Pay for `owner.name(*args, **kwargs)`. Raises TemplateBudgetExceeded."""
    match owner:
        case str() | bytes():
            _charge_text_method(owner, name, args, kwargs)
        case int() if any(isinstance(each, int) and each > MAX_WIDTH for each in (*args, *kwargs.values())):
            _refuse_width(name)
        case list() | tuple() | dict() | range():
            searched = owner if name in ("count", "index") else ()
            charge_text(size(owner) + rendered_size(args) + rendered_size(searched))


def _charge_text_method(text: str | bytes, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(each, int) and each > MAX_WIDTH for each in (*args, *kwargs.values())):
        _refuse_width(name)
    match name:
        case "replace" if len(args) >= 2:
            _charge_replacement(text, args[0], args[1])
        case "join" if args:
            charge_text(rendered_size(args[0]) + size(args[0]) * len(text))
        case "decode" | "encode" | "striptags" | "translate" | "unescape":
            raise TemplateBudgetExceeded(f"{name!r} is not served")
        case "lstrip" | "rfind" | "rindex" | "rpartition" | "rsplit" | "rstrip" | "strip":
            # Each character may be compared with each of the argument's, some hundreds per unit.
            longest = max(map(size, (*args, *kwargs.values())), default=0)
            charge_text(len(text) + len(text) * longest // 64)
        case "format" | "format_map" if isinstance(text, str):
            if _WIDE_FIELD.search(text):
                _refuse_width(name)
            charge_text(len(text) + text.count("{") * (rendered_size([*args, kwargs]) + MAX_WIDTH))
        case "center" | "ljust" | "rjust" | "zfill":
            charge_text(len(text) + MAX_WIDTH)
        case "expandtabs":  # each character may be a tab
            charge_text(len(text) * max([8, *args, *kwargs.values()]))
        case _:
            charge_text(len(text))


def charge_filter(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Pay for `value | name(*args, **kwargs)`. Raises TemplateBudgetExceeded."""
    arguments = (*args, *kwargs.values())
    numbers = [abs(each) for each in arguments if isinstance(each, int)]
    if max(numbers, default=0) > (_MAX_DECIMALS if name == "round" else MAX_WIDTH):
        _refuse_width(name)
    if arguments:
        charge_text(sum(map(rendered_size, arguments)))
    if name in _LAZY:
        spend(size(value))
        return
    if name in _SHALLOW:
        return
    written = rendered_size(value)
    charge_text(written)
    match name:
        case "replace":
            named = dict(zip(("old", "new"), args, strict=False)) | dict(kwargs)
            _charge_replacement(str(value), str(named.get("old", "")), str(named.get("new", "")))
        case "join":
            charge_text(size(value) * max(map(size, arguments), default=0))
        case "format":
            _charge_percent(str(value), [*args, kwargs])
        case "indent":
            charge_text((str(value).count("\n") + 1) * max([4, *map(size, arguments), *numbers]))
        case "tojson":
            widths = [*numbers, *(rendered_size(each) for each in arguments if not isinstance(each, int))]
            charge_text(written * max([1, *widths]))
        case "sum":
            charge_text(written * size(value) if arguments else 0)
        case "title" | "wordcount":  # these use regular expressions, which are slower
            spend(written)
        case "trim":
            _charge_text_method(str(value), "strip", args, kwargs)
        case "batch" | "slice":
            charge_text(sum(numbers))


def _charge_percent(template: str | bytes, values: object) -> None:
    text = template if isinstance(template, str) else template.decode("latin-1")
    has_keys = "%(" in text
    if _WIDE_PERCENT.search(text) or (has_keys and _WIDE_KEYED.search(text)):
        _refuse_width("%")
    is_padded = _PADDED_PERCENT.search(text) or (has_keys and _PADDED_KEYED.search(text))
    padding = MAX_WIDTH if is_padded else 8
    charge_text(len(text) + text.count("%") * (rendered_size(values) + padding))


def _charge_replacement(text: Any, old: Any, new: Any) -> None:
    kinds = {type(each) for each in (text, old, new)}
    if kinds <= {str, Markup} or kinds == {bytes}:  # otherwise `replace` raises
        charge_text(len(text) + text.count(old) * len(new))
