"""What each layer of an ONNX model loses when it alone is quantized.

    noise, kl   how far the outputs are from those of the float model (``quark.measure.outputs``)
    a function of the user's   |f(float model) − f(model with one layer quantized)|

The calibration runs once for all candidates; see ``quark.onnx.layer_runs``. Trials are divided over threads, or over
what joblib is set to (``joblib.parallel_config``): processes, or a cluster that sees ``TmpDir``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quark.errors import ConfigError
from quark.onnx.config_file import config_of
from quark.onnx.data_layout import as_reader
from quark.onnx.graph import model as files
from quark.onnx.layer_runs import open_runs
from quark.onnx.one_pass import Passes
from quark.onnx.quantization.config.config import Config, QuantizationConfig
from quark.search.function import check_metric
from quark.search.trials import MEASURES, ONE_BY_ONE, Trying, ranked
from quark.search.values import Study

Settings = Config | QuantizationConfig | Mapping[str, Any] | str


def sensitivity(
    model_input: files.ModelInput,
    config: Settings,
    samples: Any,
    candidates: Sequence[str] | None = None,
    metric: str = "sqnr",
    trying: Trying = ONE_BY_ONE,
) -> Study:
    """The loss of every layer under every candidate, with only that layer quantized.

    Args:
        model_input: the float model; it stays as it is.
        config: of the whole model: the name of a preset, keys and values of a configuration file
            (``quark.onnx.config_file``), or what ``get_default_config`` gives. Its options, target, excluded nodes and
            the algorithms that change the float model hold for every trial.
        samples: of calibration and of the trials: a data reader, or an iterable of dictionaries. A few are enough.
        candidates: presets, pairs of data types, ``float``; ``quark.onnx.quantization.config.candidates``. The preset
            of the configuration when omitted.
        metric: a name in ``MEASURES``, or ``file.py:function``, called with the path of a model.
        trying: how many at a time, and where finished trials are kept.

    Returns:
        The trials, with ``size`` and ``bits`` of every layer.

    Raises:
        ConfigError: a candidate, metric or configuration that cannot work, or a ledger of another model, data or
            configuration.
        ModelError, DataError: as ``ModelQuantizer.quantize_model``.
    """
    base, names = settings_of(config, candidates)
    check_metric(metric, MEASURES)
    reader = as_reader(model_input, samples)
    with open_runs(model_input, Config(base).compile(), names, reader, trying) as made:
        return ranked(made, metric, trying)


def settings_of(config: Settings, candidates: Sequence[str] | None) -> tuple[QuantizationConfig, list[str]]:
    """The configuration of the whole model, and the candidates.

    Raises:
        ConfigError: no candidates, and a configuration that is not known by the name of a preset.
    """
    values = {"preset": config} if isinstance(config, str) else config
    base = config_of(values) if isinstance(values, Mapping) else getattr(values, "global_quant_config", values)
    if not isinstance(base, QuantizationConfig):
        raise ConfigError(f"config is the name of a preset or what get_default_config gives, not {config!r}")
    if candidates is not None:
        return base, list(candidates)
    if not isinstance(values, Mapping):
        raise ConfigError("give candidates, or the configuration as the name of a preset, which then is the candidate")
    return base, [str(values["preset"])]


def estimate(model_input: files.ModelInput, config: Settings, samples: Any, candidates: Sequence[str]) -> Study:
    """As ``sensitivity`` with its usual metric, by a few passes (``quark.onnx.one_pass``).

    Raises:
        ConfigError, ModelError, DataError: as there.
    """
    base, names = settings_of(config, candidates)
    with open_runs(model_input, Config(base).compile(), names, as_reader(model_input, samples)) as made:
        return Passes.over(made, "sqnr").study()
