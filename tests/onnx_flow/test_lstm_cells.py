"""Steps of LSTMs as exporters write them out: torch's LSTMCell, Keras' order of gates, weights of any side and sum."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from tests.onnx_flow import models

from quark.onnx import Config, ModelQuantizer
from quark.onnx.config_file import config_of
from quark.onnx.graph.model import load, to_proto
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes.registry import apply, passes

READ, HIDDEN = 6, 5


def fused(proto: onnx.ModelProto) -> list[str]:
    """Operators after the pass; ONNX Runtime's outputs are those of before."""
    model = load(proto)
    apply(model, passes()["optimize_with_ort"], {})
    infer_shapes(model)
    apply(model, passes()["fuse_lstm_cell"], {})
    made, feeds = to_proto(model), models.feeds(proto)
    onnx.checker.check_model(made, full_check=True)
    models.assert_close(models.run(made, feeds), models.run(proto, feeds), 1e-5)
    return [node.op_type for node in made.graph.node]


def cell(
    order: str = "ifgo", gemm: bool = False, terms: int = 0, batch: int | str = 2, read: int = READ, extra: str = ""
) -> onnx.ModelProto:
    """One step. ``terms``: the place of the state's product in the sum; ``extra``: a tensor that is an output too."""
    random = np.random.default_rng(terms)
    arrays = {"W": (read, 4 * HIDDEN), "R": (HIDDEN, 4 * HIDDEN), "b": (4 * HIDDEN,)}
    constants = {name: random.normal(size=size).astype(np.float32) for name, size in arrays.items()}
    if gemm:
        constants |= {"W": np.ascontiguousarray(constants["W"].T), "Rb": constants["b"] * np.float32(0.5)}
    product = ("Gemm", ["x", "W", "b"], {"transB": 1}) if gemm else ("MatMul", ["x", "W"], {})
    second = ("Gemm", ["h", "R", "Rb"], {}) if gemm else ("MatMul", ["h", "R"], {})
    nodes = [
        helper.make_node(op, inputs, [name], **given)
        for name, (op, inputs, given) in zip("pq", (product, second), strict=True)
    ]
    sums = [("p", "q"), ("q", "p")][terms % 2]
    nodes.append(helper.make_node("Add", sums, ["s" if not gemm else "z"]))
    if not gemm:
        nodes.append(helper.make_node("Add", ["b", "s"] if terms > 1 else ["s", "b"], ["z"]))
    nodes.append(helper.make_node("Split", ["z"], [f"{gate}_" for gate in order], axis=-1))
    gates = {"i": "Sigmoid", "f": "Sigmoid", "g": "Tanh", "o": "Sigmoid"}
    nodes += [helper.make_node(kind, [f"{gate}_"], [f"{gate}a"]) for gate, kind in gates.items()]
    nodes += [
        helper.make_node("Mul", ["fa", "c"] if terms > 1 else ["c", "fa"], ["kept"]),
        helper.make_node("Mul", ["ia", "ga"], ["new"]),
        helper.make_node("Add", ["kept", "new"], ["c1"]),
        helper.make_node("Tanh", ["c1"], ["t"]),
        helper.make_node("Mul", ["oa", "t"], ["h1"]),
        helper.make_node("Neg", ["h1"], ["y"]),
    ]
    given = {"x": [batch, read], "h": [batch, HIDDEN], "c": [batch, HIDDEN]}
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in given.items()]
    made = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, None])
        for n in ("y", "c1", *([extra] if extra else []))
    ]
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "cell", ends, made, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@pytest.mark.parametrize("batch", [1, 3, "batch"])
@pytest.mark.parametrize("terms", range(4))
@pytest.mark.parametrize("gemm", [False, True])
@pytest.mark.parametrize("order", ["ifgo", "iofg", "fiog"])
def test_every_order_and_sum_is_found(order: str, gemm: bool, terms: int, batch: int | str) -> None:
    assert fused(cell(order, gemm, terms, batch)) == ["Unsqueeze"] * 3 + ["LSTM", "Squeeze", "Squeeze", "Neg"]


def test_inputs_as_wide_as_the_state_are_not_mixed_up() -> None:
    assert "LSTM" in fused(cell(read=HIDDEN))


@pytest.mark.parametrize(
    ("extra", "fits"), [("z", 0), ("s", 0), ("f_", 0), ("fa", 0), ("ga", 0), ("oa", 0), ("h1", 1), ("t", 1)]
)
def test_gates_that_are_read_elsewhere_stay(extra: str, fits: int) -> None:
    assert fused(cell(extra=extra)).count("LSTM") == fits


def test_weights_of_several_steps_stay_once() -> None:
    proto = cell()
    second = [onnx.NodeProto.FromString(node.SerializeToString()) for node in proto.graph.node]
    names = {name for node in second for name in node.output}
    for node in second:
        node.input[:] = [{"h": "h1", "c": "c1"}.get(n, f"{n}_2" if n in names else n) for n in node.input]
        node.output[:] = [f"{name}_2" for name in node.output]
    proto.graph.node.extend(second)
    proto.graph.output.append(helper.make_tensor_value_info("y_2", TensorProto.FLOAT, [None, None]))
    assert "LSTM" not in fused(proto)


@pytest.mark.parametrize(
    "told", [{"exclude": ["p"]}, {"exclude": ["q"]}, {"exclude": ["^p"]}, {"layers": {"q": "float"}}]
)
def test_what_is_said_of_a_product_holds_for_the_lstm_that_takes_its_place(told: dict[str, Any]) -> None:
    """Named by its node or by a pattern; without it the LSTM is quantized."""
    proto = cell()
    proto.graph.node[-1].CopyFrom(helper.make_node("MatMul", ["h1", "last"], ["y"]))
    proto.graph.initializer.append(numpy_helper.from_array(models.normal(HIDDEN, HIDDEN), "last"))
    for node in proto.graph.node:
        node.name = node.output[0]
    for said, stays in (({}, False), (told, True)):
        config = config_of({"preset": "A8W8_CPU", "options": {"FloatWhereFaster": False}, **said})
        plan = ModelQuantizer(Config(config)).run(proto, None, [models.feeds(proto, seed) for seed in range(2)]).plan
        [lstm] = [node for node in plan.nodes.values() if node.op_type == "LSTM"]
        assert lstm.quantized is not stays, lstm.reason


@pytest.mark.filterwarnings("ignore")
def test_the_cell_of_torch() -> None:
    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = torch.nn.LSTMCell(READ, HIDDEN)

        def forward(self, x, h, c):  # type: ignore[no-untyped-def]
            wanted = torch.nn.functional.linear(x, self.cell.weight_ih, self.cell.bias_ih)
            gates = wanted + torch.nn.functional.linear(h, self.cell.weight_hh, self.cell.bias_hh)
            i, f, g, o = gates.chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.sigmoid(o) * torch.tanh(c), c

    step, stream = Step().eval(), io.BytesIO()
    inputs = (torch.randn(2, READ), torch.randn(2, HIDDEN), torch.randn(2, HIDDEN))
    torch.onnx.export(step, inputs, stream, dynamo=False, opset_version=17, input_names=["x", "h", "c"])
    assert "LSTM" in fused(onnx.load_from_string(stream.getvalue()))
