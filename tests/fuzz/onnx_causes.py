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
from quark.onnx.random_data import RandomDataReader

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
    if not is_moderate(path):
        return
    expected = models.run(path, feed)
    for ours, theirs in zip(got, expected, strict=True):
        if theirs.dtype.kind == "f" and theirs.size and np.isfinite(theirs).all():
            unit = max(float(np.abs(theirs).max()), 1e-6)
            if not np.abs(ours - theirs).max() <= 0.2 * unit:
                raise Finding(f"far from the float model: {np.abs(ours - theirs).max() / unit:.2g}")


def is_moderate(path: Path) -> bool:
    """Whether all weights are of the usual size: one value of 1e38 leaves eight bits nothing for the others."""
    weights = (numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer)
    return all(array.dtype.kind != "f" or not array.size or np.abs(array).max() < 100 for array in weights)


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
for value in (0, -1, 1, 8, 99, 2**31, 2**62):
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


for value in (np.nan, np.inf, -np.inf, 1e-45, -0.0):
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
