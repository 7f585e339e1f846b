"""What exports and imports do where nobody says otherwise, and that they leave the model as it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from tests.onnx_flow import models
from tests.torch_flow.export.networks import IDS, Mixed
from tests.torch_flow.export.test_reload import layer, quantized

from quark.torch.export import onnx_marks
from quark.torch.export.compressed_tensors import export_compressed_tensors
from quark.torch.export.gguf_model import export_gguf
from quark.torch.export.huggingface import export_safetensors
from quark.torch.export.onnx_model import export_onnx, replaced
from quark.torch.export.reload import own_model
from quark.torch.export.write_as import export_as
from quark.torch.fake_quantize import make_quantizer
from quark.torch.quantization.config.config import Int8PerTensorSpec, QConfig
from quark.torch.quantized_layer import quantized_layers

ONNX = {"verbose": False, "do_constant_folding": True, "uint4_int4_flag": False, "dynamo": True, "use_cache": False}


@pytest.mark.parametrize(("function", "defaults"), [
    (export_safetensors, {"verify": True}), (export_compressed_tensors, {"verify": True}),
    (export_gguf, {"verify": True}), (export_as, {"verify": True}), (export_onnx, {**ONNX, "verify": True}),
    (own_model, {"trust_remote_code": False, "device": "cpu"}),
])  # fmt: skip
def test_files_are_read_again_and_strangers_code_is_not_run(function: Callable[..., Any], defaults: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in defaults} == defaults


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_that_was_traced_is_as_it_was(frozen: bool) -> None:
    """While it is traced every layer asks its quantizers, also where its weight is quantized already."""
    model = quantized(Mixed(), QConfig(layer(Int8PerTensorSpec(), Int8PerTensorSpec())))
    layers = [one for _, one in quantized_layers(model)]
    for one in layers:
        one.frozen = frozen
    with torch.no_grad():
        expected = model(IDS)
        with onnx_marks.marking(model, onnx_marks.quantizers_of(model)):
            assert {(one.frozen, one.compact) for one in layers} == {(False, True)}
        assert {(one.frozen, one.compact) for one in layers} == {(frozen, False)}
        assert torch.equal(model(IDS), expected)


def test_what_is_marked_holds_quantized_values_where_its_layer_is_frozen() -> None:
    model = quantized(Mixed(), QConfig(layer(Int8PerTensorSpec(), Int8PerTensorSpec())))
    held = {one.frozen for one in onnx_marks.quantizers_of(model) if one.value is not None}
    assert held == {one.frozen for _, one in quantized_layers(model)}
    assert onnx_marks.Marked("x", onnx_marks.quantizers_of(model)[0].quantizer).frozen is False


@pytest.mark.parametrize("outputs", [["y"], ["z"], ["y", "z"]])
def test_what_a_quantizer_gives_keeps_its_name_where_it_is_an_output(outputs: list[str]) -> None:
    part: Any = make_quantizer(layer(Int8PerTensorSpec(), Int8PerTensorSpec()).stages("input_tensors"), "x")
    part.scale, part.zero_point = torch.tensor(0.5), torch.tensor(0)
    graph = helper.make_graph(
        [
            helper.make_node("Mark", ["x"], ["y"], domain=onnx_marks.DOMAIN, key=0),
            helper.make_node("Relu", ["y"], ["z"]),
        ],
        "g",
        *(
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in names]
            for names in (["x"], outputs)
        ),
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(onnx_marks.DOMAIN, 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    made, _, turned = replaced(proto, [onnx_marks.Marked("x", part)])
    x = np.array([-0.3, 0.2, 0.7, 100], np.float32)
    values = {"y": np.array([-0.5, 0, 0.5, 63.5], np.float32), "z": np.array([0, 0, 0.5, 63.5], np.float32)}
    found = models.session(made).run(outputs, {"x": x})
    np.testing.assert_array_equal(found, [values[name] for name in outputs])
    assert sum(node.op_type == "Identity" for node in made.graph.node) == ("y" in outputs) and not turned
