"""Models that ONNX Runtime has optimized are quantized as the models that they were made from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.onnx_flow import fused_models, models
from tests.onnx_flow.test_passes import ZOO

from quark.errors import ModelError
from quark.onnx import ModelQuantizer, QConfig
from quark.onnx.coverage import coverage
from quark.onnx.graph.model import load, to_proto
from quark.onnx.passes import expand_fused

#: Models in which ONNX Runtime fuses something.
SMALL = [
    *("squeezenet11_flowers5", "stories260K", "attention", "chain", "cnn", "constant_weights", "depthwise_cnn"),
    *("initializers_as_inputs", "nhwc"),
]


def source(case: str) -> onnx.ModelProto:
    path = models.REAL_MODELS / f"{case}.onnx"
    if case in ZOO:
        return ZOO[case]
    if not path.exists():
        pytest.skip("no shared models beside the repository")
    return onnx.load(path)


def quantized(proto: onnx.ModelProto, exclude: str = "", **options: object) -> onnx.ModelProto:
    config = QConfig.get_default_config("A8W8")
    config.global_quant_config.extra_options.update(PrintSummary=False, **options)
    config.global_quant_config.nodes_to_exclude = [exclude] if exclude else []
    made = ModelQuantizer(config).quantize_model(proto, None, [fused_models.sizes(proto)])
    assert made is not None
    return made


@pytest.mark.parametrize("case", SMALL)
def test_what_onnx_runtime_has_optimized_is_quantized_like_the_original(case: str, tmp_path: Path) -> None:
    """A layer that the fused form hides would be missing from the share of the multiplications."""
    original = source(case)
    optimized = fused_models.optimized(original, str(tmp_path / "optimized.onnx"))
    assert fused_models.operators(optimized)
    expected, found = coverage(quantized(original)), coverage(quantized(optimized))
    assert found.integer > expected.integer - 0.02 and found.stored > expected.stored - 0.02


@pytest.mark.parametrize("case", fused_models.FUSED)
def test_masks_that_end_somewhere(case: str) -> None:
    proto = fused_models.FUSED[case]()
    model, feeds = load(proto), fused_models.sizes(proto)
    assert expand_fused.run(model).fired == sum(fused(node) for node in proto.graph.node)
    models.assert_close(models.run(to_proto(model), feeds), models.run(proto, feeds))


def fused(node: onnx.NodeProto) -> bool:
    alone = node.op_type == "FastGelu" and len(node.input) == 1
    return node.domain == "com.microsoft" and node.op_type in expand_fused.ROWS and not alone


def named(case: str) -> onnx.ModelProto:
    proto = fused_models.FUSED[case]()
    for node in proto.graph.node:
        node.name = f"my_{node.output[0]}"
    return proto


@pytest.mark.parametrize(
    ("case", "name", "weights"),
    [
        ("fused convolutions", "my_y", ["depthwise"]),
        ("fused products", "my_o", ["my_o_operand_1"]),
        ("fused transformer", "my_v", ["narrow"]),
    ],
)
def test_a_rule_for_the_fused_node_holds_for_all_that_it_becomes(case: str, name: str, weights: list[str]) -> None:
    def floats(made: onnx.ModelProto) -> set[str]:
        kinds = {tensor.name: tensor.data_type for tensor in made.graph.initializer}
        return {one for one, kind in kinds.items() if kind == onnx.TensorProto.FLOAT}

    assert not {one for one in floats(quantized(named(case))) if "scale" not in one} & set(weights)
    left = floats(quantized(named(case), exclude=name))
    assert all(any(one in kept for kept in left) for one in weights), left


def changed(case: str, output: str, inputs: dict[int, str] | None = None, **attributes: object) -> onnx.ModelProto:
    """A model whose node that makes ``output`` has other attributes and inputs."""
    proto = fused_models.FUSED[case]()
    (node,) = (one for one in proto.graph.node if one.output[0] == output)
    for position, name in (inputs or {}).items():
        node.input.extend([""] * (position + 1 - len(node.input)))
        node.input[position] = name
    kept = [one for one in node.attribute if one.name not in attributes]
    del node.attribute[:]
    node.attribute.extend([*kept, *(helper.make_attribute(key, value) for key, value in attributes.items())])
    return proto


REFUSED = {
    "its activation function is Softplus": changed("fused convolutions", "a", activation="Softplus"),
    "it transposes the axes of the batch": changed("fused products", "y", transBatchA=1),
    "it has a cache": changed("fused transformer", "y", {4: "past"}),
    "it turns positions": changed("fused transformer", "y", do_rotary=1),
    "its weights are computed": changed("fused transformer", "z", {1: "e"}),
    "its mask has another form": changed("fused transformer", "v", {3: "lengths"}),
    "it counts a mask that it is not given": changed("fused transformer", "e", {7: ""}),
    "the rank of what it transposes is not known": changed("fused products", "t", {1: "unknown"}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_forms_stay_and_say_why(reason: str) -> None:
    proto = REFUSED[reason]
    proto.graph.input.append(helper.make_tensor_value_info("lengths", onnx.TensorProto.INT32, [2]))
    proto.graph.input.append(helper.make_tensor_value_info("past", onnx.TensorProto.FLOAT, [2, 2, 2, 0, 4]))
    unknown = proto.graph.input.add(name="unknown")
    unknown.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    model = load(proto)
    report = expand_fused.run(model)
    assert len(report.refused) == 1 and reason in report.refused[0]
    assert report.fired == sum(fused(node) for node in proto.graph.node) - 1


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_constants_have_the_type_of_the_model(kind: type) -> None:
    proto = fused_models.products()
    if kind is np.float16:
        from onnxruntime.transformers.float16 import convert_float_to_float16

        proto = convert_float_to_float16(proto)
    model, feeds = load(proto), models.feeds(proto)
    expand_fused.run(model)
    models.assert_close(models.run(to_proto(model), feeds), models.run(proto, feeds), 2e-3)


def test_off_leaves_fused_operators_alone() -> None:
    with pytest.raises(ModelError, match=r"Attention: no rule for the operator com.microsoft::Attention"):
        quantized(fused_models.transformer(), ExpandFused=False)


@pytest.mark.parametrize("domain", ["com.microsoft.nchwc", "com.ms.internal.nhwc"])
def test_layouts_for_one_processor_are_refused(domain: str) -> None:
    proto = models.conv_chain(2)
    proto.graph.node[0].domain, proto.graph.node[0].name = domain, "first"
    proto.opset_import.append(helper.make_opsetid(domain, 1))
    with pytest.raises(ModelError, match=f"'first' is {domain}::Conv.*ORT_ENABLE_EXTENDED"):
        quantized(proto)
