"""Positions of the NPU flow against the peer's, tensor by tensor, on six small networks with the rules on and off.

``tests/golden/npu``: what AMD Quark 0.13 does, run as a black box. Where it is wrong (codes that are not rounded again
after a rule has moved their scale) the right codes and the right output error are stored beside it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from tests.onnx_flow.codes import judged
from tests.onnx_flow.models import session

from quark.onnx import Config, ModelQuantizer, QConfig, QLayerConfig, XInt8Spec, get_default_config
from quark.onnx.flow import Result

FOLDER = Path(__file__).parents[1] / "golden" / "npu"
GOLDEN = json.loads((FOLDER / "result.json").read_text())["models"]
MODES = {
    "limits on": {},
    "limits off": {"NPULimitationCheck": False},
    "plain": {"NPULimitationCheck": False, "SimulateDPU": False},
}
SPEC, LEGACY = "XInt8Spec", "preset XINT8"
#: Pools over a power of two of values: the device divides exactly, the peer multiplies by 1, here there is no node.
EXACT = {"acts": ["globalaveragepool9"], "pools": ["averagepool5"]}
CASES = [(name, api, mode) for name in GOLDEN for api in (SPEC, LEGACY) for mode in MODES]


@cache
def quantized(name: str, api: str, mode: str) -> Result:
    options = {"ForceQuantizeNoInputCheck": True, "PrintSummary": False, **MODES[mode]}
    samples = [{"x": sample} for sample in np.load(FOLDER / "inputs.npz")[name]]
    if api == LEGACY:
        legacy = get_default_config("XINT8")
        legacy.extra_options |= options
        config: QConfig | Config = Config(legacy)
    else:
        config = QConfig(QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec()), extra_options=options)
    return ModelQuantizer(config).run(FOLDER / f"{name}.onnx", None, samples)


def positions(result: Result) -> dict[str, int]:
    return {tensor.name: int(-np.log2(float(tensor.scale))) for tensor in result.plan}


@pytest.mark.parametrize(("name", "api", "mode"), CASES)
def test_every_position_is_the_peers(name: str, api: str, mode: str) -> None:
    assert positions(quantized(name, api, mode)) == GOLDEN[name][f"{api} / {mode}"]["positions"]


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in GOLDEN for mode in MODES])
def test_the_output_is_as_far_from_the_float_model_as_the_peers_right_one(name: str, mode: str) -> None:
    feeds = [{"x": sample} for sample in np.load(FOLDER / "inputs.npz")[name]]
    exact, ours = session(FOLDER / f"{name}.onnx"), session(quantized(name, SPEC, mode).proto)
    x = np.concatenate([exact.run(None, feed)[0].ravel() for feed in feeds])
    y = np.concatenate([ours.run(None, feed)[0].ravel() for feed in feeds])
    snr = 10 * np.log10(np.sum(x**2) / np.sum((x - y) ** 2))
    assert snr == pytest.approx(GOLDEN[name][f"{SPEC} / {mode}"]["snr"], abs=0.01)


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in GOLDEN for mode in MODES])
def test_the_graph_computes_what_the_peers_does_and_is_sorted(name: str, mode: str) -> None:
    proto = quantized(name, SPEC, mode).proto
    onnx.checker.check_model(proto, full_check=True)
    wanted = {outputs[0]: op_type for op_type, _, outputs in GOLDEN[name][f"{SPEC} / {mode}"]["nodes"]}
    for value in EXACT.get(name, []):
        if f"{value}_Mul" in wanted:
            wanted[value] = wanted.pop(f"{value}_Mul")
    ours = {node.output[0]: node.op_type for node in proto.graph.node if "Linear" not in node.op_type}
    assert {out.removesuffix("_QuantizeLinear_Input"): op_type for out, op_type in ours.items()} == wanted


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in GOLDEN for mode in MODES])
def test_codes_agree_with_scales(name: str, mode: str) -> None:
    found = judged(quantized(name, SPEC, mode).proto, FOLDER / f"{name}.onnx")
    assert len(found) >= 6 and all(found.values()), found


@pytest.mark.parametrize("name", ["conv1.w", "conv1.b", "conv2.b", "conv6.b"])
def test_constants_whose_position_moves_are_rounded_again(name: str) -> None:
    model = ir.from_proto(quantized("shifts", SPEC, "limits on").proto)
    codes = model.graph.initializers[f"{name}_quantized"].const_value.numpy()
    np.testing.assert_array_equal(codes, np.load(FOLDER / "requantized.npz")[name])


def test_explain_says_which_rule_moved_a_position() -> None:
    said = quantized("shifts", SPEC, "limits on").plan.explain("conv1.w")
    assert said.endswith("; position 19 → 16 by shift_cut of Conv_1")


def test_the_legacy_preset_has_unsigned_activations_in_the_middle() -> None:
    plan = quantized("concat", LEGACY, "limits on").plan
    assert {(t.spec.format, int(t.zero_point)) for t in plan.of_role("activation")} == {("uint8", 128)}
    assert {(t.spec.format, int(t.zero_point)) for t in plan.of_role("weight")} == {("int8", 0)}
