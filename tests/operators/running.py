"""Models of one operator, run on stock ONNX Runtime (no custom-op library)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from quark.operators import DOMAIN, OWN_DOMAIN, NodeFacts, add_functions, node


def model_of(
    op_name: str,
    attributes: Mapping[str, int | str],
    feeds: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray | TensorProto | None] | None = None,
    facts: NodeFacts | None = None,
    opset: int = 21,
    output: int = TensorProto.FLOAT,
    dynamic: bool | Literal["rank"] = False,
) -> onnx.ModelProto:
    """A checked model of one node; without ``facts`` it is found by ``add_functions``; ``None`` is an absent input."""
    constants = constants or {}
    names = [*feeds, *(name if value is not None else "" for name, value in constants.items())]
    while names[-1] == "":
        names.pop()
    made = node(op_name, names, ["y"], attributes, facts or NodeFacts(code_type="INT8"))
    if facts is None:
        made.overload = ""
    inputs = [described(name, value, dynamic) for name, value in feeds.items()]
    tensors = [initializer(name, value) for name, value in constants.items() if value is not None]
    graph = helper.make_graph([made], "one", inputs, [helper.make_tensor_value_info("y", output, None)], tensors)
    graph.output[0].type.tensor_type.ClearField("shape")
    domains = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1), helper.make_opsetid(OWN_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    add_functions(model)
    return model


def described(name: str, value: np.ndarray, dynamic: bool | Literal["rank"]) -> onnx.ValueInfoProto:
    elem_type = helper.np_dtype_to_tensor_dtype(value.dtype)
    shape = None if dynamic == "rank" else [None] * value.ndim if dynamic else list(value.shape)
    return helper.make_tensor_value_info(name, elem_type, shape)


def initializer(name: str, value: np.ndarray | TensorProto) -> TensorProto:
    if isinstance(value, TensorProto):
        value.name = name
        return value
    return numpy_helper.from_array(np.asarray(value), name)


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """The output ``y`` in a default session on the CPU."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))[0]


def run_operator(
    op_name: str,
    x: np.ndarray,
    attributes: Mapping[str, int | str],
    constants: Mapping[str, np.ndarray | TensorProto | None] | None = None,
    opset: int = 21,
    output: int = TensorProto.FLOAT,
    dynamic: bool | Literal["rank"] = False,
) -> np.ndarray:
    """One operator on ``x``."""
    model = model_of(op_name, attributes, {"x": x}, constants, opset=opset, output=output, dynamic=dynamic)
    return run(model, {"x": x})


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal as numbers (0 and -0 too), NaN where NaN is wanted."""
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def awkward(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """float32 values over many magnitudes, with ties, zeros, subnormals and values next to powers of two."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-30, 20, shape))
    x = np.where(rng.random(shape) < 0.15, np.round(x * 2) / 2, x)
    x = np.where(rng.random(shape) < 0.1, 0.0, x).astype(np.float32)
    near = np.nextafter(np.exp2(rng.integers(-8, 8, shape)).astype(np.float32), np.float32(0))
    return np.where(rng.random(shape) < 0.1, near, x).astype(np.float32)


def special(rows: int = 24, length: int = 64) -> np.ndarray:
    """Rows of one magnitude each, from subnormal to the largest float32, with infinities and NaN in some."""
    rng = np.random.default_rng(1)
    exponents = np.linspace(-149, 126, rows).astype(int)
    x = (rng.uniform(-1.99, 1.99, (rows, length)) * np.exp2(exponents.astype(np.float64))[:, None]).astype(np.float32)
    x[3, 5], x[7, 9], x[11, 40] = np.inf, -np.inf, np.nan
    x[13, 16:32] = 0
    x[17, 3], x[17, 4], x[17, 50] = np.nan, np.inf, np.nan
    return x
