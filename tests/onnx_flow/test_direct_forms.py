"""Forms with faster kernels over generated cases: ONNX Runtime computes the same with them, and they are found."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.onnx_flow import models

from quark.onnx.graph.model import load, to_proto
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes.registry import apply, passes

FLOAT = TensorProto.FLOAT


def made_of(
    nodes: list[onnx.NodeProto], shape: list[object], constants: dict[str, np.ndarray], opset: int = 13
) -> onnx.ModelProto:
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    ends = helper.make_tensor_value_info("x", FLOAT, shape), helper.make_tensor_value_info("y", FLOAT, None)
    graph = helper.make_graph(nodes, "generated", ends[:1], ends[1:], stored)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return onnx.shape_inference.infer_shapes(proto)


def rewritten(name: str, proto: onnx.ModelProto) -> tuple[list[str], int]:
    """Operators after the pass, and how often it fired; ONNX Runtime's outputs are those of before, of nothing too."""
    model = load(proto)
    infer_shapes(model)
    fired = apply(model, passes()[name], {}).fired
    made = to_proto(model)
    onnx.checker.check_model(made, full_check=True)
    for feeds in (models.feeds(proto), models.feeds(proto, unknown=0)):
        models.assert_close(models.run(made, feeds), models.run(proto, feeds), 1e-5)
    return [node.op_type for node in made.graph.node], fired


@pytest.mark.parametrize("seed", range(24))
def test_a_transposed_convolution_of_stride_1_is_a_convolution(seed: int) -> None:
    random = np.random.default_rng(seed)
    rank, group = int(random.integers(1, 4)), int(random.choice([1, 2]))
    read, made = group * int(random.integers(1, 4)), int(random.integers(1, 4))
    kernel = random.integers(1, 4, rank).tolist()
    dilations = random.integers(1, 3, rank).tolist()
    stride = int(random.choice([1, 1, 2]))
    most = [step * (size - 1) for step, size in zip(dilations, kernel, strict=True)]
    pads = [int(random.integers(0, one + 1)) for one in most * 2]
    attributes = {"dilations": dilations, "pads": pads, "group": group, "strides": [stride] * rank}
    constants = {"w": models.normal(read, made, *kernel, seed=seed), "b": models.normal(group * made, seed=seed)}
    node = helper.make_node("ConvTranspose", ["x", "w", "b"], ["y"], **attributes)
    found, _ = rewritten("direct_convs", made_of([node], [2, read, *[7] * rank], constants))
    assert found == (["Conv"] if stride == 1 else ["ConvTranspose"])


@pytest.mark.parametrize("seed", range(24))
def test_a_convolution_of_an_unfolded_image_is_one_convolution(seed: int) -> None:
    random = np.random.default_rng(seed)
    channels, made, size = int(random.integers(1, 4)), 3, random.integers(7, 11, 2)
    kernel, steps, strides, sides = (random.integers(low, 3 + low, 2) for low in (1, 1, 1, 0))
    padded = size + 2 * sides
    places = (padded - steps * (kernel - 1) - 1) // strides + 1
    whole = bool(random.random() < 0.8)
    if not whole:
        places = np.maximum(places - 1, 1)  # the last pixels are not read
    rows, columns = (steps[k] * np.arange(kernel[k])[:, None] + strides[k] * np.arange(places[k]) for k in range(2))
    target = np.array([1, channels * kernel[0] * kernel[1], *places])
    constants = {"pads": np.array([0, 0, *sides, 0, 0, *sides]), "rows": rows, "columns": columns, "target": target}
    constants["w"] = models.normal(made, int(target[1]), 1, 1, seed=seed)
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["p"]),
        helper.make_node("Gather", ["p", "rows"], ["g"], axis=2),
        helper.make_node("Gather", ["g", "columns"], ["h"], axis=4),
        helper.make_node("Transpose", ["h"], ["t"], perm=[0, 1, 2, 4, 3, 5]),
        helper.make_node("Reshape", ["t", "target"], ["u"]),
        helper.make_node("Conv", ["u", "w"], ["y"]),
    ]
    found, fired = rewritten("direct_convs", made_of(nodes, [1, channels, *size.tolist()], constants))
    assert fired or not whole
    assert found == ["Conv"] if fired else found[-1] == "Conv" and len(found) == 6


@pytest.mark.parametrize("seed", range(24))
def test_a_block_that_is_written_is_a_concat(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = random.integers(2, 5, int(random.integers(1, 5))).tolist()
    depth = int(random.integers(1, len(shape) + 1))
    begin, size = [0] * depth, shape[:depth]
    for axis in random.permutation(depth)[: 1 if random.random() < 0.8 else 2]:
        size[axis] = int(random.integers(1, shape[axis] + 1))
        begin[axis] = int(random.integers(0, shape[axis] - size[axis] + 1))
    indices = np.moveaxis(np.indices(size), 0, -1) + np.array(begin)
    if random.random() < 0.3:
        indices = indices.reshape(-1, depth)
    if random.random() < 0.3:
        indices = indices - np.array(shape[:depth])
    updates = models.normal(*indices.shape[:-1], *shape[depth:], seed=seed)
    nodes = [
        helper.make_node("Add", ["u", "u"], ["v"]),
        helper.make_node("ScatterND", ["x", "i", "v"], ["y"]),
    ]
    found, fired = rewritten("fewer_moves", made_of(nodes, shape, {"i": np.ascontiguousarray(indices), "u": updates}))
    cut = sum(one != whole for one, whole in zip(size, shape, strict=False))
    assert ("ScatterND" not in found) == bool(fired) == (cut <= 1)


def test_scattered_indices_and_sums_stay() -> None:
    updates = models.normal(2, 3)
    for indices, given in (([[2], [0]], {}), ([[1], [1]], {}), ([[0], [1]], {"reduction": "add"})):
        node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], **given)
        proto = made_of([node], [4, 3], {"i": np.array(indices), "u": updates}, 18)
        assert rewritten("fewer_moves", proto) == (["ScatterND"], 0)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_what_only_renames_axes_is_one_node(seed: int, free: bool) -> None:
    random = np.random.default_rng(seed)
    nodes, constants, shape, name = [], {}, [1, 4, 1, 3, 1], "x"
    for k in range(int(random.integers(2, 6))):
        kind = str(random.choice(["Squeeze", "Unsqueeze", "Transpose", "Reshape"]))
        made, ones = "y" if k == 9 else f"v{k}", [axis for axis, one in enumerate(shape) if one == 1]
        if kind == "Squeeze" and ones:
            constants[f"a{k}"] = np.array(ones[:1])
            del shape[ones[0]]
            nodes.append(helper.make_node(kind, [name, f"a{k}"], [made]))
        elif kind == "Transpose" and ones:
            order = [axis for axis in range(len(shape)) if axis != ones[0]]
            order.insert(int(random.integers(0, len(order) + 1)), ones[0])
            shape = [shape[axis] for axis in order]
            nodes.append(helper.make_node(kind, [name], [made], perm=order))
        elif kind == "Reshape":
            shape = [4, 1, 3]
            constants[f"a{k}"] = np.array([-1, 1, 3])
            nodes.append(helper.make_node(kind, [name, f"a{k}"], [made]))
        else:
            shape = [*shape, 1]
            constants[f"a{k}"] = np.array([-1])
            nodes.append(helper.make_node("Unsqueeze", [name, f"a{k}"], [made]))
        name = made
    nodes += [helper.make_node("Relu", [name], ["r"]), helper.make_node("Neg", ["r"], ["y"])]
    proto = made_of(nodes, [1, "rows" if free else 4, 1, 3, 1], constants)
    found, _ = rewritten("fewer_moves", proto)
    assert len(found) <= 3 and found[-2:] == ["Relu", "Neg"]


def test_a_transpose_that_moves_numbers_stays_and_what_two_read_is_read_by_both() -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["x", "a"], ["u"]),
        helper.make_node("Transpose", ["u"], ["t"], perm=[0, 2, 1]),
        helper.make_node("Transpose", ["u"], ["s"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["s", "n"], ["r"]),
        helper.make_node("Add", ["r", "t"], ["y"]),
    ]
    proto = made_of(nodes, [3, 4], {"a": np.array([0]), "n": np.array([1, 4, 3])})
    assert sorted(rewritten("fewer_moves", proto)[0]) == ["Add", "Reshape", "Transpose", "Unsqueeze"]


class _Chain:
    """Nodes on a tensor "a" with channels last, one after the other, and their constants."""

    def __init__(self, random: np.random.Generator, rank: int) -> None:
        self.nodes, self.last, self.random, self.rank = list[onnx.NodeProto](), "a", random, rank
        pads = np.array([0, 1, *[0] * (rank - 2), 0, *[0] * (rank - 2), 2])
        self.constants = {"half": np.array(0.5, np.float32), "0": np.array([0]), "4": np.array([4])}
        self.constants |= {"pads": pads, "end": np.array([-1])}

    def put(self, kind: str, *read: str, **more: object) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(read), [name], name=f"n_{name}", **more))
        return name

    def weight(self) -> str:
        name, sizes = f"w{len(self.constants)}", [1] * int(self.random.integers(0, self.rank))
        self.constants[name] = np.abs(models.normal(*sizes, 4, seed=len(self.constants))) + 0.5
        return name

    def grow(self, way: str) -> None:
        last, put = self.last, self.put
        if way in ("Relu", "Sigmoid", "HardSwish", "LeakyRelu"):
            self.last = put(way, last)
        elif way in ("Mul", "Add", "Div", "PRelu"):
            self.last = put(way, last, self.weight())
        elif way == "Sub":
            self.last = put(way, self.weight(), last)
        elif way == "swish":
            self.last = put("Mul", last, put("Clip", put("Add", last, "half"), "", "half"))
        elif way == "squeeze":
            self.last = put("Mul", put("ReduceMean", last, axes=[*range(1, self.rank - 1)]), last)
        elif way == "Softmax":
            self.last = put(way, last, axis=-1)
        elif way == "join":
            self.last = put("Add", last, "a")
        elif way == "Concat":
            self.last = put("Slice", put(way, last, last, axis=-1), "0", "4", "end")
        else:
            self.last = put("Slice", put(way, last, "pads"), "0", "4", "end")


WAYS = ["Relu", "Sigmoid", "HardSwish", "LeakyRelu", "Mul", "Add", "Div", "PRelu", "Sub", "swish", "squeeze", "Softmax"]


@pytest.mark.parametrize("seed", range(40))
def test_transposes_wait_until_they_meet(seed: int) -> None:
    """Whatever is computed between channels last and channels first again is computed first; Slice does not wait."""
    random = np.random.default_rng(seed)
    rank = int(random.choice([4, 4, 5]))
    chain = _Chain(random, rank)
    for way in random.choice(WAYS, int(random.integers(1, 5))):
        chain.grow(str(way))
    chain.grow(str(random.choice(["join", "Relu", "Concat", "Pad"])))
    there, back = [0, *range(2, rank), 1], [0, rank - 1, *range(1, rank - 1)]
    nodes = [
        helper.make_node("Transpose", ["x"], ["a"], name="there", perm=there),
        *chain.nodes,
        helper.make_node("Transpose", [chain.last], ["b"], name="back", perm=back),
        helper.make_node("Relu", ["b"], ["y"], name="end"),
    ]
    found, fired = rewritten("later_transposes", made_of(nodes, [2, 4, *[3] * (rank - 2)], chain.constants, 14))
    assert fired > 0 and ("Transpose" in found) == ("Slice" in found)


@pytest.mark.parametrize("rank", [4, 5])
def test_two_transposes_in_a_row_are_one(rank: int) -> None:
    there = [0, *range(2, rank), 1]
    nodes = [
        helper.make_node("Transpose", ["x"], ["a"], perm=there),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Transpose", ["b"], ["c"], perm=there),
        helper.make_node("Softmax", ["c"], ["y"], axis=1),
    ]
    found, fired = rewritten("later_transposes", made_of(nodes, [2, 4, 3, 5, 6][:rank], {}))
    assert fired >= 2 and sorted(found) == ["Relu", "Softmax", "Transpose"]


@pytest.mark.parametrize("kind", ["MatMul", "output", "ReduceMean", "other order", "attention"])
def test_transposes_stay_where_something_needs_them(kind: str) -> None:
    there = {"other order": [0, 3, 2, 1], "attention": [0, 2, 1, 3]}.get(kind, [0, 2, 3, 1])
    reads = {
        "MatMul": [helper.make_node("MatMul", ["a", "w"], ["y"])],
        "output": [helper.make_node("Transpose", ["x"], ["y"], perm=there), helper.make_node("Relu", ["y"], ["z"])],
        "ReduceMean": [helper.make_node("ReduceMean", ["a"], ["y"], axes=[3], keepdims=0)],
    }.get(kind, [helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Transpose", ["b"], ["y"], perm=there)])
    nodes = [helper.make_node("Transpose", ["x"], ["a"], perm=there), *reads]
    nodes += [helper.make_node("Transpose", ["x"], ["spare"], perm=[0, 2, 3, 1])]
    found, fired = rewritten("later_transposes", made_of(nodes, [2, 4, 3, 3], {"w": models.normal(4, 4)}))
    assert fired == 0 and found == [node.op_type for node in nodes]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose", "Gemm"])
def test_a_normalization_that_is_written_out_folds(kind: str, seed: int) -> None:
    """A Mul and an Add of constants per channel, or of one number, on either side; along other axes they stay. (So do
    those that give an output's channels units far apart: ``test_units``.)"""
    random = np.random.default_rng(seed)
    group, rank = (1 if kind == "Gemm" else int(random.choice([1, 2]))), (2 if kind == "Gemm" else 4)
    channels = {"Conv": 6, "ConvTranspose": 3 * group, "Gemm": 5}[kind]
    weight = {"Conv": (6, 4 // group, 1, 1), "ConvTranspose": (4, 3, 1, 1), "Gemm": (4, 5)}[kind]
    transposed = kind == "Gemm" and bool(random.integers(2))
    constants = {"w": models.normal(*(weight[::-1] if transposed else weight), seed=seed)}
    more = {"transB": int(transposed), "alpha": 0.5} if kind == "Gemm" else {"group": group}
    nodes, last = [helper.make_node(kind, ["x", "w"], ["t"], name="layer", **more)], "t"
    shapes = {"number": (), "numbers": (1,) * rank, "channels": (channels, *(1,) * (rank - 2))}
    shapes |= {"all": (1, channels, *(1,) * (rank - 2)), "width": (1, 1, 1, 6) if rank == 4 else (2, 1)}
    ways = random.choice([*shapes][: 5 if seed % 3 else 4], 2)
    for k, (way, op) in enumerate(zip(ways, ("Mul", "Add"), strict=True)):
        constants[f"c{k}"] = np.asarray(1 + models.normal(*shapes[str(way)], seed=seed + k, scale=0.1), np.float32)
        read = [last, f"c{k}"][:: int(random.choice([1, -1]))]
        last = "y" if k else "u"
        nodes.append(helper.make_node(op, read, [last], name=op))
    proto = made_of(nodes, [2, 4] if kind == "Gemm" else [2, 4, 6, 6], constants)
    model = load(proto)
    fired = apply(model, passes()["fold_batch_norm"], {"written_out": True}).fired
    feeds = models.feeds(proto)
    models.assert_close(models.run(to_proto(model), feeds), models.run(proto, feeds), 1e-5)
    assert fired == (2 if "width" not in ways else int(ways[0] != "width"))
    assert apply(load(proto), passes()["fold_batch_norm"], {}).fired == 0


#: Slices of x [2, 6, 4] (start, end, axis, step), and whether they become a Split.
PARTS: dict[str, tuple[list[tuple[int, int, int, int]], bool]] = {
    "halves": ([(0, 3, 1, 1), (3, 6, 1, 1)], True),
    "three, not in order": ([(4, 6, 1, 1), (0, 1, 1, 1), (1, 4, 1, 1)], True),
    "from behind, and beyond": ([(0, -2, -2, 1), (-2, 99, 1, 1)], True),
    "another axis beside": ([(0, 2, 2, 1), (0, 3, 1, 1), (3, 6, 1, 1)], True),
    "a gap": ([(0, 3, 1, 1), (4, 6, 1, 1)], False),
    "an overlap": ([(0, 3, 1, 1), (2, 6, 1, 1)], False),
    "not all": ([(0, 2, 1, 1), (2, 5, 1, 1)], False),
    "steps": ([(0, 6, 1, 2), (1, 6, 1, 2)], False),
    "all in one": ([(0, 6, 1, 1)], False),
    "twice the same": ([(0, 3, 1, 1), (0, 3, 1, 1), (3, 6, 1, 1)], False),
}


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("version", [12, 17])
def test_slices_that_are_all_of_an_axis_are_a_split(case: str, version: int) -> None:
    """ONNX Runtime has a Split of codes and no Slice of them; older opsets have no sizes as an input."""
    slices, whole = PARTS[case]
    given = {f"{name}{k}": np.array([at]) for k, one in enumerate(slices) for name, at in zip("seap", one, strict=True)}
    cut = " ".join(f"[cut{k}] y{k} = Slice (x, s{k}, e{k}, a{k}, p{k})" for k in range(len(slices)))
    made = ", ".join(f"float[a{k}, b{k}, c{k}] z{k}" for k in range(len(slices)))
    last = " ".join(f"z{k} = Neg (y{k})" for k in range(1, len(slices)))
    text = f"g (float[2, 6, 4] x) => ({made}) {{ {cut} z0 = Relu (y0) {last} }}"
    found, fired = rewritten("fewer_moves", models.model(text, given, version))
    cuts = sum(axis % 3 == 1 for _, _, axis, _ in slices)
    expected = whole and version >= 13
    assert fired == expected and found.count("Split") == expected
    assert found.count("Slice") == len(slices) - cuts * expected


#: Shape of x and y, the nodes, and whether a Softmax over channels of an image becomes one over rows.
ROWS: dict[str, tuple[str, str, bool]] = {
    "channels": ("2, 3, 4, 5", "y = Softmax <axis = 1> (a)", True),
    "of volumes, logarithms": ("1, 3, 2, 4, 5", "y = LogSoftmax <axis = -4> (a)", True),
    "first axis": ("2, 3, 4", "y = Softmax <axis = 0> (a)", True),
    "a free size": ("2, 3, 4, w", "y = Softmax <axis = 1> (a)", True),
    "free batches": ("n, 3, 4, 5", "y = Softmax <axis = 1> (a)", True),
    "two free sizes": ("2, 3, h, w", "y = Softmax <axis = 1> (a)", False),
    "free batches and sizes": ("n, 3, 4, w", "y = Softmax <axis = 1> (a)", False),
    "last axis": ("2, 3, 4, 5", "y = Softmax (a)", False),
    "one axis behind": ("2, 3, 4, 5", "y = Softmax <axis = 2> (a)", False),
    "between transposes": (
        "2, 3, 4, 5",
        "t = Transpose <perm = [0, 2, 3, 1]> (a) s = Softmax (t) y = Transpose <perm = [0, 3, 1, 2]> (s)",
        True,
    ),
    "between others": (
        "2, 3, 4, 5",
        "t = Transpose <perm = [0, 2, 3, 1]> (a) s = Softmax (t) b = Transpose <perm = [0, 1, 3, 2]> (s) "
        "c = Transpose <perm = [0, 2, 3, 1]> (b) y = Transpose <perm = [0, 2, 1, 3]> (c)",
        False,
    ),
    "read twice": (
        "2, 3, 4, 5",
        "t = Transpose <perm = [0, 2, 3, 1]> (a) s = Softmax (t) b = Transpose <perm = [0, 3, 1, 2]> (s) "
        "u = Transpose <perm = [0, 3, 1, 2]> (t) y = Add (b, u)",
        False,
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_softmax_over_channels_is_one_over_rows(case: str) -> None:
    """For it ONNX Runtime lets two axes change places, which takes ten times as long as the Softmax."""
    shape, nodes, flat = ROWS[case]
    found, fired = rewritten(
        "faster_forms", models.model(f"g (float[{shape}] x) => (float[{shape}] y) {{ a = Neg (x) {nodes} }}")
    )
    assert fired == flat and found.count("Reshape") == 2 * flat
    if flat:
        assert "Transpose" not in found
    older = models.model(
        f"g (float[{shape}] x) => (float[{shape}] y) {{ a = Neg (x) y = Softmax <axis = 1> (a) }}", {}, 12
    )
    assert rewritten("faster_forms", older)[1] == 0


#: Shape of x, that between, the order, that of y, and whether it is a shuffle of channels.
SHUFFLES: dict[str, tuple[str, str, list[int], str, bool]] = {
    "of pictures": ("2, 6, 4, 5", "2, 3, 2, 4, 5", [0, 2, 1, 3, 4], "2, 6, 4, 5", True),
    "of sounds, all of one group": ("1, 6, 7", "1, 1, 6, 7", [0, 2, 1, 3], "1, 6, 7", True),
    "free pictures": ("n, 6, 4, 5", "-1, 3, 2, 4, 5", [0, 2, 1, 3, 4], "-1, 6, 4, 5", True),
    "free sounds": ("1, 6, w", "1, 2, 3, -1", [0, 2, 1, 3], "1, 6, -1", False),
    "another order": ("2, 6, 4, 4", "2, 3, 2, 4, 4", [0, 2, 1, 4, 3], "2, 6, 4, 4", False),
    "another end": ("2, 6, 4, 4", "2, 3, 2, 4, 4", [0, 2, 1, 3, 4], "2, 6, 2, 8", False),
    "samples too": ("2, 6, 4, 4", "1, 3, 4, 4, 4", [0, 2, 1, 3, 4], "2, 6, 4, 4", False),
}


@pytest.mark.parametrize("case", SHUFFLES)
def test_shuffled_channels_are_gathered(case: str) -> None:
    """ONNX Runtime makes one Transpose of three axes of it behind a convolution in integers, forty times as slow."""
    given, between, order, made, fires = SHUFFLES[case]
    shapes = {name: np.array([int(size) for size in text.split(",")]) for name, text in (("a", between), ("b", made))}
    nodes = f"n = Neg (x) r = Reshape (n, a) t = Transpose <perm = {order}> (r) s = Reshape (t, b) y = Neg (s)"
    ends = f"float[{given}] x) => (float[{made.replace('-1', 'n' if made[0] == '-' else 'w')}] y"
    proto = models.model(f"g ({ends}) {{ {nodes} }}", shapes)
    found, fired = rewritten("faster_forms", proto)
    assert fired == fires and found.count("Gather") == fires


@pytest.mark.parametrize(
    ("slopes", "fires"),
    [([0.25], True), ([0.25, 0.25, 0.25], True), ([-1.5], True), ([0.25, 0.5, 0.25], False), ([np.inf], False)],
)
def test_a_prelu_of_one_slope_is_leaky(slopes: list[float], fires: bool) -> None:
    values = {"s": np.array(slopes, np.float32).reshape(-1, 1, 1)}
    proto = models.model("g (float[2, 3, 4, 5] x) => (float[2, 3, 4, 5] y) { n = Neg (x) y = PRelu (n, s) }", values)
    if np.isinf(slopes).any():  # what ONNX Runtime makes of it is no number to compare
        model = load(proto)
        infer_shapes(model)
        assert apply(model, passes()["faster_forms"], {}).fired == 0
        return
    assert rewritten("faster_forms", proto) == (["Neg", "LeakyRelu" if fires else "PRelu"], int(fires))
