"""``quark presets`` and ``quark options``: the rows of two registries."""

from __future__ import annotations

from typing import Any

from quark.cli.output import print_json, show
from quark.config.options import OPTIONS
from quark.config.presets import HARDWARE, PRESETS, Preset, get_preset
from quark.errors import check_name
from quark.report import Table


def run_presets(name: str | None, hardware: str | None, json: bool) -> None:
    """List the presets, a line each, or all that one of them says.

    Raises:
        ConfigError: an unknown name or kind of hardware.
    """
    if hardware is not None:
        check_name("--for", hardware, HARDWARE)
    chosen = {name: get_preset(name)} if name is not None else PRESETS
    chosen = {key: one for key, one in chosen.items() if hardware is None or hardware in one.hardware}
    if json:
        print_json({key: _fields(preset) for key, preset in chosen.items()})
    elif name is not None:
        rows = tuple((key, _words(value)) for one in chosen.values() for key, value in _fields(one).items())
        show(Table(name, ("", ""), rows, f"Use it: `quark onnx quantize model.onnx -o q.onnx --preset {name}`"))
    else:
        lines = tuple((key, one.types, ", ".join(one.hardware)) for key, one in chosen.items())
        note = "`quark presets NAME` says all about one; `quark onnx quantize --preset NAME` uses it."
        show(Table("Presets", ("name", "activations/weights", "for"), lines, note))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={setting!r}" for name, setting in value.items()) or "none"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _fields(preset: Preset) -> dict[str, Any]:
    return {
        "doc": preset.doc,
        "types": preset.types,
        "for": preset.hardware,
        "activations": "float" if preset.options.get("UseMatMulNBits") else preset.activation.describe(),
        "weights": preset.weight.describe(),
        "options": dict(preset.options),
        "target": preset.target,
    }


def run_options(json: bool) -> None:
    """List the options of ``extra_options``."""
    fields = {name: (row.default, row.doc) for name, row in OPTIONS.items()}
    if json:
        print_json({name: {"default": default, "doc": doc} for name, (default, doc) in fields.items()})
        return
    rows = tuple((name, repr(default), doc) for name, (default, doc) in fields.items())
    note = "Set one with `--set Name=value`, or in `extra_options`."
    show(Table("Options", ("name", "default", "meaning"), rows, note))
