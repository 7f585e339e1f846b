"""Random networks of free height and width: a backbone, levels of different sizes, heads, and sizes computed in the
graph. Outputs of different sizes declare one name for their axes, as exporters write them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: Heights and widths that every network takes.
SIZES = ((32, 32), (64, 32), (96, 160))


class Drawing:
    """A graph that grows by random decisions.

    Args:
        seed: of the decisions and the weights.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def constant(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, op_type: str, *inputs: str, **attributes: object) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=f"{op_type}_{name}", **attributes))
        return name

    def conv(self, x: str, read: int, made: int, kernel: int = 3, stride: int = 1) -> str:
        weight = self.rng.normal(0, (read * kernel**2) ** -0.5, (made, read, kernel, kernel)).astype(np.float32)
        bias = self.rng.normal(0, 0.1, made).astype(np.float32)
        pads = [kernel // 2] * 4
        return self.add("Conv", x, self.constant(weight), self.constant(bias), pads=pads, strides=[stride, stride])

    def curve(self, x: str) -> str:
        kind = self.rng.choice(["Relu", "SiLU", "LeakyRelu", "HardSwish", "Clip"])
        if kind == "SiLU":
            return self.add("Mul", x, self.add("Sigmoid", x))
        if kind == "Clip":
            return self.add("Clip", x, self.constant(np.float32(0)), self.constant(np.float32(6)))
        return self.add(str(kind), x)

    def part_of_shape(self, x: str, first: int, last: int) -> str:
        bounds = [self.constant(np.array([value], np.int64)) for value in (first, last)]
        return self.add("Slice", self.add("Shape", x), *bounds)

    def block(self, x: str, channels: int) -> str:
        """Layers that keep the size."""
        y = self.curve(self.conv(x, channels, channels, int(self.rng.choice([1, 3]))))
        if self.chance(0.3):
            pooled = self.add("GlobalAveragePool", y)
            y = self.add("Mul", y, self.add("Sigmoid", self.conv(pooled, channels, channels, 1)))
        if self.chance(0.3):
            y = self.add("MaxPool", y, kernel_shape=[3, 3], pads=[1] * 4, strides=[1, 1])
        return self.add("Add", x, y) if self.chance(0.5) else y

    def down(self, x: str, read: int, made: int) -> str:
        if self.chance(0.3):
            pooled = self.add("MaxPool", self.conv(x, read, made), kernel_shape=[2, 2], strides=[2, 2])
            return self.curve(pooled)
        return self.curve(self.conv(x, read, made, stride=2))

    def up(self, x: str, like: str, channels: int) -> str:
        """``x`` at the size of ``like``, added or joined to it."""
        if self.chance(0.5):
            whole = [self.part_of_shape(x, 0, 2), self.part_of_shape(like, 2, 4)]
            big = self.add("Resize", x, "", "", self.add("Concat", *whole, axis=0), mode="nearest")
        else:
            big = self.add("Resize", x, "", self.constant(np.array([1, 1, 2, 2], np.float32)), mode="nearest")
        if self.chance(0.5):
            return self.add("Add", big, like)
        return self.curve(self.conv(self.add("Concat", big, like, axis=1), 2 * channels, channels, 1))

    def head(self, x: str, channels: int, wide: int) -> str:
        """[batch, places, ``wide``]."""
        y = self.conv(x, channels, wide, 1)
        if self.chance(0.5):
            y = self.add("Reshape", y, self.constant(np.array([0, wide, -1], np.int64)))
        else:
            shape = [self.part_of_shape(y, 0, 2), self.constant(np.array([-1], np.int64))]
            y = self.add("Reshape", y, self.add("Concat", *shape, axis=0))
        y = self.add("Transpose", y, perm=[0, 2, 1])
        return self.add("Sigmoid", y) if self.chance(0.5) else self.add("Softmax", y, axis=-1)

    def attend(self, x: str, wide: int) -> str:
        """Attention of the places among themselves."""
        q, k, v = (self.add("MatMul", x, self.constant(self.matrix(wide, wide))) for _ in range(3))
        scores = self.add("Softmax", self.add("MatMul", q, self.add("Transpose", k, perm=[0, 2, 1])), axis=-1)
        return self.add("MatMul", scores, v)

    def matrix(self, rows: int, columns: int) -> np.ndarray:
        return self.rng.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)

    def give(self, name: str, sizes: list[object]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes))


def random_detector(seed: int) -> onnx.ModelProto:
    """A network whose input ``x`` is [n, 3, h, w] with free n, h and w."""
    draw, channels = Drawing(seed), 8
    levels = [draw.down(draw.down("x", 3, channels), channels, channels)]
    for _ in range(int(draw.rng.integers(1, 3))):
        levels.append(draw.block(draw.down(levels[-1], channels, channels), channels))
    for number in range(len(levels) - 1, 0, -1):
        levels[number - 1] = draw.up(levels[number], levels[number - 1], channels)
    heads = [(draw.head(level, channels, wide), wide) for level in levels for wide in (1, 4)]
    if draw.chance(0.4):
        last, wide = heads[-1]
        heads[-1] = draw.attend(last, wide), wide
    if draw.chance(0.4):
        draw.give(draw.add("Concat", *(name for name, wide in heads if wide == 4), axis=1), ["n", "all", 4])
    if draw.chance(0.3):  # an output that goes on
        heads.append((draw.add("Tanh", heads[0][0]), heads[0][1]))
    for name, wide in heads:
        draw.give(name, ["n", "places", wide])
    stale = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8, "h", "w"]) for name in levels]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w"])
    names = {output.name for output in draw.outputs}
    stale = [info for info in stale if info.name not in names] if draw.chance(0.3) else []
    graph = helper.make_graph(draw.nodes, "random", [x], draw.outputs, draw.weights, value_info=stale)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def pictures(seed: int) -> list[dict[str, np.ndarray]]:
    """A sample of every size, the last one as a batch of two."""
    rng = np.random.default_rng(seed)
    batches = [1] * (len(SIZES) - 1) + [2]
    pairs = zip(batches, SIZES, strict=True)
    return [{"x": rng.standard_normal((count, 3, *size)).astype(np.float32)} for count, size in pairs]
