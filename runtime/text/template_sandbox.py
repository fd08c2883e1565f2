"""A Jinja sandbox that limits the work of a template.

The library's sandbox keeps a template from running code and from changing its arguments. It does not prevent 10**10
loop rounds, or gigabytes from one expression. Here every rendering has a budget, see `template_budget.py`. A template
pays in three places:

1. In its generated code: at the start of each block (a loop round, a branch, a macro's body), one unit for each node in
   it. Also for comparisons, slices and `~`, for which the library has no hook.
2. In the library's own hooks: operators, calls, subscripts, and each printed value.
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

_CALL: Final = 4  # units; a call takes as long as several other nodes
# Filters that no chat needs. Each has a large result from a small input, or another result each time.
_REMOVED: Final = ("center", "filesizeformat", "pprint", "random", "striptags", "urlencode", "urlize", "wordwrap",
                   "xmlattr")  # fmt: skip
# Filters that read a whole iterator at once.
_EAGER: Final = frozenset({"groupby", "join", "list", "max", "min", "sort", "sum", "unique"})


class _ChargingCodeGenerator(CodeGenerator):
    def blockvisit(self, nodes: Any, frame: Frame) -> None:
        body = list(nodes)
        self.writeline(f"environment.spend({1 + sum(map(_cost, body))})")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # the test also runs for items that never reach the body
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
    """Return the cost of a node and everything below it, except blocks, which pay for themselves."""
    units = 1
    if isinstance(node, nodes.TemplateData):
        units += len(node.data) // CHARACTERS_PER_UNIT
    has_blocks = isinstance(node, nodes.For | nodes.If | nodes.Macro | nodes.CallBlock)
    blocks = ("body", "else_", "elif_") if has_blocks else ()
    return units + sum(_cost(child) for child in node.iter_child_nodes(exclude=blocks))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates must be compiled and rendered within a `work_budget`."""

    code_generator_class = _ChargingCodeGenerator
    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})
    spend = staticmethod(spend)  # for generated code, as the three methods below

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_paid_output, **options)
        self.globals.pop("lipsum")
        for name in _REMOVED:
            self.filters.pop(name)
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        self.tests = {name: _paying_test(name, function) for name, function in self.tests.items()}

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Register a filter that pays for its input and its output."""
        self.filters[name] = _paying(name, function)

    @staticmethod
    def paid_concat(*values: Any) -> str:
        """Return the text of `a ~ b`, and pay for it."""
        charge_text(sum(map(rendered_size, values)))
        return "".join(map(str, values))

    @staticmethod
    def paid_operand(value: Any) -> Any:
        """Return an operand of a comparison or a key, and pay for it."""
        template_budget.charge_comparison(value)
        return value

    @staticmethod
    def paid_sequence(value: Any) -> Any:
        """Return the sequence of a slice, and pay for it."""
        charge_text(size(value))
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        # Hashing a key, or naming a missing key in an error, takes as long as writing it.
        charge_text(rendered_size(argument))
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        template_budget.charge_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call as the library does. The parameters' names allow template arguments `self` and `context`."""
        spend(_CALL + len(args) // CHARACTERS_PER_UNIT + len(kwargs))  # a template may unpack a long list
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps `str.format`
        if isinstance(owner, str | bytes):  # `join` accepts an iterator
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
    """Return a filter that pays. The library's marks on it, such as for taking the context, are kept."""
    value_index = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def paying(*args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        if isinstance(arguments[value_index], Iterator):
            items = charged_items(arguments[value_index])
            arguments[value_index] = list(items) if name in _EAGER else items
        template_budget.charge_filter(name, arguments[value_index], arguments[value_index + 1 :], kwargs)
        result = function(*arguments, **kwargs)
        charge_result(result)
        return result

    return paying


def _paying_test(name: str, function: Any) -> Callable[..., Any]:
    """Return a test that pays. The library's marks on it are kept."""
    value_index = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def paying(*args: Any, **kwargs: Any) -> Any:
        template_budget.charge_test(name, args[value_index], (*args[value_index + 1 :], *kwargs.values()))
        return function(*args, **kwargs)

    return paying
