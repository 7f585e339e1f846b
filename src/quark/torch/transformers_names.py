"""Names that transformers has, read from its source: to import the tables takes seconds, since torch comes with them.

A table that is written in a way that is not understood here is not known, and then nothing is decided by it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quark.dataclass import dataclass

Table = Mapping[str, tuple[str, ...]]
AUTO = "models/auto"
BASE = ("PreTrainedConfig",)
DIVISION = "self.hidden_size % self.num_attention_heads"


@dataclass(frozen=True)
class ConfigSource:
    """A class of configurations as its source has it.

    Attributes:
        alone: it is made of transformers' base alone, and of no parts.
        fields: its own, with their defaults; ``...``: computed.
        others: names that files may have in the place of fields.
        divides: it checks that its heads divide the hidden size.
    """

    alone: bool
    fields: Mapping[str, Any]
    others: frozenset[str]
    divides: bool


@cache
def model_types() -> Table:
    """Model types -> the class of their configuration; empty where that is not known."""
    return next((found for file in ("auto_mappings", "configuration_auto") if (found := _types_in(file))), {})


def _types_in(file: str) -> Table:
    own = _tables(f"{AUTO}/{file}.py").get("CONFIG_MAPPING_NAMES", {})
    more = _tables(f"{AUTO}/configuration_auto.py").get("CONFIG_MAPPING_NAMES", {}) if own else {}
    return {**own, **more}


@cache
def classes() -> dict[str, set[str]]:
    """Classes of models -> their types, of all that have a row in a table of models."""
    found: dict[str, set[str]] = {}
    for name, table in _tables(f"{AUTO}/modeling_auto.py").items():
        if name.startswith("MODEL_"):
            for kind, listed in table.items():
                for one in listed:
                    found.setdefault(one, set()).add(kind)
    return found


def causal_class(kind: str) -> str | None:
    """The language model of a type; None: it has none, or that is not known."""
    table = _tables(f"{AUTO}/modeling_auto.py").get("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    return next(iter(table.get(kind, ())), None)


def classes_of(kind: str) -> list[str]:
    """The classes of models of a type."""
    return sorted(name for name, kinds in classes().items() if kind in kinds)


def has_class(name: str) -> bool:
    """Whether one of its modules defines a class of models, with these capitals or others."""
    text = re.compile(rf"^class {re.escape(name)}\(", re.MULTILINE | re.IGNORECASE)
    files = (one for folder in _folders() for one in (folder / "models").glob("*/modeling_*.py"))
    return any(text.search(file.read_text(encoding="utf-8")) for file in files)


def type_of_class(name: str) -> str | None:
    """The type that a class of models is made for, of several the one that it is called after; None: not known."""
    kinds = classes().get(name, set())
    called = {kind for kind in kinds if name.lower().startswith(re.sub("[_-]", "", kind))}
    found = kinds if len(kinds) == 1 else called
    return next(iter(found)) if len(found) == 1 else None


@cache
def config_source(kind: str) -> ConfigSource | None:
    """How the configuration of a type is written; None: that is not known."""
    special = (_tables(f"{AUTO}/{file}.py") for file in ("auto_mappings", "configuration_auto"))
    tables = [found.get("SPECIAL_MODEL_TYPE_TO_MODULE_NAME", {}) for found in special]
    module = next((row[0] for table in tables for row in (table.get(kind, ()),) if row), kind.replace("-", "_"))
    wanted = next(iter(model_types().get(kind, ())), None)
    body = _tree(f"models/{module}/configuration_{module}.py").body
    node = next((one for one in body if isinstance(one, ast.ClassDef) and one.name == wanted), None)
    if node is None:
        return None
    fields = {ast.unparse(one.target): _default(one.value) for one in node.body if isinstance(one, ast.AnnAssign)}
    assigned = [one for one in node.body if isinstance(one, ast.Assign)]
    names = {ast.unparse(target): one.value for one in assigned for target in one.targets}
    others = frozenset(key for key, _ in _pairs(names.get("attribute_map", node)))
    methods = {one.name: ast.unparse(one) for one in node.body if isinstance(one, ast.FunctionDef)}
    alone = tuple(map(ast.unparse, node.bases)) == BASE and not any(name.startswith("sub_configs") for name in names)
    divides = DIVISION in methods.get("validate_architecture", "")
    return ConfigSource(alone, fields, others, divides)


def _default(value: ast.AST | None) -> Any:
    return value.value if isinstance(value, ast.Constant) else ...


def activations() -> set[str]:
    """The names of its activation functions."""
    return {*_tables("activations.py").get("ACT2CLS", {})}


def quantization_methods() -> set[str]:
    """The methods of quantization that it reads."""
    return {*_tables("quantizers/auto.py").get("AUTO_QUANTIZATION_CONFIG_MAPPING", {})}


@cache
def _tables(file: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """The mappings from strings that a module of transformers makes at its top, by their names."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for node in _tree(file).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, {}).update(_pairs(node.value))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value.func
            if isinstance(call, ast.Attribute) and call.attr == "update" and isinstance(call.value, ast.Name):
                found.setdefault(call.value.id, {}).update(pair for one in node.value.args for pair in _pairs(one))
    return found


def _folders() -> list[Path]:
    spec = find_spec("transformers")
    return [*map(Path, (spec and spec.submodule_search_locations) or ())]


def _tree(file: str) -> ast.Module:
    """A module of transformers; an empty one where there is none."""
    paths = [folder / file for folder in _folders()]
    return next((ast.parse(path.read_text(encoding="utf-8")) for path in paths if path.is_file()), ast.Module([], []))


def _pairs(node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Keys and strings of a mapping as it is written: a dict, or a list of pairs."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, _strings(value)
    elif isinstance(node, ast.Call):
        for inner in (*node.args, *(one.value for one in node.keywords)):
            yield from _pairs(inner)
    elif isinstance(node, ast.List):
        for pair in node.elts:
            if isinstance(pair, ast.Tuple) and isinstance(pair.elts[0], ast.Constant):
                yield str(pair.elts[0].value), _strings(pair.elts[1])


def _strings(node: ast.AST) -> tuple[str, ...]:
    """The strings that are written in a value."""
    return tuple(one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))
