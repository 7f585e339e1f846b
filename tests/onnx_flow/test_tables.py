"""Tables that Gather takes rows of are stored as codes, and nothing else of the model changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.onnx_flow import models

from quark.numerics.granularity import Channel
from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.coverage import coverage
from quark.onnx.quantized_plan import plan_of

ROWS, WIDE, PLACES = 600, 48, 128


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "words": rng.normal(0, 1, (ROWS, WIDE)) * np.exp(rng.normal(-2, 1, (ROWS, 1))),  # rows of very different sizes
        "places": rng.normal(0, 1, (PLACES, WIDE)),
        "w": rng.normal(0, 0.1, (WIDE, 32)),
    }


def lookups(values: dict[str, np.ndarray] | None = None, kind: type[Any] = np.float32) -> onnx.ModelProto:
    """Rows of a table of words and of one of places, added and projected."""
    tensors = [numpy_helper.from_array(one.astype(kind), name) for name, one in (values or arrays()).items()]
    nodes = [
        helper.make_node("Gather", ["words", "i"], ["e"], "word"),
        helper.make_node("Gather", ["places", "p"], ["f"], "place", axis=0),
        helper.make_node("Add", ["e", "f"], ["s"], "sum"),
        helper.make_node("MatMul", ["s", "w"], ["y"], "project"),
    ]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "t"]) for name in ("i", "p")]
    y = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), ["n", "t", 32])
    graph = helper.make_graph(nodes, "g", inputs, [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feed(seed: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"i": rng.integers(0, ROWS, (2, 20)), "p": rng.integers(0, PLACES, (2, 20))}


def quantized(model: onnx.ModelProto, preset: str = "A8W8", **options: object) -> onnx.ModelProto:
    config = QConfig.get_default_config(preset)
    config.global_quant_config.nodes_to_exclude = options.pop("exclude", [])
    config.global_quant_config.extra_options.update(PrintSummary=False, **options)
    made = ModelQuantizer(config).quantize_model(model, None, [feed(k) for k in range(3)])
    assert made is not None
    onnx.checker.check_model(made, full_check=True)
    return made


def types(model: onnx.ModelProto) -> dict[str, int]:
    return {one.name: one.data_type for one in model.graph.initializer}


def loss(reference: np.ndarray, found: np.ndarray) -> float:
    reference = reference.astype(np.float64)
    return float(10 * np.log10((reference**2).sum() / ((reference - found) ** 2).sum()))


@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU", "XINT8", "U8U8_AAWA", "A8W4"])
def test_tables_take_a_quarter_of_the_bytes_and_no_accuracy(preset: str) -> None:
    model, data = lookups(), feed(9)
    made, plain = quantized(model, preset), quantized(model, preset, QuantizeEmbeddings=False)
    assert coverage(made).stored > 0.97 and coverage(plain).stored < 0.1
    assert made.ByteSize() < 0.31 * model.ByteSize() < plain.ByteSize()
    reference = models.run(model, data)[0]
    assert loss(reference, models.run(made, data)[0]) > loss(reference, models.run(plain, data)[0]) - 0.3


@pytest.mark.parametrize("preset", ["A16W8", "S16S8_ASWS", "U16S8_AAWS"])
def test_rows_are_no_coarser_than_the_activations_they_are(preset: str) -> None:
    """With 8 bits they lose what 16-bit activations are there to keep: more than 0.1 dB beside 8-bit weights."""
    model, data = lookups(), feed(9)
    made, plain = quantized(model, preset), quantized(model, preset, QuantizeEmbeddings=False)
    assert types(made)["words_quantized"] == types(made)["places_quantized"] == TensorProto.INT16
    assert made.ByteSize() < 0.6 * plain.ByteSize()
    reference = models.run(model, data)[0]
    assert loss(reference, models.run(made, data)[0]) > loss(reference, models.run(plain, data)[0]) - 0.1


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_what_is_looked_up_is_the_rounded_row(kind: type[Any]) -> None:
    """Where the rows are all that changes: half a step of each row's own scale."""
    values = {**arrays(), "w": np.eye(WIDE)[:, :32]}
    model = lookups(values, kind)
    made = quantized(model, WeightsOnly=True, exclude=["project"])
    assert types(made)["words_quantized"] == types(made)["places_quantized"] == TensorProto.INT8
    data = feed(3)
    found, reference = (models.run(one, data)[0].astype(np.float64) for one in (made, model))
    steps = [np.abs(values[name]).max(1, keepdims=True) / 127 for name in ("words", "places")]
    allowed = steps[0][data["i"]] + steps[1][data["p"]]
    slack = 1e-6 if kind is np.float32 else 0.02
    assert (np.abs(found - reference) <= allowed / 2 * 1.01 + slack).all()
    assert sum(node.op_type == "Cast" for node in made.graph.node) == (0 if kind is np.float32 else 2)
    assert np.abs(found - reference).max() > 1e-3


def test_only_rows_are_dequantized() -> None:
    """A DequantizeLinear on a whole table would dequantize it at every run."""
    made = quantized(lookups(), WeightsOnly=True)
    read = {node.input[0]: node.op_type for node in made.graph.node}
    assert read["words_quantized"] == read["places_quantized"] == "Gather"


def short(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {**values, "words": values["words"][:, :4], "places": values["places"][:, :4], "w": values["w"][:4]}


def with_mask(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    values["words"][7, 3] = -np.inf
    return values


def with_outliers(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One element of a row is far larger, in every other row: the rest of it has no resolution, and counts."""
    values["words"] = np.random.default_rng(0).normal(0, 1, (ROWS, 4 * WIDE))
    values["words"][:, 3] = 60
    values["places"] = np.random.default_rng(0).normal(0, 1, (PLACES, 4 * WIDE))
    return {**values, "w": np.ones((4 * WIDE, 32))}


def with_padding(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    values["words"][0] = 0
    return values


@pytest.mark.parametrize(
    ("change", "stored"),
    [(short, False), (with_mask, False), (with_outliers, False), (with_padding, True), (lambda values: values, True)],
)
def test_which_tables(change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], stored: bool) -> None:
    made = types(quantized(lookups(change(arrays())), WeightsOnly=True))
    assert ("words_quantized" in made) is stored


@pytest.mark.parametrize(
    "options", [{"exclude": ["word"]}, {"OpTypesToQuantize": ["MatMul"]}, {"NodesToQuantize": ["project"]}]
)
def test_what_is_not_asked_for_stays_float(options: dict[str, object]) -> None:
    assert types(quantized(lookups(), **options))["words"] == TensorProto.FLOAT


@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU"])
def test_a_table_that_is_a_weight_too(preset: str) -> None:
    """Tied embeddings: codes serve both where the scales agree, and each has its own where they do not."""
    model = lookups()
    model.graph.node.append(helper.make_node("Reshape", ["s", "flat"], ["rows"], "reshape"))
    model.graph.node.append(helper.make_node("Gemm", ["rows", "words"], ["logits"], "head", transB=1))
    model.graph.initializer.append(numpy_helper.from_array(np.array([-1, WIDE]), "flat"))
    model.graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["m", ROWS]))
    made = quantized(model, preset, FloatWhereFaster=False)
    big = [one for one in made.graph.initializer if np.prod(one.dims) == ROWS * WIDE]
    assert {one.data_type for one in big} == {TensorProto.INT8} and len(big) == (2 if preset == "A8W8" else 1)
    data = feed(4)
    reference, found = models.run(model, data), models.run(made, data)
    assert loss(reference[0], found[0]) > 25
    assert loss(reference[1], found[1]) > (10 if preset == "A8W8" else 25)  # one scale for rows of all sizes


def test_a_table_that_something_reads_in_float_keeps_its_only_form() -> None:
    model = lookups()
    model.graph.node.append(helper.make_node("ReduceMax", ["words"], ["top"], "top", keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("top", TensorProto.FLOAT, []))
    made = types(quantized(model, SimplifyModel=False, WeightsOnly=True))
    assert "words_quantized" not in made or "words" not in made


def test_the_plan_reads_back(tmp_path: Path) -> None:
    made = quantized(lookups())
    onnx.save(made, tmp_path / "m.onnx")
    row = plan_of(tmp_path / "m.onnx").tensors["words"]
    assert row.role == "weight" and row.spec.format == "int8" and row.spec.granularity == Channel(0)
    assert row.readers == {"word"} and row.given is not None
    np.testing.assert_allclose(row.given[0], np.abs(arrays()["words"]).max(1) / 127, rtol=1e-6)


def test_openvino_reads_them() -> None:
    openvino = pytest.importorskip("openvino")
    model, data = lookups(), feed(5)
    made = quantized(model)
    compiled = openvino.Core().compile_model(openvino.Core().read_model(made.SerializeToString()), "CPU")
    found = compiled([data["i"], data["p"]])[0]
    assert loss(models.run(made, data)[0], found) > 25


def test_a_lookup_counts_as_quantized() -> None:
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options.update(PrintSummary=False)
    plan = ModelQuantizer(config).run(lookups(), None, [feed()]).plan
    assert {name: plan.nodes[name].quantized for name in ("word", "place")} == {"word": True, "place": True}
