"""``TensorQuantOverrides``: what single tensors are told by name, typed and checked.

    {"tensor": [{"quant_type": Int16, "symmetric": False, ...}]}        one entry: the whole tensor
    {"weight": [{"axis": 0, "rmin": -1.0, "rmax": 1.0}, {"rmin": ..}]}  one entry per channel

Keys: ``quant_type`` (a data type class, its name, or a member of ONNX Runtime's ``QuantType``), ``symmetric``,
``reduce_range`` (half of the codes), ``rmin`` and ``rmax`` (the side that is not given is found as ever), or ``scale``
and ``zero_point``, ``axis``, and
``convert``: an entry of the same kind for the nodes in its ``recv_nodes`` (all readers without it), which then read the
tensor in that second type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quark.dataclass import dataclass
from quark.errors import ConfigError, check_name, unknown
from quark.numerics.formats import FORMATS, get_format

KEYS = (
    *("quant_type", "symmetric", "reduce_range", "rmin", "rmax"),
    *("scale", "zero_point", "axis", "convert"),
)
#: Names of ONNX Runtime that are not the name of a format behind a Q.
_SPELLED = {
    "qfloat8e4m3fn": "fp8_e4m3",
    "qfloat8e5m2": "fp8_e5m2",
    "qbfp": "bfp16",
    "qmx": "mxint8",
    "mxfp4e2m1": "mxfp4",
}
_KINDS: dict[str, type] = {"symmetric": bool, "reduce_range": bool, "axis": int, "convert": Mapping}
_WORDS = {bool: "True or False", int: "a whole number", Mapping: "a dictionary"}
_BY_VALUE = ("scale", "zero_point")
_BY_RANGE = ("symmetric", "reduce_range", "rmin", "rmax")


@dataclass(frozen=True)
class Override:
    """What one tensor is told; ``None`` leaves what the rules of the configuration say.

    Attributes:
        format: row of ``quark.numerics.formats.FORMATS``.
        range: (lows, highs), one per channel or one; a side that was not given is ``None``.
        parameters: (scales, zero points), likewise.
        axis: of the channels.
        convert: the second type, for ``readers`` (all where that is ``None``).
    """

    format: str | None = None
    symmetric: bool | None = None
    reduce_range: bool | None = None
    range: tuple[tuple[float, ...] | None, tuple[float, ...] | None] | None = None
    parameters: tuple[tuple[float, ...], tuple[int, ...]] | None = None
    axis: int | None = None
    convert: Override | None = None
    readers: frozenset[str] | None = None


def parse_overrides(given: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Override]:
    """The overrides of a configuration.

    Raises:
        ConfigError: the tensor, the key and what is allowed.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"TensorQuantOverrides must be a dictionary from tensor name to a list, not {given!r}")
    return {name: _override(f"TensorQuantOverrides[{name!r}]", entries) for name, entries in given.items()}


def from_types(given: Any) -> dict[str, list[dict[str, Any]]]:
    """``TensorQuantOverrides`` of the older option ``MixedPrecisionTensor``: data type -> names of tensors.

    Raises:
        ConfigError: not a dictionary of lists of names.
    """
    if not isinstance(given, Mapping) or not all(isinstance(names, (list, tuple)) for names in given.values()):
        raise ConfigError(f"MixedPrecisionTensor must be a dictionary from data type to tensor names, not {given!r}")
    return {name: [{"quant_type": kind}] for kind, names in given.items() for name in names}


def _override(where: str, entries: Sequence[Mapping[str, Any]]) -> Override:
    if not isinstance(entries, Sequence) or not entries or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{where} must be a list of dictionaries, one or one per channel, not {entries!r}")
    first = entries[0]
    for entry in entries:
        _check(where, entry)
    if len(entries) > 1:
        _check_channels(where, entries)
    convert = dict(first.get("convert", {}))
    readers = convert.pop("recv_nodes", None)
    if isinstance(readers, str):
        raise ConfigError(f"{where} convert: recv_nodes must be a list of node names, not {readers!r}")
    format = _format(where, first.get("quant_type"))
    if "axis" in first and format is not None and not get_format(format).has_zero_point:
        raise ConfigError(f"{where}: the data type {format!r} has no scale per channel; leave out axis")
    return Override(
        format=format,
        symmetric=first.get("symmetric"),
        reduce_range=first.get("reduce_range"),
        range=_range(where, entries),
        parameters=_columns(where, entries, _BY_VALUE),
        axis=first.get("axis"),
        convert=_override(f"{where} convert", [convert]) if convert else None,
        readers=None if readers is None else frozenset(readers),
    )


def _check(where: str, entry: Mapping[str, Any]) -> None:
    for key, value in entry.items():
        check_name(f"key of {where}", key, KEYS)
        if key in _KINDS and not _is(value, _KINDS[key]):
            raise ConfigError(f"{where}: {key} must be {_WORDS[_KINDS[key]]}, not {value!r}")
    for one, other in (("scale", "zero_point"), ("zero_point", "scale")):
        if one in entry and other not in entry:
            raise ConfigError(f"{where}: {one} needs {other} beside it")
    both = [key for key in _BY_RANGE if key in entry]
    if "scale" in entry and both:
        raise ConfigError(f"{where}: scale and zero_point say everything; leave out {', '.join(both)}")


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _check_channels(where: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """Entries of channels differ in their values; what is said of the whole tensor stands in the first, or in each."""
    first = entries[0]
    if "axis" not in first:
        raise ConfigError(f"{where} has {len(entries)} entries, one per channel: the first must give the axis")
    for key in ("quant_type", "symmetric", "reduce_range", "axis", "convert"):
        others = [entry[key] for entry in entries[1:] if key in entry and entry[key] != first.get(key)]
        if others:
            raise ConfigError(f"{where}: all channels have the same {key}, not {first.get(key)!r} and {others[0]!r}")


def _range(where: str, entries: Sequence[Mapping[str, Any]]) -> Any:
    """(lows, highs); ``None`` for a side, or for both together, that no entry gives."""
    low, high = _column(where, entries, "rmin"), _column(where, entries, "rmax")
    if low is not None and high is not None and any(a > b for a, b in zip(low, high, strict=True)):
        raise ConfigError(f"{where}: rmin must not be above rmax")
    return None if low is None and high is None else (low, high)


def _columns(where: str, entries: Sequence[Mapping[str, Any]], keys: tuple[str, str]) -> Any:
    """The values of two keys over all entries; ``None`` where no entry has them."""
    low, high = (_column(where, entries, key) for key in keys)
    if low is not None and min(low) <= 0:
        raise ConfigError(f"{where}: scale must be positive, not {min(low)!r}")
    return None if low is None else (low, high)


def _column(where: str, entries: Sequence[Mapping[str, Any]], key: str) -> tuple[float, ...] | None:
    """The values of a key over all entries; ``None`` where no entry has it."""
    having = [entry for entry in entries if key in entry]
    if having and len(having) < len(entries):
        raise ConfigError(f"{where}: every channel needs {key}, or none")
    return tuple(_number(where, key, entry[key]) for entry in entries) if having else None


def _number(where: str, key: str, value: Any) -> float | int:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {key} must be a number, not {value!r}") from error
    if not math.isfinite(number) or (key == "zero_point" and number != int(number)):
        what = "a whole number" if key == "zero_point" else "finite"
        raise ConfigError(f"{where}: {key} must be {what}, not {value!r}")
    return int(number) if key == "zero_point" else number


def _format(where: str, given: Any) -> str | None:
    """The row of a data type class, of a name, or of a member of an enumeration of types."""
    if given is None:
        return None
    if isinstance(given, type) and hasattr(given, "format"):
        return str(given.format)
    name = str(getattr(given, "name", given)).lower()
    plain = {row.replace("_", ""): row for row in FORMATS}
    found = _SPELLED.get(name) or plain.get(name.replace("_", "").removeprefix("q"))
    if found is None:
        raise ConfigError(unknown(f"quant_type of {where}", str(given), FORMATS))
    return found
