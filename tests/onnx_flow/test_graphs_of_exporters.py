"""What the exporters of real packages write and textbooks do not: bodies that read weights from outside, layers without
a first output, axes of -1 elements, declared shapes that do not hold. None may end the command or bury its verdict."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.onnx_flow import models

import quark
from quark.cli import main
from quark.cli.guidance import words
from quark.errors import ConfigError
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.coverage import coverage
from quark.onnx.graph.model import load
from quark.onnx.graph.run import Runner

RNG = np.random.default_rng(5)
FLOAT = TensorProto.FLOAT


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(RNG.normal(0, 0.3, shape).astype(np.float32), name)


def model(nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], x: list[object], y: list[object]):  # type: ignore[no-untyped-def]
    ends = [helper.make_tensor_value_info("x", FLOAT, x)], [helper.make_tensor_value_info("y", FLOAT, y)]
    graph = helper.make_graph(nodes, "g", *ends, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def body(name: str, weights: str) -> onnx.GraphProto:
    nodes = [helper.make_node("MatMul", ["h", weights], [name])]
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, FLOAT, ["n", 16])])


def branching() -> onnx.ModelProto:
    """An If whose bodies read large weights of the main graph."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=body("a", "large"), else_branch=body("b", "larger")),
    ]
    weights = [weight("w", 8, 32), weight("large", 32, 16), weight("larger", 32, 16)]
    return model(nodes, [*weights, numpy_helper.from_array(np.float32(0), "zero")], ["n", 8], ["n", 16])


def recurrent() -> onnx.ModelProto:
    """An LSTM of which only the last state is read, on a free number of steps."""
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r"], ["", "last"], hidden_size=16),
        helper.make_node("MatMul", ["last", "head"], ["y"]),
    ]
    weights = [weight("w", 1, 64, 8), weight("r", 1, 64, 16), weight("head", 16, 16)]
    return model(nodes, weights, ["steps", 1, 8], [1, 1, 16])


def declared(size: int) -> onnx.ModelProto:
    """A Conv whose input and output declare ``size`` columns."""
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    return model(nodes, [weight("w", 16, 3, 3, 3)], [1, 3, 8, "wide"], [1, 16, 8, size])


CASES = {
    "bodies": (branching, (5, 8)),
    "no first output": (recurrent, (5, 1, 8)),
    "free as -1": (lambda: declared(-1), (1, 3, 8, 10)),
    "wrong shape": (lambda: declared(9), (1, 3, 8, 10)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("preset", ["A8W8_CPU", "XINT8"])
def test_the_command_ends_with_a_verdict_and_nothing_behind_it(
    name: str, preset: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make, shape = CASES[name]
    proto, samples = make(), [RNG.normal(size=shape).astype(np.float32) for _ in range(4)]
    onnx.save(proto, tmp_path / "m.onnx")
    (tmp_path / "data").mkdir()
    for index, sample in enumerate(samples):
        np.savez(tmp_path / "data" / f"{index}.npz", x=sample)
    words = ["onnx", "quantize", tmp_path / "m.onnx", "-o", tmp_path / "q.onnx", "--data", tmp_path / "data"]
    assert main([*map(str, words), "--preset", preset]) == 0
    out, err = capfd.readouterr()
    assert "accuracy" in out and "onnxruntime" not in err
    float_model, quantized = (onnxruntime.InferenceSession(tmp_path / file) for file in ("m.onnx", "q.onnx"))
    for sample in samples:
        want, got = (session.run(None, {"x": sample})[0] for session in (float_model, quantized))
        assert 10 * np.log10(np.sum(want**2) / np.sum((want - got) ** 2)) > 15


def test_what_is_free_is_written_as_free(tmp_path: Path) -> None:
    loaded = load(declared(-1))
    assert [size if isinstance(size, int) else None for size in loaded.graph.outputs[0].shape or ()] == [1, 16, 8, None]
    assert "an axis of -1" in str(loaded.meta["quark.repairs"])


def test_weights_of_removed_bodies_go_with_them() -> None:
    """ONNX Runtime refuses large weights that nothing reads."""
    runner = Runner(load(branching()), ["h"])
    assert runner.run({"x": np.ones((2, 8), np.float32)}).values["h"].shape == (2, 32)


def test_coverage_opens_the_graph_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixing the sizes of a session makes ONNX Runtime inline branches, which is not the graph that is measured."""
    seen: list[ir.Model] = []
    original = Runner.__init__

    def spied(self: Runner, opened: ir.Model, *rest: object, **more: object) -> None:
        seen.append(opened)
        original(self, opened, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "__init__", spied)
    proto = branching()
    del proto.graph.value_info[:]
    proto.graph.node.insert(0, helper.make_node("NonZero", ["x"], ["where"]))  # sizes that nothing proves
    proto.graph.node.insert(1, helper.make_node("Cast", ["where"], ["cast"], to=FLOAT))
    proto.graph.node.insert(2, helper.make_node("MatMul", ["two", "cast"], ["extra"]))
    proto.graph.initializer.append(weight("two", 3, 2))
    proto.graph.output.append(helper.make_tensor_value_info("extra", FLOAT, [3, None]))
    found = coverage(proto, {"x": np.ones((4, 8), np.float32)})
    assert {layer.macs for layer in found.layers} >= {4 * 8 * 32, 3 * 2 * 32}
    assert seen and all(not isinstance(one.graph.inputs[0].shape[0], int) for one in seen)  # type: ignore[index]


def test_weights_in_constant_nodes_count() -> None:
    """Exporters put the weights of a body into Constant nodes; those of a branch left in float are float."""
    proto = branching()
    inside = next(one.g for one in proto.graph.node[3].attribute if one.name == "then_branch")
    held = next(one for one in proto.graph.initializer if one.name == "large")
    inside.node.insert(0, helper.make_node("Constant", [], ["large"], value=held))
    proto.graph.initializer.remove(held)
    found = coverage(proto)
    assert (found.weights, found.stored) == (8 * 32 + 2 * 32 * 16, 0.0)


def test_a_circle_of_errors_is_told_once() -> None:
    """An error that is raised again while it is handled is its own context."""
    outer, inner = ConfigError("outer"), KeyError("inner")
    outer.__cause__, inner.__context__ = inner, outer
    told = words(outer, True)
    assert [line for line in told if line.startswith("caused by")] == ["caused by: KeyError: 'inner'"]


def test_sessions_log_nothing() -> None:
    """Every session of the flow has the options of one function."""
    folder = Path(quark.__file__).parent / "onnx"
    made = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("SessionOptions")
    }
    assert made == {"graph/session.py"}


@pytest.mark.parametrize("preset", ["A8W8", "XINT8", "A16W8", "A8W8_CPU"])
@pytest.mark.parametrize("padding", [-np.inf, float(np.finfo(np.float32).min), -1e9, -1e4])
def test_padding_that_no_maximum_takes_is_no_range(padding: float, preset: str) -> None:
    """Ports of TensorFlow's pooling pad by -infinity, or by a very low number, before a MaxPool."""
    body = "r = Relu(a) p = Pad(r, pads, v) q = MaxPool<kernel_shape = [3, 3], strides = [2, 2]>(p) y = Conv(q, w2)"
    arrays = {"w": models.normal(8, 3, 3, 3, seed=1), "w2": models.normal(8, 8, 2, 2, seed=2)}
    arrays |= {"pads": np.array([0, 0, 0, 0, 0, 0, 2, 2]), "v": np.float32(padding)}
    model = models.model(
        f"g (float[1, 3, 17, 17] x) => (float[1, 8, 8, 8] y) {{ a = Conv<pads = [1, 1, 1, 1]>(x, w) {body} }}",
        arrays,
    )
    samples = [{"x": models.normal(1, 3, 17, 17, seed=seed)} for seed in range(4)]
    config = Config(global_quant_config=get_default_config(preset))
    made = ModelQuantizer(config).quantize_model(model, None, samples)
    assert made is not None
    expected, found = models.run(model, samples[0])[0], models.run(made, samples[0])[0]
    assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
    assert sum(node.op_type == "QuantizeLinear" for node in made.graph.node) >= 2
