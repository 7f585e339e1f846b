"""Shapeshifter: a list of named graph passes, from a YAML file, a mapping or a template, applied to a model.

    passes:                                     # or preprocess_passes and postprocess_passes around a quantization
      onnx_convert_opset_version: {target_opset_version: 21}
      onnx_fold_batch_norm:
    output_model_path: out.onnx                 # optional, as input_model_config: {input_model_path: in.onnx}

Passes run in the order in which they are written; one that is listed runs unless its switch is false. A list
(``- fold_batch_norm``) instead of a mapping lets one pass run twice. Everything is checked before the first one runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from quark.dataclass import dataclass
from quark.errors import ConfigError, nearest, unknown
from quark.files.outputs import check_outputs
from quark.files.untrusted import parse_yaml, read_settings
from quark.ir.runtime_faults import work_around_faults
from quark.onnx.graph import model as files
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes.registry import apply, get_pass
from quark.onnx.passes.row import Pass

Config: TypeAlias = "str | Path | Mapping[str, Any]"
Steps: TypeAlias = "tuple[tuple[Pass, dict[str, Any]], ...]"
GROUPS = ("passes", "preprocess_passes", "postprocess_passes")
PATHS = ("input_model_config", "output_model_path", "preprocessed_model_path", "input_model_path", "engine")
TEMPLATES = ("xint8", "a8w8", "a16w8", "bf16", "bfp16")


@dataclass(frozen=True)
class ShapeShifterConfig:
    """A checked configuration.

    Attributes:
        before: ``passes`` or ``preprocess_passes``.
        after: ``postprocess_passes``.
        source, output, preprocessed: paths that the configuration names.
    """

    before: Steps
    after: Steps = ()
    source: Path | None = None
    output: Path | None = None
    preprocessed: Path | None = None


@dataclass(frozen=True)
class Transformed:
    """A transformed model (``None`` when it was written to a file), and what each pass did."""

    proto: onnx.ModelProto | None
    reports: tuple[PassReport, ...]


def read(config: Config) -> ShapeShifterConfig:
    """Check a configuration: a mapping, the path of a YAML file, or the name of a template.

    Raises:
        ConfigError: no such file or template, bad YAML, an unknown key, pass or parameter.
    """
    data, where = _data(config)
    for key in data:
        if key not in (*GROUPS, *PATHS):
            raise ConfigError(f"{where}: {unknown('key', key, (*GROUPS, *PATHS))}")
    if "passes" in data and "preprocess_passes" in data:
        raise ConfigError(f"{where}: give passes, or preprocess_passes and postprocess_passes, not both")
    before = _steps(data.get("passes", data.get("preprocess_passes")), where)
    after = _steps(data.get("postprocess_passes"), where)
    if not before and not after:
        raise ConfigError(f"{where}: no pass is listed and switched on (keys: {', '.join(GROUPS)})")
    given = data.get("input_model_config") or {}
    if isinstance(given, Mapping) and given.get("model_type", "onnx") != "onnx":
        raise ConfigError(f"{where}: model_type {given['model_type']!r}: only onnx models are transformed")
    source = given.get("input_model_path") if isinstance(given, Mapping) else None
    return ShapeShifterConfig(
        before,
        after,
        _path(source or data.get("input_model_path")),
        _path(data.get("output_model_path")),
        _path(data.get("preprocessed_model_path")),
    )


def load(config: Config) -> Mapping[str, Any]:
    """A configuration as a mapping, unchecked.

    Raises:
        ConfigError: no such file or template, bad YAML.
    """
    return _data(config)[0]


def _path(value: Any) -> Path | None:
    return None if value is None else Path(str(value))


def _data(config: Config) -> tuple[Mapping[str, Any], str]:
    """The configuration as a mapping, and how messages call it."""
    if isinstance(config, Mapping):
        return config, "the configuration"
    if str(config) in TEMPLATES:
        text, where = (resources.files("quark.onnx.templates") / f"{config}.yaml").read_text("utf-8"), f"{config!s}"
        data = parse_yaml(text, where)
    else:
        path, where = Path(config), f"{str(config)!r}"
        if not path.exists():
            raise ConfigError(
                f"the configuration {where} is neither a file nor a template.{nearest(str(config), TEMPLATES)} "
                f"Templates: {', '.join(TEMPLATES)}"
            )
        data = read_settings(path, "the configuration")
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where} holds no mapping: start it with `passes:`")
    return data, where


def _steps(given: Any, where: str) -> Steps:
    return tuple((row, arguments) for row, arguments in _parsed(given, where) if arguments is not None)


def _parsed(given: Any, where: str) -> Iterator[tuple[Pass, dict[str, Any] | None]]:
    entries = [given] if isinstance(given, Mapping) else given or []
    if not isinstance(entries, list):
        raise ConfigError(f"{where}: passes are a mapping or a list, not {given!r}")
    for entry in entries:
        for name, parameters in entry.items() if isinstance(entry, Mapping) else [(entry, None)]:
            if parameters is not None and not isinstance(parameters, Mapping):
                raise ConfigError(f"{where}: the parameters of {name!r} are a mapping, not {parameters!r}")
            row = get_pass(str(name))
            yield row, row.arguments(parameters)


def run_passes(model: ir.Model, steps: Steps) -> list[PassReport]:
    """Run passes in order, in place. A quantized model is kept from faults of the runtime that they may expose."""
    reports = []
    for row, arguments in steps:
        if row.shapes:
            infer_shapes(model)
        reports.append(apply(model, row, arguments))
    if reports and any(node.op_type == "DequantizeLinear" for node in model.graph):
        infer_shapes(model)
        work_around_faults(model)
    return reports


def transform(
    model_input: str | Path | onnx.ModelProto | None, config: Config, model_output: str | Path | None = None
) -> Transformed:
    """Apply a list of passes to a model. The model that is given does not change.

    Args:
        model_input: a model, or its path; ``None`` where the configuration names it.
        config: mapping, YAML file or template (``xint8``, ``a8w8``, ``a16w8``, ``bf16``, ``bfp16``).
        model_output: where to write the result; without one (here and in the configuration) it is returned.

    Raises:
        ConfigError: the configuration is wrong; nothing has run then.
        ModelError: the model cannot be read, transformed or written.
    """
    recipe = read(config)
    source, output = recipe.source if model_input is None else model_input, model_output or recipe.output
    if source is None:
        raise ConfigError("no model is given: neither model_input nor input_model_path in the configuration")
    if output is not None:
        named = [("the configuration", Path(config))] if isinstance(config, (str, Path)) else []
        # a file, which may be a stranger's, says nothing about what it may replace
        trusted = model_output is not None or isinstance(config, Mapping)
        check_outputs([files.output_of(output)], chain(files.inputs_of_model(source), named), trusted)
    model = files.load(source)
    reports = run_passes(model, (*recipe.before, *recipe.after))
    if output is None:
        return Transformed(files.to_proto(model), tuple(reports))
    files.save(model, Path(output))
    return Transformed(None, tuple(reports))
