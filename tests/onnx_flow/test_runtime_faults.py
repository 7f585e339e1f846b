"""Faults of ONNX Runtime that end the process, refuse the file or change its numbers: no file of ours meets them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tests.onnx_flow import models

from quark.ir.runtime_faults import work_around_faults
from quark.onnx import (
    BFP16Spec,
    CalibMethod,
    Int8Spec,
    ModelQuantizer,
    MX9Spec,
    MXFP8E4M3Spec,
    QConfig,
    QLayerConfig,
    UInt8Spec,
)
from quark.onnx.compare import compare
from quark.onnx.graph.model import load, to_proto

EIGHT = QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.MinMax), weight=Int8Spec())
POOLED = """g (float[1,16,8,8] x) => (float[1,16,4,4] y) {
    [first] a = Conv(x, w) [pool] p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(a) [last] y = Conv(p, w2) }"""
CAPTURED = """g (float[1,16,8,8] x) => (float[1,16,4,4] y) <bool c = {1}> {
    [first] a = Conv(x, w) [pool] p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(a)
    [choice] s = If (c) <then_branch = t () => (float[1,16,4,4] u) { u = Relu(p) },
                         else_branch = e () => (float[1,16,4,4] v) { v = Neg(p) }>
    [last] y = Conv(s, w2) }"""
WEIGHTS = {"w": models.normal(16, 16, 1, 1, seed=1), "w2": models.normal(16, 16, 1, 1, seed=2)}


def quantized(graph: str, **more: Any) -> onnx.ModelProto:
    proto = models.model(graph, {name: array for name, array in WEIGHTS.items() if f" {name})" in graph})
    given = {"PrintSummary": False, **more.pop("options", {})}
    made = ModelQuantizer(QConfig(EIGHT, extra_options=given, **more)).quantize_model(
        proto, None, [models.feeds(proto)]
    )
    assert made is not None
    return made


def loads(proto: onnx.ModelProto, folder: Path) -> bool:
    """Whether ONNX Runtime loads a model, found out in a process of its own."""
    onnx.save(proto, folder / "model.onnx")
    code = "import sys, onnxruntime; onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"
    return subprocess.run([sys.executable, "-c", code, folder / "model.onnx"], capture_output=True).returncode == 0


def without_copies(proto: onnx.ModelProto) -> onnx.ModelProto:
    text = proto.SerializeToString()
    bare = onnx.ModelProto.FromString(text)
    names = {node.output[0]: node.input[0] for node in bare.graph.node if node.op_type == "Max"}
    graphs = [bare.graph, *(a.g for node in bare.graph.node for a in node.attribute if a.HasField("g"))]
    for node in (node for graph in graphs for node in graph.node):
        node.input[:] = [names.get(name, name) for name in node.input]
    for node in [node for node in bare.graph.node if node.op_type == "Max"]:
        bare.graph.node.remove(node)
    return bare


@pytest.mark.parametrize("spec", [BFP16Spec, MX9Spec, MXFP8E4M3Spec])
def test_a_block_format_behind_an_8_bit_pool(spec: Any, tmp_path: Path) -> None:
    layer = QLayerConfig(input_tensors=spec(), weight=spec())
    made = quantized(POOLED, specific_layer_config={layer: ["last"]})
    assert sum(node.op_type == "Max" for node in made.graph.node) == 1
    assert loads(made, tmp_path)


def test_a_block_format_behind_another_pair(tmp_path: Path) -> None:
    layer = QLayerConfig(input_tensors=BFP16Spec(), weight=BFP16Spec())
    made = quantized(
        POOLED, specific_layer_config={layer: ["pool", "last"]}, options={"EnableDualQuantNodePairs": True}
    )
    assert sum(node.op_type == "Max" for node in made.graph.node) == 1
    assert loads(made, tmp_path)


def test_a_subgraph_that_reads_an_8_bit_pool(tmp_path: Path) -> None:
    made = quantized(CAPTURED, options={"NodesToExcludeOutputQuantization": ["pool"]})
    assert loads(made, tmp_path)


BRANCHES = """g (float[n,16,8,8] x, bool c) => (float[p,q,r] y)
    <int64 first = {0}, int64[1] axis = {0}, int64 one = {1}> {
    [first] a = Conv(x, w)
    sizes = Shape(a) number = Gather(sizes, first) single = Equal(number, one)
    h = If (single) <then_branch = t () => (float[16,8,8] u) { u = Squeeze(a, axis) },
                     else_branch = e () => (float[16,8,8] v) { v = ReduceMax<keepdims = 0>(a, axis) }>
    y = If (c) <then_branch = f () => (float[16,8,8] k) { k = Relu(h) },
                else_branch = o () => (float[16,8,8] l) { l = Neg(h) }> }"""


def test_a_branch_that_fixed_sizes_decide(tmp_path: Path) -> None:
    """The runtime moves the branch out, and what moves values in it is behind a DequantizeLinear then."""
    proto = models.model(BRANCHES, {"w": WEIGHTS["w"]}, 18)
    feeds = [{"x": models.normal(1, 16, 8, 8, seed=k), "c": np.array(k % 2 == 0)} for k in range(4)]
    made = ModelQuantizer(QConfig(EIGHT, extra_options={"PrintSummary": False})).quantize_model(proto, None, feeds)
    assert made is not None and "QuantizeLinear" in {node.op_type for node in made.graph.node}
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    assert loads(made, tmp_path)
    assert not loads(without_copies(made), tmp_path), "the copy is not needed any more"


def test_models_that_need_no_copy_get_none() -> None:
    assert not any(node.op_type == "Max" for node in quantized(POOLED).graph.node)


def test_the_copy_is_needed_as_long_as_onnx_runtime_has_the_fault(tmp_path: Path) -> None:
    layer = QLayerConfig(input_tensors=BFP16Spec(), weight=BFP16Spec())
    made = quantized(POOLED, specific_layer_config={layer: ["last"]})
    sound = loads(without_copies(made), tmp_path)
    assert not sound, "this ONNX Runtime is sound: quark.ir.runtime_faults may go when every supported one is"


MOVED = """g (float[1,16,8,8] x) => (float[16,16] y, float[1,16,4,4] z) <int64[2] s = {16, 16}> {
    [first] a = Conv(x, w) [pool] p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(a)
    [flat] y = Reshape(p, s) [wave] z = Sin(p) }"""


@pytest.mark.parametrize("opset", [13, 21, 23])
def test_int8_tensors_that_are_moved_and_left_float(opset: int) -> None:
    options = {"ConvertOpsetVersion": opset, "NodesToExcludeOutputQuantization": ["pool", "flat"]}
    proto = models.model(MOVED, {"w": WEIGHTS["w"]})
    feed = models.feeds(proto)
    made = quantized(MOVED, options=options)
    exact = models.session(proto).run(None, feed)
    for a, b in zip(exact, models.session(made).run(None, feed), strict=True):
        assert a.shape == b.shape and np.sum(a**2) > 100 * np.sum((a - b) ** 2)
    assert [o.name for o in made.graph.output] == ["y", "z"]


SPARED = """g (float[1,16,8,8] x) => (float[1,16,8,8] y) {
    [first] a = Conv(x, w) [spared] b = Conv(a, w2) [wave] r = Relu(b) [last] y = Conv(r, w) }"""


def answer(proto: onnx.ModelProto, feed: dict[str, np.ndarray], *, rounding: bool) -> np.ndarray:
    """What ONNX Runtime makes of a model, with its rounding of float weights and without."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not rounding:
        options.add_session_config_entry("optimization.disable_specified_optimizers", "WeightBiasQuantization")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0])


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("spec", [None, BFP16Spec, MX9Spec])
def test_float_weights_between_8_bit_tensors_stay_what_they_are(spec: Any, relu: bool) -> None:
    graph = SPARED if relu else SPARED.replace("[wave] r = Relu(b)", "").replace("Conv(r, w)", "Conv(b, w)")
    layer = None if spec is None else QLayerConfig(weight=spec(), input_tensors=EIGHT.input_tensors)
    given = {"exclude": ["spared"]} if layer is None else {"specific_layer_config": {layer: ["spared"]}}
    proto = models.model(graph, WEIGHTS)
    feed = models.feeds(proto)
    made = ModelQuantizer(QConfig(EIGHT, extra_options={"PrintSummary": False}, **given)).quantize_model(
        proto, None, [feed]
    )
    assert made is not None
    assert sum(node.op_type == "Max" for node in made.graph.node) == 1
    np.testing.assert_array_equal(answer(made, feed, rounding=True), answer(made, feed, rounding=False))
    bare = without_copies(made)
    fault = not np.array_equal(answer(bare, feed, rounding=True), answer(bare, feed, rounding=False))
    assert fault, "this ONNX Runtime keeps float weights: the copy may go when every supported one does"


@pytest.mark.parametrize("preset", ["A8W8_CPU", "U8S8_AAWS", "A8W8", "XINT8", "A16W8"])
@pytest.mark.parametrize("length", [1, 2, 3, "T"])
def test_a_softmax_over_few_entries_keeps_its_ones(preset: str, length: int | str) -> None:
    """ONNX Runtime's integer Softmax makes 0 of 1 where it sums one entry; free lengths may be one at any time."""
    graph = f"""g (float[4,8] x, float[4,{length}] m) => (float[4,{length}] y) {{
        h = MatMul(x, w) s = Add(h, m) y = Softmax<axis = -1>(s) }}"""
    width = length if isinstance(length, int) else 5
    proto = models.model(graph, {"w": models.normal(8, 1, seed=1)})
    config = QConfig.get_default_config(preset)
    config.global_quant_config.extra_options.update(PrintSummary=False)
    rng = np.random.default_rng(0)

    def feed(size: int) -> dict[str, np.ndarray]:
        return {name: rng.normal(size=(4, n)).astype(np.float32) for name, n in (("x", 8), ("m", size))}

    made = ModelQuantizer(config).quantize_model(proto, None, [feed(width) for _ in range(8)])
    assert made is not None
    session = onnxruntime.InferenceSession(made.SerializeToString())
    for size in (1, 2, 5) if length == "T" else (width,):
        given = feed(size)
        assert np.abs(session.run(None, given)[0] - models.run(proto, given)[0]).max() < 0.2


@pytest.mark.parametrize("place", [[1, 2], ["h", "w"]], ids=str)
@pytest.mark.parametrize("kind", [Int8Spec, UInt8Spec])
@pytest.mark.parametrize("ratio", [100, 1_000])
def test_the_mean_of_large_values_may_be_small(ratio: float, kind: Any, place: list[Any]) -> None:
    """ONNX Runtime's integer GlobalAveragePool refuses every run where the result has a scale 256 times finer."""
    sizes = f"{place[0]},{place[1]}"
    graph = f"""g (float[n,2,{sizes}] x) => (float[n,2,1,1] y) {{
        h = Tanh(x) m = GlobalAveragePool(h) y = Conv(m, w) }}"""
    proto = models.model(graph, {"w": np.eye(2, dtype=np.float32)[:, :, None, None]})
    size = [2, 2] if place == ["h", "w"] else place
    x = np.tile(np.array([1, -1], np.float32), size[0] * size[1] // 2).reshape(1, 1, *size)
    sample = np.concatenate([x, -x], 1) + np.float32(1 / ratio)
    layer = QLayerConfig(input_tensors=kind(calibration_method=CalibMethod.MinMax), weight=Int8Spec())
    config = QConfig(layer, extra_options={"PrintSummary": False, "QuantizeAllOpTypes": True})
    made = ModelQuantizer(config).quantize_model(proto, None, [{"x": sample}])
    assert made is not None
    found = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"x": sample})[0]
    exact = models.run(proto, {"x": sample})[0]
    np.testing.assert_allclose(found, exact, atol=2 / 127)


@pytest.mark.parametrize("between", ["", "t = Transpose<perm = [0, 2, 3, 1]>(p) q = Transpose<perm = [0, 3, 1, 2]>(t)"])
def test_a_pool_of_floats_stays_one(between: str, tmp_path: Path) -> None:
    """ONNX Runtime carries the QuantizeLinear back over it, and its MaxPool of codes takes 15 to 80 times as long."""
    last = "q" if between else "p"
    text = f"""g (float[1,16,8,8] x) => (float[1,16,4,4] y) {{ [first] a = Conv(x, w)
        [pool] p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(a) {between} [last] y = Conv({last}, w2) }}"""
    proto = models.model(text, WEIGHTS)
    layers, given = QLayerConfig(UInt8Spec(), weight=Int8Spec()), {"PrintSummary": False}
    config = QConfig(layers, exclude=["first", "pool"], extra_options=given)
    feeds = [models.feeds(proto, seed=seed) for seed in range(2)]
    made = ModelQuantizer(config).quantize_model(proto, None, feeds)
    assert made is not None and [node.op_type for node in made.graph.node].count("Clip") == 1
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    found = onnxruntime.InferenceSession(made.SerializeToString(), options).run(None, feeds[0])[0]
    optimized = onnx.load(tmp_path / "optimized.onnx").graph
    codes = {name for node in optimized.node if node.op_type == "QuantizeLinear" for name in node.output}
    assert not any(set(node.input) & codes for node in optimized.node if "MaxPool" in node.op_type)
    assert "Clip" not in {node.op_type for node in optimized.node}, "it is removed where it did its work"
    bare = onnx.ModelProto.FromString(made.SerializeToString())
    (clip,) = [node for node in bare.graph.node if node.op_type == "Clip"]
    clip.op_type = "Identity"
    del clip.input[1:]
    expected = onnxruntime.InferenceSession(bare.SerializeToString()).run(None, feeds[0])[0]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("codes", ["uint8", "int8"])
@pytest.mark.parametrize(
    "behind", ["", "t = MaxPool<kernel_shape = [1,2]>(p)", "t = Transpose<perm = [0, 2, 3, 1]>(p)"]
)
@pytest.mark.parametrize("read", ["a = Neg(x)", "c = QuantizeLinear(x, f, zero) a = DequantizeLinear(c, f, zero)"])
def test_a_pool_that_tells_places_tells_those_of_the_largest_values(
    codes: str, behind: str, read: str, opset: int
) -> None:
    """ONNX Runtime carries the QuantizeLinear back over it, and told the first of equal codes."""
    last = "t" if behind else "p"
    text = f"""g (float[1,2,8,8] x) => (float y, int64 places) {{ {read}
        p, places = MaxPool<kernel_shape = [2,2], strides = [2,2]>(a) {behind}
        q = QuantizeLinear({last}, s, zero) d = DequantizeLinear(q, s, zero) y = Neg(d) }}"""
    constants = {"s": np.array(0.5, np.float32), "f": np.array(0.02, np.float32), "zero": np.array(9, codes)}
    proto = models.model(text, constants, opset)
    model, feeds = load(onnx.shape_inference.infer_shapes(proto)), models.feeds(proto)
    work_around_faults(model)
    exact = onnxruntime.SessionOptions()
    exact.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    expected = onnxruntime.InferenceSession(proto.SerializeToString(), exact).run(None, feeds)
    found = onnxruntime.InferenceSession(to_proto(model).SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.parametrize("inner", ["a = Conv(x, w)", "b = Conv(x, w) a = Relu(b)"])
@pytest.mark.parametrize("preset", ["A8W8_CPU", "XINT8", "BF16"])
def test_zeros_around_what_a_pool_reads_are_kept(inner: str, preset: str, caplog: pytest.LogCaptureFixture) -> None:
    """ONNX Runtime makes pads of the MaxPool of them, which hold nothing: its float session answers below 0."""
    text = f"""g (float[1,16,8,8] x) => (float[1,16,4,4] y) {{ {inner} p = Pad(a, around)
        y = MaxPool<kernel_shape = [3,3], strides = [2,2]>(p) }}"""
    around = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    proto = models.model(text, {"w": -np.abs(WEIGHTS["w"]), "around": around})
    feed = {"x": np.abs(models.feeds(proto)["x"])}
    made = ModelQuantizer(QConfig.get_default_config(preset)).quantize_model(proto, None, [feed])
    assert made is not None and compare(proto, made, [feed]).outputs["y"].sqnr > 25, "a float model that keeps them"
    assert ("leaves out the zeros" in caplog.text) == ("Relu" not in inner)
    bare = load(onnx.shape_inference.infer_shapes(proto))
    work_around_faults(bare)
    for one in (made, to_proto(bare)):
        found = onnxruntime.InferenceSession(one.SerializeToString()).run(None, feed)[0]
        assert (found[:, :, 0] == 0).all() and (found[:, :, :, 0] == 0).all()


@pytest.mark.parametrize(
    ("spec", "pairs"),
    [
        (Int8Spec(calibration_method=CalibMethod.MinMax), 2),
        (Int8Spec(calibration_method=CalibMethod.MinMax, symmetric=False), 1),
        (UInt8Spec(calibration_method=CalibMethod.MinMax), 1),
    ],
    ids=["int8", "zero point", "uint8"],
)
def test_int8_behind_a_concat_has_a_second_pair_that_onnx_runtime_removes(
    spec: Any, pairs: int, tmp_path: Path
) -> None:
    """OpenVINO reads other numbers without (``test_second_reader.py``); it is written once."""
    proto = models.model(
        """g (float[1,16,8,8] x) => (float[1,16,8,8] y) {
            [first] a = Conv(x, w) [join] c = Concat<axis = 1>(a, x) [last] y = Conv(c, w2) }""",
        {"w": WEIGHTS["w"], "w2": models.normal(16, 32, 1, 1, seed=2)},
    )
    config = QConfig(QLayerConfig(input_tensors=spec, weight=Int8Spec()), extra_options={"PrintSummary": False})
    feed = models.feeds(proto)
    made = ModelQuantizer(config).quantize_model(proto, None, [feed])
    assert made is not None
    model = load(made)
    work_around_faults(model)
    twice = to_proto(model)
    makers = {name: node for node in twice.graph.node for name in node.output}
    value, behind = next(node for node in twice.graph.node if node.name == "last").input[0], 0
    while (node := makers[value]).op_type != "Concat":
        value, behind = node.input[0], behind + (node.op_type == "QuantizeLinear")
    assert behind == pairs
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "basic.onnx")
    session = onnxruntime.InferenceSession(twice.SerializeToString(), options)
    left = [node.op_type for node in onnx.load(tmp_path / "basic.onnx").graph.node]
    assert left.count("QuantizeLinear") == sum(node.op_type == "QuantizeLinear" for node in made.graph.node) - pairs + 1
    np.testing.assert_array_equal(session.run(None, feed)[0], models.run(made, feed)[0])


@pytest.mark.parametrize("codes", ["int8", "uint8", "int16"])
@pytest.mark.parametrize(
    ("bounds", "unit"),
    [((0.0, 6.0), "1"), ((-1.0, 0.0), "1"), ((0.0, None), "1"), ((-1e-9, 1e-9), "1"), ((-2.7, None), "steps")],
)
@pytest.mark.parametrize("scale", [1e-12, 1e-10, 1e-9, 1e-8, 0.02])
def test_a_clip_is_dropped_only_where_the_codes_say_the_same(
    scale: float, bounds: tuple[float, float | None], unit: str, codes: str
) -> None:
    """ONNX Runtime itself is asked whether the copy is needed."""
    given = {"low": bounds[0] * (scale if unit == "steps" else 1), "high": bounds[1], "scale": scale}
    clip = "Clip(n, low)" if bounds[1] is None else "Clip(n, low, high)"
    proto = models.model(
        f"g (float[64] x) => (float[64] y) <{codes} zero = {{3}}> {{ n = Neg(x) a = {clip}"
        " q = QuantizeLinear(a, scale, zero) y = DequantizeLinear(q, scale, zero) }",
        {name: np.array(value, np.float32) for name, value in given.items() if value is not None},
        opset=21,
    )
    model = load(proto)
    work_around_faults(model)
    written = to_proto(model)
    x = np.float32(scale) * np.concatenate([np.linspace(-end, end, 32, dtype=np.float32) for end in (200, 40_000)])

    def said(one: onnx.ModelProto, level: int) -> np.ndarray:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel(level)
        return onnxruntime.InferenceSession(one.SerializeToString(), options).run(None, {"x": x})[0]

    exact = said(proto, 0)
    assert np.array_equal(said(written, 99), exact) and np.array_equal(said(written, 0), exact)
    needed = not np.array_equal(said(proto, 99), exact)
    assert ("Max" in [node.op_type for node in written.graph.node]) is needed
