"""EnableDualQuantNodePairs: where two precisions meet, each node has its own type around it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.onnx import (
    BFloat16Spec,
    BFP16Spec,
    CalibMethod,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    UInt8Spec,
)
from quark.onnx.flow import Result

MINMAX = CalibMethod.MinMax
EIGHT = QLayerConfig(input_tensors=Int8Spec(calibration_method=MINMAX), weight=Int8Spec())
SIXTEEN = QLayerConfig(input_tensors=Int16Spec(calibration_method=MINMAX), weight=Int16Spec())
CHAIN = """g (float[1,4,8,8] x) => (float[1,4,8,8] y) {
    [first] a = Conv<pads = [1,1,1,1]>(x, w, b) [wide] t = Conv<pads = [1,1,1,1]>(a, w2, b2)
    [move] r = Transpose<perm = [0,1,3,2]>(t) [last] y = Conv(r, w3, b3) }"""
FORK = """g (float[1,4,8,8] x) => (float[1,4,8,8] y) {
    [one] a = Conv(x, w3, b) [two] c = Conv(x, w4, b2) [three] d = Conv(a, w5, b3) [four] e = Conv(a, w6, b4)
    [sum] s = Add(c, d) [join] y = Add(s, e) }"""
WEIGHTS = {
    **{name: models.normal(4, 4, 3, 3, seed=k) * 0.3 for k, name in enumerate(("w", "w2"))},
    **{name: models.normal(4, 4, 1, 1, seed=k) for k, name in enumerate(("w3", "w4", "w5", "w6"))},
    **{name: models.normal(4, seed=k) for k, name in enumerate(("b", "b2", "b3", "b4"))},
}


def run(graph: str, layers: dict[Any, list[str]], base: QLayerConfig = EIGHT, **options: Any) -> Result:
    proto = models.model(graph, {name: array for name, array in WEIGHTS.items() if f" {name}" in graph})
    given = {"PrintSummary": False, "EnableDualQuantNodePairs": True, **options}
    config = QConfig(base, specific_layer_config=layers, extra_options=given)
    feed = models.feeds(proto)
    result = ModelQuantizer(config).run(proto, None, [feed])
    assert result.proto is not None
    onnx.checker.check_model(result.proto, full_check=True)
    x, y = models.session(proto).run(None, feed)[0], models.session(result.proto).run(None, feed)[0]
    assert np.sum(x**2) / np.sum((x - y) ** 2) > 100
    return result


def types_around(proto: onnx.ModelProto, name: str) -> tuple[list[str], list[str]]:
    """The types of the pairs before a node's first input, nearest last, and behind its output, nearest first."""
    makers = {output: node for node in proto.graph.node for output in node.output}
    kinds = {tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in proto.graph.initializer}
    node = next(node for node in proto.graph.node if node.name == name)
    before, tensor = [], node.input[0]
    while tensor in makers and makers[tensor].op_type in ("QuantizeLinear", "DequantizeLinear"):
        before = [kinds[makers[tensor].input[2]], *before] if makers[tensor].op_type == "QuantizeLinear" else before
        tensor = makers[tensor].input[0]
    behind, tensor = [], node.output[0]
    while readers := [n for n in proto.graph.node if tensor in n.input and "uantizeLinear" in n.op_type]:
        behind += [kinds[readers[0].input[2]]] if readers[0].op_type == "QuantizeLinear" else []
        tensor = readers[0].output[0]
    return before, behind


def test_the_writer_s_type_comes_first_and_the_reader_s_second() -> None:
    proto = run(CHAIN, {SIXTEEN: ["wide"]}).proto
    assert types_around(proto, "first") == (["INT8"], ["INT8", "INT16"])
    assert types_around(proto, "wide") == (["INT8", "INT16"], ["INT16"])
    assert types_around(proto, "move") == (["INT16"], ["INT16", "INT8"])
    assert types_around(proto, "last") == (["INT16", "INT8"], ["INT8"])


def test_without_the_option_a_tensor_has_one_type() -> None:
    proto = run(CHAIN, {SIXTEEN: ["wide"]}, EnableDualQuantNodePairs=False).proto
    assert types_around(proto, "wide") == (["INT16"], ["INT16"])
    assert types_around(proto, "last")[0] == ["INT16"]


def test_one_precision_needs_no_second_pair() -> None:
    config = QLayerConfig(input_tensors=Int8Spec(calibration_method=MINMAX), weight=Int16Spec())
    plan = run(CHAIN, {config: ["wide"]}).plan
    assert not [name for name in plan.tensors if "additional" in name]


def test_readers_of_one_type_share_a_pair_and_those_of_a_graph_input_stand_beside_each_other() -> None:
    plan = run(FORK, {SIXTEEN: ["two", "three", "four"]}).plan
    made = sorted(name.removesuffix("_additional") for name in plan.tensors if name.endswith("_additional"))
    assert made == ["a", "c", "d", "e", "x"]
    assert plan.tensors["a_additional"].spec.format == "int16" and plan.tensors["a"].spec.format == "int8"
    proto = run(FORK, {SIXTEEN: ["two", "three", "four"]}).proto
    assert types_around(proto, "one")[0] == ["INT8"] and types_around(proto, "two")[0] == ["INT16"]
    assert plan.tensors["a"].readers is None and plan.tensors["x"].readers == {"two"}


def test_biases_take_the_scale_that_their_node_reads() -> None:
    plan = run(CHAIN, {SIXTEEN: ["wide"]}).plan
    for name, data in {"b": "x", "b2": "a_additional", "b3": "r_additional"}.items():
        bias = plan.tensors[name]
        assert bias.bias_of is not None and bias.bias_of[0] == data
        weight = plan.tensors[bias.bias_of[1]].scale
        np.testing.assert_allclose(bias.scale, plan.tensors[data].scale * weight, rtol=1e-6)


@pytest.mark.parametrize("spec", [BFP16Spec, BFloat16Spec, UInt8Spec])
def test_any_two_formats(spec: Any) -> None:
    layer = QLayerConfig(input_tensors=spec(), weight=spec())
    plan = run(CHAIN, {layer: ["wide"]}, base=SIXTEEN).plan
    own = plan.tensors["a_additional"].spec.format
    assert own == plan.tensors["t"].spec.format != plan.tensors["a"].spec.format == "int16"
    assert plan.tensors["r_additional"].spec.format == "int16"
    assert "EnableDualQuantNodePairs" in plan.explain("a_additional")


def test_nodes_beside_a_tensor_that_was_told_a_type_take_it() -> None:
    told = {"TensorQuantOverrides": {"a": [{"quant_type": "int16"}]}}
    proto = run(CHAIN, {}, **told).proto
    assert types_around(proto, "first") == (["INT16"], ["INT16"])
    assert types_around(proto, "wide") == (["INT16"], ["INT16"])
    assert types_around(proto, "last") == (["INT16", "INT8"], ["INT8"])
