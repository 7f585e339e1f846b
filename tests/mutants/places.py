"""Places in a source file where one small change makes the program wrong, and the changed text.

A change is one of a table: a comparison that includes or excludes its bound, another arithmetic sign, ``max`` for
``min``, ``any`` for ``all``, ``or`` for ``and``, a condition turned round, a number one larger, ``True`` for ``False``.
Messages of errors, documentation and annotations are left alone: no test can be asked to know them by heart; so are
values that only errors and logs read. So is ``strict=True`` of ``zip``, which says what holds anyway, how far JSON is
indented, ``copy=False``, which saves a copy, and when pydantic builds a validator. ``speed.tsv`` names constants of
which no value changes a result: how much is worked on at a time. They and what is computed from them are left alone;
``tests/test_speed_constants.py`` sets each to other values and sees the same results.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cache
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

LEFT_ALONE = ("strict", "indent", "copy", "ignore_cleanup_errors", "defer_build")
"""Keyword arguments that are not changed."""


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
    quick = {name for where, name in constants() if where == file}
    for node, changed in _changes(ast.parse(text), quick):
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


def _changes(tree: ast.Module, quick: Set[str]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(expression, what it becomes)."""
    told = _only_told(tree) | _of_constants(tree, quick) | _rests(tree)
    for node in _code(tree, told):
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


def _code(node: ast.AST, told: set[ast.AST]) -> Iterator[ast.expr]:
    """The expressions that run: no annotations, decorators, errors, logs, formatted texts or patterns."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.pattern) or _is_log(node) or node in told:
        return
    if isinstance(node, ast.keyword) and node.arg in LEFT_ALONE:
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr) and child not in told:
                yield child
            if isinstance(child, ast.AST):
                yield from _code(child, told)


def _rests(tree: ast.Module) -> set[ast.AST]:
    """The -1 of every ``reshape``, also in a tuple: any negative number stands for it."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) == "reshape")
    given = (
        one for call in calls for part in call.args for one in (part.elts if isinstance(part, ast.Tuple) else [part])
    )
    return {one for one in given if isinstance(one, ast.UnaryOp) and isinstance(one.op, ast.USub)}


def _only_told(tree: ast.Module) -> set[ast.AST]:
    """What is computed for errors and logs alone: values of names that nothing else of the function reads."""
    told: set[ast.AST] = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            quoting = [node for node in ast.walk(function) if isinstance(node, ast.Raise) or _is_log(node)]
            quoted = {name for node in quoting for name in ast.walk(node) if isinstance(name, ast.Name)}
            read = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            others = {node.id for node in read if isinstance(node.ctx, ast.Load) and node not in quoted}
            for node in ast.walk(function):
                if isinstance(node, ast.If) and all(
                    isinstance(one, ast.Expr) and _is_log(one.value) for one in node.body
                ):
                    told |= set() if node.orelse else {node.test}
                names = _given(node)
                if names and not names & others and names <= {one.id for one in quoted}:
                    told.add(node.value)
    return told


def _of_constants(tree: ast.Module, names: Set[str]) -> set[ast.AST]:
    """The values of constants, comparisons with them, and how often they go into a number (``max(1, SIZE // n)``)."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        given = isinstance(node, ast.Assign) and any(_is_one_of(one, names) for one in node.targets)
        compared = isinstance(node, ast.Compare) and any(
            _is_one_of(one, names) for one in (node.left, *node.comparators)
        )
        divided = isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv) and _is_one_of(node.left, names)
        if given or compared or divided:
            found |= {one for one in ast.walk(node) if isinstance(one, ast.expr)}
    limited = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in ("max", "min"))
    return found | {one for node in limited if found & set(node.args) for one in ast.walk(node)}


def _is_one_of(node: ast.AST, names: Set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


@cache
def constants() -> dict[tuple[str, str], str]:
    """(file, name of a constant) -> why no value of it changes a result."""
    path = Path(__file__).with_name("speed.tsv")
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {(file, name): reason for file, name, reason in rows}


def _given(node: ast.AST) -> set[str]:
    """The names that an assignment gives values to; none of anything else."""
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    return (
        {one.id for one in parts if isinstance(one, ast.Name)}
        if all(isinstance(one, ast.Name) for one in parts)
        else set()
    )


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("_log.", "log.", "warnings."))


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
