"""What a run of Shapeshifter is given: a model, passes in order, where to write. The engine checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from quark.dataclass import dataclass
from quark.errors import ConfigError

Passes = Mapping[str, Any]


@dataclass(frozen=True)
class ModelConfig:
    """The file of a model."""

    input_model_path: str | Path


@dataclass(frozen=True)
class ONNXModelConfig(ModelConfig):
    """The file of an ONNX model.

    Attributes:
        model_type: "onnx".
    """

    model_type: str = "onnx"


@dataclass(frozen=True)
class RunConfig:
    """One run.

    Attributes:
        input_model_config: the model, where none is handed to the engine.
        engine: settings of the engine; it has none.
        passes: name -> parameters, in the order in which they run.
        output_model_path: where the result is written, for a model from a file.
        preprocess_passes, postprocess_passes: in the place of ``passes``, what runs before and after quantization.
        preprocessed_model_path: where the quantizer writes what the passes before it have made.
        input_model_path: the older way to name the model.
    """

    input_model_config: ModelConfig | Mapping[str, Any] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    passes: Passes = field(default_factory=dict)
    output_model_path: str | Path | None = None
    preprocess_passes: Passes = field(default_factory=dict)
    postprocess_passes: Passes = field(default_factory=dict)
    preprocessed_model_path: str | Path | None = None
    input_model_path: str | Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """The mapping that a YAML file would hold; what was not given is left out."""
        given = {name: value for name, value in vars(self).items() if value}
        if isinstance(self.input_model_config, ModelConfig):
            given["input_model_config"] = dict(vars(self.input_model_config))
        return given


class LoadConfigFromFileOrDict:
    """A configuration as a mapping, from a mapping, a YAML file or the name of a template.

    Attributes:
        data: the mapping: ``RunConfig(**LoadConfigFromFileOrDict("passes.yaml").data)``.

    Raises:
        ConfigError: no such file or template, bad YAML.
    """

    def __init__(self, input_data: str | Path | Mapping[str, Any]) -> None:
        from quark.onnx.shapeshifter import load

        self.data: dict[str, Any] = dict(load(input_data))


def as_run_config(config: RunConfig | Mapping[str, Any]) -> RunConfig:
    """A RunConfig from what an engine is given.

    Raises:
        ConfigError: something else, or a key that a RunConfig does not have.
    """
    if isinstance(config, RunConfig):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(f"the configuration is a RunConfig or a mapping, not {type(config).__name__}")
    try:
        return RunConfig(**config)
    except TypeError as error:
        raise ConfigError(f"the configuration has a key that a RunConfig does not have: {error}") from error
