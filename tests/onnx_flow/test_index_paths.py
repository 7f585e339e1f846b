"""Networks that choose among their own values: everything before a choice is data and is quantized, every place and
size is exact."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from tests.onnx_flow import models
from tests.onnx_flow.random_detectors import Drawing

from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.coverage import Coverage, coverage
from quark.onnx.graph import model as files
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.qdq import slots
from quark.onnx.qdq.index_paths import MAKES_DISCRETE, computes_shapes
from quark.onnx.qdq.op_rules import GENERIC

WIDE = 16


def ints(draw: Drawing, *numbers: int) -> str:
    return draw.constant(np.array(numbers, np.int64))


def backbone(draw: Drawing) -> str:
    """[1, 64, WIDE]: tokens of a small convolutional network."""
    x = draw.down(draw.down("x", 3, 8), 8, WIDE)
    return draw.add("Transpose", draw.add("Reshape", draw.block(x, WIDE), ints(draw, 1, WIDE, -1)), perm=[0, 2, 1])


def linear(draw: Drawing, x: str, wide: int = WIDE) -> str:
    return draw.add("MatMul", x, draw.constant(draw.matrix(WIDE, wide)))


def detector_with_queries(draw: Drawing) -> str:
    """Encoder → scores → TopK → GatherElements → decoder."""
    memory = draw.attend(backbone(draw), WIDE)
    scores = draw.add("ReduceMax", linear(draw, memory, 5), draw.constant(np.array([-1], np.int64)), keepdims=0)
    draw.nodes.append(helper.make_node("TopK", [scores, ints(draw, 8)], ["best", "places"], name="choose"))
    places = draw.add("Tile", draw.add("Unsqueeze", "places", ints(draw, 2)), ints(draw, 1, 1, WIDE))
    return linear(draw, draw.attend(draw.add("GatherElements", memory, places, axis=1), WIDE), 4)


def detector_with_nms(draw: Drawing) -> str:
    """Boxes and scores → NonMaxSuppression → GatherND → a second stage."""
    memory = backbone(draw)
    boxes, scores = linear(draw, memory, 4), draw.add("Transpose", linear(draw, memory, 5), perm=[0, 2, 1])
    limits = [draw.constant(np.array([value], kind)) for value, kind in ((3, np.int64), (0.5, "f4"), (-9, "f4"))]
    chosen = draw.add("NonMaxSuppression", boxes, scores, *limits)
    places = draw.add("Gather", chosen, ints(draw, 0, 2), axis=1)
    return linear(draw, draw.add("GatherND", memory, places))


def matcher(draw: Drawing) -> str:
    """Descriptors of two sets → similarities → the best partner of each → what the two make together."""
    left, right = draw.attend(backbone(draw), WIDE), linear(draw, backbone(draw))
    alike = draw.add("MatMul", left, draw.add("Transpose", right, perm=[0, 2, 1]))
    best = draw.add("ArgMax", alike, axis=2, keepdims=0)
    kept = draw.add("Cast", draw.add("Greater", alike, draw.constant(np.float32(0))), to=TensorProto.FLOAT)
    partner = draw.add("Gather", right, draw.add("Squeeze", best, ints(draw, 0)), axis=1)
    return linear(draw, draw.add("Add", draw.add("MatMul", kept, partner), left))


def sparse_points(draw: Drawing) -> str:
    """A map of scores → comparison → NonZero → the descriptors there."""
    memory = backbone(draw)
    high = draw.add("Greater", linear(draw, memory, 1), draw.constant(np.float32(-99)))
    rows = draw.add("Gather", draw.add("Transpose", draw.add("NonZero", high), perm=[1, 0]), ints(draw, 0, 1), axis=1)
    return linear(draw, draw.add("GatherND", memory, rows))


def sampling_by_hand(draw: Drawing) -> str:
    """A layer computes places, as deformable attention does: Mul → Add → Floor → Cast → Gather."""
    memory = backbone(draw)
    offset = draw.add("Mul", draw.add("Sigmoid", linear(draw, memory, 1)), draw.constant(np.float32(63)))
    moved = draw.add("Clip", draw.add("Floor", draw.add("Add", offset, draw.constant(np.float32(0.5)))))
    places = draw.add("Reshape", draw.add("Cast", moved, to=TensorProto.INT64), ints(draw, -1))
    return linear(draw, draw.add("Gather", memory, places, axis=1))


NETWORKS = (detector_with_queries, detector_with_nms, matcher, sparse_points, sampling_by_hand)


def network(build: Callable[[Drawing], str]) -> onnx.ModelProto:
    draw = Drawing(3)
    draw.give(build(draw), [None] * 3 if build not in (detector_with_nms, sparse_points) else [None] * 2)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 32, 32])
    graph = helper.make_graph(draw.nodes, "g", [x], draw.outputs, draw.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def covered(model: onnx.ModelProto, preset: str) -> Coverage:
    config = QConfig.get_default_config(preset)
    config.global_quant_config.extra_options.update(
        PrintSummary=False, FloatWhereFaster=False
    )  # what may be, not what pays
    if preset == "UINT8_DYNAMIC_QUANT":
        config.global_quant_config.extra_options.update(MatMulConstBOnly=False)
    feed = {"x": np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)}
    made = ModelQuantizer(config).quantize_model(model, None, [feed])
    assert made is not None
    return coverage(made, feed)


@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU", "XINT8", "UINT8_DYNAMIC_QUANT"])
@pytest.mark.parametrize("build", NETWORKS, ids=lambda build: build.__name__)
def test_what_leads_to_a_choice_is_data(build: Callable[[Drawing], str], preset: str) -> None:
    model = network(build)
    assert coverage(model).integer == 0
    assert covered(model, preset).integer >= 0.95


@pytest.mark.parametrize("build", NETWORKS, ids=lambda build: build.__name__)
def test_weights_in_few_bits_too(build: Callable[[Drawing], str]) -> None:
    model = network(build)
    found = covered(model, "MATMUL_NBITS")
    products = [layer for layer in found.layers if layer.op_type in ("MatMul", "MatMulNBits")]
    constants = {weight.name for weight in model.graph.initializer}
    weights = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in constants]
    assert sum(layer.op_type == "MatMulNBits" for layer in products) == len(weights)


def test_places_that_a_layer_computes_stay_exact_up_to_it() -> None:
    model = files.load(network(sampling_by_hand))
    infer_shapes(model)
    exact = [node.op_type for node in model.graph if node in computes_shapes(model)]
    assert exact == ["Mul", "Add", "Floor", "Clip", "Cast", "Reshape"]


@pytest.mark.parametrize("op_type", sorted(MAKES_DISCRETE))
def test_no_walk_goes_through_a_choice(op_type: str) -> None:
    """Whatever the operator, what it reads is data."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["y"], name="data"),
        helper.make_node(op_type, ["y"], ["z"], name="choice"),
        helper.make_node("Cast", ["z"], ["i"], to=TensorProto.INT64),
        helper.make_node("Gather", ["x", "i"], ["out"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "out")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    model = files.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    infer_shapes(model)
    assert {node.op_type for node in computes_shapes(model)} == {"Cast"}


def test_arithmetic_on_sizes_stays_float() -> None:
    """Half the size of the input, computed in float: rounded, it would be another picture."""
    draw = Drawing(0)
    size = draw.add("Cast", draw.part_of_shape("x", 2, 4), to=TensorProto.FLOAT)
    half = draw.add("Floor", draw.add("Mul", size, draw.constant(np.float32(0.5))))
    sizes = [draw.part_of_shape("x", 0, 2), draw.add("Cast", half, to=TensorProto.INT64)]
    y = draw.add("Resize", draw.conv("x", 3, 3), "", "", draw.add("Concat", *sizes, axis=0), mode="nearest")
    draw.give(draw.conv(y, 3, 3), [1, 3, None, None])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, "h", "w"])
    graph = helper.make_graph(draw.nodes, "g", [x], draw.outputs, draw.weights)
    model = files.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    infer_shapes(model)
    assert {node.op_type for node in computes_shapes(model)} == {"Slice", "Cast", "Mul", "Floor", "Concat"}


def test_shares_of_macs() -> None:
    """3x3 convolution of 3 to 4 channels on 8x8 (6,912), then 256 to 5 (1,280); by hand."""
    draw = Drawing(0)
    flat = draw.add("Flatten", draw.conv("x", 3, 4))
    draw.give(draw.add("Gemm", flat, draw.constant(draw.matrix(256, 5))), [1, 5])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])
    graph = helper.make_graph(draw.nodes, "g", [x], draw.outputs, draw.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    feed = {"x": np.ones((1, 3, 8, 8), np.float32)}
    found = coverage(model, feed)
    assert [layer.macs for layer in found.layers] == [6912, 1280]
    assert (found.integer, found.stored, found.weights) == (0, 0, 3 * 4 * 9 + 256 * 5)
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options.update(PrintSummary=False)
    config.global_quant_config.nodes_to_exclude = [model.graph.node[0].name]
    made = ModelQuantizer(config).quantize_model(model, None, [feed])
    assert made is not None
    assert coverage(made, feed).integer == pytest.approx(1280 / (6912 + 1280))


@pytest.mark.parametrize(("op_type", "inputs", "read"), [
    ("GridSample", 2, "x0"), ("RoiAlign", 3, "x0"), ("MaxRoiAlign", 2, "x0"), ("ScatterND", 3, "x0 x2"),
    ("Sum", 3, "x0 x1 x2"), ("Range", 3, ""),
])  # fmt: skip
def test_coordinates_are_no_activations_where_all_operators_are_quantized(op_type: str, inputs: int, read: str) -> None:
    values = [ir.Value(name=f"x{at}", type=ir.TensorType(ir.DataType.FLOAT)) for at in range(inputs)]
    found = slots.data_inputs(ir.node(op_type, values), GENERIC)
    assert [value.name for value in found] == read.split()


ORDERED = """g (float[8, 16] x) => (float[8, 8] y, int64[8, 3] i) {
    [layer] l = MatMul (x, w) v, i = TopK (l, k) u = OneHot (i, depth, both) s = ReduceSum <keepdims = 0> (u, axis)
    m = Mul (s, l) [last] y = MatMul (m, z)
}"""


def test_an_order_is_read_of_float_values_and_the_rest_of_codes() -> None:
    """Codes make equal what differed, and then the first is chosen: three of 32 features, and 17 dB instead of 40."""
    weights = {"w": models.normal(16, 32), "z": models.normal(32, 8, seed=1), "k": np.array([3])}
    weights |= {"depth": np.array(32), "both": np.array([0, 1], np.float32), "axis": np.array([1])}
    proto, feeds = models.model(ORDERED, weights, 17), [{"x": models.normal(8, 16, seed=seed)} for seed in range(12)]
    config = QConfig.get_default_config("A8W8_CPU")
    config.global_quant_config.extra_options.update(PrintSummary=False, FloatWhereFaster=False)
    made = ModelQuantizer(config).quantize_model(proto, None, feeds)
    nodes = {node.op_type: node for node in made.graph.node}
    assert nodes["TopK"].input[0] == "l" and nodes["Mul"].input[1] != "l"
    pairs = [(models.run(proto, feed)[0], models.run(made, feed)[0]) for feed in feeds]
    signal, noise = (
        sum(np.sum(np.square(one)) for one in each) for each in zip(*((x, x - y) for x, y in pairs), strict=True)
    )
    assert 10 * np.log10(signal / noise) > 30
