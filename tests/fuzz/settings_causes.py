"""Damage to settings that lie beside models: preprocess.yaml, plans of both flows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tests.fuzz.causes import Cause, Finding
from tests.fuzz.config_causes import VALUES, YAMLS

from quark.onnx.config_file import read_values
from quark.onnx.preprocess_file import FILE, read_beside, text_of
from quark.onnx.preprocessing import Preprocessing
from quark.search.energy import read_table

PICTURES = {
    "mean": [0.5, 0.4, 0.3],
    "std": [0.2, 0.2, 0.2],
    "scale": 255,
    "size": [8, 8],
    "resize": "crop",
    "bgr": True,
}
SECTIONS = {"m.onnx": {"float_model": "f.onnx", **PICTURES}, "other.onnx": {"scale": 1.0}}
PLAN: dict[str, Any] = {
    "preset": "A8W8",
    "options": {"Percentile": 99.9},
    "layers": {"conv": "A16W8"},
    "exclude": ["y"],
}
ODD = (
    *VALUES,
    [0.0, 0.0, 0.0],
    [float("nan")] * 3,
    [float("inf")] * 3,
    [1e400, -1, 0],
    [1] * 1000,
    10**400,
    [10**400] * 3,
    [2**70, 1],
    [[1, 2, 3]],
)

ENERGY: dict[str, Any] = {"int8/int8": 0.2, "float32/float32": 3.7, "uint16/int8": 1}

PREPROCESS: list[Cause] = []
ENERGIES: list[Cause] = []
PLANS: list[Cause] = []


def read(folder: Path) -> None:
    """Read the settings as commands do.

    Raises:
        Finding: settings that no picture can be read by.
    """
    if (folder / FILE).exists():
        text_of(Preprocessing(), folder / "other.onnx", folder / "float.onnx")
        found = read_beside(folder / "m.onnx")
        if found is not None and any(value == 0 for value in found.to_dict().get("std") or []):
            raise Finding("a deviation of 0 was taken")
        return
    for path in sorted(folder.glob("energy.*")):
        if not all(0 <= value < float("inf") for value in read_table(str(path)).values()):
            raise Finding("an energy that is none")
    for path in sorted(folder.glob("plan.*")):
        read_values(path)


def put(name: str, content: bytes | Callable[[], bytes], folder: Path) -> None:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content())


def yaml_of(values: dict[str, Any]) -> bytes:
    """The settings as YAML, or as JSON where YAML has no word for them."""
    try:
        text = yaml.safe_dump(values, allow_unicode=True)
    except yaml.YAMLError:
        text = json.dumps(values)
    return text.encode("utf-8", "surrogatepass")


def damaged(values: dict[str, Any]) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Every field with every odd value, gone, and with a stranger beside it; written only where it is judged."""
    for key in values:
        for number, value in enumerate(ODD):
            yield key, f"{number}: {value!r:.20}", partial(yaml_of, {**values, key: value})
        yield key, "gone", partial(yaml_of, {name: one for name, one in values.items() if name != key})
    yield "a key too much", "a word", partial(yaml_of, {**values, "z": "x"})
    yield "file", "as it should be", partial(yaml_of, values)


for reader, causes, name, values in (
    ("preprocess", PREPROCESS, FILE, PICTURES),
    ("plan", PLANS, "plan.yaml", PLAN),
    ("energy", ENERGIES, "energy.yaml", ENERGY),
):
    for kind, damage, made in damaged(values):
        causes.append(Cause(reader, kind, damage, partial(put, name, made)))
    for damage, content in YAMLS.items():
        causes.append(Cause(reader, "text", damage, partial(put, name, content)))
for kind, damage, made in damaged(SECTIONS):
    PREPROCESS.append(Cause("preprocess", f"in a section: {kind}", damage, partial(put, FILE, made)))
