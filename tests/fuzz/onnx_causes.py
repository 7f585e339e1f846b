"""Damage to ONNX models, field by field of the protobuf."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from tests.fuzz.causes import Cause, Finding
from tests.onnx_flow import models

import quark.onnx.flow  # noqa: F401 - imported before a process is forked for every cause
from quark.onnx import CalibMethod, Int8Spec, ModelQuantizer, QConfig, QLayerConfig, UInt8Spec
from quark.onnx.data import RandomDataReader

Edit = Callable[[onnx.ModelProto], "onnx.ModelProto | bytes | None"]
HUGE, NEGATIVE = 1 << 40, -1
MODEL = "model.onnx"
CONFIG = QConfig(
    QLayerConfig(input_tensors=UInt8Spec(calibration_method=CalibMethod.MinMax, symmetric=False), weight=Int8Spec()),
    extra_options={"PrintSummary": False},
)


def base() -> onnx.ModelProto:
    """Conv, Relu, Reshape, Gemm, with constants of every kind that a reader looks at."""
    graph = """
    g (float[1, 3, 6, 6] x) => (float[1, 4] y) <float[1, 2, 4, 4] c> {
        c = Conv <kernel_shape = [3, 3]> (x, w, b)
        r = Relu (c)
        f = Reshape (r, shape)
        y = Gemm <alpha = 1.0, transB = 1> (f, w2, b2)
    }"""
    weights = {"w": models.normal(2, 3, 3, 3), "b": models.normal(2), "shape": np.array([1, 32])}
    weights |= {"w2": models.normal(4, 32), "b2": models.normal(4)}
    return models.model(graph, weights, 17)


def read(folder: Path) -> None:
    """Quantize as a script does; the answer is right if ONNX Runtime runs it, and it is the float model's.

    Raises:
        Finding: ONNX Runtime does not load the result, or its outputs are far from those of the float model.
    """
    path, result = folder / MODEL, folder / "result.onnx"
    reader = RandomDataReader(path)
    ModelQuantizer(CONFIG).quantize_model(path, result, reader)
    feed = next(iter(RandomDataReader(path)))
    onnx.checker.check_model(str(result), full_check=True)
    got = models.run(result, feed)
    expected = models.run(path, feed)
    for ours, theirs in zip(got, expected, strict=True):
        if theirs.dtype.kind == "f" and theirs.size:
            unit = max(float(np.abs(theirs).max()), 1e-6)
            if not np.abs(ours - theirs).max() <= 0.2 * unit:
                raise Finding(f"far from the float model: {np.abs(ours - theirs).max() / unit:.2g}")


def write(edit: Edit, folder: Path) -> None:
    proto = base()
    made = edit(proto)
    content = made if isinstance(made, bytes) else (made or proto).SerializeToString()
    (folder / MODEL).write_bytes(content)


CAUSES: list[Cause] = []


def cause(field: str, damage: str) -> Callable[[Edit], Edit]:
    """Register a damage; the edit works on the base model or returns another one (or bytes)."""

    def register(edit: Edit) -> Edit:
        CAUSES.append(Cause("onnx", field, damage, partial(write, edit)))
        return edit

    return register


def node(proto: onnx.ModelProto, op_type: str) -> onnx.NodeProto:
    return next(one for one in proto.graph.node if one.op_type == op_type)


def weight(proto: onnx.ModelProto, name: str = "w") -> TensorProto:
    return next(one for one in proto.graph.initializer if one.name == name)


def attribute(proto: onnx.ModelProto, op_type: str, name: str) -> AttributeProto:
    return next(one for one in node(proto, op_type).attribute if one.name == name)


# ---- the file --------------------------------------------------------------------------------------------------------

RAW = {
    "empty": b"",
    "text": b"not a model",
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "a lone tag": b"\x3a",
    "length beyond the end": b"\x3a\xff\xff\xff\xff\x0f",
    "an endless varint": b"\x08" + b"\x80" * 40,
    "groups a hundred deep": b"\x0b" * 100,
    "groups a million deep": b"\x0b" * 1_000_000,
    "zip": b"PK\x03\x04" + bytes(100),
    "json": b'{"graph": {}}',
}
for damage, content in RAW.items():
    cause("file", damage)(lambda proto, content=content: content)
for share in (0.1, 0.5, 0.9, 0.99):
    cause("file", f"cut at {share}")(
        lambda proto, share=share: proto.SerializeToString()[: int(proto.ByteSize() * share)]
    )
cause("file", "twice")(lambda proto: proto.SerializeToString() * 2)
cause("file", "with a tail")(lambda proto: proto.SerializeToString() + b"\x00\x01\x02")

# ---- model fields ----------------------------------------------------------------------------------------------------


def set_field(target: Callable[[onnx.ModelProto], object], name: str, value: object) -> Edit:
    def edit(proto: onnx.ModelProto) -> None:
        setattr(target(proto), name, value)

    return edit


for value in (0, -1, 1, 2, 3, 2**31, 2**62):
    cause("ir_version", str(value))(set_field(lambda proto: proto, "ir_version", value))
for value in (0, -1, 1, 5, 99, 2**31, 2**62):
    cause("opset version", str(value))(set_field(lambda proto: proto.opset_import[0], "version", value))


@cause("opset_import", "missing")
def _(proto: onnx.ModelProto) -> None:
    del proto.opset_import[:]


@cause("opset_import", "twice")
def _(proto: onnx.ModelProto) -> None:
    proto.opset_import.append(helper.make_opsetid("", 11))


@cause("opset_import", "twice by the long name")
def _(proto: onnx.ModelProto) -> None:
    proto.opset_import.append(helper.make_opsetid("ai.onnx", 11))


@cause("opset_import", "of an unknown domain only")
def _(proto: onnx.ModelProto) -> None:
    proto.opset_import[0].domain = "com.example"


@cause("opset_import", "domain of 100,000 letters")
def _(proto: onnx.ModelProto) -> None:
    proto.opset_import.append(helper.make_opsetid("d" * 100_000, 1))


@cause("graph", "missing")
def _(proto: onnx.ModelProto) -> None:
    proto.ClearField("graph")


@cause("graph", "without nodes")
def _(proto: onnx.ModelProto) -> None:
    del proto.graph.node[:]


@cause("graph", "without outputs")
def _(proto: onnx.ModelProto) -> None:
    del proto.graph.output[:]


@cause("graph", "without inputs")
def _(proto: onnx.ModelProto) -> None:
    del proto.graph.input[:]


@cause("graph name", "missing")
def _(proto: onnx.ModelProto) -> None:
    proto.graph.ClearField("name")


@cause("metadata_props", "one key twice")
def _(proto: onnx.ModelProto) -> None:
    for value in ("a", "b"):
        proto.metadata_props.add(key="k", value=value)


@cause("metadata_props", "a plan that is none")
def _(proto: onnx.ModelProto) -> None:
    proto.metadata_props.add(key="openquark.plan", value="!!")


@cause("training_info", "present")
def _(proto: onnx.ModelProto) -> None:
    proto.training_info.add().algorithm.name = "t"


@cause("producer_name", "of a million letters")
def _(proto: onnx.ModelProto) -> None:
    proto.producer_name = "p" * 1_000_000


# ---- names -----------------------------------------------------------------------------------------------------------


def rename(proto: onnx.ModelProto, old: str, new: str) -> None:
    """Rename a tensor everywhere."""
    for one in proto.graph.node:
        one.input[:] = [new if name == old else name for name in one.input]
        one.output[:] = [new if name == old else name for name in one.output]
    for values in (proto.graph.initializer, proto.graph.input, proto.graph.output, proto.graph.value_info):
        for value in values:
            value.name = new if value.name == old else value.name


STRANGE = {
    "NUL": "a\0b",
    "newline": "a\nb",
    "escape": "\x1b[31m",
    "path": "../../x",
    "absolute path": "/etc/passwd",
    "spaces": "  ",
    "emoji": "🦆",
    "right to left": "\u202eabc",
    "surrogates' neighbour": "\ud7ff",
    "of 100,000 letters": "n" * 100_000,
    "braces": "{x!r:.80}",
    "rich markup": "[bold]x[/nothing]",
    "percent": "%s%n",
}
for damage, text in STRANGE.items():
    cause("tensor name", damage)(lambda proto, text=text: rename(proto, "r", text))
    cause("weight name", damage)(lambda proto, text=text: rename(proto, "w", text))
    cause("input name", damage)(lambda proto, text=text: rename(proto, "x", text))
    cause("output name", damage)(lambda proto, text=text: rename(proto, "y", text))
    cause("node name", damage)(set_field(lambda proto: proto.graph.node[0], "name", text))
for field, mark in (("tensor name", b"r"), ("node name", b"NODENAME")):

    @cause(field, "invalid UTF-8")
    def _(proto: onnx.ModelProto, mark: bytes = mark) -> bytes:
        proto.graph.node[0].name = "NODENAME"
        rename(proto, "r", "TENSORNAME")
        text = b"TENSORNAME" if mark == b"r" else mark
        return proto.SerializeToString().replace(text, b"\xff\xfe" + text[2:])


for field in ("w", "x", "y", "c", "Conv", "Gemm", "alpha", "kernel_shape"):

    @cause(f"the name {field}", "invalid UTF-8")
    def _(proto: onnx.ModelProto, field: str = field) -> bytes:
        marker = "Q" * 23
        rename(proto, field, marker)
        for one in proto.graph.node:
            one.op_type = marker if one.op_type == field else one.op_type
            for attr in one.attribute:
                attr.name = marker if attr.name == field else attr.name
        return proto.SerializeToString().replace(marker.encode(), b"\xc3\x28" + b"Q" * 21)


@cause("opset domain", "invalid UTF-8")
def _(proto: onnx.ModelProto) -> bytes:
    proto.opset_import.append(helper.make_opsetid("QQQQQQ", 1))
    return proto.SerializeToString().replace(b"QQQQQQ", b"\xff\xffQQQQ")


@cause("metadata_props", "invalid UTF-8")
def _(proto: onnx.ModelProto) -> bytes:
    proto.metadata_props.add(key="QQQQQQ", value="v")
    return proto.SerializeToString().replace(b"QQQQQQ", b"\xff\xffQQQQ")


# ---- nodes -----------------------------------------------------------------------------------------------------------

for op_type in ("Conv", "Relu", "Reshape", "Gemm"):

    @cause(f"inputs of {op_type}", "none")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        del node(proto, op_type).input[:]

    @cause(f"inputs of {op_type}", "nine")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).input.extend(["x"] * 9)

    @cause(f"inputs of {op_type}", "empty names")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).input[:] = [""] * len(node(proto, op_type).input)

    @cause(f"inputs of {op_type}", "its own output")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).input[0] = node(proto, op_type).output[0]

    @cause(f"inputs of {op_type}", "nobody's")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).input[0] = "nobody"

    @cause(f"outputs of {op_type}", "none")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        del node(proto, op_type).output[:]

    @cause(f"outputs of {op_type}", "one more")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).output.append("more")

    @cause(f"outputs of {op_type}", "that of another node")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).output[0] = "r" if op_type != "Relu" else "c"

    @cause(f"outputs of {op_type}", "a weight")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).output[0] = "w"

    @cause(f"outputs of {op_type}", "the graph input")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).output[0] = "x"

    @cause(f"attributes of {op_type}", "unknown")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).attribute.append(helper.make_attribute("nonsense", 1))

    @cause(f"attributes of {op_type}", "one twice")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        for _ in range(2):
            node(proto, op_type).attribute.append(helper.make_attribute("allowzero", 0))

    @cause(f"operator {op_type}", "unknown")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).op_type = "Nonsense"

    @cause(f"operator {op_type}", "empty")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).op_type = ""

    @cause(f"domain of {op_type}", "unknown")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).domain = "com.example"

    @cause(f"domain of {op_type}", "the runtime's, which lacks it")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).domain = "com.microsoft"
        proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))

    @cause(f"domain of {op_type}", "ai.onnx")
    def _(proto: onnx.ModelProto, op_type: str = op_type) -> None:
        node(proto, op_type).domain = "ai.onnx"


# ---- attributes ------------------------------------------------------------------------------------------------------

VALUES = {
    "kernel_shape": ("Conv", [[0, 0], [-1, 3], [HUGE, 3], [3], [3, 3, 3], [], 3, 3.0, "3"]),
    "strides": ("Conv", [[0, 0], [-1, 1], [HUGE, 1], [1], [2**63 - 1, 1]]),
    "dilations": ("Conv", [[0, 0], [-1, 1], [HUGE, 1], [1]]),
    "pads": ("Conv", [[-1, 0, 0, 0], [HUGE, 0, 0, 0], [1], [1, 1, 1, 1, 1, 1]]),
    "group": ("Conv", [0, -1, 7, 2**62, 1.0, [1]]),
    "auto_pad": ("Conv", ["NONSENSE", "", 1, "SAME_UPPER"]),
    "alpha": ("Gemm", [float("nan"), float("inf"), -float("inf"), 1e38, 0.0, 1, "1", [1.0]]),
    "beta": ("Gemm", [float("nan"), float("inf"), 3e38, "x"]),
    "transB": ("Gemm", [2, -1, 2**62, 0, 1.0, "a"]),
    "transA": ("Gemm", [1, 7]),
    "allowzero": ("Reshape", [1, 7, "x"]),
}


def with_value(proto: onnx.ModelProto, op_type: str, name: str, value: object) -> None:
    target = node(proto, op_type)
    kept = [one for one in target.attribute if one.name != name]
    del target.attribute[:]
    kind = AttributeProto.INTS if value == [] else None
    target.attribute.extend([*kept, helper.make_attribute(name, value, attr_type=kind)])


for name, (op_type, values) in VALUES.items():
    for value in values:
        cause(f"attribute {name}", repr(value))(partial(with_value, op_type=op_type, name=name, value=value))


@cause("attribute type", "undefined")
def _(proto: onnx.ModelProto) -> None:
    attribute(proto, "Conv", "kernel_shape").type = AttributeProto.UNDEFINED


@cause("attribute type", "not that of its value")
def _(proto: onnx.ModelProto) -> None:
    attribute(proto, "Conv", "kernel_shape").type = AttributeProto.FLOAT


@cause("attribute reference", "outside of a function")
def _(proto: onnx.ModelProto) -> None:
    attribute(proto, "Conv", "kernel_shape").ref_attr_name = "k"


# ---- initializers ----------------------------------------------------------------------------------------------------

for name in ("w", "b", "shape"):

    @cause(f"data of {name}", "none")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).ClearField("raw_data")

    @cause(f"data of {name}", "a byte short")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).raw_data = weight(proto, name).raw_data[:-1]

    @cause(f"data of {name}", "an element more")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).raw_data += weight(proto, name).raw_data[:8]

    @cause(f"data of {name}", "in the field of another type")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).ClearField("raw_data")
        weight(proto, name).string_data.append(b"x")

    @cause(f"data of {name}", "in two fields")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).float_data.append(1.0)

    @cause(f"data_type of {name}", "undefined")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).data_type = 0

    @cause(f"data_type of {name}", "99")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).data_type = 99

    @cause(f"data_type of {name}", "string")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).data_type = TensorProto.STRING

    @cause(f"data_type of {name}", "int4")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).data_type = TensorProto.INT4

    @cause(f"data_type of {name}", "complex")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).data_type = TensorProto.COMPLEX64

    @cause(f"dims of {name}", "negative")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).dims[0] = NEGATIVE

    @cause(f"dims of {name}", "2^40")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).dims[0] = HUGE

    @cause(f"dims of {name}", "overflow to the right size")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).dims.extend([2**33, 2**31, 1])

    @cause(f"dims of {name}", "zero")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).dims[0] = 0

    @cause(f"dims of {name}", "none")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        del weight(proto, name).dims[:]

    @cause(f"dims of {name}", "a thousand ones")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).dims.extend([1] * 1000)

    @cause(f"segment of {name}", "present")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).segment.begin = 1

    @cause(f"name of {name}", "missing")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        weight(proto, name).ClearField("name")

    @cause(f"name of {name}", "twice")
    def _(proto: onnx.ModelProto, name: str = name) -> None:
        proto.graph.initializer.append(weight(proto, name))


for value in (np.nan, np.inf, -np.inf, 3e38, 1e-45, -0.0):
    for name in ("w", "b", "w2"):

        @cause(f"a value of {name}", str(value))
        def _(proto: onnx.ModelProto, name: str = name, value: float = value) -> None:
            array = numpy_helper.to_array(weight(proto, name)).copy()
            array.reshape(-1)[0] = value
            weight(proto, name).CopyFrom(numpy_helper.from_array(array, name))


for value in (-2, 0, 33, HUGE, -(2**63)):

    @cause("the shape that Reshape reads", str(value))
    def _(proto: onnx.ModelProto, value: int = value) -> None:
        weight(proto, "shape").CopyFrom(numpy_helper.from_array(np.array([1, value]), "shape"))


@cause("sparse_initializer", "present")
def _(proto: onnx.ModelProto) -> None:
    proto.graph.sparse_initializer.add().values.name = "s"


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
    ("MatMul", "sizes that differ"): text("g (float[2, 3] x) => (float[2, 5] y) { y = MatMul (x, w) }", w=models.normal(4, 5)),
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
        "g (float[1] x) => (float[1] y) { l = Loop (, t, w) <body = b (int64 i, bool c, float[1] s) => (bool d, float[1] o)"
        " { d = Identity (c) o = Add (s, s) }> y = Mul (x, l) }",
        t=np.array(True), w=models.normal(1),
    ),
    ("Loop", "endless, of the input"): text(
        "g (float[1] x) => (float[1] y) { y = Loop (, t, x) <body = b (int64 i, bool c, float[1] s) => (bool d, float[1] o)"
        " { d = Identity (c) o = Relu (s) }> }",
        t=np.array(True),
    ),
    ("Loop", "2^62 times"): text(
        "g (float[1] x) => (float[1] y) { y = Loop (n, t, x) <body = b (int64 i, bool c, float[1] s) => (bool d, float[1] o)"
        " { d = Identity (c) o = Relu (s) }> }",
        t=np.array(True), n=np.array(2**62),
    ),
    ("Loop", "a condition that is always true"): text(
        "g (float[1] x) => (float[1] y) { y = Loop (, t, x) <body = b (int64 i, bool c, float[1] s) => (bool d, float[1] o)"
        " { d = Greater (k, i) o = Relu (s) }> }",
        t=np.array(True), k=np.array(2**62),
    ),
    ("Loop", "three times"): text(
        "g (float[1] x) => (float[1] y) { y = Loop (n, t, x) <body = b (int64 i, bool c, float[1] s) => (bool d, float[1] o)"
        " { d = Identity (c) o = Relu (s) }> }",
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


@cause("nodes", "a chain of 5,000")
def _(proto: onnx.ModelProto) -> onnx.ModelProto:
    return chain(5_000)


@cause("nodes", "1,000,001")
def _(proto: onnx.ModelProto) -> onnx.ModelProto:
    return chain(1_000_001)


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


for depth in (3, 40):
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
