"""GPTQ, GPTAQ and Qronos for ``UseMatMulNBits``: weights in few bits and groups, rounded for what the layers read.

Scales and zero points are those of rounding to nearest (``nbits_algorithms.nearest``); the algorithm chooses the codes.
The weights of the model become values on that grid, and the Plan gets its parameters, so that the codes are written as
they are. A layer reads what the layers before it, already rounded, make. ``GPTQConfig`` (the default), ``GPTAQConfig``,
``QronosConfig`` or a registered algorithm in ``algo_config`` rounds; bits, groups and symmetry are those of
``MatMulNBitsParams``.

Few samples fit anything: a layer that reads fewer than ``PLENTY`` rows per input feature is rounded on each half of
the data first, and judged on the other half. Where it is no better there than rounded to nearest, it is left to that.

Not handled: Gather and weights that several nodes read, which are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.algorithms.columns import Columns
from quark.algorithms.own import OWN
from quark.algorithms.rounders import ROUNDERS, rounder_of
from quark.config.nbits import NBits, parse_nbits
from quark.config.plan import Plan
from quark.errors import ConfigError
from quark.ir.surgery import input_name
from quark.numerics.elements import Element
from quark.numerics.formats import get_format
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.gptq import LayerInputs, lost, on_grid
from quark.onnx.algorithms.layers import named
from quark.onnx.algorithms.linear import Linear, linear_of
from quark.onnx.algorithms.moments import Moments, Pair, in_halves
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.graph.report import PassReport
from quark.onnx.qdq.nbits_algorithms import ALGORITHMS, nearest
from quark.onnx.quantization.config.algorithm import ALGO_NAME_TO_CLASS, AlgoConfig, GPTQConfig

#: Rows of data per input feature from which on chance has no part.
PLENTY = 16


def run(model: ir.Model, plan: Plan, tuning: Sequence[AlgoConfig], context: JobContext) -> list[PassReport]:
    """Round the layers of the Plan, in place, where the chosen algorithm needs data.

    Raises:
        ConfigError: an algorithm that has no part in this mode, or a field that says otherwise than the parameters.
        DataError: there is no calibration data.
    """
    options = context.job.options
    nbits = parse_nbits(options.MatMulNBitsParams)
    config = _config(nbits, tuning)
    if config is None:
        return []
    wanted = named(model, config.layers)
    found = [layer for layer in map(linear_of, model.graph) if layer is not None and _own(layer, plan)]
    layers = [layer for layer in found if wanted is None or layer.name in wanted]
    reads = [_source(layer) for layer in layers]
    beside = (model.clone(), reads) if rounder_of(config).paired else None
    walks = LayerInputs(model, reads, context, feeds_of(model, context), beside)
    stage, better = f"nbits_{config.name}", 0
    for done, (layer, name) in enumerate(zip(layers, reads, strict=True), 1):
        finished = context.journal.arrays(f"{stage} {layer.name}")
        inputs = walks.of(name, name)
        arrays = _rounded(layer.weight, inputs, nbits, config) if finished is None else finished
        if finished is None:
            context.journal.finish_arrays(f"{stage} {layer.name}", arrays)
        if arrays["better"]:
            better += 1
            tensor = plan.tensors[input_name(layer.node, 1)]
            plan.put(replace(tensor, scale=arrays["scale"], zero_point=arrays["zero_point"]))
            layer.write(arrays["weight"])
        context.progress(stage, done, len(layers))
    return [PassReport(stage, better)]


def _config(nbits: NBits, tuning: Sequence[AlgoConfig]) -> Any:
    """The algorithm and its settings; ``None`` where nothing needs data."""
    wanted = ALGORITHMS[nbits.Algorithm].needs_data
    names = [type(one).__name__ for one in tuning]
    for one, name in zip(tuning, names, strict=True):
        if one.own is None and one.name not in ROUNDERS:
            able = ", ".join((*(ALGO_NAME_TO_CLASS[name].__name__ for name in ROUNDERS), *OWN))
            raise ConfigError(f"algo_config: {name} cannot tune what UseMatMulNBits stores; allowed: {able}")
        if not wanted:
            raise ConfigError(
                f"algo_config: {name} has no part in MatMulNBitsParams with Algorithm {nbits.Algorithm!r}; set "
                "MatMulNBitsParams={'Algorithm': 'GPTQ'}"
            )
        if one.own is None:  # settings of a registered algorithm are its own, whatever they are called
            _check_fields(nbits, one)
    if len(tuning) > 1:
        raise ConfigError(f"algo_config: {', '.join(names)} would round the same weights for UseMatMulNBits; keep one")
    return tuning[0] if tuning else GPTQConfig() if wanted else None


def _check_fields(nbits: NBits, config: AlgoConfig) -> None:
    """What MatMulNBitsParams says, an algorithm may repeat, and not contradict."""
    said = {"bits": nbits.Bits, "group_size": nbits.GroupSize, "weight_symmetric": nbits.Symmetric}
    for name, value in config.to_dict().items():
        if name in ("per_channel", "mse") or (name in said and value != said[name]):
            there = f": {said[name]!r}" if name in said else ""
            raise ConfigError(
                f"{type(config).__name__}: the field {name} cannot be {value!r} with UseMatMulNBits: "
                f"MatMulNBitsParams says what the weights become{there}"
            )


def _own(layer: Linear, plan: Plan) -> bool:
    """Whether the layer is to be stored in few bits, and nothing else reads its weight."""
    decision, value = plan.nodes.get(layer.name), layer.node.inputs[1]
    return decision is not None and decision.quantized and value is not None and len(value.uses()) == 1


def _source(layer: Linear) -> str:
    return input_name(layer.node, 0)


def _rounded(weight: np.ndarray, inputs: Iterable[Pair], nbits: NBits, config: AlgoConfig) -> dict[str, np.ndarray]:
    """The weight [out, in] on its grid, the grid's parameters, and whether it is better than rounded to nearest."""
    weight, columns = np.asarray(weight, np.float32), weight.shape[1]
    halves = in_halves(inputs, columns)
    blocks = nearest(weight, nbits)
    middle = np.full(blocks.scales.shape, 1 << (nbits.Bits - 1), np.uint8)
    points = middle if blocks.zero_points is None else blocks.zero_points
    step, zero = (
        np.repeat(side.astype(np.float32), nbits.GroupSize, 1)[:, :columns] for side in (blocks.scales, points)
    )
    kind = get_format(f"uint{nbits.Bits}")
    if not isinstance(kind, Element):
        raise TypeError(f"{kind.name} has no codes")
    found = _tuned(weight, halves, Columns(kind, step, zero), config)
    parameters = {"scale": blocks.scales, "zero_point": points}
    return {"weight": weight if found is None else found, "better": np.array(found is not None), **parameters}


def _tuned(weight: np.ndarray, halves: tuple[Moments, Moments], grid: Columns, config: AlgoConfig) -> np.ndarray | None:
    """The weight on its grid, or None where rounding to nearest is as good; ``in_halves`` of the data."""
    nearest_weight, whole = np.asarray(grid.round(weight)), (halves[0] + halves[1]).mean

    def better(found: np.ndarray, judge: Moments) -> bool:
        return lost(found, weight, judge) < lost(nearest_weight, weight, judge)

    if whole.count < PLENTY * weight.shape[1]:
        means = [half.mean for half in halves]
        if not all(half.count for half in halves) or not all(
            better(on_grid(weight, fit, grid, config), judge) for fit, judge in (means, means[::-1])
        ):
            return None
    found = on_grid(weight, whole, grid, config)
    return found if better(found, whole) else None
