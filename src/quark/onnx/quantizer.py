"""``ModelQuantizer``: the public verb of the ONNX flow. The engine behind it is imported when it is first used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark.config.job import with_plan
from quark.errors import ConfigError
from quark.garbage import rare_collections
from quark.onnx.quantization.config import Config, QConfig

if TYPE_CHECKING:
    import onnx

    from quark.config.plan import Plan
    from quark.onnx.flow import Progress
    from quark.onnx.result import Result


class ModelQuantizer:
    """Quantizes models by one configuration. The configuration is read, never changed, and serves any number of models.

    Args:
        config: a ``QConfig``, or the older ``Config``.

    Attributes:
        result: what the last quantization made and learnt (``quark.onnx.result.Result``); None before one.

    Raises:
        ConfigError: the configuration cannot work; the message names the field.
    """

    def __init__(self, config: QConfig | Config) -> None:
        if not isinstance(config, (QConfig, Config)):
            given = type(config).__name__
            raise ConfigError(
                f"ModelQuantizer needs a QConfig or a Config, not {given}; a Config holds a global config"
            )
        self.config = config
        self.result: Result | None = None

    def quantize_model(
        self,
        model_input: str | Path | onnx.ModelProto,
        model_output: str | Path | None = None,
        calibration_data_reader: Any = None,
    ) -> onnx.ModelProto | None:
        """Quantize one model.

        Args:
            model_input: path of the float model, or the model itself; it stays as it is.
            model_output: path of the quantized model; the model is returned instead when this is ``None``.
            calibration_data_reader: an object with ``get_next()`` that gives one dictionary of arrays per sample, an
                iterable of such dictionaries, or a loader or dataset whose items are arrays, tensors, tuples (labels
                follow the inputs) or dictionaries. Not needed with ``UseRandomData`` or ``WeightsOnly``.

        Returns:
            The quantized model when ``model_output`` is ``None``, otherwise ``None``.

        Raises:
            ModelError: the model cannot be read, quantized or written.
            DataError: the calibration data does not fit the model.
            ConfigError: the configuration names something that the model does not have.
        """
        return self.run(model_input, model_output, calibration_data_reader).proto

    def run(
        self,
        model_input: str | Path | onnx.ModelProto,
        model_output: str | Path | None = None,
        calibration_data_reader: Any = None,
        progress: Progress | None = None,
        plan: Plan | None = None,
    ) -> Result:
        """``quantize_model`` with everything it learnt: plan, size, coverage, metrics, verdict, seconds of each stage.

        ``plan`` is carried out in the place of the configuration's own decisions; its ranges and scales are found anew.

        The same value is ``result`` afterwards, also of ``quantize_model``; it is None before and after a failure.
        """
        with rare_collections():
            from quark.onnx.flow import quantize

        self.result = None
        job = with_plan(self.config.compile(), plan)
        self.result = quantize(job, model_input, model_output, calibration_data_reader, progress)
        return self.result
