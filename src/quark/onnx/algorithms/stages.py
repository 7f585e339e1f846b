"""Which algorithm runs in which stage of the flow: one row per algorithm.

``transform`` changes the float model before anything is placed; ``tune`` changes weights when all scales are known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.onnx.algorithms import cle
from quark.onnx.graph.report import PassReport
from quark.onnx.quantization.config.algorithm import AlgoConfig, CLEConfig

Transform = Callable[[ir.Model, Any, Job], PassReport]


def _cle(model: ir.Model, config: CLEConfig, job: Job) -> PassReport:
    return cle.run(model, config, job.options.ReplaceClip6Relu)


TRANSFORMS: dict[type[AlgoConfig], Transform] = {CLEConfig: _cle}


def transform(model: ir.Model, job: Job) -> list[PassReport]:
    """Run the algorithms that change the float model, in the order of ``algo_config``."""
    chosen = [(TRANSFORMS[type(config)], config) for config in job.algorithms if type(config) in TRANSFORMS]
    return [run(model, config, job) for run, config in chosen]
