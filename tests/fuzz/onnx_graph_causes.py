"""Damage to ONNX models as whole graphs: operators with impossible arguments, loops, sizes, subgraphs, functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tests.fuzz.onnx_causes import CAUSES, HUGE, Edit, cause, read
from tests.onnx_flow import models

__all__ = ["CAUSES", "read"]
STATE = "<body = b (int64 i, bool c, float[1] s) => (bool d, float[1] o)"


# ---- types and shapes ------------------------------------------------------------------------------------------------

PLACES = {
    "input": lambda proto: proto.graph.input[0],
    "output": lambda proto: proto.graph.output[0],
    "value_info": lambda proto: proto.graph.value_info[0],
}
for place, get in PLACES.items():

    @cause(f"type of {place}", "missing")
    def _(proto: onnx.ModelProto, get: Callable = get) -> None:
        get(proto).ClearField("type")

    @cause(f"type of {place}", "sequence")
    def _(proto: onnx.ModelProto, get: Callable = get) -> None:
        get(proto).type.sequence_type.elem_type.tensor_type.elem_type = 1

    @cause(f"name of {place}", "missing")
    def _(proto: onnx.ModelProto, get: Callable = get) -> None:
        get(proto).ClearField("name")

    @cause(f"name of {place}", "nobody's")
    def _(proto: onnx.ModelProto, get: Callable = get) -> None:
        get(proto).name = "nobody"

    @cause(f"shape of {place}", "missing")
    def _(proto: onnx.ModelProto, get: Callable = get) -> None:
        get(proto).type.tensor_type.ClearField("shape")

    @cause(f"shape of {place}", "rank too small")
    def _(proto: onnx.ModelProto, get: Callable = get) -> None:
        del get(proto).type.tensor_type.shape.dim[1:]

    @cause(f"shape of {place}", "rank too large")
    def _(proto: onnx.ModelProto, get: Callable = get) -> None:
        get(proto).type.tensor_type.shape.dim.add().dim_value = 1

    @cause(f"shape of {place}", "twice")
    def _(proto: onnx.ModelProto, get: Callable = get) -> None:
        (proto.graph.input if get is PLACES["input"] else proto.graph.output).append(get(proto))

    for element in (0, 99, -1, TensorProto.STRING, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.COMPLEX64):

        @cause(f"element type of {place}", str(element))
        def _(proto: onnx.ModelProto, get: Callable = get, element: int = element) -> None:
            get(proto).type.tensor_type.elem_type = element

    for size in (0, -1, 7, HUGE, 2**63 - 1, "N", "", "a\0"):

        @cause(f"size in {place}", repr(size))
        def _(proto: onnx.ModelProto, get: Callable = get, size: object = size) -> None:
            dim = get(proto).type.tensor_type.shape.dim[1]
            setattr(dim, "dim_value" if isinstance(size, int) else "dim_param", size)


# ---- whole graphs ----------------------------------------------------------------------------------------------------


def text(graph: str, opset: int = 17, functions: str = "", **weights: np.ndarray) -> Edit:
    """A model of its own in the place of the base."""

    def edit(proto: onnx.ModelProto) -> onnx.ModelProto:
        return models.model(graph, weights, opset)

    return edit


I64 = np.int64
WHOLE = {
    ("Flatten", "axis 99"): text("g (float[2, 3] x) => (float[2, 3] y) { f = Flatten <axis = 99> (x) y = Relu (f) }"),
    ("Concat", "axis -9"): text("g (float[2, 3] x) => (float[4, 3] y) { y = Concat <axis = -9> (x, x) }"),
    ("Transpose", "perm twice 0"): text("g (float[2, 3] x) => (float[3, 2] y) { y = Transpose <perm = [0, 0]> (x) }"),
    ("MatMul", "sizes that differ"): text(
        "g (float[2, 3] x) => (float[2, 5] y) { y = MatMul (x, w) }", w=models.normal(4, 5)
    ),
    ("Gather", "index outside"): text("g (float[2, 3] x) => (float[3] y) { y = Gather (x, i) }", i=np.array(99)),
    ("Range", "to 1e15"): text(
        "g (float[1] x) => (float[m] y) { r = Range (a, b, c) f = Cast <to = 1> (r) y = Mul (x, f) }",
        a=np.array(0), b=np.array(10**15), c=np.array(1),
    ),
    ("Range", "step 0"): text(
        "g (float[1] x) => (float[m] y) { r = Range (a, b, c) f = Cast <to = 1> (r) y = Mul (x, f) }",
        a=np.array(0), b=np.array(10), c=np.array(0),
    ),
    ("Range", "to 1e15, float"): text(
        "g (float[1] x) => (float[m] y) { r = Range (a, b, c) y = Mul (x, r) }",
        a=np.float32(0).reshape(()), b=np.float32(1e15).reshape(()), c=np.float32(1).reshape(()),
    ),
    ("ConstantOfShape", "2^40"): text(
        "g (float[1] x) => (float[m] y) { r = ConstantOfShape (s) y = Mul (x, r) }", s=np.array([HUGE])
    ),
    ("ConstantOfShape", "2^20 x 2^20"): text(
        "g (float[1] x) => (float[m, n] y) { r = ConstantOfShape (s) y = Mul (x, r) }", s=np.array([1 << 20, 1 << 20])
    ),
    ("ConstantOfShape", "negative"): text(
        "g (float[1] x) => (float[m] y) { r = ConstantOfShape (s) y = Mul (x, r) }", s=np.array([-5])
    ),
    ("Expand", "2^40"): text("g (float[1] x) => (float[m] y) { y = Expand (x, s) }", s=np.array([HUGE])),
    ("Expand", "of a constant to 2^40"): text(
        "g (float[1] x) => (float[m] y) { e = Expand (w, s) y = Mul (x, e) }", s=np.array([HUGE]), w=models.normal(1)
    ),
    ("Tile", "2^40"): text("g (float[1] x) => (float[m] y) { y = Tile (x, s) }", s=np.array([HUGE])),
    ("Tile", "of a constant, computed"): text(
        "g (float[1] x) => (float[m] y) { s2 = Mul (s, s) e = Tile (w, s2) y = Mul (x, e) }",
        s=np.array([1 << 20]), w=models.normal(1),
    ),
    ("Pad", "2^40"): text("g (float[4] x) => (float[m] y) { y = Pad (x, p) }", p=np.array([0, HUGE])),
    ("Resize", "2^20 times"): text(
        "g (float[1, 1, 4, 4] x) => (float[1, 1, m, n] y) { y = Resize (x, , s) }",
        s=np.array([1, 1, 2**20, 2**20], np.float32),
    ),
    ("Resize", "0 times"): text(
        "g (float[1, 1, 4, 4] x) => (float[1, 1, m, n] y) { y = Resize (x, , s) }", s=np.array([1, 1, 0, 0], np.float32)
    ),
    ("OneHot", "depth 2^40"): text(
        "g (float[1] x, int64[1] i) => (float[1, m] y) { h = OneHot (i, d, v) y = Mul (x, h) }",
        d=np.array(HUGE), v=np.array([0, 1], np.float32),
    ),
    ("EyeLike", "2^20 x 2^20"): text(
        "g (float[1] x) => (float[m, n] y) { r = ConstantOfShape (s) e = EyeLike (r) y = Mul (x, e) }",
        s=np.array([1 << 20, 1 << 20]),
    ),
    ("Loop", "endless, of constants"): text(
        f"g (float[1] x) => (float[1] y) {{ l = Loop (, t, w) {STATE} {{ d = Identity (c) o = Add (s, s) }}>"
        " y = Mul (x, l) }",
        t=np.array(True), w=models.normal(1),
    ),
    ("Loop", "endless, of the input"): text(
        f"g (float[1] x) => (float[1] y) {{ y = Loop (, t, x) {STATE}  {{ d = Identity (c) o = Relu (s) }}> }}",
        t=np.array(True),
    ),
    ("Loop", "2^62 times"): text(
        f"g (float[1] x) => (float[1] y) {{ y = Loop (n, t, x) {STATE}  {{ d = Identity (c) o = Relu (s) }}> }}",
        t=np.array(True), n=np.array(2**62),
    ),
    ("Loop", "a condition that is always true"): text(
        f"g (float[1] x) => (float[1] y) {{ y = Loop (, t, x) {STATE}  {{ d = Greater (k, i) o = Relu (s) }}> }}",
        t=np.array(True), k=np.array(2**62),
    ),
    ("Loop", "three times"): text(
        f"g (float[1] x) => (float[1] y) {{ y = Loop (n, t, x) {STATE}  {{ d = Identity (c) o = Relu (s) }}> }}",
        t=np.array(True), n=np.array(3),
    ),
    ("Loop", "scan output 2^40 long"): text(
        "g (float[1] x) => (float[m, 1] y) { y = Loop (n, t) <body = b (int64 i, bool c) => (bool d, float[1] o)"
        " { d = Identity (c) o = Relu (x) }> }",
        t=np.array(True), n=np.array(HUGE),
    ),
    ("If", "without a branch"): text(
        "g (float[1] x, bool c) => (float[1] y) { y = If (c) <then_branch = t () => (float[1] a) { a = Relu (x) }> }"
    ),
    ("If", "branches of different types"): text(
        "g (float[1] x, bool c) => (float[1] y) { y = If (c) <then_branch = t () => (float[1] a) { a = Relu (x) },"
        " else_branch = e () => (int64[1] b) { b = Cast <to = 7> (x) }> }"
    ),
    ("circle", "of two nodes"): text("g (float[1] x) => (float[1] y) { a = Add (x, b) b = Relu (a) y = Relu (b) }"),
    ("output", "the input itself"): text("g (float[2, 2] x) => (float[2, 2] x) { y = Relu (x) }"),
    ("output", "a constant"): text("g (float[2, 2] x) => (float[2] w) { y = Relu (x) }", w=models.normal(2)),
    ("opset", "of the future operator"): text("g (float[2, 2] x) => (float[2, 2] y) { y = Gelu (x) }", opset=11),
    ("QuantizeLinear", "there already"): text(
        "g (float[2] x) => (float[2] y) { q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }",
        s=np.float32(0.1).reshape(()), z=np.array(0, np.uint8),
    ),
}  # fmt: skip
for (field, damage), edit in WHOLE.items():
    cause(field, damage)(edit)


@cause("nodes", "a chain of 500")
def _(proto: onnx.ModelProto) -> onnx.ModelProto:
    return chain(500)


@cause("nodes", "200,001")
def _(proto: onnx.ModelProto) -> onnx.ModelProto:
    return chain(200_001)


def chain(length: int) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("v0", f"v{length}")]
    graph = onnx.GraphProto(name="g", input=values[:1], output=values[1:])
    one = onnx.NodeProto(op_type="Relu").SerializeToString()
    nodes = (b"\x0a" + bytes([len(a)]) + a + b"\x12" + bytes([len(b)]) + b + one for a, b in names(length))
    body = b"".join(b"\x0a" + bytes([len(content)]) + content for content in nodes)
    graph = onnx.GraphProto.FromString(body + graph.SerializeToString())
    return onnx.ModelProto(ir_version=8, graph=graph, opset_import=[helper.make_opsetid("", 17)])


def names(length: int) -> list[tuple[bytes, bytes]]:
    return [(b"v%d" % k, b"v%d" % (k + 1)) for k in range(length)]


def subgraphs(depth: int) -> onnx.ModelProto:
    """If inside If inside If."""
    value = helper.make_tensor_value_info
    inner = helper.make_graph([helper.make_node("Relu", ["x"], ["o0"])], "b", [], [value("o0", 1, [1])])
    for k in range(depth):
        made = helper.make_node("If", ["c"], [f"o{k + 1}"], then_branch=inner, else_branch=small(f"e{k}"))
        inner = helper.make_graph([made], "b", [], [value(f"o{k + 1}", 1, [1])])
    graph = helper.make_graph(list(inner.node), "g", [value("x", 1, [1]), value("c", 9, [])], list(inner.output))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def small(name: str) -> onnx.GraphProto:
    made = helper.make_tensor_value_info(name, 1, [1])
    return helper.make_graph([helper.make_node("Relu", ["x"], [name])], name, [], [made])


for depth in (3, 20):
    cause("subgraphs", f"{depth} deep")(lambda proto, depth=depth: subgraphs(depth))


# ---- functions -------------------------------------------------------------------------------------------------------


def function(name: str, *calls: str) -> onnx.FunctionProto:
    """A function of one input that calls others one after the other."""
    tensors = ["a", *(f"t{k}" for k in range(len(calls) - 1)), "b"]
    domains = ["" if call == "Relu" else "f" for call in calls]
    nodes = [
        helper.make_node(call, [tensors[k]], [tensors[k + 1]], domain=domain)
        for k, (call, domain) in enumerate(zip(calls, domains, strict=True))
    ]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    return helper.make_function("f", name, ["a"], ["b"], nodes, imports)


def calling(*functions: onnx.FunctionProto) -> onnx.ModelProto:
    """A model that calls the last function behind a convolution."""
    values = [helper.make_tensor_value_info(name, 1, [1, 3, 6, 6]) for name in "xy"]
    call = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node(functions[-1].name, ["c"], ["y"], domain="f"),
    ]
    weights = [numpy_helper.from_array(models.normal(3, 3, 3, 3), "w")]
    graph = helper.make_graph(call, "g", values[:1], values[1:], weights)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=functions)


def nested(depth: int, width: int) -> onnx.ModelProto:
    made = [function("f0", "Relu")]
    for k in range(1, depth):
        made.append(function(f"f{k}", *[f"f{k - 1}"] * width))
    return calling(*made)


FUNCTIONS = {
    "plain": lambda proto: calling(function("f0", "Relu", "Relu")),
    "calls itself": lambda proto: calling(function("f0", "f0")),
    "two that call each other": lambda proto: calling(function("f1", "f0"), function("f0", "f1")),
    "missing": lambda proto: calling(function("f0", "f9")),
    "twice": lambda proto: calling(function("f0", "Relu"), function("f0", "Relu")),
    "ten calls, eight deep": lambda proto: nested(8, 10),
    "three calls, three deep": lambda proto: nested(3, 3),
    "two thousand deep": lambda proto: nested(2000, 1),
}
for damage, made in FUNCTIONS.items():
    cause("functions", damage)(made)


@cause("function inputs", "more than the call gives")
def _(proto: onnx.ModelProto) -> onnx.ModelProto:
    made = calling(function("f0", "Relu"))
    made.functions[0].input.append("more")
    return made


@cause("function outputs", "nobody makes")
def _(proto: onnx.ModelProto) -> onnx.ModelProto:
    made = calling(function("f0", "Relu"))
    made.functions[0].output[0] = "nobody"
    return made


@cause("function opset_import", "missing")
def _(proto: onnx.ModelProto) -> onnx.ModelProto:
    made = calling(function("f0", "Relu"))
    del made.functions[0].opset_import[:]
    return made


@cause("function attribute", "that the call lacks")
def _(proto: onnx.ModelProto) -> onnx.ModelProto:
    made = calling(function("f0", "Relu"))
    made.functions[0].attribute.append("needed")
    return made
