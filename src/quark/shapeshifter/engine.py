"""Runs the passes of a ``RunConfig`` on a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quark.errors import ConfigError
from quark.shapeshifter.config import RunConfig, as_run_config

if TYPE_CHECKING:
    import onnx


class Engine:
    """Checks a configuration when it is made, and runs it as often as it is asked to.

    Raises:
        ConfigError: an unknown pass, parameter or key; nothing has run then.
    """

    def __init__(self, config: RunConfig | Mapping[str, Any]) -> None:
        self.config = as_run_config(config)
        self.initialize()

    def initialize(self) -> None:
        """Check the configuration again, for instance after a pass was registered."""
        from quark.onnx.shapeshifter import read

        read(self.config.to_dict())

    def run(self, float_model: onnx.ModelProto | None = None) -> onnx.ModelProto | None:
        """Run the passes.

        Args:
            float_model: a model, which is not changed; ``None`` for the file that the configuration names.

        Returns:
            The new model, for one in memory; ``None`` for a file, whose result is in ``output_model_path``.

        Raises:
            ConfigError: no model, or a file without ``output_model_path``.
            ModelError: the model cannot be read, transformed or written.
        """
        from quark.onnx.shapeshifter import transform

        given = self.config.to_dict()
        if float_model is not None:
            given.pop("output_model_path", None)
            return transform(float_model, given).proto
        if "output_model_path" not in given:
            raise ConfigError("the model comes from a file: say in output_model_path where the result goes")
        return transform(None, given).proto


def shapeshifter(
    run_config: RunConfig | Mapping[str, Any], model: onnx.ModelProto | None = None
) -> onnx.ModelProto | None:
    """``Engine(run_config).run(model)``."""
    return Engine(run_config).run(model)
