"""The graph as the NPU computes it (``SimulateDPU``): one row per operator that its fixed-point arithmetic changes.

Runs after calibration, so that ranges are those of the float model, and only on nodes that are quantized: what stays
float does not run on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from quark.config.job import Job
from quark.config.plan import Plan
from quark.dataclass import dataclass
from quark.ir.surgery import Names, name_of
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.rewriting import rewrite_each
from quark.onnx.npu import fixed_point, softmax

Wanted = Callable[[ir.Node], bool]


@dataclass(frozen=True)
class Simulation:
    """One rewrite.

    Attributes:
        option: that decides about it.
        name: in reports.
        types: operators that it rewrites.
        look: what is found at a node, or why it stays.
        rewrite: is given the node, what was found, and the names in use; False: nothing changed.
        by_default: whether NPU flows do it unless told otherwise.
        another: the function that it puts in the place of another one; empty where it corrects by a constant factor.
    """

    option: str
    name: str
    types: tuple[str, ...]
    look: Callable[[ir.Node], Any]
    rewrite: Callable[[ir.Node, Any, Names], object]
    by_default: bool = True
    another: str = ""

    def run(self, model: ir.Model, wanted: Wanted) -> PassReport:
        """Rewrite the wanted nodes of ``model`` in place."""
        nodes = [node for node in model.graph if node.op_type in self.types and node.domain == "" and wanted(node)]
        return rewrite_each(model, self.name, nodes, self.look, self.rewrite)


def _as_it_is(node: ir.Node) -> ir.Node:
    return node


def _factor(option: str, name: str, types: tuple[str, ...], factor: Callable[[ir.Node], float | str]) -> Simulation:
    return Simulation(option, name, types, factor, fixed_point.multiply)


#: In the order in which they run: a Sigmoid that became a HardSigmoid is corrected as one.
SIMULATIONS: tuple[Simulation, ...] = (
    Simulation(
        *("ConvertLeakyReluToDPUVersion", "dpu_leaky_relu", ("LeakyRelu",)),
        *(fixed_point.slope_of, fixed_point.set_slope),
    ),
    Simulation(
        *("ConvertSigmoidToHardSigmoid", "dpu_sigmoid", ("Sigmoid",)),
        *(_as_it_is, fixed_point.to_hard_sigmoid),
        another="HardSigmoid for Sigmoid",
    ),
    _factor("ConvertHardSigmoidToDPUVersion", "dpu_hard_sigmoid", ("HardSigmoid",), fixed_point.of_sixth),
    _factor(
        "ConvertAvgPoolToDPUVersion", "dpu_average_pool", ("AveragePool", "GlobalAveragePool"), fixed_point.of_pool
    ),
    _factor("ConvertReduceMeanToDPUVersion", "dpu_reduce_mean", ("ReduceMean",), fixed_point.of_mean),
    Simulation(
        *("ConvertSoftmaxToDPUVersion", "dpu_softmax", ("Softmax",)),
        *(_as_it_is, softmax.rewrite),
        by_default=False,
        another="a polynomial for Softmax",
    ),
    Simulation(
        *("ConvertInstanceNormToDPUVersion", "dpu_instance_norm", ("InstanceNormalization",)),
        *(_as_it_is, fixed_point.to_own_operator),
        by_default=False,
    ),
    Simulation(
        *("ConvertClipToDPUVersion", "dpu_clip", ("Clip",)),
        *(fixed_point.bounds_of, fixed_point.make_whole),
        by_default=False,
        another="Clip with whole bounds",
    ),
)


def simulate(model: ir.Model, plan: Plan, job: Job) -> list[PassReport]:
    """Rewrite ``model`` in place to what the device computes; reports of what was rewritten."""
    return [row.run(model, wanted_in(plan)) for row in SIMULATIONS if asked(row, job)]


def wanted_in(plan: Plan) -> Wanted:
    """Whether a node runs on the device: quantized ones do."""

    def wanted(node: ir.Node) -> bool:
        decision = plan.nodes.get(name_of(node))
        return decision is not None and decision.quantized

    return wanted


def asked(row: Simulation, job: Job) -> bool:
    """Whether the job has this rewrite: in NPU flows, and where ``SimulateDPU`` or its own option is written down."""
    if not job.options.SimulateDPU:
        return False
    given = getattr(job.options, row.option)
    wanted = job.npu or "SimulateDPU" in job.options.given
    return (row.by_default and wanted) if given is None else bool(given)
