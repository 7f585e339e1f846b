"""Whole models: functions found and added, overloads side by side, kernels before functions, the checker's verdict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.operators.amd_operators import bfp_quantize_dequantize, mx_quantize_dequantize
from tests.operators.running import assert_same, awkward, run

from quark.errors import ConfigError, ModelError
from quark.operators import (
    DOMAIN,
    OPERATORS,
    add_functions,
    function_for,
    node,
    required_functions,
)
from quark.operators.mx import ELEMENT_TYPES

F = TensorProto.FLOAT


def model_of(
    nodes: list, shape: tuple = (2, 40, 3), tensors: tuple = (), opset: int = 17, ir: int = 8
) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", F, shape)
    graph = helper.make_graph(nodes, "g", [x], [helper.make_tensor_value_info("y", F, shape)], list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def plain(op_name: str, x: str, y: str, attributes: dict) -> onnx.NodeProto:
    """A node as another tool writes it: no overload."""
    return helper.make_node(op_name, [x], [y], domain=DOMAIN, **attributes)


def test_a_model_of_another_tool_runs() -> None:
    first, second = {"axis": 1, "rounding_mode": 2}, {"axis": 2, "bfp_method": "to_bfp_prime", "block_size": 16}
    nodes = [plain("BFPQuantizeDequantize", "x", "a", first), plain("BFPQuantizeDequantize", "a", "y", second)]
    model = model_of(nodes)
    add_functions(model)
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == 10 and {(e.domain, e.version) for e in model.opset_import} == {("", 17), (DOMAIN, 1)}
    assert [f.overload for f in model.functions] == [n.overload for n in model.graph.node]
    assert all({a.name for a in n.attribute} == set(OPERATORS[n.op_type].attributes) for n in model.graph.node)
    x = awkward((2, 40, 3))
    want = bfp_quantize_dequantize(bfp_quantize_dequantize(x, **first), **second)
    assert_same(run(model, {"x": x}), want)


def test_equal_nodes_share_a_function_and_a_second_call_adds_nothing() -> None:
    nodes = [plain("MXQuantizeDequantize", "x", "a", {}), plain("MXQuantizeDequantize", "a", "y", {"axis": 1})]
    model = model_of(nodes, (2, 64, 3))
    add_functions(model)
    assert [f.overload for f in model.functions] == ["int8,1,32,0@whole-2.FLOAT"]
    before = model.SerializeToString()
    add_functions(model)
    assert model.SerializeToString() == before and required_functions(model) == []


def test_every_element_type_side_by_side() -> None:
    names = ["x", *ELEMENT_TYPES[:-1], "y"]
    nodes = [
        node("MXQuantizeDequantize", [source], [target], {"element_dtype": element})
        for source, target, element in zip(names, names[1:], ELEMENT_TYPES, strict=False)
    ]
    model = model_of(nodes)
    add_functions(model)
    want = x = awkward((2, 40, 3))
    for element in ELEMENT_TYPES:
        want = mx_quantize_dequantize(want, element)
    assert len(model.functions) == len(ELEMENT_TYPES)
    assert_same(run(model, {"x": x}), want)


def test_nodes_inside_a_branch() -> None:
    branch = helper.make_graph(
        [plain("BFPQuantizeDequantize", "x", "inner", {})], "b", [], [helper.make_tensor_value_info("inner", F, None)]
    )
    flag = numpy_helper.from_array(np.array(True), "flag")
    model = model_of([helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)], tensors=(flag,))
    add_functions(model)
    assert len(model.functions) == 1
    x = awkward((2, 40, 3))
    assert_same(run(model, {"x": x}), bfp_quantize_dequantize(x))


def test_a_registered_kernel_wins_over_a_function() -> None:
    """What a compiler relies on: ONNX Runtime has a kernel for this name, so the function (zero) is not called."""
    zero = [helper.make_node("Sub", ["x", "x"], ["y"])]
    function = helper.make_function(
        "com.microsoft", "Gelu", ["x"], ["y"], zero, [helper.make_opsetid("", 17)], overload="any,1@whole-3.FLOAT"
    )
    made = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    made.overload = function.overload
    model = model_of([made], ir=10)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model.functions.append(function)
    x = np.ones((2, 40, 3), np.float32)
    np.testing.assert_allclose(run(model, {"x": x}), 0.8413447 * x, rtol=1e-6)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("opset", [13, 15, 18, 21, 25, 26])
def test_every_function_passes_the_checker(name: str, opset: int) -> None:
    function = function_for(name, {}, opset)
    model = model_of([helper.make_node("Identity", ["x"], ["y"])], opset=opset, ir=10)
    model.opset_import.append(helper.make_opsetid(function.domain, 1))
    model.functions.append(function)
    onnx.checker.check_model(model, full_check=True)
    assert {entry.domain: entry.version for entry in function.opset_import} == {"": opset}
    assert {n.domain for n in function.node} == {""}


def test_refusals() -> None:
    with pytest.raises(ModelError, match="needs opset 13 or higher, and the model has opset 11"):
        add_functions(model_of([plain("MXQuantizeDequantize", "x", "y", {})], opset=11))
    with pytest.raises(ConfigError, match="Did you mean 'block_size'"):
        add_functions(model_of([plain("MXQuantizeDequantize", "x", "y", {"blok_size": 16})]))
    with pytest.raises(ModelError, match="has no overload name"):
        required_functions(model_of([plain("MXQuantizeDequantize", "x", "y", {})]))
    unknown = helper.make_node("ExtendedQuantizeLinear", ["x", "s", "z"], ["y"], "q", domain=DOMAIN)
    with pytest.raises(ModelError, match="node 'q': the type of its zero point 'z' is not known"):
        add_functions(model_of([unknown]))


def test_a_refused_model_keeps_its_functions() -> None:
    good, bad = plain("MXQuantizeDequantize", "x", "a", {}), plain("MXQuantizeDequantize", "a", "y", {"axis": 7})
    model = model_of([good, bad])
    with pytest.raises(ModelError, match="axis 7 does not exist"):
        add_functions(model)
    assert not model.functions


def test_functions_survive_shape_inference_and_offline_optimization(tmp_path: Path) -> None:
    model = model_of([plain("BFPQuantizeDequantize", "x", "y", {})], (2, 40, 3))
    add_functions(model)
    model = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    options = ort.SessionOptions()
    options.optimized_model_filepath = f"{tmp_path}/optimized.onnx"
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = awkward((2, 40, 3))
    assert_same(run(onnx.load(f"{tmp_path}/optimized.onnx"), {"x": x}), bfp_quantize_dequantize(x))


WEIGHT_OPERATORS = [
    ("BFPQuantizeDequantize", {"rounding_mode": 2}, bfp_quantize_dequantize),
    ("BFPQuantizeDequantize", {"bfp_method": "to_bfp_prime", "block_size": 16}, bfp_quantize_dequantize),
    ("MXQuantizeDequantize", {"element_dtype": "fp4_e2m1"}, mx_quantize_dequantize),
]


def convolution(weight: np.ndarray, op_name: str, attributes: dict) -> onnx.ModelProto:
    nodes = [plain(op_name, "w", "wq", attributes), helper.make_node("Conv", ["x", "wq"], ["y"])]
    x = helper.make_tensor_value_info("x", F, [1, weight.shape[1], 5, 5])
    y = helper.make_tensor_value_info("y", F, [1, weight.shape[0], 3, 3])
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    add_functions(model)
    return model


@pytest.mark.parametrize(("op_name", "attributes", "simulate"), WEIGHT_OPERATORS)
def test_a_weight_is_quantized_once_when_the_model_is_loaded(
    op_name: str, attributes: dict, simulate: Callable, tmp_path: Path
) -> None:
    weight = awkward((8, 40, 3, 3))
    model = convolution(weight, op_name, attributes)
    options = ort.SessionOptions()
    options.optimized_model_filepath = f"{tmp_path}/optimized.onnx"
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (node_left,) = (folded := onnx.load(f"{tmp_path}/optimized.onnx")).graph.node
    assert node_left.op_type == "Conv"
    kept = next(t for t in folded.graph.initializer if t.name == node_left.input[1])
    assert_same(numpy_helper.to_array(kept), simulate(weight, **attributes))


def test_a_weight_with_a_nan_keeps_it() -> None:
    weight = awkward((2, 8, 3, 3))
    weight[1, 3, 0, 0] = np.nan
    got = run(convolution(weight, "BFPQuantizeDequantize", {}), {"x": np.ones((1, 8, 5, 5), np.float32)})
    assert np.isnan(got[0, 1]).all() and np.isfinite(got[0, 0]).all()
