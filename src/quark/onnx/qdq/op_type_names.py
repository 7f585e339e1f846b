"""Operator types that a configuration names: which exist at all, and which the model has.

One configuration serves many models, so a type that only this model lacks is told and no mistake. A type that neither
ONNX nor ONNX Runtime nor this package knows is one, unless a library of the user's own brings it: what such a library
defines cannot be asked, so there it is told as well.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import onnx
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from quark.errors import ConfigError, nearest
from quark.operators.registry import OPERATORS

_log = logging.getLogger(__name__)


@cache
def runtime_types() -> frozenset[str]:
    """The operator types of this build of ONNX Runtime, asked once: it takes longer than to quantize a small model."""
    schemas: Any = getattr(runtime, "get_all_operator_schema", list)()  # a build of one's own may lack it
    return frozenset(schema.name for schema in schemas)


def existing_types() -> set[str]:
    """Every operator type of ONNX, to which a program may add, of ONNX Runtime, and of our domains."""
    return {schema.name for schema in onnx.defs.get_all_schemas()} | runtime_types() | set(OPERATORS)


def check_types(asked: Mapping[str, Iterable[str]], present: Iterable[str], libraries: bool) -> None:
    """Raise for types that exist nowhere.

    Args:
        asked: field or option -> the types that it names.
        present: the types of the model, which may be of any domain.
        libraries: whether ``UserCustomOpLibPath`` may define more.

    Raises:
        ConfigError: the field, the type and the nearest one that exists.
    """
    known = {*present}
    rare = {one for listed in asked.values() for one in listed if one not in known and not onnx.defs.has(one)}
    if not rare or rare <= runtime_types():
        return
    known |= existing_types()
    for field, listed in asked.items():
        for op_type in listed if not libraries else ():
            if op_type not in known:
                raise ConfigError(
                    f"{field}: the operator type {op_type!r} exists neither in ONNX nor in ONNX Runtime nor in the "
                    f"model.{nearest(op_type, known)}"
                )


def tell_absent(asked: Mapping[str, Iterable[str]], present: Iterable[str]) -> None:
    """Log, one line per field, the types that the model does not have: nothing comes of what is said of them."""
    known = set(present)
    for field, listed in asked.items():
        absent = [op_type for op_type in dict.fromkeys(listed) if op_type not in known]
        if absent:
            _log.warning("%s: the model has no %s", field, ", ".join(absent))
