"""Work that grows with the graph, not with its square; and very large graphs in pieces."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from benchmarks.graph_cost import CHANNELS, SIZE, Branching
from onnx import TensorProto, helper, numpy_helper

import quark
from quark.onnx import Config, ModelQuantizer, get_default_config
from quark.onnx.graph import pieces
from quark.onnx.graph.model import load
from quark.onnx.graph.pieces import Pieces, open_in_pieces, spans
from quark.onnx.graph.run import Runner
from quark.onnx.graph.session import Light

OURS = str(Path(quark.__file__).parent)
X = np.random.default_rng(1).normal(0, 1, (1, CHANNELS, SIZE, SIZE)).astype(np.float32)
WEIGHTS_OF_BODY = np.full((1, CHANNELS, 1, 1), 0.5, np.float32)


def quantized(length: int, preset: str = "A8W8", stated: bool = False) -> onnx.ModelProto:
    """Args: stated: all types are in the file, as they are in those of graphs that are large by themselves."""
    config = get_default_config(preset)
    config.extra_options.update(PrintSummary=False, FillAllValueInfo=stated)
    made = ModelQuantizer(Config(config)).quantize_model(Branching(length).model(), None, [{"x": X}])
    assert made is not None
    return made


def visits(length: int, preset: str) -> Counter[CodeType]:
    """Lines of ours that a job runs, function by function."""
    counted: Counter[CodeType] = Counter()

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        counted[frame.f_code] += 1
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(OURS) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        quantized(length, preset)
    finally:
        sys.settrace(before)
    return counted


@pytest.mark.parametrize("preset", ["A8W8", "XINT8"])
def test_every_function_of_ours_does_work_in_proportion_to_the_nodes(preset: str) -> None:
    quantized(8, preset)  # what is only done once
    small, large = visits(20, preset), visits(80, preset)
    grown = {
        f"{Path(code.co_filename).relative_to(OURS)}:{code.co_qualname}": (small[code], count)
        for code, count in large.items()
        if count > 500 and count > 6 * small[code]
    }
    assert not grown, "lines at 40 and at 160 nodes"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "WHOLE", 30)
    monkeypatch.setattr(pieces, "PIECE", 20)


def whole_run(model: onnx.ModelProto) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return list(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": X}))


def opened(model: onnx.ModelProto) -> Any:
    return open_in_pieces(Light.of(load(model)), onnxruntime.SessionOptions)


@pytest.mark.usefixtures("small_pieces")
def test_pieces_give_what_the_whole_gives() -> None:
    model = quantized(40, stated=True)
    found = opened(model)
    assert isinstance(found, Pieces) and len(found.sessions) > 8
    assert [one.name for one in found.get_inputs()] == ["x"]
    np.testing.assert_array_equal(found.run(None, {"x": X})[0], whole_run(model)[0])


@pytest.mark.usefixtures("small_pieces")
def test_tensors_inside_are_seen_through_pieces() -> None:
    model = onnx.shape_inference.infer_shapes(Branching(60).model())
    names = [name for node in model.graph.node for name in node.output][:-1]
    asked = onnx.ModelProto()
    asked.CopyFrom(model)
    asked.graph.output.extend(value for value in model.graph.value_info if value.name in names)
    expected = dict(zip(["y", *(value.name for value in model.graph.value_info)], whole_run(asked), strict=True))
    values = Runner(load(model), names, complete=True).run({"x": X}).values
    assert len(values) == len(names)
    for name in names:
        np.testing.assert_allclose(values[name], expected[name], atol=1e-6, err_msg=name)


@pytest.mark.usefixtures("small_pieces")
def test_quantizing_in_pieces_gives_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces = quantized(40)
    monkeypatch.setattr(pieces, "WHOLE", 1 << 20)
    assert in_pieces.SerializeToString() == quantized(40).SerializeToString()


def with_body(length: int) -> onnx.ModelProto:
    """A long chain whose last node is an If that reads what the first node made."""
    nodes = [helper.make_node("Relu", ["x"], ["first"])]
    nodes += [helper.make_node("Sigmoid", ["first" if k == 0 else f"s{k - 1}"], [f"s{k}"]) for k in range(length)]
    made = helper.make_tensor_value_info("made", TensorProto.FLOAT, [1, CHANNELS, SIZE, SIZE])
    body = helper.make_graph([helper.make_node("Mul", ["first", "w"], ["made"])], "body", [], [made])
    other = helper.make_graph([helper.make_node("Add", ["first", f"s{length - 1}"], ["made"])], "other", [], [made])
    nodes.append(helper.make_node("If", ["yes"], ["y"], then_branch=body, else_branch=other))
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, [1, CHANNELS, SIZE, SIZE]) for end in ("x", "y")]
    weights = [numpy_helper.from_array(WEIGHTS_OF_BODY, "w"), numpy_helper.from_array(np.array(True), "yes")]
    graph = helper.make_graph(nodes, "body", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(model)


@pytest.mark.usefixtures("small_pieces")
def test_bodies_read_from_earlier_pieces() -> None:
    model = with_body(60)
    found = opened(model)
    assert isinstance(found, Pieces)
    np.testing.assert_array_equal(found.run(None, {"x": X})[0], whole_run(model)[0])


def test_nothing_is_cut_where_a_tensor_crosses_that_numpy_does_not_have() -> None:
    nodes = [helper.make_node("Cast", ["x"], ["b0"], to=TensorProto.BFLOAT16)]
    nodes += [helper.make_node("Identity", [f"b{k}"], [f"b{k + 1}"]) for k in range(20)]
    nodes.append(helper.make_node("Cast", ["b20"], ["c"], to=TensorProto.FLOAT))
    nodes += [helper.make_node("Relu", ["c" if k == 0 else f"r{k - 1}"], [f"r{k}"]) for k in range(20)]
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, [4]) for end in ("x", "r19")]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]))
    graph = onnx.shape_inference.infer_shapes(model).graph
    assert spans(graph, 10)[0][1] == 22
    assert spans(graph, 10)[-1][1] == len(nodes)


@pytest.mark.usefixtures("small_pieces")
def test_the_whole_graph_has_the_last_word() -> None:
    model = with_body(60)
    found = opened(model)
    with pytest.raises(Exception, match="x"):
        found.run(None, {})
    assert found.run(["y"], {"x": X})[0].shape == X.shape  # by the whole graph, which has been opened meanwhile
