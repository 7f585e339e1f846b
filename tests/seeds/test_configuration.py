"""Page 004 but for its options: the statements, every field of a configuration, layers and subgraphs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models
from tests.seeds import text
from tests.seeds.awkward import Reader, decibels, eight, network, quantized, samples

import quark.onnx
from quark.config.options import OPTIONS
from quark.errors import ConfigError, DataError
from quark.onnx import (
    AdaRoundConfig,
    CalibMethod,
    CLEConfig,
    Int8Spec,
    Int16Spec,
    ModelQuantizer,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
    ScaleType,
)

SPECS = ("Int8", "UInt8", "XInt8", "Int16", "UInt16", "Int32", "UInt32", "BFloat16", "BFP16")
QUIET = {"PrintSummary": False}


@text.needed
def test_the_overview_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, code = text.block("004", "from quark.onnx import ModelQuantizer", "quantizer.quantize_model(")
    onnx.save(network(), "float.onnx")
    given = {"model_input": "float.onnx", "model_output": "out.onnx", "calibration_data_reader": Reader(samples())}
    exec(compile(code, "004", "exec"), given)
    assert decibels(onnx.load("out.onnx")) > 25


def test_inputs_and_outputs(tmp_path: Path) -> None:
    """A path or a model goes in; a path is written, or a model comes back; without data UseRandomData has to be set."""
    path, out = tmp_path / "float.onnx", tmp_path / "out.onnx"
    onnx.save(network(), path)
    quantizer = ModelQuantizer(QConfig(eight(), extra_options=QUIET))
    assert quantizer.quantize_model(str(path), str(out), Reader(samples())) is None
    back = [quantizer.quantize_model(one, calibration_data_reader=Reader(samples())) for one in (network(), str(path))]
    assert [one.graph for one in back] == [onnx.load(out).graph] * 2
    with pytest.raises(DataError, match="UseRandomData"):
        quantizer.quantize_model(str(path))
    random = QConfig(eight(), extra_options={**QUIET, "UseRandomData": True})
    assert isinstance(ModelQuantizer(random).quantize_model(str(path)), onnx.ModelProto)


FIELDS = {
    "global_config": None,
    "specific_layer_config": None,
    "layer_type_config": None,
    "exclude": None,
    "algo_config": None,
    "use_external_data_format": False,
    "extra_options": None,
}


@pytest.mark.parametrize("name", FIELDS)
def test_field(name: str) -> None:
    parameter = inspect.signature(QConfig).parameters[name]
    assert parameter.default == FIELDS[name]
    QConfig(**{name: FIELDS[name]})


@text.needed
def test_fields_are_those_of_the_text() -> None:
    _, code = text.block("004", "quant_config = QConfig(", ")")
    names = [line.split()[0].rstrip(":") for line in code.split("\n")[1:-1]]
    assert names == list(FIELDS) == list(inspect.signature(QConfig).parameters)[: len(names)]
    said = {line.split()[0].rstrip(":"): line.rsplit("= ", 1)[1].rstrip(",") for line in code.split("\n")[2:-1]}
    assert said == {name: repr(default) for name, default in FIELDS.items() if name in said}


def test_the_default_is_eight_bits_everywhere() -> None:
    assert QConfig().compile() == QConfig(QLayerConfig(input_tensors=Int8Spec(), weight=Int8Spec())).compile()


@pytest.mark.parametrize("name", SPECS)
def test_spec(name: str) -> None:
    """Every type for inputs and for weights, with the defaults of its kind, on awkward shapes."""
    spec = getattr(quark.onnx, f"{name}Spec")()
    assert isinstance(spec, QTensorConfig)
    assert spec.symmetric == (not name.startswith("U"))
    result = quantized(QLayerConfig(input_tensors=spec, weight=spec))
    assert decibels(result.proto) > (20 if name in ("XInt8", "Int32", "UInt32") else 25)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["Int8Spec", "UInt8Spec", "Int16Spec"])
def test_symmetric(name: str, symmetric: bool) -> None:
    spec = getattr(quark.onnx, name)(symmetric=symmetric, calibration_method=CalibMethod.MinMax)
    shifted = [{"x": np.abs(feed["x"]), "z": feed["z"]} for feed in samples()]
    plan = quantized(QLayerConfig(input_tensors=spec, weight=eight().weight), None, shifted).plan.tensors["x"]
    middle = 128 if name == "UInt8Spec" else 0
    assert (int(plan.zero_point) == middle) == symmetric


@pytest.mark.parametrize("rule", ["Float32", "PowerOf2", "Int16"])
def test_scale_type(rule: str) -> None:
    plan = quantized(eight(scale_type=ScaleType[rule])).plan.tensors
    scales = np.concatenate(
        [np.ravel(one.scale) for one in plan.values() if one.scale is not None and one.role != "bias"]
    )
    powers = np.log2(scales) % 1 == 0
    assert powers.all() if rule == "PowerOf2" else not powers.all()
    if rule == "Int16":
        fractions = [np.float64(scale) * 2.0**shift for scale in scales for shift in [np.floor(np.log2(32767 / scale))]]
        assert np.abs(np.array(fractions) - np.rint(fractions)).max() < 1e-2


@pytest.mark.parametrize("method", ["MinMax", "MinMSE", "Percentile", "Entropy", "LayerwisePercentile"])
def test_calibration_method(method: str) -> None:
    assert decibels(quantized(eight(calibration_method=CalibMethod[method])).proto) > 18


@pytest.mark.parametrize(("name", "scales"), [("Tensor", 1), ("Channel", 10), ("Group", None)])
def test_granularity(name: str, scales: int | None) -> None:
    weight = Int8Spec(quant_granularity=QuantGranularity[name], calibration_method=CalibMethod.MinMax)
    plan = quantized(QLayerConfig(input_tensors=eight().input_tensors, weight=weight), WeightsOnly=name == "Group").plan
    assert np.size(plan.tensors["w2"].scale) == (scales or np.size(plan.tensors["w2"].scale))
    assert name != "Group" or np.size(plan.tensors["w5"].scale) >= 11


# ---- layers ------------------------------------------------------------------------------------------------------

SIXTEEN = QLayerConfig(
    input_tensors=Int16Spec(calibration_method=CalibMethod.MinMax),
    weight=Int16Spec(calibration_method=CalibMethod.MinMax),
    bias=Int16Spec(calibration_method=CalibMethod.MinMax),
    output_tensors=Int16Spec(calibration_method=CalibMethod.MinMax),
)
NAMED: dict[str, tuple[list[Any], set[str]]] = {
    "names": (["/conv1/Conv", "/conv2/Conv"], {"/conv1/Conv", "/conv2/Conv"}),
    "patterns": (["^/conv1/.*", "^/conv2/.*"], {"/conv1/Conv", "/conv1/Relu", "/conv2/Conv"}),
    "subgraph": (
        [(["/conv1/Conv", "/conv2/Conv"], ["Relu9", "MatMul10"])],
        {"/conv1/Conv", "/conv1/Relu", "/conv2/Conv", "Relu9", "MatMul10"},
    ),
}


PLACES = ("/conv1/Conv", "/conv1/Relu", "/conv2/Conv", "Relu9", "flat", "MatMul10", "tail")


def layered() -> onnx.ModelProto:
    """A network whose nodes have the names of the page's examples."""
    graph = """g (float[1, 6, 9, 7] x) => (float y, float v) {
        a = Conv (x, w1, b1)
        r = Relu (a)
        c = Conv <group = 2> (r, w3, b3)
        v = Relu (c)
        f = Flatten (c)
        m = MatMul (f, w)
        y = Gemm <transB = 1> (m, w7, b)
    }"""
    weights = {"w1": models.normal(10, 6, 3, 2) * 0.2, "b1": models.normal(10), "w3": models.normal(4, 5, 1, 1)}
    weights |= {"b3": models.normal(4, seed=3), "w": models.normal(168, 11) * 0.1, "w7": models.normal(3, 11)}
    proto = models.model(graph, {**weights, "b": models.normal(3)}, opset=21)
    for node, name in zip(proto.graph.node, PLACES, strict=True):
        node.name = name
    return proto


FEEDS = [{"x": models.normal(1, 6, 9, 7, seed=k)} for k in range(3)]
LAYERS = {"/conv1/Conv": "w1", "/conv2/Conv": "w3", "MatMul10": "w", "tail": "w7"}


def configured(**fields: Any) -> Any:
    options = {**QUIET, **fields.pop("extra_options", {})}
    return ModelQuantizer(QConfig(eight(), extra_options=options, **fields)).run(layered(), None, Reader(FEEDS))


@pytest.mark.parametrize("form", NAMED)
def test_specific_layers(form: str) -> None:
    given, inside = NAMED[form]
    result = configured(specific_layer_config={SIXTEEN: given})
    kinds = {node: result.plan.tensors[weight].spec.format for node, weight in LAYERS.items()}
    assert kinds == {node: "int16" if node in inside else "int8" for node in LAYERS}
    biases = {node: result.plan.tensors[bias].spec.format for node, bias in (("/conv1/Conv", "b1"), ("tail", "b"))}
    assert biases == {"/conv1/Conv": "int16", "tail": "int32"}
    assert np.isfinite(models.run(result.proto, FEEDS[0])[0]).all()


def test_later_inputs_win_over_earlier_outputs() -> None:
    """The output of one layer is the input of the next, and what is said later of it holds."""
    first = QLayerConfig(
        input_tensors=eight().input_tensors, weight=eight().weight, output_tensors=SIXTEEN.output_tensors
    )
    second = eight()
    given = {first: ["/conv1/Relu"], second: ["/conv2/Conv"]}
    assert configured(specific_layer_config=given).plan.tensors["r"].spec.format == "int8"
    turned = {second: ["/conv2/Conv"], first: ["/conv1/Relu"]}
    assert configured(specific_layer_config=turned).plan.tensors["r"].spec.format == "int16"


def test_layer_types() -> None:
    """The example of the page: two types another way, two left float; types that the model lacks are no mistake."""
    result = configured(layer_type_config={SIXTEEN: ["Conv", "ConvTranspose"], None: ["MatMul", "Gemm"]})
    plan = result.plan
    assert {plan.tensors[name].spec.format for name in ("w1", "w3")} == {"int16"}
    assert not plan.nodes["MatMul10"].quantized and not plan.nodes["tail"].quantized
    with pytest.raises(ConfigError, match="Convv"):
        configured(layer_type_config={SIXTEEN: ["Convv"]})


@pytest.mark.parametrize("form", NAMED)
def test_exclude(form: str) -> None:
    given, inside = NAMED[form]
    result = configured(exclude=given)
    assert {node for node in LAYERS if not result.plan.nodes[node].quantized} == inside & LAYERS.keys()


def test_algorithms() -> None:
    pytest.importorskip("torch")
    algorithms = [CLEConfig(cle_steps=2), AdaRoundConfig(learning_rate=0.1, num_iterations=100)]
    result = configured(algo_config=algorithms)
    names = {report.name for report in result.passes}
    assert {"cle", "adaround"} <= names
    assert np.isfinite(models.run(result.proto, FEEDS[0])[0]).all()


@pytest.mark.parametrize("outside", [True, False])
def test_external_data(outside: bool, tmp_path: Path) -> None:
    config = QConfig(eight(), use_external_data_format=outside, extra_options=QUIET)
    ModelQuantizer(config).quantize_model(network(), str(tmp_path / "out.onnx"), Reader(samples()))
    assert len(list(tmp_path.iterdir())) == 1 + outside
    assert decibels(onnx.load(tmp_path / "out.onnx")) > 25


GROUPS = {1: "SimplifyModel", 2: "OpTypesToQuantize", 3: "RemoveQDQConvRelu", 4: "CalibMovingAverage", 5: "Int16Bias"}
GROUPS |= {
    6: "Int16Scale",
    7: "SimulateDPU",
    8: "BF16WithClip",
    9: "UseMatMulNBits",
    10: "ExecutionProviders",
    11: "EvalMetrics",
}


@pytest.mark.parametrize("number", GROUPS)
def test_category(number: int) -> None:
    """Options carry the group of the page's table."""
    assert OPTIONS[GROUPS[number]].group == number
    assert {row.group for row in OPTIONS.values()} == set(GROUPS)


@text.needed
def test_categories_are_those_of_the_text() -> None:
    start = next(n for n, line in enumerate(text.lines("004")) if line.startswith("Parameters"))
    numbers = [int(line.split()[0]) for line in text.lines("004")[start:60] if re.fullmatch(r"\d+ \|", line)]
    assert numbers == list(GROUPS)
