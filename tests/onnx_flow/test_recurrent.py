"""LSTM, GRU and RNN: weights as codes, arithmetic in float; and layers inside model-local functions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.onnx_flow import models

from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.coverage import coverage

HIDDEN, READ = 96, 80
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(op_type: str, directions: int = 1) -> onnx.ModelProto:
    """Rows of very different sizes, as trained gates have."""
    rng, rows = np.random.default_rng(0), GATES[op_type] * HIDDEN
    sizes = np.exp(rng.normal(-2, 1, (1, rows, 1)))
    arrays = {name: rng.normal(0, 1, (directions, rows, wide)) * sizes for name, wide in (("W", READ), ("R", HIDDEN))}
    arrays["B"] = rng.normal(0, 0.1, (directions, 2 * rows))
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    direction = {1: "forward", 2: "bidirectional"}[directions]
    node = helper.make_node(op_type, ["x", "W", "R", "B"], ["y"], "cell", hidden_size=HIDDEN, direction=direction)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["steps", 1, READ])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["steps", directions, 1, HIDDEN])
    graph = helper.make_graph([node], "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def quantized(model: onnx.ModelProto, preset: str, **options: object) -> onnx.ModelProto:
    config = QConfig.get_default_config(preset)
    config.global_quant_config.extra_options.update(PrintSummary=False, **options)
    x = model.graph.input[0]
    sizes = [dim.dim_value or 5 for dim in x.type.tensor_type.shape.dim]
    feeds = [{x.name: np.random.default_rng(k).standard_normal(sizes).astype(np.float32)} for k in range(2)]
    made = ModelQuantizer(config).quantize_model(model, None, feeds)
    assert made is not None
    onnx.checker.check_model(made, full_check=True)
    return made


@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU", "XINT8", "U8U8_AAWA", "UINT8_DYNAMIC_QUANT"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("op_type", GATES)
def test_weights_in_a_quarter_of_the_bytes(op_type: str, directions: int, preset: str) -> None:
    model = recurrent(op_type, directions)
    made = quantized(model, preset)
    assert coverage(made).stored > 0.93
    assert made.ByteSize() < model.ByteSize() / (3 if preset != "XINT8" else 2.5)
    feed = {"x": np.random.default_rng(9).standard_normal((20, 1, READ)).astype(np.float32)}
    reference, found = models.run(model, feed)[0], models.run(made, feed)[0]
    loss = 10 * np.log10((reference**2).sum() / ((reference - found) ** 2).sum())
    assert loss > (30 if preset in ("A8W8", "A8W8_CPU") else 12)


def test_no_step_dequantizes_anything() -> None:
    """Weights behind DequantizeLinear would be repacked by ONNX Runtime at every run."""
    for op_type in GATES:
        kinds = {node.op_type for node in quantized(recurrent(op_type), "A8W8").graph.node}
        assert "DequantizeLinear" not in kinds and {"Cast", "Mul"} <= kinds


def test_what_is_excluded_stays_float() -> None:
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options.update(PrintSummary=False)
    config.global_quant_config.nodes_to_exclude = ["cell"]
    both = onnx.compose.merge_models(recurrent("LSTM"), onnx.compose.add_prefix(recurrent("GRU"), "b_"), io_map=[])
    feeds = [{name: np.ones((4, 1, READ), np.float32) for name in ("x", "b_x")}]
    made = ModelQuantizer(config).quantize_model(both, None, feeds)
    assert made is not None
    types = {tensor.name: tensor.data_type for tensor in made.graph.initializer}
    assert types["W"] == TensorProto.FLOAT and types["b_W_quantized"] == TensorProto.INT8


def in_functions() -> onnx.ModelProto:
    """A model that is one call of a function which calls another."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    conv = helper.make_node("Conv", ["a", "k"], ["c"], pads=[1] * 4)
    block = helper.make_function("mine", "Block", "ak", "b", [conv, helper.make_node("Relu", "c", "b")], imports)
    call = helper.make_node("Block", ["a", "k"], ["t"], domain="mine")
    net = helper.make_function(
        "mine", "Net", "ak", "b", [call, helper.make_node("GlobalAveragePool", "t", "b")], imports
    )
    weight = numpy_helper.from_array(models.normal(8, 3, 3, 3, seed=0), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 16, 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8, 1, 1])
    graph = helper.make_graph([helper.make_node("Net", ["x", "w"], ["y"], domain="mine")], "g", [x], [y], [weight])
    return helper.make_model(graph, functions=[block, net], opset_imports=imports, ir_version=9)


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "A8W8_CPU", "UINT8_DYNAMIC_QUANT"])
def test_layers_inside_functions_are_quantized(preset: str) -> None:
    model = in_functions()
    made = quantized(model, preset)
    assert coverage(made).integer == 1
    feed = {"x": models.normal(1, 3, 16, 16, seed=3)}
    np.testing.assert_allclose(models.run(made, feed)[0], models.run(model, feed)[0], atol=0.2)


@pytest.mark.parametrize("computed", ["W", "R"])
@pytest.mark.parametrize("op_type", GATES)
def test_a_layer_that_computes_one_of_its_weights_keeps_both(op_type: str, computed: str) -> None:
    """Codes of one weight alone would be no layer's storage; those of a computed one are not constant at all."""
    model = recurrent(op_type)
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=0),
        helper.make_node("Mul", [computed, "mean"], ["made"]),
        *model.graph.node,
    ]
    nodes[-1].input[{"W": 1, "R": 2}[computed]] = "made"
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    both = onnx.compose.merge_models(model, onnx.compose.add_prefix(recurrent("GRU"), "b_"), io_map=[])
    feed = {"x": np.random.default_rng(9).standard_normal((20, 1, READ)).astype(np.float32)}
    feed["b_x"] = feed["x"]
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options.update(PrintSummary=False)
    made = ModelQuantizer(config).quantize_model(both, None, [feed])
    assert made is not None
    weights = {one.name: one.data_type for one in made.graph.initializer}
    assert weights["b_W_quantized"] == TensorProto.INT8
    other = {"W": "R", "R": "W"}[computed]
    assert weights[other] == TensorProto.FLOAT and not {"W_quantized", "R_quantized", "made_quantized"} & set(weights)
    np.testing.assert_array_equal(models.run(made, feed)[0], models.run(both, feed)[0])


def shared(reader: str) -> onnx.ModelProto:
    """A layer beside the cell that reads the cell's weight of the input too."""
    model = recurrent("LSTM")
    if reader == "MatMul":
        node = helper.make_node("MatMul", ["other", "W"], ["z"], "beside")
        sizes = [("other", [1, 3, 4 * HIDDEN]), ("z", [1, 3, READ])]
    else:
        node = helper.make_node("LSTM", ["other", "W", "R", "B"], ["z"], "beside", hidden_size=HIDDEN)
        sizes = [("other", [4, 1, READ]), ("z", [4, 1, 1, HIDDEN])]
    into, out = (helper.make_tensor_value_info(name, TensorProto.FLOAT, size) for name, size in sizes)
    model.graph.node.append(node)
    model.graph.input.append(into)
    model.graph.output.append(out)
    return model


@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU", "XINT8", "UINT8_DYNAMIC_QUANT"])
@pytest.mark.parametrize("reader", ["MatMul", "LSTM"])
def test_a_weight_that_another_layer_reads_is_quantized_for_both(reader: str, preset: str) -> None:
    model, config = shared(reader), QConfig.get_default_config(preset)
    config.global_quant_config.extra_options.update(PrintSummary=False, FloatWhereFaster=False)
    rng = np.random.default_rng(1)
    sizes = {one.name: [dim.dim_value or 4 for dim in one.type.tensor_type.shape.dim] for one in model.graph.input}
    feeds = [{name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()} for _ in range(3)]
    quantizer = ModelQuantizer(config)
    made = quantizer.quantize_model(model, None, feeds)
    assert made is not None
    left = {tensor.name for tensor in made.graph.initializer if tensor.data_type == TensorProto.FLOAT}
    assert not left & {"W", "R"}
    reference, found = models.run(model, feeds[0]), models.run(made, feeds[0])
    floor = 10 if preset in ("XINT8", "UINT8_DYNAMIC_QUANT") else 25
    for one, other in zip(reference, found, strict=True):
        assert 10 * np.log10((one**2).sum() / ((one - other) ** 2).sum()) > floor
    if reader == "MatMul" and preset != "UINT8_DYNAMIC_QUANT":
        makers = {node.output[0]: node.op_type for node in made.graph.node}
        (beside,) = (node for node in made.graph.node if node.op_type == "MatMul")
        assert makers[beside.input[1]] == "DequantizeLinear"  # what becomes MatMulInteger, not the cell's Mul
    if reader == "LSTM":
        assert coverage(made).stored > 0.93
        assert made.ByteSize() < model.ByteSize() / 2.5
