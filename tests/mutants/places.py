"""Places in a source file where one small change makes the program wrong, and the changed text.

A change is one of a table: a comparison that includes or excludes its bound, another arithmetic sign, ``max`` for
``min``, ``any`` for ``all``, ``or`` for ``and``, a condition turned round, a number one larger, ``True`` for ``False``.
Messages of errors, documentation and annotations are left alone: no test can be asked to know them by heart. So is
``strict=True`` of ``zip``, which says what holds anyway, and how far JSON is indented.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
CALLED = {
    "max": "min",
    "min": "max",
    "maximum": "minimum",
    "minimum": "maximum",
    "amax": "amin",
    "amin": "amax",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "ceil": "floor",
    "zeros": "ones",
    "ones": "zeros",
    "isfinite": "isinf",
    "isnan": "isinf",
    "argmin": "argmax",
    "argmax": "argmin",
    "sorted": "list",
}


@dataclass(frozen=True)
class Place:
    """One change of one file.

    Attributes:
        file: path below the folder of sources.
        line, column: where, from 1 and 0; end_line: the last line of the expression.
        was, becomes: the text of the changed expression before and after.
        start, end: offsets of the expression in the text of the file.
    """

    file: str
    line: int
    column: int
    end_line: int
    was: str
    becomes: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.was}  ->  {self.becomes}"


def places_in(path: Path, file: str) -> list[Place]:
    """Every change of a file, in its order."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    found = []
    for node, changed in _changes(ast.parse(text)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        was, becomes = text.encode()[start:end].decode(), ast.unparse(changed)
        if becomes != ast.unparse(node):
            found.append(
                Place(
                    file,
                    node.lineno,
                    node.col_offset,
                    node.end_lineno or 0,
                    " ".join(was.split()),
                    f"({becomes})",
                    start,
                    end,
                )
            )
    return found


def changed_text(path: Path, place: Place) -> str:
    """The text of a file with one change."""
    content = path.read_bytes()
    return (content[: place.start] + place.becomes.encode() + content[place.end :]).decode()


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(expression, what it becomes)."""
    for node in _code(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = COMPARED[type(node.ops[0])]()
            yield node, ast.Compare(node.left, [operator], node.comparators)
        elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not _is_text(node):
            yield node, ast.BinOp(node.left, COMPUTED[type(node.op)](), node.right)
        elif isinstance(node, ast.BoolOp):
            yield node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, node.operand
        elif isinstance(node, ast.IfExp) and not isinstance(node.orelse, ast.JoinedStr):
            yield node, ast.IfExp(node.test, node.orelse, node.body)
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            yield node, ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
        elif isinstance(node, ast.Call) and (name := _name(node.func)) in CALLED:
            yield node, ast.Call(_renamed(node.func, CALLED[name]), node.args, node.keywords)


def _code(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that run: no annotations, decorators, errors, formatted texts or patterns."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.pattern):
        return
    if isinstance(node, ast.keyword) and node.arg in ("strict", "indent"):
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr):
                yield child
            if isinstance(child, ast.AST):
                yield from _code(child)


def _is_text(node: ast.BinOp) -> bool:
    """Texts that are joined, and unions of types."""
    sides = (node.left, node.right)
    constants = [one.value for one in sides if isinstance(one, ast.Constant)]
    texts = any(isinstance(one, ast.JoinedStr) for one in sides) or any(isinstance(one, str) for one in constants)
    return texts or (isinstance(node.op, ast.BitOr) and None in constants)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _renamed(function: ast.expr, name: str) -> ast.expr:
    if isinstance(function, ast.Attribute):
        return ast.Attribute(function.value, name, ast.Load())
    return ast.Name(name, ast.Load())
