"""Layers whose weight other code reads: state-space models hand ``self.conv1d.weight`` to a kernel of their own.

What such code computes with is the float weight (or the codes of a file), whatever the layer's quantizers do, so these
layers stay float. They are found in the source of the model's modules: ``self.<layer>.weight`` in a method, but for its
type, device and shape, for methods that ``forward`` never comes to, and for code that the module's own attributes
turn off (training among them). Not handled: layers read under another name.
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache

from torch import nn

ASKED = ("isinstance", "hasattr", "type", "id")
COMPARED: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
HARMLESS = ("dtype", "device", "shape", "ndim", "size", "is_meta", "requires_grad")
SETTING_UP = ("__init__", "_init_weights", "reset_parameters", "init_weights", "extra_repr", "post_init")


def read_directly(model: nn.Module, at_all: bool = False) -> list[str]:
    """Names of the modules whose weight some other module reads; ``at_all``: or asks for its type, device or shape."""
    found: dict[str, None] = {}
    running = running_methods({base for module in model.modules() for base in type(module).__mro__})
    for path, module in model.named_modules():
        for base in type(module).__mro__:
            reading = reading_methods(base.__module__, at_all).get(base.__name__, ())
            for method in (one for one in reading if one.name in running):
                found |= {f"{path}.{own}" if path else own: None for own in reads(method, module, at_all)}
    known = {name for name, module in model.named_modules() if "weight" in module._parameters}
    return [name for name in found if name in known]


def running_methods(classes: Iterable[type]) -> set[str]:
    """Names of the methods that ``forward`` may come to: by any name that a running method mentions.

    What only a user calls (diffusers' ``fuse_projections`` copies weights into a new layer) is not among them.
    """
    mentioned: dict[str, set[str]] = {}
    for base in classes:
        for method, names in mentions(base.__module__).get(base.__name__, {}).items():
            mentioned.setdefault(method, set()).update(names)
    running, new = set[str](), {"forward", "__call__"}
    while new:
        running |= new
        new = {name for one in new for name in mentioned.get(one, ()) if name in mentioned} - running
    return running


@cache
def mentions(module: str) -> dict[str, dict[str, set[str]]]:
    """For each class of a Python module its methods by name, with the attributes that they mention."""
    found: dict[str, dict[str, set[str]]] = {}
    for name, own in all_methods(module).items():
        for method in own:  # a property and its setter have one name
            names = {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
            found.setdefault(name, {}).setdefault(method.name, set()).update(names)
    return found


@cache
def reading_methods(module: str, at_all: bool) -> dict[str, list[ast.FunctionDef]]:
    """For each class of a Python module the methods that read weights."""
    found = {
        name: [item for item in own if any(reads(item, None, at_all))] for name, own in all_methods(module).items()
    }
    return {name: reading for name, reading in found.items() if reading}


@cache
def all_methods(module: str) -> dict[str, list[ast.FunctionDef]]:
    """The methods of each class of a Python module; none of torch's own, or without a source."""
    if module.split(".")[0] in ("torch", "builtins", "quark") or module not in sys.modules:
        return {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, SyntaxError):
        return {}
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {node.name: list(methods(node)) for node in classes}


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """The methods of a class that run with its model; whatever they call the module, here it is ``self``."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name not in SETTING_UP:
            own = item.args.args[0].arg if item.args.args else "self"
            for name in ast.walk(item) if own != "self" else ():
                if isinstance(name, ast.Name) and name.id == own:
                    name.id = "self"
            yield item


def reads(node: ast.AST, module: nn.Module | None, at_all: bool) -> Iterator[str]:
    """``a.b`` for each ``self.a.b.weight`` that is read where ``module`` is ``self``: its values, or it ``at_all``."""
    if isinstance(node, ast.If) and (known := decided(node.test, module)) is not None:
        for statement in node.body if known else node.orelse:
            yield from reads(statement, module, at_all)
        return
    asked = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKED
    if not at_all and (asked or (isinstance(node, ast.Attribute) and node.attr in HARMLESS)):
        return
    if isinstance(node, ast.Attribute) and node.attr == "weight" and (path := path_of(node.value)):
        yield path
    for child in ast.iter_child_nodes(node):
        yield from reads(child, module, at_all)


def decided(test: ast.expr, module: nn.Module | None) -> bool | None:
    """What a condition is for ``module`` in evaluation: attributes, compared with constants; None: not known."""
    if isinstance(test, ast.BoolOp):
        parts, stops = [decided(part, module) for part in test.values], isinstance(test.op, ast.Or)
        return stops if stops in parts else None if None in parts else not stops
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = decided(test.operand, module)
        return None if inner is None else not inner
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant):
        left, right = value_of(test.left, module), test.comparators[0].value
        compare = COMPARED.get(type(test.ops[0]))
        if compare is None or not isinstance(left, int | float) or not isinstance(right, int | float):
            return None
        return compare(left, right)
    found = value_of(test, module)
    return found if isinstance(found, bool) else None


def value_of(node: ast.expr, module: nn.Module | None) -> object:
    """The value of ``self.a``; None where it is not known."""
    own = path_of(node)
    return False if own == "training" else getattr(module, own, None) if own.isidentifier() else None


def path_of(node: ast.expr) -> str:
    """``a.b`` of ``self.a.b``; nothing of anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return ".".join(parts) if isinstance(node, ast.Name) and node.id == "self" else ""
