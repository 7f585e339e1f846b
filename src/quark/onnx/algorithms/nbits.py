"""GPTQ for ``UseMatMulNBits``: weights in few bits and groups, rounded for what the layers read.

Scales and zero points are those of rounding to nearest (``nbits_algorithms.nearest``); GPTQ chooses the codes. The
weights of the model become values on that grid, and the Plan gets its parameters, so that the codes are written as they
are. A layer reads what the layers before it, already rounded, make. ``GPTQConfig`` in ``algo_config`` gives the block
size, the damping and the order; bits, groups and symmetry are those of ``MatMulNBitsParams``.

Few samples fit anything: a layer that reads fewer than ``PLENTY`` rows per input feature is rounded on each half of
the data first, and judged on the other half. Where it is no better there than rounded to nearest, it is left to that.

Not handled: Gather and weights that several nodes read, which are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir

from quark.algorithms.columns import Columns
from quark.algorithms.gptq import gptq, loss
from quark.config.nbits import NBits, parse_nbits
from quark.config.plan import Plan
from quark.errors import ConfigError
from quark.numerics.elements import Element
from quark.numerics.formats import get_format
from quark.onnx.algorithms.context import Context
from quark.onnx.algorithms.gptq import mean_moments, moments_in_halves
from quark.onnx.algorithms.linear import Linear, linear_of
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.algorithms.walk import Walk
from quark.onnx.graph.report import PassReport
from quark.onnx.qdq.nbits_algorithms import ALGORITHMS, nearest
from quark.onnx.quantization.config.algorithm import AlgoConfig, GPTQConfig

_STAGE = "nbits_gptq"
#: Rows of data per input feature from which on chance has no part.
PLENTY = 16


def run(model: ir.Model, plan: Plan, tuning: Sequence[AlgoConfig], context: Context) -> list[PassReport]:
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
    layers = [layer for layer in map(linear_of, model.graph) if layer is not None and _own(layer, plan)]
    reads = [_source(layer) for layer in layers]
    feeds = feeds_of(model, context)
    walk = Walk(model, feeds, reads, options.ExecutionProviders, options.UserCustomOpLibPath)
    better = 0
    for done, (layer, name) in enumerate(zip(layers, reads, strict=True), 1):
        finished = context.resume.done(_STAGE, layer.name)
        inputs = (sample[name] for sample in walk.advance([name]))
        arrays = _rounded(layer.weight, inputs, nbits, config) if finished is None else finished
        if finished is None:
            context.resume.finish(_STAGE, layer.name, arrays)
        if arrays["better"]:
            better += 1
            tensor = plan.tensors[str(layer.node.inputs[1].name)]  # type: ignore[union-attr]
            plan.put(replace(tensor, scale=arrays["scale"], zero_point=arrays["zero_point"]))
            layer.write(arrays["weight"])
        context.progress(_STAGE, done, len(layers))
    return [PassReport(_STAGE, better)]


def _config(nbits: NBits, tuning: Sequence[AlgoConfig]) -> GPTQConfig | None:
    """How GPTQ runs; ``None`` where nothing needs data."""
    wanted = ALGORITHMS[nbits.Algorithm].needs_data
    for one in tuning:
        if not isinstance(one, GPTQConfig):
            raise ConfigError(
                f"algo_config: {type(one).__name__} cannot tune what UseMatMulNBits stores; GPTQConfig can"
            )
        if not wanted:
            raise ConfigError(
                f"algo_config: GPTQConfig has no part in MatMulNBitsParams with Algorithm {nbits.Algorithm!r}; set "
                "MatMulNBitsParams={'Algorithm': 'GPTQ'}"
            )
        _check_fields(nbits, one)
        return one
    return GPTQConfig() if wanted else None


def _check_fields(nbits: NBits, config: GPTQConfig) -> None:
    """What MatMulNBitsParams says, GPTQConfig may repeat, and not contradict."""
    said = {"bits": nbits.Bits, "group_size": nbits.GroupSize, "weight_symmetric": nbits.Symmetric}
    for name, value in config.to_dict().items():
        if name in ("per_channel", "mse") or (name in said and value != said[name]):
            there = f": {said[name]!r}" if name in said else ""
            raise ConfigError(
                f"GPTQConfig: the field {name} cannot be {value!r} with UseMatMulNBits: MatMulNBitsParams says what "
                f"the weights become{there}"
            )


def _own(layer: Linear, plan: Plan) -> bool:
    """Whether the layer is to be stored in few bits, and nothing else reads its weight."""
    decision, value = plan.nodes.get(layer.name), layer.node.inputs[1]
    return decision is not None and decision.quantized and value is not None and len(value.uses()) == 1


def _source(layer: Linear) -> str:
    return "" if layer.node.inputs[0] is None else str(layer.node.inputs[0].name)


def _rounded(
    weight: np.ndarray, inputs: Iterable[np.ndarray], nbits: NBits, config: GPTQConfig
) -> dict[str, np.ndarray]:
    """The weight [out, in] on its grid, the grid's parameters, and whether it is better than rounded to nearest."""
    weight, columns = np.asarray(weight, np.float32), weight.shape[1]
    totals, counts = moments_in_halves(inputs, columns)
    blocks = nearest(weight, nbits)
    middle = np.full(blocks.scales.shape, 1 << (nbits.Bits - 1), np.uint8)
    points = middle if blocks.zero_points is None else blocks.zero_points
    step, zero = (
        np.repeat(side.astype(np.float32), nbits.GroupSize, 1)[:, :columns] for side in (blocks.scales, points)
    )
    kind = get_format(f"uint{nbits.Bits}")
    if not isinstance(kind, Element):
        raise TypeError(f"{kind.name} has no codes")
    found = _tuned(weight, totals, counts, Columns(kind, step, zero), config)
    parameters = {"scale": blocks.scales, "zero_point": points}
    return {"weight": weight if found is None else found, "better": np.array(found is not None), **parameters}


def _tuned(
    weight: np.ndarray, totals: np.ndarray, counts: np.ndarray, grid: Columns, config: GPTQConfig
) -> np.ndarray | None:
    """The weight on its grid, or None where rounding to nearest is as good; ``moments_in_halves`` of the data."""
    run = partial(gptq, grid=grid, block_size=config.block_size, damping=config.perc_damp, act_order=config.act_order)
    nearest_error = np.asarray(grid.round(weight)) - weight
    whole = mean_moments(totals.sum(0), int(counts.sum()))
    if counts.sum() < PLENTY * weight.shape[1]:
        halves = [mean_moments(total, int(count)) for total, count in zip(totals, counts, strict=True)]
        if not counts.all() or not all(
            _less(np.asarray(run(weight, fit)) - weight, nearest_error, judge) for fit, judge in (halves, halves[::-1])
        ):
            return None
    found = np.asarray(run(weight, whole))
    return found if _less(found - weight, nearest_error, whole) else None


def _less(error: np.ndarray, other: np.ndarray, hessian: np.ndarray) -> bool:
    """Whether one error of a weight changes outputs less than another."""
    return float(loss(error, hessian).sum()) < float(loss(other, hessian).sum())
