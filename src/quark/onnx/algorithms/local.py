"""What rounding costs the linear layers that read one tensor, under a change of its channels: measured, not assumed.

    loss(T) = mean over the layers   ‖ X Wᵀ − Q(X T) Q(W T⁻ᵀ)ᵀ ‖² / ‖ X Wᵀ ‖²

T is what a transformation does to the channels (a diagonal, a rotation), Q the rounding that the job gives the tensor
and the weights. X are rows of the calibration data, spread evenly over the samples, as many as ``BUDGET`` holds.

Not handled: what the layers before and behind do to the error; ``guard.py`` looks at the outputs of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from quark.config.nbits import NBits, parse_nbits
from quark.config.options import Options
from quark.config.plan import Plan, TensorPlan
from quark.config.tensor import TensorSpec
from quark.dataclass import dataclass
from quark.ir.surgery import input_name
from quark.numerics.granularity import Granularity, Group
from quark.onnx.algorithms.context import JobContext
from quark.onnx.algorithms.linear import Linear
from quark.onnx.algorithms.samples import feeds_of
from quark.onnx.graph.run import Runner
from quark.onnx.graph.session import Runtime
from quark.onnx.qdq.modes import MODES
from quark.onnx.qdq.nbits_algorithms import nearest, values_of
from quark.onnx.qdq.parameters import from_range, weight_range
from quark.onnx.qdq.settings import request_of

#: Bytes of all rows together, and the fewest and most rows of a tensor.
BUDGET, FEWEST, MOST = 1 << 28, 64, 2048
Change = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Seen:
    """A tensor on the calibration data: every channel's largest and mean magnitude, and some rows [n, channels]."""

    largest: np.ndarray
    mean: np.ndarray
    rows: np.ndarray


def look(
    model: ir.Model, found: Mapping[ir.Value, Sequence[Linear]], context: JobContext, stage: str
) -> dict[str, Seen]:
    """Magnitudes and rows of the tensors, by name; one sample is in memory at a time.

    Raises:
        DataError: there is no calibration data.
    """
    options, feeds = context.job.options, feeds_of(model, context)
    widths = {str(value.name): layers[0].weight.shape[1] for value, layers in found.items()}
    runner = Runner(model, widths, (), Runtime.of(options))
    rows = min(max(BUDGET // (4 * sum(widths.values())), FEWEST), MOST)
    share = -(-rows // max(len(feeds), 1))
    largest = {name: np.zeros(width, np.float32) for name, width in widths.items()}
    total, count = {name: np.zeros(width) for name, width in widths.items()}, dict.fromkeys(widths, 0)
    kept: dict[str, list[np.ndarray]] = {name: [] for name in widths}
    for done, feed in enumerate(feeds, 1):
        seen = runner.run(feed).values
        for name, width in widths.items():
            array = np.asarray(seen[name], np.float32).reshape(-1, width)
            if len(array):
                size = np.abs(array)
                np.maximum(largest[name], size.max(0), out=largest[name])
                total[name] += size.sum(0, dtype=np.float64)
                count[name] += len(array)
                kept[name].append(array[:: -(-len(array) // share)].copy())
        context.progress(stage, done, len(feeds))
    empty = {name: np.zeros((0, width), np.float32) for name, width in widths.items()}
    mean = {name: (total[name] / max(count[name], 1)).astype(np.float32) for name in widths}
    return {name: Seen(largest[name], mean[name], np.concatenate([empty[name], *kept[name]])) for name in widths}


@dataclass(frozen=True)
class RoundingJudge:
    """Knows how a job rounds the tensors of a model before anything is changed."""

    plan: Plan
    options: Options
    nbits: NBits | None = None

    def tensor_of(self, layer: Linear) -> TensorPlan | None:
        """What the plan says of a layer's weight; None: it stays float."""
        return self.plan.tensors.get(input_name(layer.node, 1))

    def granularity_of(self, layer: Linear) -> Granularity | None:
        """Which weights of a layer share a scale."""
        tensor = self.tensor_of(layer)
        return None if tensor is None else tensor.spec.granularity

    def loss(
        self, value: ir.Value, layers: Sequence[Linear], rows: np.ndarray, change: Change, inverse: Change
    ) -> float:
        """The loss of a change of the channels.

        Args:
            rows: of the tensor ``value`` that the layers read.
            change, inverse: what becomes of rows [n, channels] of the tensor and of the weights.
        """
        data = self.rounded_rows(value, change(rows))
        return float(np.mean([self._of(layer, rows, data, inverse) for layer in layers]))

    def rounded_weight(self, layer: Linear, weight: np.ndarray) -> np.ndarray:
        """A weight [out, in] for ``layer`` as the job rounds it."""
        tensor = self.tensor_of(layer)
        if tensor is None:
            return weight
        if self.nbits is not None:
            return values_of(nearest(weight, self.nbits), self.nbits.Bits, weight.shape[1])
        stored = weight if layer.transposed else np.ascontiguousarray(weight.T)
        bounds = weight_range(stored, tensor.spec, tensor.name)
        found = _round(stored, tensor.spec, bounds, self.options.WeightScaled)
        return found if layer.transposed else found.T

    def _of(self, layer: Linear, rows: np.ndarray, data: np.ndarray, inverse: Change) -> float:
        weight = np.asarray(layer.weight, np.float32)
        turned = self.rounded_weight(layer, np.asarray(inverse(weight), np.float32))
        expected = rows @ weight.T
        noise = np.square(data @ turned.T - expected, dtype=np.float64).sum()
        return float(noise / max(np.square(expected, dtype=np.float64).sum(), 1e-300))

    def rounded_rows(self, value: ir.Value, rows: np.ndarray) -> np.ndarray:
        """Rows [n, channels] for the tensor ``value`` as the job rounds it."""
        tensor = self.plan.tensors.get(str(value.name))
        if tensor is None:
            return rows
        request = request_of(tensor.spec, self.options)
        statistic = request.search.observe(request.settings)
        statistic.update(rows)
        found = request.search.find(statistic, request.grid, request.settings)
        blocks = tensor.spec.granularity
        spec = replace(tensor.spec, granularity=replace(blocks, axis=1)) if isinstance(blocks, Group) else tensor.spec
        return _round(rows, spec, found, self.options.ActivationScaled)  # channels are the last axis of the tensor


def judge_of(model: ir.Model, context: JobContext) -> RoundingJudge:
    """The judge of a model as it is."""
    job = context.job
    nbits = parse_nbits(job.options.MatMulNBitsParams) if job.mode == "nbits" else None
    return RoundingJudge(MODES[job.mode].place(model.clone(), job, context.known), job.options, nbits)


def _round(values: np.ndarray, spec: TensorSpec, found: tuple[Any, Any], scaled: bool) -> np.ndarray:
    one = (np.float32(1), np.int64(0))
    scale, zero_point = one if spec.row.unit_scale and not scaled else from_range(spec, *found, scaled)
    return np.asarray(spec.coding.fake_quantize(values, scale, zero_point))
