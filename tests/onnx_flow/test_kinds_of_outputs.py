"""What models give back beside tensors of numbers: sequences, optionals, text, truth values, maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from quark.cli.app import app
from quark.errors import ModelError
from quark.measure.answers import Answers
from quark.onnx.graph.model import load
from quark.onnx.graph.run import as_array

FLOAT = helper.make_tensor_type_proto(TensorProto.FLOAT, [None, 8])
SEQUENCE = helper.make_value_info("seen", helper.make_sequence_type_proto(FLOAT))
KINDS: dict[str, tuple[list[onnx.NodeProto], onnx.ValueInfoProto]] = {
    "sequence": ([helper.make_node("SequenceConstruct", ["made", "data"], ["seen"])], SEQUENCE),
    "sequence of unlike tensors": (
        [
            helper.make_node("Concat", ["made", "data"], ["both"], axis=0),
            helper.make_node("SequenceConstruct", ["made", "both"], ["seen"]),
        ],
        SEQUENCE,
    ),
    "optional": (
        [helper.make_node("Optional", ["made"], ["seen"])],
        helper.make_value_info("seen", helper.make_optional_type_proto(FLOAT)),
    ),
    "text": (
        [
            helper.make_node("ArgMax", ["made"], ["best"], axis=1, keepdims=0),
            helper.make_node("Gather", ["words", "best"], ["seen"]),
        ],
        helper.make_tensor_value_info("seen", TensorProto.STRING, [None]),
    ),
    "truth": (
        [helper.make_node("Greater", ["made", "data"], ["seen"])],
        helper.make_tensor_value_info("seen", TensorProto.BOOL, [None, 8]),
    ),
}


def model_of(nodes: list[onnx.NodeProto], output: onnx.ValueInfoProto, *domains: tuple[str, int]) -> onnx.ModelProto:
    weights = numpy_helper.from_array(np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32), "weights")
    words = numpy_helper.from_array(np.array([f"class {k}" for k in range(8)], dtype=object), "words")
    first = helper.make_node("MatMul", ["data", "weights"], ["made"])
    given = helper.make_tensor_value_info("data", TensorProto.FLOAT, [None, 8])
    graph = helper.make_graph([first, *nodes], "graph", [given], [output], [weights, words])
    opsets = [helper.make_opsetid(*one) for one in (("", 20), *domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", ["A8W8_CPU", "XINT8"])
def test_a_model_is_judged_by_what_it_gives_back(kind: str, preset: str, tmp_path: Path) -> None:
    onnx.save(model_of(*KINDS[kind]), tmp_path / "model.onnx")
    np.save(tmp_path / "data.npy", np.random.default_rng(1).normal(size=(24, 8)).astype(np.float32))
    data = ["--data", str(tmp_path / "data.npy")]
    model, made = str(tmp_path / "model.onnx"), str(tmp_path / "made.onnx")
    ran = CliRunner().invoke(app, ["onnx", "quantize", model, "-o", made, "--preset", preset, *data])
    assert ran.exception is None and ran.exit_code == 0, ran.output
    said = next(line for line in ran.output.splitlines() if line.startswith("accuracy"))
    word = "labels" if kind in ("text", "truth") else "seen"
    assert "unknown" not in said and word in said and "nan" not in said
    ran = CliRunner().invoke(app, ["onnx", "compare", model, made, *data])
    assert ran.exception is None and ran.exit_code == 0, ran.output


def test_labels_that_are_text_are_counted() -> None:
    told = Answers()
    for ours, theirs in ((["a", "b"] * 8, ["a", "b"] * 8), (["a", "b"] * 8, ["a", "a"] * 8)):
        told.update(np.array(ours, dtype=object), np.array(theirs, dtype=object))
    assert (told.kind, told.share) == ("labels", 0.75)


def test_sequences_and_optionals_become_arrays() -> None:
    row = np.ones((1, 2), np.float32)
    assert as_array([row, 2 * row]).shape == (2, 1, 2)
    assert as_array([row, np.zeros((2, 2), np.float32)]).tolist() == [1, 1, 0, 0, 0, 0]
    assert as_array([]).size == 0 and as_array(None).size == 0


@pytest.mark.parametrize("end", ["input", "output"])
def test_maps_are_refused_by_name(end: str) -> None:
    kind = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    if end == "output":
        node = helper.make_node("ZipMap", ["made"], ["seen"], domain="ai.onnx.ml", classlabels_int64s=list(range(8)))
        output = helper.make_value_info("seen", helper.make_sequence_type_proto(kind))
        proto = model_of([node], output, ("ai.onnx.ml", 3))
    else:
        node = helper.make_node("DictVectorizer", ["kept"], ["seen"], domain="ai.onnx.ml", int64_vocabulary=[0, 1])
        output = helper.make_tensor_value_info("seen", TensorProto.FLOAT, [1, 2])
        proto = model_of([node], output, ("ai.onnx.ml", 3))
        proto.graph.input.append(helper.make_value_info("kept", kind))
    name = "seen" if end == "output" else "kept"
    with pytest.raises(ModelError, match=f"the {end} '{name}' is of the ONNX type map.*zipmap"):
        load(proto)
