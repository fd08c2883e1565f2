"""A Jinja sandbox that bounds the work of a template: its steps, the texts that it makes, and single operations.

The library's sandbox keeps a template from running code and from changing what it is given. It still lets it loop
10**10 times, or make gigabytes in one expression. Here each rendering has a budget. Every block that is entered (a
round of a loop, a branch, a macro's body) costs as many units as it has nodes. Every operation whose result can be much
larger than its operands is paid for before it runs, by the size of its result.

Work is counted, not timed: whether a template renders a conversation never depends on how busy the machine is.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from markupsafe import Markup

MAX_UNITS: Final = 2_000_000  # of one rendering: about one second of one core
CHARACTERS_PER_UNIT: Final = 8
MAX_WIDTH: Final = 9_999  # of padding, indentation, batches
_CALL: Final = 4  # units: a call takes as long as several other nodes
_MAX_BITS: Final = 4096  # of a whole number
_MAX_DECIMALS: Final = 300
# Filters that no chat needs: each makes much of little, or something else each time.
_LEFT_OUT: Final = ("center", "filesizeformat", "pprint", "random", "striptags", "urlencode", "urlize", "wordwrap",
                    "xmlattr")  # fmt: skip
# Filters that read the whole of a list at once, that go through it one by one, and that don't look inside.
_CONSUMING: Final = frozenset({"groupby", "join", "list", "max", "min", "sort", "sum", "unique"})
_LOOPING: Final = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
_SHALLOW: Final = frozenset({"abs", "attr", "count", "d", "default", "first", "float", "int", "items", "last", "length",
                             "reverse", "round"})  # fmt: skip
_WIDE_PERCENT: Final = re.compile(r"%[^a-zA-Z%]*(?:[0-9]{5}|\*)")
_WIDE_FIELD: Final = re.compile(r"\{[^{}]*(?:\{|[0-9]{5})")


class TooMuchWork(TemplateRuntimeError):
    """The template does more than its budget allows."""


class _Budget:
    """Units that are left of one rendering."""

    __slots__ = ("left",)

    def __init__(self, units: int) -> None:
        self.left = units


_budget: ContextVar[_Budget | None] = ContextVar("budget of a template", default=None)


@contextmanager
def budget() -> Iterator[None]:
    """Whatever a template does inside, compiling included, has MAX_UNITS in all. Beyond them it raises TooMuchWork."""
    token = _budget.set(_Budget(MAX_UNITS))
    try:
        yield
    finally:
        _budget.reset(token)


def _current() -> _Budget:
    found = _budget.get()
    assert found is not None, "templates are compiled and rendered within a budget"
    return found


def spend(units: int) -> None:
    """Pay for work that follows. Raises TooMuchWork."""
    found = _current()
    found.left -= units
    if found.left < 0:
        _refuse_more()


def spend_text(characters: int) -> None:
    """Pay for a text, or for entries of a list. Raises TooMuchWork."""
    spend(1 + characters // CHARACTERS_PER_UNIT)


def _refuse_more() -> NoReturn:
    raise TooMuchWork(f"it does more work than the {MAX_UNITS} steps that one conversation may take")


def _refuse_width(name: str) -> NoReturn:
    raise TooMuchWork(f"{name!r} with a width or count of more than {MAX_WIDTH}")


def _size(value: object) -> int:
    """Characters of a text, entries of a container, else 1. Does not look inside."""
    return len(value) if isinstance(value, str | bytes | list | tuple | dict | range) else 1


def written_size(value: object) -> int:
    """About how many characters `value` has when it is written out, however deep. A list that holds the same list twice
    counts it twice, as its text does. Raises TooMuchWork as soon as it is more than the budget allows.
    """
    if isinstance(value, str):
        return len(value)
    most = _current().left * CHARACTERS_PER_UNIT
    total, pending = 0, [value]
    while pending:
        match pending.pop():
            case str() | bytes() as text:
                total += len(text)
            case dict() as members:
                pending += members.keys()
                pending += members.values()
            case list() | tuple() as items:
                pending += items
            case Namespace() as namespace:
                pending.append(object.__getattribute__(namespace, "_Namespace__attrs"))
        total += CHARACTERS_PER_UNIT
        if total + len(pending) > most:
            _refuse_more()
    return total


def _counted(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        spend(1)
        yield item


class _CountingCode(CodeGenerator):
    """Generates a call of `spend` at the beginning of every block, and around operations that must be paid for."""

    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        body = list(nodes)
        self.writeline(f"environment.spend({1 + sum(map(_cost, body))})")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # it runs for items too that never reach the body
            price = nodes.Const(1 + _cost(node.test))
            paid = nodes.Call(nodes.EnvironmentAttribute("spend_and_go_on"), [price], [], None, None)
            node.test = nodes.And(paid, node.test).set_environment(self.environment).set_lineno(node.lineno)
        super().visit_For(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._write_paid("compared", node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._write_paid("compared", node.expr, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined(")
        for value in node.nodes:
            self.visit(value, frame)
            self.write(", ")
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self._write_paid("copied", node.node, frame)
        self.write("[")
        self.visit(node.arg, frame)
        self.write("]")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for item in node.items:
            self._write_paid("compared", item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _write_paid(self, name: str, node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{name}(")
        self.visit(node, frame)
        self.write(")")


def _cost(node: nodes.Node) -> int:
    """How many nodes run with the block that `node` is in, and the text that it writes. Inner blocks pay themselves."""
    units = 1
    if isinstance(node, nodes.TemplateData):
        units += len(node.data) // CHARACTERS_PER_UNIT
    inner = ("body", "else_", "elif_") if isinstance(node, nodes.For | nodes.If | nodes.Macro | nodes.CallBlock) else ()
    return units + sum(_cost(child) for child in node.iter_child_nodes(exclude=inner))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compile and render with it only inside of `budget`."""

    code_generator_class = _CountingCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_shown, **options)
        self.globals.pop("lipsum")
        for name in _LEFT_OUT:
            self.filters.pop(name)
        for name, found in list(self.filters.items()):
            self.add_filter(name, found)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Register a filter that pays for what it is given and for what it makes."""
        self.filters[name] = _paying(name, function)

    spend = staticmethod(spend)

    @staticmethod
    def spend_and_go_on(units: int) -> bool:
        """For a condition."""
        spend(units)
        return True

    @staticmethod
    def joined(*values: Any) -> str:
        """The values of `a ~ b`, as one text."""
        spend_text(sum(map(written_size, values)))
        return "".join(map(str, values))

    @staticmethod
    def compared(value: Any) -> Any:
        """An operand of a comparison, or a key: lists of lists take as long to compare as to write out."""
        spend_text(written_size(value) if isinstance(value, list | tuple | dict) else _size(value) // 8)
        return value

    @staticmethod
    def copied(value: Any) -> Any:
        """What a slice is taken of."""
        spend_text(_size(value))
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):  # hashing it takes as long as writing it out
            spend_text(written_size(argument))
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As the library's. A template may give arguments named `self` or `context`."""
        spend(_CALL)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps `str.format`
        if isinstance(owner, str | bytes):
            args = tuple(list(_counted(each)) if isinstance(each, Iterator) else each for each in args)
            _check_text_method(owner, __obj.__name__, args, kwargs)
        elif isinstance(owner, int) and any(isinstance(each, int) and each > MAX_WIDTH for each in args):
            _refuse_width(__obj.__name__)
        elif isinstance(owner, list | tuple | dict):
            looked_at = owner if __obj.__name__ in ("count", "index") else ()
            spend_text(_size(owner) + written_size(args) + written_size(looked_at))
        result = super().call(__context, __obj, *args, **kwargs)
        if not isinstance(__obj, LoopContext):
            spend_text(_size(result))
        return result


def _shown(value: Any) -> Any:
    """Each value that a template prints."""
    spend_text(written_size(value))
    return value


def _check_binop(operator: str, left: Any, right: Any) -> None:
    """Pay for `left operator right` before it is computed. Raises TooMuchWork."""
    if operator == "+":
        spend_text(_size(left) + _size(right))
    elif operator == "%" and isinstance(left, str | bytes):
        _check_percent(left, right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and bits > _MAX_BITS:
            raise TooMuchWork(f"a number of more than {_MAX_BITS} bits")
    elif operator == "*":
        times, repeated = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(times, int):
            spend_text(max(times, 0) * _size(repeated))


def _check_percent(template: str | bytes, values: object) -> None:
    text = template if isinstance(template, str) else template.decode("latin-1")
    if _WIDE_PERCENT.search(text):
        _refuse_width("%")
    padding = MAX_WIDTH if re.search("%[^a-zA-Z%]*[0-9]{2}", text) else 8
    spend_text(len(text) + text.count("%") * (written_size(values) + padding))


def _check_text_method(text: str | bytes, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(each, int) and each > MAX_WIDTH for each in (*args, *kwargs.values())):
        _refuse_width(name)
    match name:
        case "replace" if len(args) >= 2:
            _spend_replacement(text, args[0], args[1])
        case "join" if args:
            spend_text(written_size(args[0]) + _size(args[0]) * len(text))
        case "translate":
            raise TooMuchWork("'translate' is not served")
        case "format" | "format_map" if isinstance(text, str):
            if _WIDE_FIELD.search(text):
                _refuse_width(name)
            spend_text(len(text) + text.count("{") * (written_size([*args, kwargs]) + MAX_WIDTH))
        case "center" | "ljust" | "rjust" | "zfill":
            spend_text(len(text) + MAX_WIDTH)
        case "expandtabs":  # each character may be a tab
            spend_text(len(text) * max([8, *args, *kwargs.values()]))
        case _:
            spend_text(len(text))


def _spend_replacement(text: Any, old: Any, new: Any) -> None:
    kinds = {type(each) for each in (text, old, new)}
    if kinds <= {str, Markup} or kinds == {bytes}:
        spend_text(len(text) + text.count(old) * len(new))


def _paying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays. What the library marks a filter with (that it takes the context, say) is kept."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def paying(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if isinstance(given[first], Iterator):
            counted = _counted(given[first])
            given[first] = list(counted) if name in _CONSUMING else counted
        _check_filter(name, given[first], given[first + 1 :], kwargs)
        result = function(*given, **kwargs)
        spend_text(_size(result))
        return result

    return paying


def _check_filter(name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Pay for what a filter will make of `value`. Raises TooMuchWork."""
    every = (*args, *kwargs.values())
    numbers = [each for each in every if isinstance(each, int)]
    if max(numbers, default=0) > (_MAX_DECIMALS if name == "round" else MAX_WIDTH):
        _refuse_width(name)
    if name in _LOOPING:
        spend(_size(value))
        return
    if name in _SHALLOW:
        return
    written = written_size(value)
    spend_text(written)
    match name:
        case "replace" if len(args) >= 2:
            _spend_replacement(str(value), str(args[0]), str(args[1]))
        case "join":
            spend_text(_size(value) * max(map(_size, every), default=0))
        case "format":
            _check_percent(str(value), [*args, kwargs])
        case "indent":
            spend_text((str(value).count("\n") + 1) * max([4, *map(_size, every), *numbers]))
        case "tojson":
            spend_text(
                written * max([1, *numbers, *(written_size(each) for each in every if not isinstance(each, int))])
            )
        case "sum":
            spend_text(written * _size(value) if every else 0)
        case "batch" | "slice":
            spend_text(sum(numbers))
