"""ONNX Runtime's fused integer kernels answer as the file says, for values of every size.

The judge is the runtime itself, with its graph optimizations off: there each operator computes in float between its
DequantizeLinear and QuantizeLinear. A fused kernel may round another way at a tie, by one code of a few hundred.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models
from tests.pairs import pairs

from quark.onnx import Config, ModelQuantizer, get_default_config

ATTENTION = "r = Reshape(x, ROWS) t = Transpose<perm = [0, 1, 3, 2]>(r) h = MatMul(r, t) s = Softmax<axis = -1>(h)"
BODIES = {  # what one operator makes of x, and how long its last axis is
    "Softmax of 3": ("r = Reshape(x, rows3) s = Softmax<axis = -1>(r)", 3),
    "Softmax of 12": ("s = Softmax<axis = -1>(x)", 12),
    "Softmax of 240": ("r = Reshape(x, rows240) s = Softmax<axis = -1>(r)", 240),
    "attention over 3": (ATTENTION.replace("ROWS", "of3"), 3),
    "attention over 10": (ATTENTION.replace("ROWS", "of10"), 10),
    "attention over 120": (ATTENTION.replace("ROWS", "of120"), 120),
    "Sigmoid": ("s = Sigmoid(x)", 12),
    "LeakyRelu": ("s = LeakyRelu<alpha = 0.1>(x)", 12),
    "Add": ("t = Reshape(x, turned) u = Transpose<perm = [0, 1, 3, 2]>(t) s = Add(x, u)", 12),
    "Mul": ("t = Reshape(x, turned) u = Transpose<perm = [0, 1, 3, 2]>(t) s = Mul(x, u)", 12),
    "Concat": ("t = Sigmoid(x) s = Concat<axis = 1>(x, t)", 12),
    "AveragePool": ("s = AveragePool<kernel_shape = [2, 2]>(x)", 11),
    "GlobalAveragePool": ("s = GlobalAveragePool(x)", 1),
    "MatMul": ("t = Transpose<perm = [0, 1, 3, 2]>(x) s = MatMul(x, t)", 10),
    "MaxPool": ("s = MaxPool<kernel_shape = [2, 2]>(x)", 11),
}
SIZES = {"tiny": (1e-5, 0.0), "small": (0.02, 0.0), "one": (1.0, 0.0), "large": (1e4, 0.0), "far from 0": (1.0, 40.0)}
#: Presets, and the operators that they quantize (all); what is left in float between integer layers is fused, too.
CASES = [("A8W8_CPU", []), ("A8W8", []), ("XINT8", []), ("A8W8_CPU", ["MatMul"]), ("A8W8", ["MatMul"])]


def graph(body: str, length: int) -> onnx.ModelProto:
    """The operator on pictures of 10 x 12, and a layer that reads what it makes."""
    sizes = {"rows3": [2, 6, 40, 3], "rows240": [2, 3, 240], "turned": [2, 6, 12, 10], "of3": [1, 160, 3, 3]}
    sizes |= {"of10": [2, 6, 10, 12], "of120": [1, 1, 120, 12]}
    given = {name: np.array(size) for name, size in sizes.items() if f" {name})" in body}
    weights = {"w": models.normal(length, 16, seed=1), "w2": models.normal(16, 16, seed=2)}
    text = f"g (float[2, 6, 10, 12] x) => (float y) {{ {body} [layer] z = MatMul(s, w) [last] y = MatMul(z, w2) }}"
    proto = models.model(text, {**weights, **given})
    proto.graph.output[0].type.Clear()
    return onnx.shape_inference.infer_shapes(proto, strict_mode=True)


def answers(path: Path, sample: dict[str, np.ndarray], level: onnxruntime.GraphOptimizationLevel) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 3
    found: np.ndarray = onnxruntime.InferenceSession(path, options).run(None, sample)[0]
    return found


@pytest.mark.parametrize(("name", "size", "case"), pairs(BODIES, SIZES, CASES))
def test_a_fused_kernel_answers_as_the_file_says(
    name: str, size: str, case: tuple[str, list[str]], tmp_path: Path
) -> None:
    preset, types = case
    spread, middle = SIZES[size]
    chance = np.random.default_rng(5)
    samples = [{"x": (middle + spread * chance.normal(size=(2, 6, 10, 12))).astype(np.float32)} for _ in range(3)]
    config = Config(global_quant_config=get_default_config(preset))
    config.global_quant_config.op_types_to_quantize = types
    ModelQuantizer(config).quantize_model(graph(*BODIES[name]), tmp_path / "q.onnx", samples)
    levels = onnxruntime.GraphOptimizationLevel
    plain, fused = (
        answers(tmp_path / "q.onnx", samples[0], one) for one in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_ALL)
    )
    assert np.linalg.norm(plain - fused) <= 0.1 * np.linalg.norm(plain)
