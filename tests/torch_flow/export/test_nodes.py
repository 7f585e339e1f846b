"""The nodes that an ONNX export writes for one tensor, run by ONNX Runtime: weights in every form, scales at run time.

The nodes of a weight give the values that the model computes with in torch; those of an activation are compared with
the formula, written down here in NumPy.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from tests.onnx_flow import models

from quark.errors import ConfigError
from quark.numerics.formats import FORMATS
from quark.numerics.granularity import Token
from quark.operators import add_functions
from quark.torch.export.onnx_marks import Marked
from quark.torch.export.onnx_nodes import Nodes, activation, nodes_of, parameters
from quark.torch.fake_quantize import make_quantizer
from quark.torch.quantization.config.config import (
    BFP16Spec,
    FP4PerGroupSpec,
    FP8E4M3PerTensorSpec,
    MX6Spec,
    OCP_MXFP4Spec,
    OCP_MXFP8E4M3Spec,
    QLayerConfig,
    ScaleQuantSpec,
)
from quark.torch.quantization.config.config import QTensorConfig as Spec
from quark.torch.quantization.config.type import Dtype, QSchemeType, ScaleType

X = (torch.randn(4, 64, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.1, 3, 4)[:, None]).contiguous()
TENSOR, CHANNEL, GROUP = QSchemeType.per_tensor, QSchemeType.per_channel, QSchemeType.per_group


def run(nodes: Nodes, result: str, x: np.ndarray) -> np.ndarray:
    graph = helper.make_graph(
        nodes.nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, X.shape)],
        nodes.constants,
    )
    opsets = [
        helper.make_opsetid("", 21),
        helper.make_opsetid("com.amd.quark", 1),
        helper.make_opsetid("org.openquark", 1),
    ]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    add_functions(model)
    onnx.checker.check_model(model)
    return models.run(model, {"x": x})[0]


def spec(dtype: str, scheme: QSchemeType = TENSOR, **more: Any) -> Any:
    extra = {CHANNEL: {"ch_axis": 0}, GROUP: {"ch_axis": -1, "group_size": 16}}.get(scheme, {})
    return Spec(Dtype[dtype], qscheme=scheme, **{**extra, **more})


WEIGHTS: dict[str, Any] = {
    f"{dtype} {scheme.name} {'sym' if symmetric else 'asym'}": spec(dtype, scheme, symmetric=symmetric)
    for dtype in ("int2", "uint2", "int3", "int4", "uint4", "int8", "uint8", "int16")
    for scheme in (TENSOR, CHANNEL, GROUP)
    for symmetric in (True, False)
    if dtype in Dtype.__members__
}
WEIGHTS |= {f"fp8 {scheme.name}": spec("fp8_e4m3", scheme) for scheme in (TENSOR, CHANNEL, GROUP)}
WEIGHTS |= {
    "other axis": spec("int8", CHANNEL, ch_axis=1),
    "other groups": spec("int4", GROUP, ch_axis=0, group_size=2),
    "long groups": spec("int4", GROUP, group_size=128),
    "fp8 with a short block": spec("fp8_e4m3", GROUP, group_size=24),
    "bfloat16": spec("bfloat16"),
    "float16": spec("float16"),
    "mxfp4": OCP_MXFP4Spec(-1, False).to_quantization_spec(),
    "mxfp8": OCP_MXFP8E4M3Spec(-1, False).to_quantization_spec(),
    "mx6": MX6Spec(-1, 16).to_quantization_spec(),
    "bfp16": BFP16Spec(-1).to_quantization_spec(),
    "fp4": FP4PerGroupSpec(-1, 16).to_quantization_spec(),
    "nvfp4": ScaleQuantSpec(FP4PerGroupSpec(-1, 16), FP8E4M3PerTensorSpec()).to_quantization_spec(),
}


@pytest.mark.parametrize("name", WEIGHTS)
@torch.no_grad()
def test_a_weight_is_read_as_the_model_computes_with_it(name: str) -> None:
    quantizer: Any = make_quantizer(QLayerConfig(weight=WEIGHTS[name]).stages("weight"), "w", True)
    quantizer.eval()
    quantizer.start(X.device)
    quantizer(X)
    quantizer.finish()
    wanted = quantizer(X).numpy()
    nodes, result = nodes_of(Marked("w", quantizer, X), "")
    np.testing.assert_allclose(run(nodes, result, np.zeros(1, np.float32)), wanted, rtol=1e-6, atol=0)
    assert all(one.name.startswith("w.") for one in nodes.constants)
    assert all(node.input[-1] for node in nodes.nodes), "an input that is left out stands between others"


@pytest.mark.parametrize("size, axis, fits", [(24, -1, False), (16, -1, True), (2, 0, False), (128, -1, True)])
@torch.no_grad()
def test_only_whole_groups_along_the_last_axis_are_packed(size: int, axis: int, fits: bool) -> None:
    stages = (spec("int3", GROUP, ch_axis=axis, group_size=size).to_stage(),)
    quantizer: Any = make_quantizer(stages, "w", True)
    quantizer.start(X.device)
    quantizer(X)
    quantizer.finish()
    quantizer.eval()
    with nullcontext() if fits else pytest.raises(ConfigError, match="whole groups along the last axis"):
        nodes_of(Marked("w", quantizer, X), "")


def rounded(x: np.ndarray, low: int, high: int, symmetric: bool, divisor: float) -> np.ndarray:
    """x over its scale, rounded and clipped, times its scale; one range for the last axis."""
    top, bottom = np.maximum(x.max(-1, keepdims=True), 0), np.minimum(x.min(-1, keepdims=True), 0)
    span = np.maximum(top, -bottom) if symmetric else top - bottom
    scale = (span.astype(np.float64) / divisor).astype(np.float32)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
    middle = 0 if low < 0 else (high + 1) // 2
    zero = np.float32(middle) if symmetric else np.clip(np.rint(low - bottom / scale), low, high).astype(np.float32)
    return ((np.clip(np.rint(x / scale) + zero, low, high) - zero) * scale).astype(np.float32)


@pytest.mark.parametrize("dtype", ["int4", "int8", "uint8"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shared", ["tensor", "token", "16", "24", "100"])
def test_scales_at_run_time_are_those_of_the_formula(dtype: str, symmetric: bool, shared: str) -> None:
    size = {"group_size": int(shared)} if shared.isdigit() else {}
    stage = spec(dtype, GROUP if size else TENSOR, symmetric=symmetric, is_dynamic=True, **size).to_stage()
    if shared == "token":
        stage = replace(stage, spec=replace(stage.spec, granularity=Token()))
    made: Any = make_quantizer((stage,), "x")
    nodes = Nodes("x")
    result = activation(nodes, made, "x", X.shape[-1])
    x = X.numpy().copy()
    x[2] = 0
    bits = int(dtype.removeprefix("u").removeprefix("int"))
    low, high = (0, 2**bits - 1) if dtype[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    rows = x.reshape(1, -1) if shared == "tensor" else x
    divisor = made.stage.grid.divisor
    assert divisor in (high - low, (high - low) / 2, 2 ** (bits - 1) - 1)
    step = int(shared) if size else x.size  # the last group is short where this does not divide 64
    groups = [rows[:, start : start + step] for start in range(0, rows.shape[1], step)]
    wanted = np.concatenate([rounded(one, low, high, symmetric, divisor) for one in groups], 1).reshape(x.shape)
    np.testing.assert_allclose(run(nodes, result, x), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (spec("int8", GROUP, ch_axis=0, is_dynamic=True), "dynamic groups along the axis 0"),
        (spec("int8", CHANNEL, ch_axis=0, is_dynamic=True), "dynamic scales"),
        (spec("int8", scale_type=ScaleType.pof2, is_dynamic=True), "dynamic scales of the rule 'power_of_two'"),
        (spec("int8", GROUP), "static scales"),
        (spec("int8"), "no sample has given it a scale"),
        (spec("int3"), "no sample has given it a scale"),
    ],
)
def test_activations_that_onnx_cannot_say(given: Any, told: str) -> None:
    try:
        made: Any = make_quantizer((given.to_stage(),), "x")
    except ConfigError:
        return
    with pytest.raises(ConfigError, match=told):
        activation(Nodes("x"), made, "x")


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int4", "fp8_e4m3"])
def test_static_activations_have_their_scale(dtype: str, zero: int) -> None:
    made: Any = make_quantizer((spec(dtype, symmetric=not zero or dtype.startswith("fp8")).to_stage(),), "x")
    made.scale = torch.tensor(0.05)
    if made.stage.format.has_zero_point:
        made.zero_point = torch.tensor(zero, dtype=torch.int32)
    nodes = Nodes("x")
    result = activation(nodes, made, "x")
    made.eval()
    with torch.no_grad():
        wanted = made(X).numpy()
    np.testing.assert_allclose(run(nodes, result, X.numpy()), wanted, rtol=1e-6)
    standard = dtype in ("int8", "uint8", "int16")
    kinds = [node.op_type for node in nodes.nodes]
    assert kinds == (["QuantizeLinear", "DequantizeLinear"] if standard else ["QuantizeDequantize"])
    if standard:
        assert len(nodes.nodes[1].input) == (2 if dtype == "int8" and not zero else 3)


@pytest.mark.parametrize("change", [{"rounding": "half_away"}, {"zero_point_type": "float"}, {}])
def test_activations_are_rounded_half_to_even_with_whole_zero_points(change: dict[str, Any]) -> None:
    made: Any = make_quantizer((spec("int8").to_stage(),), "x")
    made.scale, made.zero_point = torch.tensor(0.05), torch.tensor(0, dtype=torch.int32)
    stage: Any = SimpleNamespace(format=made.stage.format, calibrated=True, spec=made.stage.spec, real_zero=False)
    if "rounding" in change:
        stage.spec = SimpleNamespace(rounding=change["rounding"])
    stage.real_zero = "zero_point_type" in change
    part: Any = SimpleNamespace(stage=stage, granularity=made.granularity, scale=made.scale, zero_point=made.zero_point)
    with pytest.raises(ConfigError, match="real zero points and roundings") if change else nullcontext():
        activation(Nodes("x"), part, "x")


@pytest.mark.parametrize("dtype", ["int2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32"])
@pytest.mark.parametrize("zero", [0, 1])
def test_zero_points_of_the_standard_operators(dtype: str, zero: int) -> None:
    """int32 has none but 0, which is left out."""
    nodes, row = Nodes("x"), FORMATS[dtype]
    given = torch.tensor([0, zero], dtype=torch.int32)
    with pytest.raises(ConfigError, match="int32 has no zero") if dtype == "int32" and zero else nullcontext():
        scale, found = parameters(nodes, torch.tensor([0.5, 2.0]), given, row)
        assert scale == "x.scale" and found == ("" if dtype == "int32" else "x.zero_point")
        kinds = {one.name: (one.data_type, list(one.dims)) for one in nodes.constants}
        whole = {} if dtype == "int32" else {found: (getattr(TensorProto, dtype.upper()), [2])}
        assert kinds == whole | {scale: (TensorProto.FLOAT, [2])}


def test_fp8_of_tensors_at_run_time() -> None:
    made: Any = make_quantizer((FP8E4M3PerTensorSpec(is_dynamic=True).to_quantization_spec().to_stage(),), "x")
    nodes = Nodes("x")
    result = activation(nodes, made, "x")
    made.eval()
    with torch.no_grad():
        wanted = made(X).numpy()
    np.testing.assert_allclose(run(nodes, result, X.numpy()), wanted, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_floats_of_sixteen_bits_are_cast(dtype: str) -> None:
    made: Any = make_quantizer((spec(dtype).to_stage(),), "x")
    nodes = Nodes("x")
    result = activation(nodes, made, "x")
    made.eval()
    with torch.no_grad():
        np.testing.assert_array_equal(run(nodes, result, X.numpy()), made(X).numpy())
    assert [node.op_type for node in nodes.nodes] == ["Cast", "Cast"]
