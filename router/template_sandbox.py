"""A jinja sandbox whose templates cannot take time or memory out of proportion to the messages they are given.

A chat template comes with the model, so it may be careless or hostile. Threads cannot be killed and processes are dear, so
the sandbox counts: whatever a template does is charged to the Meter of its rendering before it is done, in units of about
a nanosecond, and what overdraws it ends with OverBudget. Nothing else is reachable:
    loops, macros   charged per round and call with the size of their body; a loop's items are counted before it begins
    operators       charged by the size of their operands; numbers are bounded; no powers, no % formatting
    filters, tests  only those below, charged by the size of what they read and of what they make; iterators become lists
    calls           only methods below of strings, lists and dicts, macros, and the functions that templates are given
    output          charged by its size
No attribute that begins with "_", nothing that changes what it is given, no other template (jinja's own sandbox, no loader).
Pure but for the Meter in force, which is a context variable: any thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from types import BuiltinMethodType, MethodType
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# Units of work. A loop's round takes 0.2 to 0.5 ns of a busy core per unit charged for it, an addition 2, the two below 3.
NODE_WORK = 100  # one node of the syntax tree
CALL_WORK = 3_000  # one call of a macro, or of a filter by another, besides what it does
MAX_DEPTH = 64  # of lists in lists, where they are read whole
MAX_INDENT = 64  # columns
MAX_NUMBER_BITS = 256


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_METHODS: dict[type, frozenset[str]] = {
    str: _words(
        "strip lstrip rstrip split rsplit splitlines partition rpartition startswith endswith removeprefix removesuffix upper"
        " lower title capitalize replace join find rfind index count isdigit isalpha isalnum isspace isupper islower"
    ),
    dict: _words("items keys values get"),
    list: _words("index count"),
    tuple: _words("index count"),
    LoopContext: _words("cycle changed"),
}
_SPLIT_WORK = 8  # per character: each may become a string of its own
_CHEAP_FILTERS = _words("length count first last default d safe abs int float")
_FILTERS = _words(
    "trim upper lower capitalize title string escape e sort unique reverse items dictsort map select reject selectattr"
    " rejectattr"
)
_FILTER_WORK = {"sort": 16, "unique": 4, "dictsort": 16, "escape": 6, "e": 6}  # times the size: comparisons, growth
_CHEAP_TESTS = _words(
    "defined undefined none boolean true false integer float number string mapping iterable sequence callable sameas odd even"
    " divisibleby"
)
_TESTS = _words("eq == equalto ne != lt < lessthan le <= gt > greaterthan ge >= in upper lower")

Item = TypeVar("Item")


class OverBudget(Exception):
    """The template wants more work done than this rendering may take."""


class Meter:
    """The work that one rendering may still do."""

    __slots__ = ("left",)

    def __init__(self, work: int) -> None:
        self.left = work

    def charge(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise OverBudget


METER: ContextVar[Meter] = ContextVar(
    "METER"
)  # unset while a template is compiled: then no filter is worked out in advance


def charge(work: int) -> None:
    METER.get().charge(work)


def charge_for(value: object, times: int = 1, depth: int = 0) -> None:
    """Charge for reading a value whole, `times` over, with all that it contains."""
    if isinstance(value, str):
        charge(len(value) * times)
    elif isinstance(value, (list, tuple, dict)):
        if depth == MAX_DEPTH:
            raise SecurityError(f"lists are nested more than {MAX_DEPTH} deep")
        charge(NODE_WORK * times * (1 + len(value)))
        for item in value.items() if isinstance(value, dict) else value:
            charge_for(item, times, depth + 1)


def counted(value: Iterable[Item], work: int) -> Iterable[Item]:
    """`value`, with `work` charged for each item; an iterator becomes a list."""
    if isinstance(value, Sized):
        charge(work * len(value))
        return value
    items = []
    for item in value:
        charge(work)
        items.append(item)
    return items


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one template."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, **functions: Callable[..., object]) -> None:
        """`functions`: what the template may call by name, besides range, namespace and dict."""
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], finalize=_written)
        self.template_work = 0  # of one run through all of it
        self._functions = {"range": _range, "namespace": Namespace, "dict": dict, **functions}
        self.globals = dict(self._functions)
        self.filters = {name: self.filters[name] for name in _CHEAP_FILTERS}
        filters: Mapping[str, Any] = jinja2.filters.FILTERS
        self.filters |= {name: _metered(filters[name], _FILTER_WORK.get(name, 1)) for name in _FILTERS}
        self.filters |= {"list": _list, "join": _join, "replace": _replace, "indent": _indent, **_OPERATORS}
        self.tests = {name: self.tests[name] for name in _CHEAP_TESTS}
        tests: Mapping[str, Any] = jinja2.tests.TESTS
        self.tests |= {name: _metered(tests[name], 1) for name in _TESTS}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        self.template_work = _work_of(tree)
        metered = _Metered().visit(tree)
        assert isinstance(metered, nodes.Template)
        return metered

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to {attribute!r} is not allowed in chat templates")

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if type(left) is str and type(right) is str and operator == "+":  # what templates do most
            METER.get().charge(len(left) + len(right))
            return left + right
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise SecurityError(f"{operator!r} is not allowed in chat templates")
        for value, other in ((left, right), (right, left)):
            if isinstance(value, (str, list, tuple)):
                charge(len(value) * (max(1, int(other)) if operator == "*" else 1))
            elif isinstance(value, int) and value.bit_length() > MAX_NUMBER_BITS:
                raise SecurityError(f"a number has more than {MAX_NUMBER_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Named as jinja names them, so that no keyword argument of a template can collide."""
        if isinstance(__obj, Macro):
            charge(CALL_WORK + __self.template_work)
        elif isinstance(__obj, (BuiltinMethodType, MethodType)) and _is_allowed(__obj):
            args = _charged_method(__obj, args)
        elif any(__obj is function for function in __self._functions.values()):
            charge_for(args)
        else:
            raise SecurityError(f"calling {_name(__obj)} is not allowed in chat templates")
        return super().call(__context, __obj, *args, **kwargs)


class _Metered(NodeTransformer):
    """Puts the meter into a syntax tree, where no method of the environment is asked."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not allowed in chat templates", node.lineno)
        work = NODE_WORK + sum(map(_work_of, node.body)) + (_work_of(node.test) if node.test else 0)
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _filtered(node.iter, "_counted", nodes.Const(work))
        return node

    def visit_Include(self, node: nodes.Include) -> nodes.Node:
        raise jinja2.TemplateSyntaxError("other templates are not allowed in chat templates", node.lineno)

    visit_Extends = visit_Import = visit_FromImport = visit_Include

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), "_concatenated")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "_searched" if operand.op in ("in", "notin") else "_read")
        node.expr = _filtered(node.expr, "_read")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered(node, "_read")
        node.arg = _filtered(node.arg, "_read")
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        """A key is hashed: tuples in tuples that are one and the same are read as often as they occur."""
        self.generic_visit(node)
        node.key = _filtered(node.key, "_read")
        return node


def _filtered(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _work_of(node: nodes.Node) -> int:
    """Of one run through a tree, besides what its operations charge."""
    data = node.data if isinstance(node, nodes.TemplateData) else ""
    return NODE_WORK + len(data) + sum(map(_work_of, node.iter_child_nodes()))


def _name(value: object) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


# -- what templates do -------------------------------------------------------------------------------------------------


def _written(value: object) -> object:
    """Of every expression that is output."""
    if type(value) is str:
        METER.get().charge(len(value))
        return value
    charge_for(value)
    if not isinstance(value, (str, int, float, list, tuple, dict, type(None), jinja2.Undefined)):
        raise SecurityError(f"writing a {type(value).__name__} is not allowed in chat templates")
    return value


def _metered(function: Callable[..., Any], times: int) -> Callable[..., Any]:
    """A filter or test of jinja's, charged for."""

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        charge(NODE_WORK)
        for value in (*args, *kwargs.values()):
            charge_for(value, times)
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            return list(counted(result, CALL_WORK))
        charge_for(result)
        return result

    return metered


def _list(value: Iterable[Item]) -> list[Item]:
    return list(counted(value, NODE_WORK))


def _join(value: Iterable[object], separator: str = "") -> str:
    items = _list(value)
    charge_for(items)
    charge(len(separator) * len(items))
    return separator.join(map(str, items))


def _replace(text: str, old: str, new: str, count: int = -1) -> str:
    charge(len(text) + text.count(old) * len(new))
    return text.replace(old, new, count)


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not 0 <= width <= MAX_INDENT:
        raise SecurityError(f"indenting by {width:d} columns; the limit is {MAX_INDENT}")
    charge(len(text) + width * (1 + text.count("\n")))
    return jinja2.filters.do_indent(text, width, first, blank)


def _concatenated(values: list[object]) -> str:
    charge_for(values)
    return "".join(map(str, values))


def _read(value: Item) -> Item:
    charge_for(value)
    return value


def _searched(value: Item) -> Item:
    if not isinstance(value, dict):
        charge_for(value)
    return value


_OPERATORS: dict[str, Callable[..., Any]] = {
    "_counted": counted,
    "_concatenated": _concatenated,
    "_read": _read,
    "_searched": _searched,
}


def _range(*args: int) -> list[int]:
    """A list, because whoever searches or sorts a range makes its numbers anyway, where nothing is charged for them."""
    for number in args:
        if number.bit_length() > MAX_NUMBER_BITS:
            raise SecurityError(f"a number has more than {MAX_NUMBER_BITS} bits")
    return _list(range(*args))


def _is_allowed(method: BuiltinMethodType | MethodType) -> bool:
    return method.__name__ in _METHODS.get(type(method.__self__), ())


def _charged_method(method: BuiltinMethodType | MethodType, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments to call it with."""
    owner = method.__self__
    charge(NODE_WORK)
    if not isinstance(owner, str):
        if not isinstance(owner, (dict, LoopContext)):  # index, count: they compare
            charge_for(owner)
        for value in args:
            charge_for(value)
        return args
    charge(len(owner) * (_SPLIT_WORK if "split" in method.__name__ else 1))
    for value in args:
        charge_for(value)
    if method.__name__ == "replace" and len(args) > 1 and isinstance(args[0], str):
        charge(owner.count(args[0]) * len(args[1]))
    if method.__name__ == "join" and args:
        args = (_list(args[0]), *args[1:])
        charge(len(owner) * len(args[0]))
        charge_for(args[0])
    return args
