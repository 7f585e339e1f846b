"""The graph as the NPU computes it (``SimulateDPU``): one row per operator that its fixed-point arithmetic changes.

Runs after calibration, so that ranges are those of the float model, and only on nodes that are quantized: what stays
float does not run on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.onnx.graph.report import PassReport
from quark.onnx.passes import (
    dpu_average_pool,
    dpu_clip,
    dpu_hard_sigmoid,
    dpu_instance_norm,
    dpu_leaky_relu,
    dpu_reduce_mean,
    dpu_sigmoid,
    dpu_softmax,
)

Wanted = Callable[[ir.Node], bool]


@dataclass(frozen=True)
class Simulation:
    """One rewrite: the option that decides about it, and whether NPU flows do it unless told otherwise.

    ``another``: the function that it puts in the place of another one; empty where it corrects by a constant factor.
    """

    option: str
    run: Callable[[ir.Model, Wanted], PassReport]
    by_default: bool = True
    another: str = ""


#: In the order in which they run: a Sigmoid that became a HardSigmoid is corrected as one.
SIMULATIONS: tuple[Simulation, ...] = (
    Simulation("ConvertLeakyReluToDPUVersion", dpu_leaky_relu.run),
    Simulation("ConvertSigmoidToHardSigmoid", dpu_sigmoid.run, another="HardSigmoid for Sigmoid"),
    Simulation("ConvertHardSigmoidToDPUVersion", dpu_hard_sigmoid.run),
    Simulation("ConvertAvgPoolToDPUVersion", dpu_average_pool.run),
    Simulation("ConvertReduceMeanToDPUVersion", dpu_reduce_mean.run),
    Simulation("ConvertSoftmaxToDPUVersion", dpu_softmax.run, by_default=False, another="a polynomial for Softmax"),
    Simulation("ConvertInstanceNormToDPUVersion", dpu_instance_norm.run, by_default=False),
    Simulation("ConvertClipToDPUVersion", dpu_clip.run, by_default=False, another="Clip with whole bounds"),
)


def simulate(model: ir.Model, plan: Plan, job: Job) -> list[PassReport]:
    """Rewrite ``model`` in place to what the device computes; reports of what was rewritten."""
    return [row.run(model, wanted_in(plan)) for row in SIMULATIONS if asked(row, job)]


def wanted_in(plan: Plan) -> Wanted:
    """Whether a node runs on the device: quantized ones do."""

    def wanted(node: ir.Node) -> bool:
        decision = plan.nodes.get(node.name or "")
        return decision is not None and decision.quantized

    return wanted


def asked(row: Simulation, job: Job) -> bool:
    """Whether the job has this rewrite: in NPU flows, and where ``SimulateDPU`` or its own option is written down."""
    if not job.options.SimulateDPU:
        return False
    given = getattr(job.options, row.option)
    wanted = job.npu or "SimulateDPU" in job.options.model_fields_set
    return (row.by_default and wanted) if given is None else bool(given)
