"""The node tests of onnx for QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear, run by three of our ways.

arithmetic   the functions that compute scales and codes when a model is quantized (``quark.numerics``)
reference    the operators that we write for types ONNX Runtime's kernels refuse, in onnx's reference evaluator
runtime      the same file in ONNX Runtime
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from quark.numerics import affine
from quark.numerics.affine import Grid
from quark.numerics.formats import FORMATS
from quark.numerics.granularity import Channel, Granularity, Group, Tensor
from quark.operators import NodeFacts, add_functions, node
from quark.operators import affine as affine_operators

#: The cases come in the newest opset, which ONNX Runtime need not read.
OPSET = 25
OPERATORS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")


def collected() -> dict[str, Any]:
    """Every node test that is one of the three operators, by name."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases()
    return {
        one.name: one for one in found if [node.op_type for node in one.model.graph.node] in [[o] for o in OPERATORS]
    }


CASES = collected()


def row_of(elem_type: int) -> Any:
    """Our format of codes of an ONNX type."""
    name = onnx.TensorProto.DataType.Name(elem_type)
    return next(row for row in FORMATS.values() if row.onnx_type == name and not hasattr(row, "size"))


def operands(case: Any) -> tuple[onnx.NodeProto, list[np.ndarray], list[np.ndarray], int, dict[str, Any]]:
    """Node, inputs, outputs, type of the codes, attributes."""
    (one,) = case.model.graph.node
    (inputs, outputs), *_ = case.data_sets
    types = {
        value.name: value.type.tensor_type.elem_type for value in (*case.model.graph.input, *case.model.graph.output)
    }
    code = types[one.output[0] if one.op_type != "DequantizeLinear" else one.input[0]]
    return one, arrays(inputs), arrays(outputs), code, {a.name: helper.get_attribute_value(a) for a in one.attribute}


def arrays(values: Any) -> list[np.ndarray]:
    """Arrays of what a case stores (arrays, or tensors as messages)."""
    return [numpy_helper.to_array(one) if isinstance(one, onnx.TensorProto) else np.asarray(one) for one in values]


def granularity_of(x: np.ndarray, scale: np.ndarray, attributes: dict[str, Any]) -> Granularity:
    """How ONNX lays the scale beside the values."""
    axis = attributes.get("axis", 1)
    if attributes.get("block_size", 0):
        return Group(axis, attributes["block_size"])
    return Channel(axis) if scale.ndim == 1 and scale.size > 1 else Tensor()


def same(found: np.ndarray, wanted: np.ndarray, case: Any) -> None:
    """What the runner of onnx compares."""
    assert found.shape == wanted.shape
    found, wanted = (np.asarray(one).astype(np.float64) for one in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=case.rtol, atol=case.atol)


@pytest.mark.parametrize("name", CASES)
def test_arithmetic(name: str) -> None:
    case = CASES[name]
    one, inputs, outputs, code, attributes = operands(case)
    row = row_of(code)
    if one.op_type == "DynamicQuantizeLinear":
        (x,) = inputs
        scale, zero = Grid(row, symmetric=False).parameters(x.min(), x.max())
        for found, wanted in zip((affine.quantize(x, scale, zero, row), scale, zero), outputs, strict=True):
            same(np.asarray(found), wanted, case)
        return
    x, scale, *zero = inputs
    granularity = granularity_of(x, scale, attributes)
    zero_point = zero[0].astype(row.zero_dtype) if zero and row.has_zero_point else np.zeros(scale.shape, np.int32)
    if one.op_type == "QuantizeLinear":
        found = affine.quantize(x, scale, zero_point, row, granularity)
        same(np.asarray(found if row.has_zero_point else row.decode(found, 0)), outputs[0], case)
    else:
        same(
            affine.dequantize(x if row.has_zero_point else codes(x), scale, zero_point, row, granularity),
            outputs[0],
            case,
        )


def codes(values: np.ndarray) -> np.ndarray:
    """Codes of small floats as unsigned bytes: those of NumPy are a type of their own."""
    return np.asarray(values).view(np.uint8)


def rebuilt(case: Any) -> tuple[onnx.ModelProto, list[np.ndarray]]:
    """The case with our operator in the place of the standard one, its inputs as constants, its output as float32."""
    one, inputs, outputs, code, attributes = operands(case)
    if one.op_type == "DynamicQuantizeLinear" or attributes.get("block_size", 0):
        pytest.skip("a file of ours has the standard operator here")
    kind = onnx.TensorProto.DataType.Name(code)
    if kind not in affine_operators.STORED:
        pytest.skip("a file of ours has no standard operator of this type, and stores it packed")
    model = onnx.ModelProto.FromString(case.model.SerializeToString())
    real = model.graph.input[one.op_type == "DequantizeLinear"]  # the values, or beside codes the scale
    elem = onnx.TensorProto.DataType.Name(real.type.tensor_type.elem_type)
    site = NodeFacts(tuple(inputs[0].shape), elem, inputs[1].size > 1, kind)
    names = list(one.input)
    if len(names) == 2:
        names.append("zero_of_the_judge")
        zeros = helper.make_tensor(names[2], code, inputs[1].shape, [0] * inputs[1].size)
        model.graph.initializer.append(zeros)
    model.ir_version, model.opset_import[0].version = 10, OPSET
    model.graph.initializer.extend(numpy_helper.from_array(x, name) for name, x in zip(one.input, inputs, strict=True))
    del model.graph.node[:], model.graph.input[:]
    kept = {"axis": attributes.get("axis", 1) if inputs[1].size > 1 else 0}
    cast = helper.make_node("Cast", ["found"], list(one.output), to=onnx.TensorProto.FLOAT)
    model.graph.node.extend([node(f"Extended{one.op_type}", names, ["found"], kept, site), cast])
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    add_functions(model)
    return model, outputs


@pytest.mark.parametrize("name", CASES)
def test_reference(name: str) -> None:
    model, outputs = rebuilt(CASES[name])
    (found,) = ReferenceEvaluator(model).run(None, {})
    same(found, outputs[0], CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_runtime(name: str) -> None:
    model, outputs = rebuilt(CASES[name])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {})
    same(found, outputs[0], CASES[name])
