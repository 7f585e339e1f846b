"""Shapeshifter, to which page 004 sends its readers: every published pass from a file, on awkward shapes, and passes
of one's own around a quantization.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from tests.onnx_flow import models
from tests.seeds.awkward import decibels, half, network, quantized, samples
from tests.seeds.values import BRAIN, MIXED, POWERS

from quark.onnx import QLayerConfig
from quark.onnx.passes.registry import unregister_pass
from quark.shapeshifter import Engine, LoadConfigFromFileOrDict, ONNXPass, RunConfig, shapeshifter

TEMPLATES = ("xint8", "a8w8", "a16w8", "bf16", "bfp16")
SHAPES = {"x": [2, 6, 9, 7], "z": [2, 5], "y": [2, 3], "image": [2, 4, 5, 3]}
#: Published pass -> its parameters in a file.
FLOAT: dict[str, dict[str, Any]] = {
    **{
        f"onnx_{name}": {name: True}
        for name in (
            *(
                "convert_bn_to_conv",
                "convert_clip_to_relu",
                "convert_reduce_mean_to_global_avg_pool",
                "convert_split_to_slice",
            ),
            *("split_large_kernel_pool", "fold_batch_norm", "fold_batch_norm_after_concat", "fold_div_into_matmul"),
            *(
                "fuse_gelu",
                "fuse_instance_norm",
                "fuse_l2_norm",
                "fuse_layer_norm",
                "optimize_with_ort",
                "remove_input_init",
            ),
            *("convert_nchw_to_nhwc", "cross_layer_equalization", "simplify"),
        )
    },
    "onnx_convert_opset_version": {"target_opset_version": 21},
    "onnx_copy_bias_init": {"shared_bias_op_types": ["Conv", "Gemm"]},
    "onnx_copy_shared_init": {"shared_init_op_types": ["Conv", "Gemm", "Mul"]},
    "onnx_fix_shapes": {"input_output_name_shapes": SHAPES},
    "onnx_set_node_attributes": {"node_attribute_updates": [{"node_name": "leaky", "attributes": {"alpha": 0.1}}]},
    "onnx_xint8_simulate": {"xint8_simulate": True},
}
#: Passes of quantized models -> parameters, and the configuration of the model.
QUANTIZED: dict[str, tuple[dict[str, Any], QLayerConfig | None]] = {
    "onnx_adjust_bias_scale": ({"adjust_bias_scale": True}, MIXED),
    "onnx_align_scale": ({"align_scale": ["Concat", "MaxPool", "Slice"]}, None),
    "onnx_constrain_per_channel_weight_scale": ({"constrain_per_channel_weight_scale": True}, None),
    "onnx_remove_qdq_between_op_types": ({"remove_qdq_between_op_types": [["Sigmoid", "Mul"]]}, None),
    "onnx_xint8_adjust": ({"xint8_adjust": True}, POWERS),
    "onnx_insert_clip_before_bfloat16_qdq": ({"insert_clip_before_bfloat16_qdq": True}, BRAIN),
    "onnx_replace_bfloat16_qdq_with_cast": ({"replace_bfloat16_qdq_with_cast": True}, BRAIN),
    "onnx_remove_bfloat16_cast": ({"remove_bfloat16_cast": True}, BRAIN),
}


def through_file(folder: Path, proto: onnx.ModelProto, passes: dict[str, Any]) -> onnx.ModelProto:
    """The model that a YAML file makes of one on disk."""
    onnx.save(proto, folder / "in.onnx")
    given = {
        "input_model_config": {"model_type": "onnx", "input_model_path": str(folder / "in.onnx")},
        "passes": passes,
        "output_model_path": str(folder / "out.onnx"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(given, sort_keys=False), encoding="utf-8")
    config = RunConfig(**LoadConfigFromFileOrDict(str(folder / "run.yaml")).data)
    assert shapeshifter(config) is None
    made = onnx.load(folder / "out.onnx")
    onnx.checker.check_model(made)
    return made


@pytest.mark.parametrize("name", FLOAT)
def test_pass(name: str, tmp_path: Path) -> None:
    made = through_file(tmp_path, network(), {name: FLOAT[name]})
    if name == "onnx_convert_nchw_to_nhwc":
        assert [dim.dim_value for dim in made.graph.input[0].type.tensor_type.shape.dim][1:] == [9, 7, 6]
        return
    feed = samples()[1] if name == "onnx_fix_shapes" else samples()[2]
    pairs = zip(models.run(made, feed), models.run(network(), feed), strict=True)
    loose = 0.2 if name == "onnx_xint8_simulate" else 1e-4
    assert all(np.abs(found - exact).max() <= loose * max(np.abs(exact).max(), 1) for found, exact in pairs)


@pytest.mark.parametrize("name", QUANTIZED)
def test_pass_of_quantized_models(name: str, tmp_path: Path) -> None:
    parameters, layer = QUANTIZED[name]
    made = through_file(tmp_path, quantized(layer).proto, {name: parameters})
    assert decibels(made) > 20


def test_float16_to_float32(tmp_path: Path) -> None:
    made = through_file(tmp_path, half(network()), {"onnx_convert_fp16_to_fp32": {"convert_fp16_to_fp32": True}})
    assert made.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert decibels(made) > 40


@pytest.mark.parametrize("template", TEMPLATES)
def test_template(template: str) -> None:
    made = Engine(RunConfig(**LoadConfigFromFileOrDict(template).data)).run(network())
    assert made is not None and decibels(made) > 60
    assert next(one.version for one in made.opset_import if not one.domain) >= 21


class HalveLeakPass(ONNXPass):
    """Halve the slope of every LeakyRelu."""

    def run(self, model: onnx.ModelProto) -> onnx.ModelProto:
        for node in model.graph.node:
            for attribute in node.attribute:
                if node.op_type == "LeakyRelu" and attribute.name == "alpha" and self.config.get("halve_leak", True):
                    attribute.f /= 2
        return model


@pytest.fixture
def own() -> Iterator[str]:
    HalveLeakPass.register()
    yield "halve_leak"
    unregister_pass("halve_leak")


def slope(proto: onnx.ModelProto) -> float:
    return next(a.f for node in proto.graph.node if node.op_type == "LeakyRelu" for a in node.attribute)


def test_a_pass_of_ones_own(own: str, tmp_path: Path) -> None:
    made = through_file(tmp_path, network(), {own: {own: True}})
    assert slope(made) == pytest.approx(0.05)


def test_passes_around_a_quantization(own: str, tmp_path: Path) -> None:
    """A file of the user's with passes before and after, one of them the user's own."""
    given = {
        "preprocess_passes": {"onnx_fold_batch_norm": {"fold_batch_norm": True}, f"onnx_{own}": {own: True}},
        "postprocess_passes": {
            "onnx_remove_qdq_between_op_types": {"remove_qdq_between_op_types": [["Sigmoid", "Mul"]]}
        },
    }
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(given, sort_keys=False), encoding="utf-8")
    proto = quantized(PreprocessYAML=str(path)).proto
    assert slope(proto) == pytest.approx(0.05)
    assert "BatchNormalization" not in {node.op_type for node in proto.graph.node}
    read = {name for node in proto.graph.node if node.op_type == "QuantizeLinear" for name in node.input[:1]}
    assert "s" not in read
