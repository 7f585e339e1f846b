"""Parts of a float16 model in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.onnx_flow import models

from quark.errors import ConfigError
from quark.onnx.shapeshifter import transform
from quark.onnx.tools.command import find, main


def half() -> onnx.ModelProto:
    """Three products, a constant that two of them read, a result that is an output and is read on."""
    graph = """
    half (float16[2, 4] x) => (float16[2, 4] b, float16[2, 4] d) {
        a = MatMul (x, w) b = Add (a, k) c = MatMul (b, w) d = Mul (c, k)
    }"""
    weights = {"w": models.normal(4, 4).astype(np.float16), "k": np.array(0.1, np.float16)}
    proto = models.model(graph, weights, 15)
    for node in proto.graph.node:
        node.name = node.output[0]
    return proto


def kinds(proto: onnx.ModelProto) -> dict[str, int]:
    shapes = onnx.shape_inference.infer_shapes(proto, strict_mode=True).graph
    return {value.name: value.type.tensor_type.elem_type for value in (*shapes.value_info, *shapes.output)}


@pytest.mark.parametrize("parts", [["a:b"], [("a", "b")], ["a:b", "d:d"]])
def test_a_part_is_computed_in_float32(parts: list) -> None:
    proto = half()
    done = transform(proto, {"passes": {"convert_fp16_to_fp32": {"subgraphs_to_include": parts}}}).proto
    assert done is not None
    onnx.checker.check_model(done, full_check=True)
    found = kinds(done)
    outputs = {node.name: node.output[0] for node in done.graph.node}
    assert {found[outputs[name]] for name in "ab"} == {onnx.TensorProto.FLOAT}
    assert found[outputs["c"]] == onnx.TensorProto.FLOAT16
    assert (found[outputs["d"]] == onnx.TensorProto.FLOAT) == (len(parts) == 2)
    assert [value.type.tensor_type.elem_type for value in done.graph.output] == [onnx.TensorProto.FLOAT16] * 2
    x = models.feeds(proto)
    for ours, theirs in zip(models.run(done, x), models.run(proto, x), strict=True):
        np.testing.assert_allclose(ours.astype(np.float32), theirs.astype(np.float32), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("part", "message"),
    [("a:e", "the node name 'e' matches no node"), ("a", "not of the form start:end"), ("d:b", "is not closed")],
)
def test_a_wrong_part_is_refused(part: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transform(half(), {"passes": {"convert_fp16_to_fp32": {"subgraphs_to_include": [part]}}})


def test_the_tool(tmp_path: Path) -> None:
    onnx.save(half(), tmp_path / "in.onnx")
    arguments = [str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--subgraphs_to_include", "a:b"]
    assert main(find("convert_fp16_to_fp32"), arguments) == 0
    assert [node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node].count("Cast") == 2
