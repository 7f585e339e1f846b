"""Passes for NPUs on files that are quantized already: the scales of the flow, LSTMs with their grids, CLE by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from tests.onnx_flow import models, pass_models
from tests.onnx_flow.test_npu_golden import FOLDER, GOLDEN, LEGACY, SPEC, quantized

from quark.errors import ConfigError
from quark.onnx.shapeshifter import transform


def passes(proto: onnx.ModelProto, *steps: str | dict) -> tuple[onnx.ModelProto, list[tuple[str, int]], list[str]]:
    """(result, how often each pass fired, reasons)."""
    done = transform(proto, {"passes": list(steps)})
    assert done.proto is not None
    onnx.checker.check_model(done.proto, full_check=True)
    refused = [reason for report in done.reports for reason in report.refused]
    return done.proto, [(report.name, report.fired) for report in done.reports], refused


def scales(proto: onnx.ModelProto) -> dict[str, float]:
    """Scale of every Q and of every dequantized constant, by the node's name."""
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    nodes = [node for node in proto.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    return {node.name: float(tensors[node.input[1]]) for node in nodes}


@pytest.mark.parametrize("api", [SPEC, LEGACY])
@pytest.mark.parametrize("name", GOLDEN)
def test_a_file_is_brought_within_the_limits_that_the_flow_keeps(name: str, api: str) -> None:
    whole, plain = quantized(name, api, "limits on").proto, quantized(name, api, "plain").proto
    result, _, _ = passes(plain, "xint8_simulate", "onnx_xint8_adjust")
    assert scales(result) == scales(whole)
    computing = [node.op_type for node in whole.graph.node if "Linear" not in node.op_type]
    assert sorted(node.op_type for node in result.graph.node if "Linear" not in node.op_type) == sorted(computing)
    for sample in np.load(FOLDER / "inputs.npz")[name]:
        wanted, found = models.run(whole, {"x": sample})[0], models.run(result, {"x": sample})[0]
        # constants are rounded twice here: a few codes differ by one, and what was cut off stays cut off
        assert 10 * np.log10(np.sum(wanted**2) / max(np.sum((wanted - found) ** 2), 1e-30)) > 20


def test_a_moved_constant_keeps_its_values() -> None:
    plain = quantized("shifts", SPEC, "plain").proto
    result, _, _ = passes(plain, "xint8_adjust")
    codes = {
        t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for m in (plain, result) for t in m.graph.initializer
    }
    before, after = scales(plain), scales(result)
    assert after["conv1.w_DequantizeLinear"] == 8 * before["conv1.w_DequantizeLinear"]
    stored = next(n.input[0] for n in result.graph.node if n.name == "conv1.w_DequantizeLinear")
    moved = np.abs(codes["conv1.w_quantized"] / 8 - codes[stored])
    assert stored != "conv1.w_quantized" and moved.max() <= 0.5


def test_a_model_within_the_limits_stays() -> None:
    proto = quantized("chain", SPEC, "limits on").proto
    result, fired, _ = passes(proto, "xint8_simulate", "xint8_adjust")
    assert fired == [("xint8_simulate", 0), ("xint8_adjust", 0)] and scales(result) == scales(proto)


# ---- LSTM ------------------------------------------------------------------------------------------------------------


def test_an_lstm_states_its_grids() -> None:
    proto = pass_models.lstm()
    result, _, _ = passes(proto, "convert_lstm_to_customlstm")
    (node,) = [node for node in result.graph.node if node.op_type == "ExtendedLSTM"]
    said = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    tensors = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    for letter, name in (("x", "x"), ("w", "w"), ("r", "r"), ("b", "b"), ("y", "y")):
        assert said[f"{letter}_scale"] == tensors[f"{name}_scale"] and said[f"{letter}_zero_point"] == 0
    assert (said["direction"], said["hidden_size"], said["layout"]) == (b"bidirectional", 4, 0)
    assert node.domain == "com.amd.quark" and [f.name for f in result.functions] == ["ExtendedLSTM"]
    feeds = models.feeds(proto, seed=5)
    np.testing.assert_array_equal(models.run(result, feeds)[0], models.run(proto, feeds)[0])


@pytest.mark.parametrize(
    ("proto", "reason"),
    [
        (lambda: pass_models.lstm("y, h, c"), "the output Y only"),
        (lambda: pass_models.lstm(no_bias=True), "its input B is not quantized"),
        (lambda: with_attribute("clip", 3.0), "has no attribute 'clip'"),
        (lambda: without_output_grid(), "its output Y is not quantized"),
    ],
)
def test_an_lstm_that_the_operator_cannot_stand_for_stays(proto: object, reason: str) -> None:
    made = proto()  # type: ignore[operator]
    result, fired, refused = passes(made, "convert_lstm_to_customlstm")
    assert fired == [("convert_lstm_to_customlstm", 0)] and reason in refused[0]
    assert "LSTM" in models.op_types(result)


def with_attribute(name: str, value: float) -> onnx.ModelProto:
    proto = pass_models.lstm()
    (node,) = [node for node in proto.graph.node if node.op_type == "LSTM"]
    node.attribute.append(helper.make_attribute(name, value))
    return proto


def without_output_grid() -> onnx.ModelProto:
    proto = pass_models.lstm()
    kept = [node for node in proto.graph.node if node.name not in ("y_QuantizeLinear", "y_DequantizeLinear")]
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    (node,) = [node for node in proto.graph.node if node.op_type == "LSTM"]
    node.output[0] = "y"
    return proto


# ---- cross-layer equalization ----------------------------------------------------------------------------------------


def test_equalization_by_name_and_type() -> None:
    proto = pass_models.unequal()
    weights = lambda model: [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "wa"]  # noqa: E731
    result, fired, _ = passes(proto, "cross_layer_equalization")
    assert fired == [("cross_layer_equalization", 2)]  # the pair, once more at the end
    spread = [
        np.abs(w).max((1, 2, 3)).max() / np.abs(w).max((1, 2, 3)).min() for w in (*weights(proto), *weights(result))
    ]
    assert spread[1] < spread[0] / 5
    for off in ({"op_types_to_quantize": ["Gemm"]}, {"nodes_to_exclude": ["a"]}, {"nodes_to_quantize": ["a", "z"]}):
        assert passes(proto, {"onnx_cross_layer_equalization": off})[1] == [("cross_layer_equalization", 0)]
    both = {"nodes_to_quantize": ["a", "y"], "cle_steps": 3}
    assert passes(proto, {"onnx_cross_layer_equalization": both})[1] == [("cross_layer_equalization", 2)]
    with pytest.raises(ConfigError, match="unknown node 'no'"):
        passes(proto, {"cross_layer_equalization": {"nodes_to_exclude": ["no"]}})
    with pytest.raises(ConfigError, match="cle_steps"):
        passes(proto, {"cross_layer_equalization": {"cle_steps": 0}})


def test_files(tmp_path: Path) -> None:
    """The tool's own way, from a file to a file."""
    from quark.onnx.tools.command import find, main

    onnx.save(pass_models.lstm("y, h, c"), tmp_path / "in.onnx")
    assert main(find("convert_lstm_to_customlstm"), [str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx")]) == 0
    assert "LSTM" in models.op_types(onnx.load(tmp_path / "out.onnx"))
