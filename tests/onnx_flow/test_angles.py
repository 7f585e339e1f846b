"""What a sine or cosine is taken of stays float: positions, times, coordinates, and what layers give to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.qdq.angles import ANGLE, NoData, makes_angles

RNG = np.random.default_rng(0)
FREQUENCIES = (1 / 10000 ** (np.arange(8) / 8)).astype(np.float32)
END = "sine = Sin (angle) cosine = Cos (angle) both = Concat <axis = -1> (sine, cosine) y = MatMul (both, w)"
#: Name -> (input, its values, the graph up to the angle, the nodes that stay float, by their results).
FORMS: dict[str, tuple[str, Any, str, str]] = {
    "rotary positions": (
        "int64[6] x",
        lambda: RNG.integers(0, 900, 6),
        "f = Cast <to = 1> (x) c = Unsqueeze (f, last) p = MatMul (c, row) angle = Identity (p)",
        "c p angle f",
    ),
    "a time": (
        "float[6,1] x",
        lambda: RNG.integers(0, 900, (6, 1)).astype(np.float32),
        "p = Mul (x, row) angle = Mul (p, two)",
        "p angle",
    ),
    "coordinates": (
        "float[6,2] x",
        lambda: RNG.random((6, 2), np.float32),
        "p = MatMul (x, directions) angle = Mul (p, two)",
        "p angle",
    ),
    "a layer": (
        "float[6,8] x",
        lambda: RNG.normal(size=(6, 8)).astype(np.float32),
        "h = MatMul (x, square) r = Relu (h) p = MatMul (r, square) angle = Mul (p, four)",
        "angle",
    ),
}


def model_of(name: str) -> onnx.ModelProto:
    """A form, with a layer behind the sine."""
    given, _, body, _ = FORMS[name]
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({given}) => (float[6,4] y) {{ {body} {END} }}'
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(1)
    weights = {
        "row": FREQUENCIES[None], "two": np.float32(2), "four": np.float32(4), "last": np.int64([1]),
        "directions": rng.normal(0, 5, (2, 8)), "square": rng.normal(0, 0.5, (8, 8)), "w": rng.normal(0, 0.3, (16, 4)),
    }  # fmt: skip
    for key, value in weights.items():
        kept = np.asarray(value) if key == "last" else np.asarray(value, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(kept, key))
    for node in model.graph.node:
        node.name = node.output[0]
    return model


@pytest.mark.parametrize("name", FORMS)
def test_the_nodes_that_make_an_angle_stay_float(name: str) -> None:
    model = ir.from_proto(model_of(name))
    infer_shapes(model)
    nodes, values = makes_angles(model)
    assert {str(node.name) for node in nodes} == set(FORMS[name][3].split())
    assert {"angle"} <= {str(value.name) for value in values}
    assert {node for node, why in NoData.of(model).nodes.items() if why == ANGLE} == nodes


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "UINT8_DYNAMIC_QUANT"])
@pytest.mark.parametrize("name", FORMS)
def test_8_bits_are_near_float(name: str, preset: str) -> None:
    model, make = model_of(name), FORMS[name][1]
    feeds = [{"x": make()} for _ in range(16)]
    config = get_default_config(preset)
    config.extra_options.update(PrintSummary=False)
    made = ModelQuantizer(Config(config)).quantize_model(model, None, feeds)
    assert made is not None
    sessions = [onnxruntime.InferenceSession(one.SerializeToString()) for one in (model, made)]
    wanted, found = (np.stack([session.run(None, feed)[0] for feed in feeds]) for session in sessions)
    assert 10 * np.log10(np.square(wanted).sum() / np.square(wanted - found).sum()) > 19


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = MatMul (x, w) b = Mul (a, two) y = Sin (b)", "b"),
        ("a = MatMul (x, w) b = Mul (a, two) c = Sin (b) y = Add (a, c)", "b"),  # Snake: a is data too
        ("a = MatMul (x, w) b = Mul (a, two) c = Sin (b) y = Add (b, c)", ""),  # so is b
        ("a = MatMul (x, w) b = Relu (a) y = Tan (b)", ""),  # an activation function is no arithmetic
        ("a = MatMul (x, w) y = Mul (a, two)", ""),
        ("a = Transpose (x) b = Sub (a, two) c = Div (b, two) d = Neg (c) y = Cos (d)", "a b c d"),
    ],
)
def test_what_else_reads_it_ends_the_chain(body: str, expected: str) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 17]> g (float[8,8] x) => (float[8,8] y) {{ {body} }}'
    proto = onnx.parser.parse_model(text)
    weights = {"w": np.eye(8, dtype=np.float32), "two": np.float32(2)}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in weights.items())
    model = ir.from_proto(proto)
    infer_shapes(model)
    assert {str(node.outputs[0].name) for node in makes_angles(model)[0]} == set(expected.split())


@pytest.mark.parametrize(("size", "left"), [(4, True), (5, False)])
def test_products_over_a_few_numbers_are_of_coordinates(size: int, left: bool) -> None:
    head = f'<ir_version: 8, opset_import: ["" : 17]> g (float[6,{size}] x) => (float[6,8] y)'
    text = head + " { a = MatMul (x, w) y = Sin (a) }"
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((size, 8), np.float32), "w"))
    model = ir.from_proto(proto)
    infer_shapes(model)
    nodes, values = makes_angles(model)
    assert bool(nodes) == left and {str(value.name) for value in values} == {"a"}
