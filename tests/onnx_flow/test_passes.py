"""Every pass keeps the outputs of ONNX Runtime, says why it does not fire, and finds nothing more the second time."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from tests.onnx_flow import models
from tests.onnx_flow.counting import calls

from quark.onnx.graph.lift import lift
from quark.onnx.graph.model import load, to_proto
from quark.onnx.graph.report import PassReport
from quark.onnx.graph.shapes import infer_shapes
from quark.onnx.passes import constants, fold_batch_norm, fold_constants, input_initializers, simplify, unshare

PASSES: dict[str, Callable[[ir.Model], PassReport]] = {
    "constants": constants.run,
    "fold_batch_norm": fold_batch_norm.run,
    "fold_constants": fold_constants.run,
    "input_initializers": input_initializers.run,
    "simplify": simplify.run,
    "unshare": unshare.run,
}
REAL = ("gtcrn_simple", "silero_vad_16k_op15", "squeezenet11_flowers5", "stories260K", "ultraface_rfb320", "yolox_nano")


def computed_reshape() -> onnx.ModelProto:
    """A batch that is not known, and a Reshape whose target is computed from the shape."""
    graph = """
    computed (float[N, 3, 4] x) => (float[a, b] y) {
        zero = Constant <value = int64 {0}> ()
        axes = Constant <value = int64[1] {0}> ()
        s = Shape (x)
        rows = Gather (s, zero)
        first = Unsqueeze (rows, axes)
        s2 = Shape (x)
        columns = Slice (s2, one, three)
        all = ReduceProd <keepdims = 1> (columns)
        target = Concat <axis = 0> (first, all)
        r = Reshape (x, target)
        y = Relu (r)
    }"""
    return models.model(graph, {"one": np.array([1]), "three": np.array([3])})


def detours() -> onnx.ModelProto:
    """Identity, Dropout, an unused branch, a constant made of constants, two Slices in a row, one thing twice."""
    graph = """
    detours (float[2, 4, 6] x) => (float[2, 4, 3] y, float[2, 4, 6] same) {
        i = Identity (x)
        d, mask = Dropout (i, ratio)
        unused = Exp (d)
        w2 = Mul (w, two)
        wt = Transpose <perm = [1, 0]> (w2)
        m = MatMul (d, wt)
        t = Add (m, bias)
        u = Add (m, bias)
        a = Mul (t, u)
        s1 = Slice (a, zero, three, last, step)
        s2 = Slice (s1, zero, five, zero, step)
        y = Identity (s2)
        same = Identity (x)
    }"""
    numbers = {name: np.array([k]) for name, k in {"zero": 0, "three": 3, "five": 5, "last": 2, "step": 1}.items()}
    weights = {"w": models.normal(6, 6), "two": np.array(2, np.float32), "bias": models.normal(6)}
    return models.model(graph, {**weights, **numbers, "ratio": np.array(0.5, np.float32)})


def norms(kind: str, weight: np.ndarray, attributes: str, shape: str, bias: np.ndarray | None = None, opset: int = 13):
    """``kind`` with a BatchNormalization after it."""
    arguments = "x, w" if bias is None else "x, w, b"
    channels = {"Gemm": 6, "Conv": 6, "ConvTranspose": 6}[kind]
    out = shape.replace("float", "float").split("[")[1]
    rank = out.count(",") + 1
    free = ", ".join(f"d{k}" for k in range(rank))
    graph = f"""
    norm ({shape} x) => (float[{free}] y) {{
        c = {kind} {attributes} ({arguments})
        y = BatchNormalization (c, bn_scale, bn_bias, bn_mean, bn_var)
    }}"""
    weights = {"w": weight, **({} if bias is None else {"b": bias}), **models.batch_norm("bn", channels)}
    return models.model(graph, weights, opset)


FOLDS = {
    "conv": norms("Conv", models.normal(6, 4, 3, 3), "", "float[2, 4, 5, 5]"),
    "conv with bias": norms("Conv", models.normal(6, 4, 3, 3), "", "float[2, 4, 5, 5]", models.normal(6)),
    "conv 1d": norms("Conv", models.normal(6, 4, 3), "", "float[2, 4, 5]"),
    "conv 3d": norms("Conv", models.normal(6, 2, 2, 2, 2), "", "float[1, 2, 4, 4, 4]"),
    "depthwise": norms("Conv", models.normal(6, 1, 3, 3), "<group = 6>", "float[2, 6, 5, 5]"),
    "grouped": norms("Conv", models.normal(6, 2, 3, 3), "<group = 2>", "float[2, 4, 5, 5]"),
    "transposed": norms("ConvTranspose", models.normal(4, 6, 3, 3), "", "float[2, 4, 5, 5]", models.normal(6)),
    "transposed grouped": norms("ConvTranspose", models.normal(4, 3, 3, 3), "<group = 2>", "float[2, 4, 5, 5]"),
    "transposed depthwise": norms("ConvTranspose", models.normal(6, 1, 3, 3), "<group = 6>", "float[2, 6, 5, 5]"),
    "gemm": norms("Gemm", models.normal(5, 6), "", "float[3, 5]", models.normal(6)),
    "gemm without bias": norms("Gemm", models.normal(5, 6), "", "float[3, 5]"),
    "gemm transposed": norms("Gemm", models.normal(6, 5), "<transB = 1>", "float[3, 5]", models.normal(6)),
    "gemm scaled": norms("Gemm", models.normal(5, 6), "<alpha = 0.5, beta = 3.0>", "float[3, 5]", models.normal(1, 6)),
    "gemm with a bias for every element": norms("Gemm", models.normal(5, 6), "", "float[3, 5]", models.normal(3, 6)),
    "gemm with one bias": norms("Gemm", models.normal(6, 6), "", "float[3, 6]", models.normal(1)),
}


def constants_in_a_body() -> onnx.ModelProto:
    """Nodes without inputs before every kind of move, where folding of the graph does not reach."""
    return models.model(
        """bodies (float[2, 3] x) => (float[1, 4] y) {
            n = ReduceMax <keepdims = 0> (x) c = Greater (n, zero)
            k = If (c) <
                then_branch = g () => (float[1, 6] t) {
                    a = Constant <value = float[2, 3] {1, 2, 3, 4, 5, 6}> () s = Constant <value_ints = [1, 6]> ()
                    b = Transpose (a) u = Unsqueeze (b, first) q = Squeeze (u, first) r = Reshape (q, s)
                    p = Reshape (a, s) t = Add (p, r)
                },
                else_branch = h () => (float[1, 6] e) { f = Flatten <axis = 0> (x) e = Identity (f) }
            >
            y = MatMul (k, w)
        }""",
        {"zero": np.float32(0), "first": np.int64([0]), "w": models.normal(6, 4)},
        17,
    )


ZOO = {
    "constants in a body": constants_in_a_body(),
    "attention": models.attention(),
    "branching": models.branching(),
    "chain": models.conv_chain(3),
    "cnn": models.cnn(),
    "computed_reshape": computed_reshape(),
    "constant_weights": models.constant_weights(models.cnn()),
    "depthwise_cnn": models.depthwise_cnn(),
    "detours": detours(),
    "initializers_as_inputs": models.initializers_as_inputs(models.cnn()),
    "nhwc": models.nhwc(13),
    "shared_weights": models.shared_weights(),
    "two_inputs": models.two_inputs(),
}


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("case", ZOO)
def test_outputs_stay_and_the_second_run_finds_nothing(case: str, name: str) -> None:
    proto, run = ZOO[case], PASSES[name]
    inputs = models.feeds(proto)
    model = load(proto)
    report = run(model)
    result = to_proto(model)
    onnx.checker.check_model(result)
    models.assert_close(models.run(result, inputs), models.run(proto, inputs))
    assert [value.name for value in result.graph.output] == [value.name for value in proto.graph.output]
    assert [value.name for value in models.real_inputs(result)] == [value.name for value in models.real_inputs(proto)]
    again = run(model)
    assert again.fired == 0
    assert to_proto(model).SerializeToString(deterministic=True) == result.SerializeToString(deterministic=True)
    assert report.fired >= 0 and all(isinstance(reason, str) for reason in again.refused)


@pytest.mark.parametrize("name", REAL)
def test_simplify_keeps_real_models(name: str) -> None:
    """Other passes: ``test_pass_table``."""
    path = models.REAL_MODELS / f"{name}.onnx"
    if not path.exists():
        pytest.skip("no shared models beside the repository")
    inputs = models.real_feeds(name, onnx.load(path))
    model = lift(load(path), 17)
    simplify.run(model, always=True, sample=inputs)
    models.assert_close(models.run(to_proto(model), inputs), models.run(path, inputs))


# ---- constants -------------------------------------------------------------------------------------------------------


def test_constant_nodes_become_initializers_of_the_same_name() -> None:
    model = load(models.constant_weights(models.cnn()))
    constants.run(model)
    assert "Constant" not in operators(model)
    assert set(model.graph.initializers) == {tensor.name for tensor in models.cnn().graph.initializer}


def test_every_kind_of_constant_node() -> None:
    graph = """
    kinds (float[3] x) => (float[3] y, int64[2] z) {
        a = Constant <value_float = 2.5> ()
        b = Constant <value_floats = [1.0, 2.0, 3.0]> ()
        c = Constant <value_int = 1> ()
        z = Constant <value_ints = [7, 8]> ()
        f = Cast <to = 1> (c)
        p = Add (x, a)
        q = Add (p, b)
        y = Add (q, f)
    }"""
    proto = models.model(graph)
    model = load(proto)
    constants.run(model)
    assert operators(model) == ["Constant", "Add", "Add", "Add"]  # a constant that is an output stays a node
    inputs = models.feeds(proto)
    models.assert_close(models.run(to_proto(model), inputs), models.run(proto, inputs), 1e-6)


def test_detours_are_taken_away() -> None:
    model = load(detours())
    report = constants.run(model)
    assert operators(model) == ["MatMul", "Add", "Add", "Mul", "Slice", "Slice", "Identity"]
    assert any(
        "'same' (Identity) stays: it joins a graph output to a graph input" in reason for reason in report.refused
    )
    assert "w" not in model.graph.initializers and "wt" in model.graph.initializers


def test_a_dropout_that_trains_stays() -> None:
    graph = "g (float[4] x) => (float[4] y) { d = Dropout (x, ratio, train) y = Neg (d) }"
    model = load(models.model(graph, {"ratio": np.array(0.5, np.float32), "train": np.array(True)}))
    constants.run(model)
    assert operators(model) == ["Dropout", "Neg"]


def test_an_identity_of_two_outputs_stays() -> None:
    graph = "g (float[4] x) => (float[4] y, float[4] z) { y = Neg (x) z = Identity (y) }"
    model = load(models.model(graph))
    report = constants.run(model)
    assert operators(model) == ["Neg", "Identity"] and "another output" in report.refused[0]


def test_a_computed_shape_is_folded_as_far_as_it_is_known() -> None:
    model = load(computed_reshape())
    constants.run(model)
    assert operators(model) == ["Shape", "Gather", "Unsqueeze", "Concat", "Reshape", "Relu"]
    np.testing.assert_array_equal(model.graph.initializers["all"].const_value.numpy(), [12])


def test_a_computed_shape_is_folded_altogether_where_the_batch_is_known() -> None:
    proto = computed_reshape()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 5
    model = load(proto)
    constants.run(model)
    assert operators(model) == ["Reshape", "Relu"]
    np.testing.assert_array_equal(model.graph.initializers["target"].const_value.numpy(), [5, 12])


LARGE = {
    "ConstantOfShape": "big = ConstantOfShape (sides)",
    "Expand": "big = Expand (one, sides)",
    "Tile": "big = Tile (square, sides)",
    "Pad": "big = Pad (square, ends)",
    "ScatterND": "zeros = ConstantOfShape (sides) big = ScatterND (zeros, place, one)",
    "Range": "numbers = Range (zero, count, single) big = Reshape (numbers, sides)",
}


@pytest.mark.parametrize("kind", LARGE)
def test_no_constants_are_written_out_that_are_larger_than_what_they_are_made_of(kind: str) -> None:
    """OnnxSlim folds them too, unless told: a model of 135 kB that computes its filters became one of 1.1 MB."""
    numbers = {"sides": np.array([300, 300]), "one": np.ones(1, np.float32), "ends": np.array([299, 299, 0, 0])}
    numbers |= {"square": np.ones((1, 1), np.float32), "place": np.array([[3, 4]]), "zero": np.array(0, np.float32)}
    numbers |= {"count": np.array(90000, np.float32), "single": np.array(1, np.float32)}
    body = f"{LARGE[kind]} t = Transpose <perm = [1, 0]> (x) u = Transpose <perm = [1, 0]> (t) y = Add (u, big)"
    used = {name: value for name, value in numbers.items() if re.search(rf"\b{name}\b", body)}
    model = load(models.model(f"g (float[300, 300] x) => (float[300, 300] y) {{ {body} }}", used))
    before, feeds = to_proto(model), {"x": models.normal(300, 300)}
    assert simplify.run(model).fired  # two Transposes in a row go
    after = to_proto(model)
    assert after.ByteSize() < 10_000 and "Transpose" not in operators(model)
    np.testing.assert_array_equal(models.run(after, feeds)[0], models.run(before, feeds)[0])


@pytest.mark.parametrize("dtype", ["float", "float16", "int32"])
def test_a_cast_to_the_type_of_a_tensor_is_a_constant_where_the_type_is_known(dtype: str) -> None:
    """torch's exporter writes a bias of nothing so, with optimize=False: BatchNormalization was not folded into it."""
    body = "c = CastLike (half, x) b = Expand (c, two) y = Add (x, b)"
    weights = {"half": np.array(1.5, np.float32), "two": np.array([2])}
    made = models.model(f"g ({dtype}[2] x) => ({dtype}[2] y) {{ {body} }}", weights, 15)
    model = load(made)
    assert fold_constants.run(model).fired == 3 and operators(model) == ["Add"]
    feed = {"x": np.ones(2, {"float": np.float32, "float16": np.float16, "int32": np.int32}[dtype])}
    np.testing.assert_array_equal(models.run(to_proto(model), feed)[0], models.run(made, feed)[0])


def test_a_cast_to_a_type_that_nobody_knows_stays() -> None:
    text = "g (float[2] x) => (float[2] y) { u = Own.Unknown (x) c = CastLike (half, u) y = Add (x, x) }"
    model = load(models.model(text.replace("Own.Unknown", "Identity"), {"half": np.array(1.5, np.float32)}, 15))
    model.graph[0].domain = "own"
    model.graph[0].outputs[0].type = None
    fold_constants.run(model)
    assert "CastLike" in operators(model)


def test_results_that_are_larger_than_what_they_are_made_of_stay() -> None:
    graph = "g (float[1] x) => (float[a, b] y) { big = Expand (one, shape) y = Add (x, big) }"
    model = load(models.model(graph, {"one": np.ones(1, np.float32), "shape": np.array([500, 500])}))
    report = fold_constants.run(model)
    assert operators(model) == ["Expand", "Add"]
    assert "'big' (Expand) stays: its result (1000000 bytes) is larger" in report.refused[0]


def test_random_numbers_and_quantized_weights_are_no_constants() -> None:
    graph = """
    g (float[2, 3] x) => (float[2, 3] y) {
        r = RandomNormalLike <seed = 1.0> (w)
        d = DequantizeLinear (q, s)
        m = Add (x, d)
        y = Add (m, r)
    }"""
    weights = {"w": models.normal(2, 3), "q": np.ones((2, 3), np.int8), "s": np.array(0.5, np.float32)}
    model = load(models.model(graph, weights))
    fold_constants.run(model)
    assert operators(model) == ["RandomNormalLike", "DequantizeLinear", "Add", "Add"]


def test_initializers_that_a_feed_may_override_are_no_constants() -> None:
    graph = "g (float[3] x) => (float[3] y) { n = Neg (w) y = Add (x, n) }"
    model = load(models.initializers_as_inputs(models.model(graph, {"w": models.normal(3)})))
    assert fold_constants.run(model).fired == 0
    input_initializers.run(model)
    assert fold_constants.run(model).fired == 1


def test_what_a_subgraph_reads_is_kept_and_folded() -> None:
    graph = """
    g (float[2] x, bool flag) => (float[2] y) {
        w2 = Neg (w)
        y = If (flag) <
            then_branch = then () => (float[2] t) { t = Add (x, w2) },
            else_branch = other () => (float[2] o) { o = Identity (x) }
        >
    }"""
    proto = models.model(graph, {"w": models.normal(2)})
    model = load(proto)
    constants.run(model)
    assert operators(model) == ["If"] and list(model.graph.initializers) == ["w2"]
    for flag in (True, False):
        inputs = {"x": models.normal(2, seed=1), "flag": np.array(flag)}
        models.assert_close(models.run(to_proto(model), inputs), models.run(proto, inputs), 0)


# ---- BatchNormalization ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FOLDS)
def test_batch_norm_is_folded(case: str) -> None:
    proto = FOLDS[case]
    inputs = models.feeds(proto)
    model = load(proto)
    assert fold_batch_norm.run(model).fired == 1
    result = to_proto(model)
    assert len(result.graph.node) == 1 and len(result.graph.initializer) == 2
    models.assert_close(models.run(result, inputs), models.run(proto, inputs), 1e-5)


def test_the_default_epsilon_is_that_of_onnx() -> None:
    proto = norms("Conv", models.normal(6, 4, 1, 1), "", "float[1, 4, 2, 2]")
    variance = next(tensor for tensor in proto.graph.initializer if tensor.name == "bn_var")
    variance.CopyFrom(onnx.numpy_helper.from_array(np.full(6, 1e-6, np.float32), "bn_var"))
    inputs = models.feeds(proto)
    model = load(proto)
    fold_batch_norm.run(model)
    models.assert_close(models.run(to_proto(model), inputs), models.run(proto, inputs), 1e-5)


def test_half_floats_stay_half_floats() -> None:
    graph = """
    half (float16[1, 2, 3, 3] x) => (float16[1, 2, 3, 3] y) {
        c = Conv (x, w)
        y = BatchNormalization (c, bn_scale, bn_bias, bn_mean, bn_var)
    }"""
    weights = {"w": models.normal(2, 2, 1, 1), **models.batch_norm("bn", 2)}
    model = load(models.model(graph, {name: array.astype(np.float16) for name, array in weights.items()}, 15))
    assert fold_batch_norm.run(model).fired == 1
    assert {value.dtype for value in model.graph.initializers.values()} == {ir.DataType.FLOAT16}


def test_shared_weights_are_copied_and_not_changed() -> None:
    proto = models.shared_weights()
    model = load(proto)
    before = {name: model.graph.initializers[name].const_value.numpy().copy() for name in ("w", "b")}
    assert fold_batch_norm.run(model).fired == 1
    for name, array in before.items():
        np.testing.assert_array_equal(model.graph.initializers[name].const_value.numpy(), array)
    assert {"w_folded", "w_bias"} <= set(model.graph.initializers)


def test_two_norms_behind_one_shared_weight() -> None:
    graph = """
    two (float[1, 4, 3, 3] x) => (float[1, 4, 3, 3] y, float[1, 4, 3, 3] z) {
        a = Conv (x, w)
        y = BatchNormalization (a, p_scale, p_bias, p_mean, p_var)
        b = Conv (y, w)
        z = BatchNormalization (b, q_scale, q_bias, q_mean, q_var)
    }"""
    weights = {"w": models.normal(4, 4, 1, 1), **models.batch_norm("p", 4, 1), **models.batch_norm("q", 4, 2)}
    proto = models.model(graph, weights)
    inputs = models.feeds(proto)
    model = load(proto)
    assert fold_batch_norm.run(model).fired == 2
    models.assert_close(models.run(to_proto(model), inputs), models.run(proto, inputs), 1e-5)


def test_the_arrays_of_the_caller_are_not_written_to() -> None:
    proto = models.cnn()
    before = proto.SerializeToString(deterministic=True)
    source = ir.from_proto(proto)
    fold_batch_norm.run(load(source))
    assert ir.to_proto(source).SerializeToString(deterministic=True) != b""
    assert proto.SerializeToString(deterministic=True) == before


REFUSED = {
    "read by others": ("c = Conv (x, w) y = BatchNormalization (c, s, s, s, s) z = Relu (c)", "read by others"),
    "a graph output": ("z = Conv (x, w) y = BatchNormalization (z, s, s, s, s)", "read by others"),
    "another operator": ("c = Relu (x) y = BatchNormalization (c, s, s, s, s) z = Neg (y)", "follows Relu"),
    "the input": ("y = BatchNormalization (x, s, s, s, s) z = Neg (y)", "follows no node"),
    "a computed weight": (
        "v = Neg (w) u = Add (v, x) c = Conv (x, u) y = BatchNormalization (c, s, s, s, s) z = Neg (y)",
        "weight or bias of 'c' .Conv. is not a constant",
    ),
    "computed statistics": (
        "c = Conv (x, w) t = ReduceMax <axes = [0, 2, 3], keepdims = 0> (x) "
        "y = BatchNormalization (c, t, s, s, s) z = Neg (y)",
        "parameters are not constants",
    ),
    "training": (
        "c = Conv (x, w) y, m, v = BatchNormalization <training_mode = 1> (c, s, s, s, s) z = Neg (y)",
        "training form",
    ),
    "not finite": (
        "c = Conv (x, w) y = BatchNormalization <epsilon = 0.0> (c, s, s, s, n) z = Neg (y)",
        "not finite",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_why_a_batch_norm_stays(case: str) -> None:
    body, reason = REFUSED[case]
    graph = f"g (float[2, 2, 1, 1] x) => (float[a, b, c, d] y, float[e, f, g, h] z) {{ {body} }}"
    weights = {"w": models.normal(2, 2, 1, 1), "s": np.ones(2, np.float32), "n": np.zeros(2, np.float32)}
    model = load(models.model(graph, weights, 14))
    nodes = len(model.graph)
    report = fold_batch_norm.run(model)
    assert report.fired == 0 and len(model.graph) == nodes
    assert len(report.refused) == 1
    assert re.search(reason, report.refused[0])


# ---- unshare ---------------------------------------------------------------------------------------------------------


def test_every_reader_after_the_first_gets_a_copy() -> None:
    model = load(models.shared_weights())
    assert unshare.run(model, ["Conv"]).fired == 2
    convs = [node for node in model.graph if node.op_type == "Conv"]
    names = [value.name for node in convs for value in node.inputs[1:]]
    assert names == ["w", "b", "w_copy", "b_copy"]
    np.testing.assert_array_equal(convs[0].inputs[1].const_value.numpy(), convs[1].inputs[1].const_value.numpy())


def test_only_biases() -> None:
    model = load(models.shared_weights())
    assert unshare.run(model, ["Conv", "ConvTranspose", "Gemm"], (2,)).fired == 1
    assert "b_copy" in model.graph.initializers and "w_copy" not in model.graph.initializers


def test_other_operators_do_not_count() -> None:
    graph = "g (float[4] x) => (float[4] y) { a = Add (x, w) b = Mul (a, w) y = Add (b, w) }"
    model = load(models.model(graph, {"w": models.normal(4)}))
    assert unshare.run(model, ["Mul"]).fired == 0
    assert unshare.run(model, ["Add"]).fired == 1
    assert [node.inputs[1].name for node in model.graph] == ["w", "w", "w_copy"]


# ---- simplify --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "gain"),
    [
        ("a = Slice (x, z, t, l) y = Slice (a, z, o, l)", "Slice and Slice"),
        ("a = Relu (x) b = Relu (x) y = Add (a, b)", "Relu computed twice"),
        ("a = Relu (x) y = Transpose <perm = [1, 0]> (a)", None),
        ("a = Relu (x) b = Neg (x) y = Add (a, b)", None),
        ("a = Transpose <perm = [1, 0]> (x) b = Relu (a) c = Transpose <perm = [1, 0]> (a) y = Add (b, c)", None),
    ],
)
def test_the_cheap_look(body: str, gain: str | None) -> None:
    numbers = {name: np.array([k]) for name, k in {"z": 0, "o": 1, "t": 2, "l": 1}.items()}
    found = simplify.worthwhile(load(models.model(f"g (float[3, 3] x) => (float[a, b] y) {{ {body} }}", numbers)))
    assert (found is None) if gain is None else (found is not None and gain in found)


def test_a_clean_network_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplify, "_slim", lambda *_: pytest.fail("OnnxSlim ran"))
    model = load(models.conv_chain(20))
    fold_batch_norm.run(model)
    assert simplify.run(model) == PassReport("simplify", 0, ("nothing to gain",))


def test_detours_are_simplified() -> None:
    model = load(detours())
    constants.run(model)
    report = simplify.run(model)
    assert report.fired == 2 and operators(model).count("Slice") == 1 and operators(model).count("Add") == 1


def test_large_weights_are_shared_and_not_copied() -> None:
    graph = "g (float[8, 64] x) => (float[a, b] y) { m = MatMul (x, w) a = Relu (m) b = Relu (m) y = Add (a, b) }"
    model = load(models.model(graph, {"w": models.normal(64, 64)}))
    tensor = model.graph.initializers["w"].const_value
    assert simplify.run(model).fired == 1
    assert model.graph.initializers["w"].const_value is tensor


def test_unread_inputs_stay_part_of_the_interface() -> None:
    graph = "g (float[4] u, float[4] x) => (float[4] y) { a = Relu (x) b = Relu (x) y = Add (a, b) }"
    model = load(models.model(graph))
    assert simplify.run(model).fired == 1
    assert [value.name for value in to_proto(model).graph.input] == ["u", "x"]


def test_a_failure_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxslim

    def fail(*_: object, **__: object) -> None:
        raise KeyError("lost tensor")

    monkeypatch.setattr(onnxslim, "slim", fail)
    model = load(detours())
    before = to_proto(model).SerializeToString(deterministic=True)
    assert simplify.run(model, always=True).refused == ("OnnxSlim failed: KeyError: 'lost tensor'",)
    assert to_proto(model).SerializeToString(deterministic=True) == before


def test_trials_of_one_model_simplify_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxslim

    slim, seen = onnxslim.slim, list[object]()

    def counted(proto: onnx.ModelProto, **options: object) -> object:
        seen.append(options)
        return slim(proto, **options)

    monkeypatch.setattr(onnxslim, "slim", counted)

    def simplified(options: dict[str, object], scale: float = 1.0) -> bytes:
        graph = "g (float[4] x) => (float[4] y) { a = Mul (x, c) b = Mul (x, c) y = Add (a, b) }"
        model = load(models.model(graph, {"c": np.full(4, scale, np.float32)}))
        assert simplify.run(model, options, always=True).fired
        made = to_proto(model).SerializeToString(deterministic=True)
        next(iter(model.graph)).op_type = "Neg"  # what is kept is not touched
        return made

    first = simplified({})
    assert simplified({}) == first and len(seen) == 1
    assert simplified({}, 2.0) != first and len(seen) == 2  # a small constant is part of the model
    simplified({"skip_fusion_patterns": ["FusionGelu"]}, 2.0)
    assert len(seen) == 3 and simplified({}) == first


@pytest.mark.parametrize("damage", ["value", "shape", "name", "crash"])
def test_a_wrong_result_is_not_used(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxslim

    def wrong(proto: onnx.ModelProto, **_: object) -> onnx.ModelProto:
        last = proto.graph.node[-1]
        if damage == "name":
            end, last.output[0] = last.output[0], "other"
            proto.graph.node.append(helper.make_node("Neg", ["other"], [end]))
            proto.graph.output[0].name = "other"
            return proto
        node = {"value": "Neg", "shape": "ReduceSum", "crash": "Crash"}[damage]
        last.output[0], end = "before", last.output[0]
        proto.graph.node.append(helper.make_node(node, ["before"], [end]))
        del proto.graph.output[0].type.tensor_type.shape.dim[:]
        return proto

    monkeypatch.setattr(onnxslim, "slim", wrong)
    proto = models.cnn()
    model = load(proto)
    (reason,) = simplify.run(model, always=True).refused
    words = {"value": "changes the output", "shape": "changes the shape", "name": "names", "crash": "does not run"}
    assert words[damage] in reason
    models.assert_close(models.run(to_proto(model), models.feeds(proto)), models.run(proto, models.feeds(proto)), 0)


def test_a_large_graph_is_simplified_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplify, "MANY", 5)
    model = load(detours())
    assert "switch it on" in simplify.run(model).refused[0]
    assert simplify.run(model, always=True).fired > 0


def test_a_sample_of_the_caller_decides_where_random_numbers_do_not_run() -> None:
    graph = """
    g (float[N, 6] x) => (float[a, b] y) {
        r = Reshape (x, to)
        a = Relu (r)
        b = Relu (r)
        y = Add (a, b)
    }"""
    proto = models.model(graph, {"to": np.array([5, 6])})
    model = load(proto)
    assert "does not run" in simplify.run(model).refused[0]
    assert simplify.run(model, sample={"x": models.normal(5, 6)}).fired == 1


# ---- cost ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PASSES)
def test_cost_is_linear_in_the_number_of_nodes(name: str) -> None:
    run = PASSES[name]
    run(load(models.conv_chain(5)))
    small, middle, large = (calls(run, load(models.conv_chain(length))) for length in (100, 200, 400))
    assert middle < 2.3 * small and large < 2.3 * middle


def test_casts_and_slices_that_change_nothing_go() -> None:
    graph = """g (float[4,6] x, int64[4,6] k) => (float[4,6] y, float[4,6] z, float[4,3] u) {
        a = Cast <to = 1> (x) b = Slice (a, zero, far, axis, one) y = Neg (b)
        c = Cast <to = 1> (k) z = Neg (c) d = Slice (a, zero, three, axis, one) u = Neg (d) }"""
    numbers = {"zero": [0], "far": [2**63 - 1], "axis": [1], "one": [1], "three": [3]}
    proto = models.model(graph, {name: np.array(value) for name, value in numbers.items()})
    model = load(proto)
    constants.run(model)
    assert sorted(operators(model)) == ["Cast", "Neg", "Neg", "Neg", "Slice"]
    inputs = {"x": models.normal(4, 6), "k": np.arange(24).reshape(4, 6)}
    models.assert_close(models.run(to_proto(model), inputs), models.run(proto, inputs), 0)


def test_defaults_that_lose_their_readers_do_not_become_required_inputs() -> None:
    proto = models.initializers_as_inputs(models.cnn())  # OnnxSlim folds the normalization into new weights
    model = lift(load(proto), 17)
    report = simplify.run(model, always=True)
    assert report.fired > 0, report
    result = to_proto(model)
    feeds = models.feeds(models.cnn())
    models.assert_close(models.run(result, feeds), models.run(models.cnn(), feeds), 1e-4)
    given = {tensor.name for tensor in result.graph.initializer}
    assert [value.name for value in result.graph.input if value.name not in given] == ["x"]


def test_the_type_of_what_an_unknown_operator_makes_is_learnt_from_its_readers() -> None:
    proto = models.model(
        "g (float[1,4,8,8] x) => (float[1,4,8,8] y) { m = Relu(x) i = Identity(m) y = Conv(m, w) }",
        {"w": models.normal(4, 4, 1, 1)},
    )
    proto.graph.node[0].domain, proto.graph.node[0].op_type = "own", "Gate"
    proto.opset_import.append(onnx.helper.make_opsetid("own", 1))
    model = ir.from_proto(proto)
    infer_shapes(model)
    types = {value.name: value.dtype for node in model.graph for value in node.outputs}
    assert types == {"m": ir.DataType.FLOAT, "i": ir.DataType.FLOAT, "y": ir.DataType.FLOAT}
