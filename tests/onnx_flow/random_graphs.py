"""Random graphs of free sizes: one to three inputs, branches that meet again, sizes that the graph computes, several
outputs, some of which are read on. Each tensor is known by its shape at each of the three sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper
from tests.onnx_flow.random_detectors import Drawing

#: batch, height, width, places of the three runs
SIZES = ((1, 16, 16, 4), (1, 24, 16, 7), (2, 40, 24, 12))
Shape = tuple[int, ...]
#: elements up to which a tensor may grow
LARGEST = 1 << 16
WIDTHS = (4, 8)
CURVES = ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSwish", "Softplus", "Neg", "Abs", "Elu", "Identity")
BINARIES = ("Add", "Sub", "Mul", "Max")


@dataclass(frozen=True)
class Tensor:
    """A tensor and its shapes at the three sizes."""

    name: str
    shapes: tuple[Shape, ...]

    @property
    def rank(self) -> int:
        return len(self.shapes[0])

    def fixed(self, axis: int) -> int | None:
        """The size of an axis where it is always the same."""
        sizes = {shape[axis] for shape in self.shapes}
        return sizes.pop() if len(sizes) == 1 else None

    def resized(self, name: str, **axes: Callable[[int], int]) -> Tensor:
        """Another tensor with other sizes along ``a0`` to ``a3``."""
        kept: Callable[[int], int] = int
        shapes = (tuple(axes.get(f"a{axis}", kept)(size) for axis, size in enumerate(shape)) for shape in self.shapes)
        return Tensor(name, tuple(shapes))


Grow = Callable[["Graph", Tensor], Tensor | None]


class Graph(Drawing):
    """A graph that grows by random operators from the tensors it has."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.pool: list[Tensor] = []

    def one_of(self, values: Sequence[int]) -> int:
        return int(self.rng.choice(values))

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def partner(self, x: Tensor, fits: Callable[[Shape, Shape], bool]) -> Tensor | None:
        """A tensor of the same rank whose shapes fit at every size."""
        found = [y for y in self.pool if y.rank == x.rank and all(map(fits, x.shapes, y.shapes))]
        return found[int(self.rng.integers(len(found)))] if found else None

    def dense(self, x: str, read: int, made: int) -> str:
        return self.add("MatMul", x, self.constant(self.matrix(read, made)))


# ---- operators of any rank -------------------------------------------------------------------------------------------


def curve(g: Graph, x: Tensor) -> Tensor:
    return Tensor(g.add(str(g.rng.choice(CURVES)), x.name), x.shapes)


def softmax(g: Graph, x: Tensor) -> Tensor | None:
    """Over few entries: presets of NPUs give the result the range 0..1, in which hundreds of even ones are 0."""
    if any(shape[-1] > 16 for shape in x.shapes):
        return None
    return Tensor(g.add("Softmax", x.name, axis=-1), x.shapes)


def binary(g: Graph, x: Tensor) -> Tensor | None:
    """With a tensor of the same size, or one that has size 1 somewhere."""
    y = g.partner(x, lambda a, b: all(q in (p, 1) for p, q in zip(a, b, strict=True)))
    return y and Tensor(g.add(str(g.rng.choice(BINARIES)), x.name, y.name), x.shapes)


def chosen(g: Graph, x: Tensor) -> Tensor:
    """A curve without a jump, which codes could fall on either side of."""
    below = g.add("Mul", x.name, g.constant(np.float32(0.1)))
    return Tensor(g.add("Where", g.add("Greater", x.name, g.constant(np.float32(0))), x.name, below), x.shapes)


def joined(g: Graph, x: Tensor) -> Tensor | None:
    axis = int(g.rng.integers(1, x.rank))
    y = g.partner(x, lambda a, b: a[:axis] + a[axis + 1 :] == b[:axis] + b[axis + 1 :])
    if y is None:
        return None
    shapes = ((*a[:axis], a[axis] + b[axis], *a[axis + 1 :]) for a, b in zip(x.shapes, y.shapes, strict=True))
    return Tensor(g.add("Concat", x.name, y.name, axis=axis), tuple(shapes))


def halved(g: Graph, x: Tensor) -> Tensor:
    """The first half along an axis, by a size that the graph computes."""
    axis = int(g.rng.integers(1, x.rank))
    half = g.add("Div", g.part_of_shape(x.name, axis, axis + 1), g.ints(2))
    if g.chance(0.5):
        made = g.add("Slice", x.name, g.ints(0), half, g.ints(axis))
        return x.resized(made, **{f"a{axis}": lambda size: size // 2})
    made = g.add("Slice", x.name, half, g.ints(2**31), g.ints(axis))
    return x.resized(made, **{f"a{axis}": lambda size: size - size // 2})


def strided(g: Graph, x: Tensor) -> Tensor:
    axis = int(g.rng.integers(1, x.rank))
    made = g.add("Slice", x.name, g.ints(0), g.ints(2**31), g.ints(axis), g.ints(2))
    return x.resized(made, **{f"a{axis}": lambda size: (size + 1) // 2})


def mean(g: Graph, x: Tensor) -> Tensor:
    axis = int(g.rng.integers(1, x.rank))
    made = g.add(str(g.rng.choice(["ReduceMean", "ReduceMax"])), x.name, axes=[axis], keepdims=1)
    return x.resized(made, **{f"a{axis}": lambda size: 1})


def expanded(g: Graph, x: Tensor) -> Tensor:
    small = mean(g, x)
    return Tensor(g.add("Expand", small.name, g.add("Shape", x.name)), x.shapes)


def turned(g: Graph, x: Tensor) -> Tensor:
    order = [0, *(1 + int(axis) for axis in g.rng.permutation(x.rank - 1))]
    made = g.add("Transpose", x.name, perm=order)
    return Tensor(made, tuple(tuple(shape[axis] for axis in order) for shape in x.shapes))


def linear(g: Graph, x: Tensor) -> Tensor | None:
    read, made = x.fixed(-1), g.one_of(WIDTHS)
    if read is None:
        return None
    y = g.dense(x.name, read, made)
    if g.chance(0.5):
        y = g.add("Add", y, g.constant(g.rng.normal(0, 0.1, made).astype(np.float32)))
    return x.resized(y, **{f"a{x.rank - 1}": lambda size: made})


def layer_norm(g: Graph, x: Tensor) -> Tensor | None:
    wide = x.fixed(-1)
    if wide is None or wide < 4:
        return None
    scale, shift = (g.constant(g.rng.normal(middle, 0.1, wide).astype(np.float32)) for middle in (1, 0))
    return Tensor(g.add("LayerNormalization", x.name, scale, shift, axis=-1), x.shapes)


# ---- images ----------------------------------------------------------------------------------------------------------


def conv(g: Graph, x: Tensor) -> Tensor | None:
    read = x.fixed(1)
    if read is None:
        return None
    kernel, stride, made = g.one_of((1, 3)), g.one_of((1, 1, 2)), g.one_of(WIDTHS)
    if g.chance(0.3):  # one filter for each channel
        weight = g.constant(g.rng.normal(0, 0.3, (read, 1, 3, 3)).astype(np.float32))
        return Tensor(g.add("Conv", x.name, weight, pads=[1] * 4, group=read), x.shapes)
    size = {f"a{axis}": lambda size: (size - 1) // stride + 1 for axis in (2, 3)}
    return x.resized(g.conv(x.name, read, made, kernel, stride), a1=lambda _: made, **size)


def conv_transpose(g: Graph, x: Tensor) -> Tensor | None:
    read, made = x.fixed(1), g.one_of(WIDTHS)
    if read is None:
        return None
    weight = g.constant(g.rng.normal(0, 0.3, (read, made, 2, 2)).astype(np.float32))
    y = g.add("ConvTranspose", x.name, weight, strides=[2, 2])
    return x.resized(y, a1=lambda _: made, a2=lambda size: 2 * size, a3=lambda size: 2 * size)


def pooled(g: Graph, x: Tensor) -> Tensor:
    kind, stride = str(g.rng.choice(["MaxPool", "AveragePool"])), g.one_of((1, 2))
    y = g.add(kind, x.name, kernel_shape=[3, 3], pads=[1] * 4, strides=[stride] * 2)
    return x.resized(y, a2=lambda size: (size - 1) // stride + 1, a3=lambda size: (size - 1) // stride + 1)


def global_pool(g: Graph, x: Tensor) -> Tensor:
    return x.resized(g.add("GlobalAveragePool", x.name), a2=lambda _: 1, a3=lambda _: 1)


def enlarged(g: Graph, x: Tensor) -> Tensor:
    mode = str(g.rng.choice(["nearest", "linear"]))
    y = g.add("Resize", x.name, "", g.constant(np.array([1, 1, 2, 2], np.float32)), mode=mode)
    return x.resized(y, a2=lambda size: 2 * size, a3=lambda size: 2 * size)


def resized_like(g: Graph, x: Tensor) -> Tensor | None:
    like = g.partner(x, lambda a, b: True)
    if like is None:
        return None
    whole = [g.part_of_shape(x.name, 0, 2), g.part_of_shape(like.name, 2, 4)]
    y = g.add("Resize", x.name, "", "", g.add("Concat", *whole, axis=0), mode="nearest")
    return Tensor(y, tuple((*a[:2], *b[2:]) for a, b in zip(x.shapes, like.shapes, strict=True)))


def padded(g: Graph, x: Tensor) -> Tensor:
    mode = str(g.rng.choice(["constant", "reflect", "edge"]))
    mode = mode if all(min(shape[2:]) > 1 for shape in x.shapes) else "constant"
    y = g.add("Pad", x.name, g.ints(0, 0, 1, 0, 0, 0, 0, 1), mode=mode)
    return x.resized(y, a2=lambda size: size + 1, a3=lambda size: size + 1)


def batch_norm(g: Graph, x: Tensor) -> Tensor | None:
    wide = x.fixed(1)
    if wide is None:
        return None
    ends = ((0.5, 1.5), (-0.3, 0.3), (-0.3, 0.3), (0.5, 1.5))
    values = [g.constant(g.rng.uniform(low, high, wide).astype(np.float32)) for low, high in ends]
    return Tensor(g.add("BatchNormalization", x.name, *values), x.shapes)


def instance_norm(g: Graph, x: Tensor) -> Tensor | None:
    wide = x.fixed(1)
    if wide is None or any(shape[2] * shape[3] < 16 for shape in x.shapes):
        return None
    values = [g.constant(np.full(wide, value, np.float32)) for value in (1, 0)]
    return Tensor(g.add("InstanceNormalization", x.name, *values), x.shapes)


def shuffled(g: Graph, x: Tensor) -> Tensor | None:
    wide = x.fixed(1)
    if wide is None or wide % 4:
        return None
    y = g.add("DepthToSpace", x.name, blocksize=2)
    return x.resized(y, a1=lambda size: size // 4, a2=lambda size: 2 * size, a3=lambda size: 2 * size)


def flattened(g: Graph, x: Tensor) -> Tensor | None:
    wide = x.fixed(1)
    if wide is None:
        return None
    y = g.add("Reshape", x.name, g.ints(0, wide, -1))
    return Tensor(y, tuple((n, c, h * w) for n, c, h, w in x.shapes))


# ---- sequences -------------------------------------------------------------------------------------------------------


def attention(g: Graph, x: Tensor) -> Tensor | None:
    wide = x.fixed(2)
    return Tensor(g.attend(x.name, wide), x.shapes) if wide is not None and wide > 1 else None


def heads(g: Graph, x: Tensor) -> Tensor | None:
    """Attention of two heads, taken apart and put together by Reshape."""
    wide = x.fixed(2)
    if wide is None or wide % 2:
        return None
    apart = [g.add("Reshape", g.dense(x.name, wide, wide), g.ints(0, 0, 2, wide // 2)) for _ in range(3)]
    orders = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    q, k, v = (g.add("Transpose", y, perm=order) for y, order in zip(apart, orders, strict=True))
    y = g.add("Transpose", g.add("MatMul", g.add("Softmax", g.add("MatMul", q, k), axis=-1), v), perm=[0, 2, 1, 3])
    whole = g.add("Concat", g.part_of_shape(x.name, 0, 2), g.ints(-1), axis=0)
    return Tensor(g.add("Reshape", y, whole), x.shapes)


def rows(g: Graph, x: Tensor) -> Tensor | None:
    """All places in one axis, through a Gemm, and back."""
    wide, made = x.fixed(2), g.one_of(WIDTHS)
    if wide is None:
        return None
    flat = g.add("Reshape", x.name, g.ints(-1, wide))
    y = g.add("Gemm", flat, g.constant(g.matrix(made, wide)), transB=1)
    back = g.add("Concat", g.part_of_shape(x.name, 0, 2), g.ints(made), axis=0)
    return x.resized(g.add("Reshape", y, back), a2=lambda _: made)


def conv1d(g: Graph, x: Tensor) -> Tensor | None:
    read, made = x.fixed(1), g.one_of(WIDTHS)
    if read is None:
        return None
    weight = g.constant(g.rng.normal(0, (3 * read) ** -0.5, (made, read, 3)).astype(np.float32))
    return x.resized(g.add("Conv", x.name, weight, pads=[1, 1]), a1=lambda _: made)


def first_place(g: Graph, x: Tensor) -> Tensor:
    y = g.add("Gather", x.name, g.constant(np.int64(0)), axis=1)
    return Tensor(y, tuple((shape[0], shape[2]) for shape in x.shapes))


def largest(g: Graph, x: Tensor) -> Tensor:
    y = g.add("TopK", x.name, g.ints(1), axis=1)
    g.nodes[-1].output.append(f"{y}_places")
    return x.resized(y, a1=lambda _: 1)


def summed(g: Graph, x: Tensor) -> Tensor:
    return Tensor(g.add("CumSum", x.name, g.constant(np.int64(1))), x.shapes)


def one_more_axis(g: Graph, x: Tensor) -> Tensor:
    y = g.add("Unsqueeze", x.name, g.ints(1))
    return Tensor(y, tuple((shape[0], 1, *shape[1:]) for shape in x.shapes))


ANY: tuple[Grow, ...] = (curve, curve, binary, binary, joined, turned, linear, linear, chosen, layer_norm, softmax)
SOME: tuple[Grow, ...] = (halved, strided, mean, expanded)
OF_RANK: dict[int, tuple[Grow, ...]] = {
    2: (*ANY, one_more_axis),
    3: (*ANY, *SOME, attention, heads, rows, rows, conv1d, conv1d, first_place, largest, summed, one_more_axis),
    4: (
        *ANY,
        *SOME,
        *(conv,) * 6,
        conv_transpose,
        pooled,
        global_pool,
        enlarged,
        resized_like,
        padded,
        batch_norm,
        instance_norm,
        shuffled,
        flattened,
    ),
}


def inputs(g: Graph) -> list[onnx.ValueInfoProto]:
    """An image, a sequence and ids, or some of them."""
    found = [kind for kind in ("image", "sequence", "ids") if g.chance(0.5)] or ["image"]
    declared = []
    for kind in found:
        free: list[object] = {"image": ["n", 3, "h", "w"], "sequence": ["n", "t", 8], "ids": ["n", "t"]}[kind]  # type: ignore[assignment]
        element = TensorProto.INT64 if kind == "ids" else TensorProto.FLOAT
        declared.append(helper.make_tensor_value_info(kind, element, free))
        if kind == "image":
            g.pool.append(Tensor(kind, tuple((n, 3, h, w) for n, h, w, _ in SIZES)))
        else:
            name = kind if kind == "sequence" else g.add("Gather", g.constant(g.matrix(20, 8)), kind)
            g.pool.append(Tensor(name, tuple((n, t, 8) for n, _, _, t in SIZES)))
    return declared


def random_graph(seed: int, steps: int = 14) -> onnx.ModelProto:
    """A model of random operators; what nothing reads is an output, and some tensors that something reads."""
    g = Graph(seed)
    declared = inputs(g)
    for _ in range(steps):
        x = g.pool[max(int(g.rng.integers(len(g.pool))), int(g.rng.integers(len(g.pool))))]
        grow = OF_RANK[x.rank][int(g.rng.integers(len(OF_RANK[x.rank])))]
        y = grow(g, x)
        if y is not None and all(0 < np.prod(shape) <= LARGEST for shape in y.shapes):
            g.pool.append(y)
    made = [x for x in g.pool if any(x.name == name for node in g.nodes for name in node.output)]
    read = {name for node in g.nodes for name in node.input}
    ends = [x for x in made if x.name not in read or g.chance(0.1)]
    for x in ends:  # free axes have one name, as careless exporters write them
        free: list[object] = [x.fixed(axis) if axis else "n" for axis in range(x.rank)]
        g.give(x.name, ["free" if size is None else size for size in free])
    graph = helper.make_graph(_needed(g, {x.name for x in ends}), "random", declared, g.outputs, g.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _needed(g: Graph, ends: set[str]) -> list[onnx.NodeProto]:
    """The nodes that an output depends on; operators that were given up leave some."""
    wanted, kept = set(ends), []
    for node in reversed(g.nodes):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]


def feeds(model: onnx.ModelProto, seed: int) -> list[dict[str, np.ndarray]]:
    """A sample of each of the three sizes."""
    rng, found = np.random.default_rng(seed), []
    for n, h, w, t in SIZES:
        all_of = {
            "image": rng.standard_normal((n, 3, h, w)).astype(np.float32),
            "sequence": rng.standard_normal((n, t, 8)).astype(np.float32),
            "ids": rng.integers(0, 20, (n, t)),
        }
        found.append({one.name: all_of[one.name] for one in model.graph.input})
    return found
