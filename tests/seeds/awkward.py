"""A network of awkward shapes: numbers of channels differ, images are not squares, the batch is free.

Two inputs and two outputs; a convolution with bias, a depthwise and a grouped one, a transposed one, a normalization, a
Gemm with a turned weight and one without, a MatMul without bias, pools, a concatenation, and activations of many kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from tests.onnx_flow import models

from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig
from quark.onnx.flow import Result
from quark.onnx.shapeshifter import transform

GRAPH = """
net (float[N, 6, 9, 7] x, float[N, 5] z) => (float[N, 3] y, float[N, 4, 5, 3] image) {
    [first] a = Conv <pads = [1, 0, 1, 1], kernel_shape = [3, 2]> (x, w1, b1)
    [norm] n = BatchNormalization (a, n_scale, n_bias, n_mean, n_var)
    [relu] r = Relu (n)
    [depthwise] d = Conv <group = 10, pads = [1, 1, 1, 1], kernel_shape = [3, 3]> (r, w2, b2)
    [leaky] l = LeakyRelu <alpha = 0.1> (d)
    [grouped] g = Conv <group = 2, strides = [2, 2], kernel_shape = [1, 1]> (l, w3, b3)
    [clip] c = Clip (g, zero, six)
    [up] u = ConvTranspose <group = 2, kernel_shape = [1, 1]> (c, w4, b4)
    [gate] s = Sigmoid (u)
    [gated] m = Mul (u, s)
    [joined] j = Concat <axis = 1> (c, m)
    [small] p = MaxPool <kernel_shape = [2, 1], pads = [0, 0, 1, 0], strides = [1, 1]> (c)
    [image] image = Slice (p, from, to, axes, steps)
    [mean] q = GlobalAveragePool (j)
    [flat] f = Flatten (q)
    [turned] h = Gemm <transB = 1> (f, w5, b5)
    [plain] k = Gemm (z, w6, b6)
    [sum] t = Add (h, k)
    [last] v = MatMul (t, w7)
    [odds] y = Softmax (v)
}"""


def _int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@cache
def weights() -> Mapping[str, np.ndarray]:
    return {
        "w1": models.normal(10, 6, 3, 2, seed=1) * 0.2,
        "b1": models.normal(10, seed=2),
        **models.batch_norm("n", 10),
        "w2": models.normal(10, 1, 3, 3, seed=3) * 0.4,
        "b2": models.normal(10, seed=4),
        "w3": models.normal(4, 5, 1, 1, seed=5) * 0.6,
        "b3": models.normal(4, seed=6) + 2,
        "w4": models.normal(4, 4, 1, 1, seed=7) * 0.4,
        "b4": models.normal(8, seed=8),
        "w5": models.normal(11, 12, seed=9) * 0.3,
        "b5": models.normal(11, seed=10),
        "w6": models.normal(5, 11, seed=11) * 0.4,
        "b6": models.normal(11, seed=12),
        "w7": models.normal(11, 3, seed=13) * 0.4,
        "zero": np.float32(0).reshape(()),
        "six": np.float32(6).reshape(()),
        "from": _int64(0, 0),
        "to": _int64(5, 3),
        "axes": _int64(2, 3),
        "steps": _int64(1, 1),
    }


def network(opset: int = 17) -> onnx.ModelProto:
    """The network as a model of its own."""
    return models.model(GRAPH, weights(), opset=opset)


def samples(count: int = 4, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Samples of different batch sizes."""
    rng = np.random.default_rng(seed)
    shapes = {"x": (6, 9, 7), "z": (5,)}
    return [
        {name: rng.standard_normal((1 + k % 3, *shape)).astype(np.float32) for name, shape in shapes.items()}
        for k in range(count)
    ]


class Reader:
    """A reader as the documents have it: get_next, and nothing else."""

    def __init__(self, data: Sequence[Mapping[str, np.ndarray]]) -> None:
        self.left = iter(data)

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        """The next sample, or None."""
        return next(self.left, None)


def eight(**spec: Any) -> QLayerConfig:
    """Eight bits everywhere."""
    given = {"calibration_method": CalibMethod.MinMax, **spec}
    return QLayerConfig(input_tensors=Int8Spec(**given), weight=Int8Spec(**given))


def half(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model as float16."""
    return transform(proto, {"passes": {"convert_fp32_to_half": {"keep_io_types": False}}}).proto


def quantized(
    layer: QLayerConfig | None = None,
    proto: onnx.ModelProto | None = None,
    feeds: Sequence[Mapping[str, np.ndarray]] | None = None,
    **options: Any,
) -> Result:
    """What becomes of the network, or of another model, with a reader that can be read once."""
    config = QConfig(layer or eight(), extra_options={"PrintSummary": False, **options})
    result = ModelQuantizer(config).run(proto or network(), None, Reader(feeds or samples()))
    assert result.proto is not None
    return result


def decibels(proto: onnx.ModelProto, reference: onnx.ModelProto | None = None) -> float:
    """SQNR of the worse output on samples that were not calibrated on."""
    runs = [models.session(one) for one in (proto, reference or network())]
    worst = np.inf
    for place in range(2):
        noise = signal = 0.0
        for sample in samples(3, seed=9):
            found, exact = (run.run(None, sample)[place].astype(np.float64) for run in runs)
            noise, signal = noise + float(np.square(found - exact).sum()), signal + float(np.square(exact).sum())
        worst = min(worst, 10 * np.log10(signal / max(noise, 1e-30)))
    return float(worst)
