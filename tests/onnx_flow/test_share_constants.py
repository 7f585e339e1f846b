"""Constants of equal contents are stored once: which are, which are not, and that nothing else changes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tests.onnx_flow import models

from quark.onnx.graph.model import load, to_proto
from quark.onnx.passes import share_constants


def shared(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    model = load(proto)
    report = share_constants.run(model)
    made = to_proto(model)
    onnx.checker.check_model(made, full_check=True)
    feed = models.feeds(proto)
    models.assert_close(models.run(made, feed), models.run(proto, feed), 0.0)
    return made, report.fired


def test_equal_contents_are_one_and_contents_of_another_type_shape_or_sign_are_not() -> None:
    weights = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.zeros((2, 3), np.float32),
        "minus": np.full((2, 3), -0.0, np.float32),
        "turned": np.zeros((3, 2), np.float32),
        "wide": np.zeros((2, 3), np.float64),
        "far": np.concatenate([np.ones(4096), [0]]).astype(np.float32),
        "near": np.concatenate([np.ones(4096), [1]]).astype(np.float32),
    }
    proto = models.model(
        """g (float[2, 3] x) => (float[2, 3] y, float[2, 3] m, float[3, 2] t, double[2, 3] d, float[4097] f) {
            u = Add (x, a) y = Add (u, b) m = Mul (x, minus)
            xt = Transpose (x) t = Add (xt, turned) xd = Cast <to = 11> (x) d = Add (xd, wide) f = Sub (far, near) }""",
        weights,
        17,
    )
    made, fired = shared(proto)
    assert fired == 1 and {one.name for one in made.graph.initializer} == set(weights) - {"b"}


def test_outputs_and_inputs_keep_their_constants() -> None:
    weights = {name: np.ones(4, np.float32) for name in ("first", "second", "given", "out")}
    proto = models.model(
        "g (float[4] x, float[4] given) => (float[4] y, float[4] out) { u = Add (x, first) v = Add (u, second) "
        "y = Add (v, given) }",
        weights,
        17,
    )
    made, fired = shared(proto)
    assert fired == 1 and {one.name for one in made.graph.initializer} == {"first", "given", "out"}


def branches(size: int, outside: bool) -> onnx.ModelProto:
    """An If whose branches have equal constants of so many numbers, and a graph around them that may have them too."""
    proto = models.model(
        "g (float[1] x) => (float[1] y) { p = Greater (x, zero) y = Identity (x) }",
        {"zero": np.zeros(1, np.float32)},
        17,
    )
    array = np.arange(size, dtype=np.float32)
    bodies = {}
    for branch, op_type in (("then", "ReduceMax"), ("else", "ReduceMin")):
        node = helper.make_node(op_type, [f"{branch}_w"], [f"{branch}_y"], keepdims=1)
        end = helper.make_tensor_value_info(f"{branch}_y", onnx.TensorProto.FLOAT, [1])
        bodies[f"{branch}_branch"] = helper.make_graph(
            [node], branch, [], [end], [numpy_helper.from_array(array, f"{branch}_w")]
        )
    nodes = [proto.graph.node[0], helper.make_node("If", ["p"], ["y"], **bodies)]
    if outside:
        proto.graph.initializer.append(numpy_helper.from_array(array, "w"))
        nodes[1].output[0] = "one"
        nodes += [helper.make_node("ReduceSum", ["w"], ["sum"]), helper.make_node("Add", ["one", "sum"], ["y"])]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto


def test_bodies_read_what_is_outside_and_leave_what_is_large_there() -> None:
    def places(made: onnx.ModelProto) -> list[int]:
        node = next(node for node in made.graph.node if node.op_type == "If")
        return [len(made.graph.initializer), *(len(one.g.initializer) for one in node.attribute)]

    assert places(shared(branches(8, outside=True))[0]) == [2, 0, 0]
    assert places(shared(branches(8, outside=False))[0]) == [1, 1, 1]
    assert places(shared(branches(4096, outside=False))[0]) == [2, 0, 0]


@pytest.mark.parametrize("size", [8, 4096])
@pytest.mark.parametrize("reads", ["own", "outer"])
def test_a_name_that_a_body_uses_for_another_constant_is_not_read_there(reads: str, size: int) -> None:
    """``k`` is one array outside and another in both branches, which read the first by another name: their own, or one
    of the graph around them; ONNX Runtime takes such models."""
    first, second = np.arange(size, dtype=np.float32), np.ones(size, np.float32)
    bodies = {}
    for branch in ("then", "else"):
        nodes = [
            helper.make_node("Mul", ["t", "k"], [f"{branch}_u"]),
            helper.make_node("Add", [f"{branch}_u", "z"], [f"{branch}_y"]),
        ]
        inside = [numpy_helper.from_array(second, "k")]
        inside += [numpy_helper.from_array(first, "z")] if reads == "own" else []
        end = helper.make_tensor_value_info(f"{branch}_y", onnx.TensorProto.FLOAT, [size])
        bodies[f"{branch}_branch"] = helper.make_graph(nodes, branch, [], [end], inside)
    weights = {"k": first, **({"z": first} if reads == "outer" else {})}
    proto = models.model(
        f"g (float[{size}] x) => (float[{size}] y) {{ t = Add (x, k) s = ReduceSum <keepdims = 0> (x) "
        "p = Greater (s, zero) y = Identity (t) }",
        {**weights, "zero": np.zeros((), np.float32)},
        17,
    )
    proto.graph.node[-1].CopyFrom(helper.make_node("If", ["p"], ["y"], **bodies))
    shared(proto)
