"""A Jinja sandbox that bounds the work of a template.

The library's sandbox keeps a template from running code and from changing its arguments. It does not keep it from
looping 10**10 times, or from making gigabytes in one expression. Here every rendering has a budget, see
`template_budget.py`. A template pays in three places:

1. In the code that is generated for it: at the start of each block (a round of a loop, a branch, a macro's body), one
   unit for each node in it; and for comparisons, slices and `~`, which the library has no hook for.
2. In the library's own hooks: operators, calls, subscripts, and each value that is printed.
3. In the filters and tests, which are wrapped.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.text import template_budget
from runtime.text.template_budget import (
    CHARACTERS_PER_UNIT,
    charge_result,
    charge_text,
    charged_items,
    rendered_size,
    size,
    spend,
)

_CALL: Final = 4  # units: a call takes as long as several other nodes
# Filters that no chat needs: each makes much of little, or something else each time.
_REMOVED: Final = ("center", "filesizeformat", "pprint", "random", "striptags", "urlencode", "urlize", "wordwrap",
                   "xmlattr")  # fmt: skip
# Filters that read the whole of an iterator at once.
_EAGER: Final = frozenset({"groupby", "join", "list", "max", "min", "sort", "sum", "unique"})


class _ChargingCodeGenerator(CodeGenerator):
    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        body = list(nodes)
        self.writeline(f"environment.spend({1 + sum(map(_cost, body))})")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # it also runs for items that never reach the body
            cost = nodes.Const(1 + _cost(node.test))
            paid = nodes.Call(nodes.EnvironmentAttribute("spend"), [cost], [], None, None)
            node.test = nodes.And(paid, node.test).set_environment(self.environment).set_lineno(node.lineno)
        super().visit_For(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._write_call("paid_operand", node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._write_call("paid_operand", node.expr, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.paid_concat(")
        for value in node.nodes:
            self.visit(value, frame)
            self.write(", ")
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self._write_call("paid_sequence", node.node, frame)
        self.write("[")
        self.visit(node.arg, frame)
        self.write("]")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for item in node.items:
            self._write_call("paid_operand", item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _write_call(self, name: str, node: nodes.Node, frame: Frame) -> None:
        self.write(f"environment.{name}(")
        self.visit(node, frame)
        self.write(")")


def _cost(node: nodes.Node) -> int:
    """Return the cost of a node with all below it. Blocks below it pay for themselves."""
    units = 1
    if isinstance(node, nodes.TemplateData):
        units += len(node.data) // CHARACTERS_PER_UNIT
    has_blocks = isinstance(node, nodes.For | nodes.If | nodes.Macro | nodes.CallBlock)
    blocks = ("body", "else_", "elif_") if has_blocks else ()
    return units + sum(_cost(child) for child in node.iter_child_nodes(exclude=blocks))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compile and render with it only within a `budget`."""

    code_generator_class = _ChargingCodeGenerator
    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})
    spend = staticmethod(spend)  # for generated code, as the three below

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_paid_output, **options)
        self.globals.pop("lipsum")
        for name in _REMOVED:
            self.filters.pop(name)
        for name, found in list(self.filters.items()):
            self.add_filter(name, found)
        self.tests = {name: _paying_test(name, found) for name, found in self.tests.items()}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Register a filter that pays for its input and its output."""
        self.filters[name] = _paying(name, function)

    @staticmethod
    def paid_concat(*values: Any) -> str:
        """Return the text of `a ~ b`."""
        charge_text(sum(map(rendered_size, values)))
        return "".join(map(str, values))

    @staticmethod
    def paid_operand(value: Any) -> Any:
        """Return an operand of a comparison, or a key."""
        template_budget.charge_comparison(value)
        return value

    @staticmethod
    def paid_sequence(value: Any) -> Any:
        """Return what a slice is taken of."""
        charge_text(size(value))
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        # Hashing a key, or naming one that is missing, takes as long as writing it.
        charge_text(rendered_size(argument))
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        template_budget.charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """As the library's. A template may give arguments named `self` or `context`."""
        spend(_CALL + len(args) // CHARACTERS_PER_UNIT + len(kwargs))  # a template may spread a long list
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps `str.format`
        if isinstance(owner, str | bytes):  # `join` takes an iterator
            args = tuple(list(charged_items(each)) if isinstance(each, Iterator) else each for each in args)
        if not isinstance(__obj, LoopContext | Macro | type):  # these do nothing to their arguments
            charge_text(sum(map(rendered_size, (*args, *kwargs.values()))))
        template_budget.charge_method(owner, getattr(__obj, "__name__", ""), args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if not isinstance(__obj, LoopContext):
            charge_result(result)
        return result


def _paid_output(value: Any) -> Any:
    charge_text(rendered_size(value))
    return value


def _paying(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it pays. The library's marks on it, such as taking the context, are kept."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def paying(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if isinstance(given[first], Iterator):
            items = charged_items(given[first])
            given[first] = list(items) if name in _EAGER else items
        template_budget.charge_filter(name, given[first], given[first + 1 :], kwargs)
        result = function(*given, **kwargs)
        charge_result(result)
        return result

    return paying


def _paying_test(name: str, function: Any) -> Callable[..., Any]:
    """Wrap a test so that it pays. The library's marks on it are kept."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def paying(*args: Any, **kwargs: Any) -> Any:
        template_budget.charge_test(name, args[first], (*args[first + 1 :], *kwargs.values()))
        return function(*args, **kwargs)

    return paying
