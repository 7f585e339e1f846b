"""Values as JSON can hold them, the same in every process: what an identity of a job compares.

Functions count by name, code, defaults and what they close over, but lists, dictionaries and sets, which they may fill
while they run; not by what they call. An object of a class that is
not known here counts by its class and its attributes; two of one class with equal attributes are equal.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import CellType, CodeType
from typing import Any

import numpy as np

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
DATA = (Mapping, set, frozenset, list, tuple, np.ndarray, np.generic)
TEXT = "OSU"  # kinds of NumPy data types that hold text
Known = Callable[[Any], Any]
"""What stands for a value of a kind that this module does not know; ``None`` for any other value."""


def plain(value: Any, known: Known = lambda value: None, within: tuple[int, ...] = ()) -> Any:
    """``value`` in lists, numbers and words.

    Args:
        value: anything.
        known: is asked first, for every value inside.
        within: the objects that are being told, by identity: one that holds itself ends there.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else value
    if (found := known(value)) is not None:
        return found
    if id(value) in within:
        return "itself"
    inside = functools.partial(plain, known=known, within=(*within, id(value)))
    if isinstance(value, (np.ndarray, np.generic)):
        return _array(np.asarray(value))
    if isinstance(value, Mapping):
        return [[inside(key), inside(item)] for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted((inside(item) for item in value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [inside(item) for item in value]
    return _object(value, inside)


def _object(value: Any, inside: Callable[[Any], Any]) -> Any:
    """The same of what is no collection."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, functools.partial):
        return ["partial", inside(value.func), inside(value.args), inside(value.keywords)]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, *([f.name, inside(getattr(value, f.name))] for f in fields(value))]
    if hasattr(value, "__qualname__"):
        name, code = f"{value.__module__}.{value.__qualname__}", code_of(value)
        return [name, code] if code else name
    if hasattr(value, "__dict__"):
        return [type(value).__qualname__, inside(vars(value))]
    return ADDRESS.sub("", repr(value))


def code_of(function: Any) -> str:
    """A digest of what a function does by its own code, hexadecimal; empty for what has none, such as a class."""
    inner = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(inner, "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    cells = [cell.cell_contents for cell in inner.__closure__ or () if cell != CellType()]
    closed = [one for one in cells if not isinstance(one, (list, dict, set))]  # what it fills while it runs
    words = json.dumps([_code(code), plain([inner.__defaults__, inner.__kwdefaults__, closed], briefly)])
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def _code(code: CodeType) -> list[Any]:
    """What a function does, without where it stands; functions within it too."""
    consts = [_code(one) if isinstance(one, CodeType) else plain(one) for one in code.co_consts]
    return [code.co_code.hex(), list(code.co_names), consts]


def briefly(value: Any) -> Any:
    """A function or an object inside another by its name or class, so that nothing far away counts; no data."""
    if isinstance(value, (*DATA, enum.Enum, functools.partial)) or not hasattr(value, "__dict__"):
        return None
    code = getattr(value, "__code__", None)
    kind = value if hasattr(value, "__qualname__") else type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return [name, _code(code)] if isinstance(code, CodeType) else name


def _array(array: np.ndarray) -> list[Any]:
    content = repr(array.tolist()).encode() if array.dtype.kind == "O" else np.ascontiguousarray(array).tobytes()
    return [str(array.dtype), list(array.shape), hashlib.blake2b(content, digest_size=16).hexdigest()]
