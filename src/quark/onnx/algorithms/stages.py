"""Which algorithm runs in which stage of the flow: one row per algorithm.

``transform`` changes the float model before anything is placed; ``tune`` changes weights when all scales are known.
An algorithm is imported when it runs: most jobs have none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.errors import ConfigError
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.samples import rereadable
from quark.onnx.graph.report import PassReport
from quark.onnx.quantization.config.algorithm import (
    AdaQuantConfig,
    AdaRoundConfig,
    AlgoConfig,
    AutoMixprecisionConfig,
    AutoRoundConfig,
    AWQConfig,
    BiasCorrectionConfig,
    CalibrationSearchConfig,
    ChannelEqualizationConfig,
    CLEConfig,
    GPTAQConfig,
    GPTQConfig,
    QronosConfig,
    QuarotConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
)

Transform = Callable[..., PassReport]
Tune = Callable[[ir.Model, Plan, Any, JobContext], PassReport]


def _cle(model: ir.Model, config: CLEConfig, context: JobContext, part: float = 1.0) -> PassReport:
    from quark.onnx.algorithms import cle

    return cle.run(model, config, context.job.options.ReplaceClip6Relu, part=part)


def _equalize(model: ir.Model, config: ChannelEqualizationConfig, context: JobContext, part: float = 1.0) -> PassReport:
    from quark.onnx.algorithms import equalization

    return equalization.run(model, replace(config, widest=config.widest**part), context)


def _smoothquant(model: ir.Model, config: SmoothQuantConfig, context: JobContext) -> PassReport:
    from quark.onnx.algorithms import smoothquant

    return smoothquant.run(model, config, context)


def _awq(model: ir.Model, config: AWQConfig, context: JobContext) -> PassReport:
    from quark.onnx.algorithms import awq

    return awq.run(model, config, context)


def _quarot(model: ir.Model, config: QuarotConfig, context: JobContext) -> PassReport:
    from quark.onnx.algorithms import quarot

    return quarot.run(model, config, context)


def _svdquant(model: ir.Model, config: SVDQuantConfig, context: JobContext) -> PassReport:
    from quark.onnx.algorithms import svdquant

    return svdquant.run(model, config, context)


def _finetune(model: ir.Model, plan: Plan, config: Any, context: JobContext) -> PassReport:
    from quark.onnx.algorithms import finetune

    return finetune.run(model, plan, config, context)


def _correct_biases(model: ir.Model, plan: Plan, config: BiasCorrectionConfig, context: JobContext) -> PassReport:
    from quark.onnx.algorithms import bias_correction

    return bias_correction.run(model, plan, config, context)


def _round_columns(model: ir.Model, plan: Plan, config: Any, context: JobContext) -> PassReport:
    from quark.onnx.algorithms import gptq

    return gptq.run(model, plan, config, context)


TRANSFORMS: dict[type[AlgoConfig], Transform] = {
    CLEConfig: _cle,
    ChannelEqualizationConfig: _equalize,
    SmoothQuantConfig: _smoothquant,
    AWQConfig: _awq,
    QuarotConfig: _quarot,
    SVDQuantConfig: _svdquant,
}
#: Transformations that can go a part of their way, and the parts that are tried.
PARTS: dict[type[AlgoConfig], tuple[float, ...]] = {
    CLEConfig: (1.0, 0.75, 0.5, 0.25),
    ChannelEqualizationConfig: (1.0, 0.5, 0.25),
}
TUNES: dict[type[AlgoConfig], Tune] = {
    AdaRoundConfig: _finetune,
    AdaQuantConfig: _finetune,
    AutoRoundConfig: _finetune,
    BiasCorrectionConfig: _correct_biases,
    **dict.fromkeys((GPTQConfig, GPTAQConfig, QronosConfig), _round_columns),
}
_LOOK = (
    *(SmoothQuantConfig, AWQConfig, QuarotConfig, SVDQuantConfig, ChannelEqualizationConfig),
    *(CalibrationSearchConfig, AutoMixprecisionConfig),
)
#: Algorithms that read the calibration data, which then has to be read more than once.
READS_DATA = frozenset([*_LOOK, *TUNES])


def reader_for(job: Job, reader: Any) -> Any:
    """The reader, its samples kept in memory where an algorithm reads it again and it cannot be."""
    judged = any(isinstance(config, CLEConfig) and not config.keep_worse for config in job.algorithms)
    reads = judged or any(config.own is not None or type(config) in READS_DATA for config in job.algorithms)
    return rereadable(reader) if reads else reader


def transform(model: ir.Model, context: JobContext) -> list[PassReport]:
    """Run the algorithms that change the float model, in the order of ``algo_config``.

    One goes as far as the quantized model gains by it, and is put back where it does not gain, unless its field
    ``keep_worse`` says otherwise.
    """
    chosen = [(TRANSFORMS[type(config)], config) for config in context.job.algorithms if type(config) in TRANSFORMS]
    if not chosen:
        return []
    from quark.onnx.algorithms.guard import guarded

    return [
        run(model, config, context) if config.keep_worse else guarded(_parts(run, config), model, config, context)
        for run, config in chosen
    ]


def _parts(run: Transform, config: AlgoConfig) -> dict[float, Transform]:
    return {1.0: run, **{part: partial(run, part=part) for part in PARTS.get(type(config), ()) if part != 1}}


def tune(model: ir.Model, plan: Plan, context: JobContext) -> list[PassReport]:
    """Run the algorithms that change weights at final scales, in the order of ``algo_config``.

    What makes the model worse is put back, unless the field ``keep_worse`` says otherwise.

    Raises:
        ConfigError: the activations have no scales before the model runs.
    """
    if context.job.mode == "nbits":
        from quark.onnx.algorithms import nbits

        return nbits.run(model, plan, _tuning(context), context)
    chosen = [(TUNES.get(type(config), _round_columns), config) for config in _tuning(context)]
    if chosen and context.job.mode != "static":
        names = ", ".join(type(config).__name__ for _, config in chosen)
        raise ConfigError(f"algo_config: {names} needs scales that are known beforehand, not dynamic quantization")
    if len(chosen) > 1:  # what the first one changes is not a target for the second
        context = replace(context, reference=model.clone())
    if not chosen:
        return []
    from quark.onnx.algorithms.tuned import guarded_tune

    return [
        run(model, plan, config, context) if _unjudged(config) else guarded_tune(run, model, plan, config, context)
        for run, config in chosen
    ]


def _unjudged(config: Any) -> bool:
    """Whether what an algorithm did stays in any case; gain gives up some of the squared error on purpose."""
    return config.keep_worse or getattr(config, "gain", False)


def _tuning(context: JobContext) -> list[AlgoConfig]:
    return [config for config in context.job.algorithms if config.own is not None or type(config) in TUNES]
