"""``quark presets`` and ``quark options``: the rows of two registries."""

from __future__ import annotations

from typing import Any

from quark.cli.output import print_json, show
from quark.config.options import Options
from quark.config.presets import PRESETS, Preset
from quark.report import Table


def run_presets(json: bool) -> None:
    """List the presets."""
    if json:
        print_json({name: _fields(preset) for name, preset in PRESETS.items()})
        return
    rows = tuple((name, one.activation.describe(), one.weight.describe(), one.doc) for name, one in PRESETS.items())
    note = 'Use one with `quark onnx quantize --preset NAME` or `get_default_config("NAME")`.'
    show(Table("Presets", ("name", "activations", "weights", "for"), rows, note))


def _fields(preset: Preset) -> dict[str, Any]:
    return {
        "doc": preset.doc,
        "activations": preset.activation.describe(),
        "weights": preset.weight.describe(),
        "options": dict(preset.options),
        "target": preset.target,
    }


def run_options(json: bool) -> None:
    """List the options of ``extra_options``."""
    fields = {name: (field.default, field.description or "") for name, field in Options.model_fields.items()}
    if json:
        print_json({name: {"default": default, "doc": doc} for name, (default, doc) in fields.items()})
        return
    rows = tuple((name, repr(default), doc) for name, (default, doc) in fields.items())
    note = "Set one with `--set Name=value`, or in `extra_options`."
    show(Table("Options", ("name", "default", "meaning"), rows, note))
