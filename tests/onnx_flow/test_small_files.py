"""A model of long names and few weights does not grow by what is written beside its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.onnx_flow import models

from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.explain import explain

DEPTH, WIDE = 12, 8


def named(letters: int) -> onnx.ModelProto:
    """A chain of small convolutions whose tensors have names of so many letters, alike but for the last."""
    names = [f"{'model/block;' * (letters // 12)}{k}" for k in range(DEPTH + 1)]
    rng, nodes, weights = np.random.default_rng(0), [], []
    for k in range(DEPTH):
        kernel = rng.normal(0, 0.1, (WIDE, WIDE, 3, 3)).astype(np.float32)
        weights.append(numpy_helper.from_array(kernel, f"{names[k]}/kernel"))
        nodes.append(helper.make_node("Conv", [names[k], weights[-1].name], [names[k + 1]], f"n{k}", pads=[1] * 4))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, WIDE, 8, 8]) for name in (names[0], names[-1])]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def quantized(model: onnx.ModelProto, preset: str, **options: object) -> onnx.ModelProto:
    config = QConfig.get_default_config(preset)
    config.global_quant_config.extra_options.update(PrintSummary=False, FloatWhereFaster=False, **options)
    feed = {model.graph.input[0].name: np.random.default_rng(0).normal(0, 1, (1, WIDE, 8, 8)).astype(np.float32)}
    made = ModelQuantizer(config).quantize_model(model, None, [feed])
    assert made is not None
    onnx.checker.check_model(made, full_check=True)
    reference, found = models.run(model, feed)[0], models.run(made, feed)[0]
    assert 10 * np.log10((reference**2).sum() / ((reference - found) ** 2).sum()) > 15
    return made


@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU", "A16W8"])
def test_long_names_are_not_repeated(preset: str) -> None:
    """Every further letter of a name stands fewer than three times more in the quantized file; it was ten times."""
    short, long = named(36), named(360)
    letters = (DEPTH + 1) * 324 + DEPTH * 324
    before = long.ByteSize() - short.ByteSize()
    after = quantized(long, preset).ByteSize() - quantized(short, preset).ByteSize()
    assert after - before < 3 * letters


@pytest.mark.parametrize("preset", ["A8W8", "A8W8_CPU", "XINT8"])
def test_nothing_is_stated_that_every_reader_infers(preset: str) -> None:
    made = quantized(named(24), preset)
    inferred = {name for node in made.graph.node if "Linear" in node.op_type for name in node.output}
    inferred |= {one.name for one in made.graph.initializer}
    stated = {one.name for one in made.graph.value_info}
    assert not stated & inferred
    assert (not stated) is (preset == "A8W8_CPU")  # compilers for devices get what they got


def test_who_asks_for_every_type_gets_it() -> None:
    made = quantized(named(24), "A8W8_CPU", FillAllValueInfo=True)
    stated = {one.name for one in (*made.graph.value_info, *made.graph.output)}
    assert {name for node in made.graph.node for name in node.output} <= stated


def test_compilers_for_npus_find_whole_names() -> None:
    tensor = named(60).graph.node[3].output[0]
    assert f"{tensor}_QuantizeLinear" in {node.name for node in quantized(named(60), "XINT8").graph.node}
    assert f"{tensor}_QuantizeLinear" not in {node.name for node in quantized(named(60), "A8W8").graph.node}


def test_short_names_explain_themselves(tmp_path: Path) -> None:
    made = quantized(named(120), "A8W8")
    onnx.save(made, tmp_path / "m.onnx")
    sources = {node.output[0]: node.input[0] for node in made.graph.node if node.op_type == "QuantizeLinear"}
    assert len(sources) > DEPTH
    for short, source in sources.items():
        tensor = source.removesuffix("_QuantizeLinear_Input")
        assert explain(tmp_path / "m.onnx", short) == explain(tmp_path / "m.onnx", tensor)
