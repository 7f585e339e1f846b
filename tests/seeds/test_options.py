"""Options as the text has them: every name, stated type and default; and all of them on awkward shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.onnx_flow import models
from tests.pairs import thinned
from tests.seeds import text
from tests.seeds.awkward import decibels, half, network, quantized, samples
from tests.seeds.options import BY_NAME, NBITS, OPTIONS, OVERRIDES, STATED
from tests.seeds.values import BASE, TRIED, values_of

from quark.config.nbits import NBits
from quark.config.options import Options, parse_options
from quark.errors import ConfigError, ModelError
from quark.onnx import QConfig

NAMES = [row.name for row in OPTIONS]
#: None of the text is our empty list: nothing is named.
EMPTY = {"OpTypesToQuantize", "NodesToQuantize", "ExtraOpTypesToQuantize", "RemoveQDQBetweenOps"}
#: The text has a rule; ``test_defaults.py`` holds it.
RULED = {
    *("QuantizeFP16", "UseFP32Scale", "Int32Bias", "MatMulConstBOnly", "CalibTensorRangeSymmetric", "RefineBlockAxis"),
    *("ConvertBNToConv", "ConvertReduceMeanToGlobalAvgPool", "SplitLargeKernelPool", "ConvertSplitToSlice"),
    *("AlignConcat", "AlignPool", "AlignPad", "AlignSlice", "FoldBatchNorm"),
    *(row.name for row in OPTIONS if row.name.startswith("Convert") and "DPU" in row.name and row.said == "True"),
    "ConvertSigmoidToHardSigmoid",
}
#: No default in the text.
SILENT = {"FixShapes": None, "CalibDataSize": None, "MatMulNBitsParams": {}, "EvalDataReader": None}
SILENT |= {"ForceQuantizeNoInputCheck": False}
#: Our own default, on purpose; the reasons are in ``tests.seeds.rows``.
OWN = {"AddQDQPairToWeight": False, "NumBins": None, "AlignEltwiseQuantType": True, "MinMSEModeFloatScale": "All"}
OWN |= {"EnableSubgraph": None}


@text.needed
def test_the_table_is_what_the_text_says() -> None:
    said = [
        (o.line, o.name, {"QuantType | ExtendedQuantType": "type"}.get(o.kind, o.kind), o.default)
        for o in text.options()
    ]
    assert said == [(row.line, row.name, row.kind, row.said) for row in STATED]


@pytest.mark.parametrize("name", NAMES)
def test_type(name: str) -> None:
    assert name in Options.ROWS
    for value in values_of(name, BY_NAME[name].kind):
        beside = {key: given for key, given in BASE[name][1].items() if key == "CryptoMode"} if name in BASE else {}
        parse_options({**beside, name: value})
        QConfig(extra_options={**beside, name: value})
    if BY_NAME[name].kind == "bool":
        with pytest.raises(ConfigError, match=name):
            parse_options({name: "yes"})


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RULED | OWN.keys()])
def test_default(name: str) -> None:
    stated = SILENT[name] if name in SILENT else BY_NAME[name].default
    ours = Options.ROWS[name].default
    assert ours == stated or (name in EMPTY and ours in (None, []) and stated in (None, ""))


@pytest.mark.parametrize("name", OWN)
def test_own_default(name: str) -> None:
    assert Options.ROWS[name].default == OWN[name] != BY_NAME[name].default


@pytest.mark.parametrize("name", NBITS)
def test_parameter_of_nbits(name: str) -> None:
    assert getattr(NBits, name) == BY_NAME[name].default
    assert type(getattr(NBits, name)).__name__ == {"string": "str"}.get(BY_NAME[name].kind, BY_NAME[name].kind)


@pytest.mark.parametrize("name", OVERRIDES)
def test_field_of_an_override(name: str) -> None:
    from onnxruntime.quantization import QuantType

    from quark.onnx import ExtendedQuantType

    given: dict[str, tuple[dict[str, Any], ...]] = {
        "quant_type": ({"quant_type": QuantType.QInt8}, {"quant_type": ExtendedQuantType.QInt16}),
        "axis": ({"axis": 1}, {"quant_type": QuantType.QInt8, "axis": 0}),
        "scale": ({"scale": 0.1, "zero_point": 0}, {"scale": np.float32(0.1), "zero_point": np.int8(0)}),
        "zero_point": ({"scale": 0.1, "zero_point": 3},),
        "symmetric": ({"symmetric": True}, {"symmetric": False}),
        "reduce_range": ({"reduce_range": True}, {"reduce_range": False}),
        "rmax": ({"rmin": -1.0, "rmax": 1.0},),
        "rmin": ({"rmin": -1.0, "rmax": 1.0},),
    }
    for entry in given[name]:
        parse_options({"TensorQuantOverrides": {"w1": [entry]}})
    wrong: dict[str, dict[str, Any]] = {
        "scale": {"scale": 0.1},
        "zero_point": {"zero_point": 1},
        **{
            field: {"scale": 0.1, "zero_point": 0, field: value}
            for field, value in (("symmetric", True), ("reduce_range", True), ("rmax", 1.0), ("rmin", -1.0))
        },
        "axis": {"quant_type": ExtendedQuantType.QBFP, "axis": 1},
        "quant_type": {"quant_type": "QInt9"},
    }
    with pytest.raises(ConfigError):
        parse_options({"TensorQuantOverrides": {"w1": [wrong[name]]}})


#: What stays float or is cut on purpose: how near the result is then is no matter.
ROUGH = {"Percentile": 15.0, "UseRandomData": 10.0, "ConvertSigmoidToHardSigmoid": 10.0, "UseMatMulNBits": 20.0}
HALF = ("ConvertFP16ToFP32", "QuantizeFP16", "UseFP32Scale")
ROUGH |= {"RandomDataReaderInputShape": 5.0, "RandomDataReaderInputDataRange": 20.0, "PercentileCandidates": 15.0}
ROUGH |= {"MatMulNBitsParams": 15.0, "MinMSEModePof2Scale": 15.0, "CalibDataSize": 15.0, "CalibMovingAverage": 15.0}


@pytest.mark.parametrize("name", thinned(NAMES, 2))
def test_awkward_shapes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    layer, beside = BASE.get(name, (None, {}))
    default = Options.ROWS[name].default
    stated = not default if isinstance(default, bool) else values_of(name, BY_NAME[name].kind)[0]
    value = TRIED.get(name, stated)
    proto, feeds = network(), [feed for feed in samples() if name != "FixShapes" or len(feed["x"]) == 2]
    if name in HALF:
        proto, feeds = (
            half(proto),
            [{key: array.astype(np.float16) for key, array in feed.items()} for feed in samples()],
        )
    before = proto.SerializeToString()
    if name == "UserCustomOpLibPath":
        (tmp_path / "folder").mkdir()
        with pytest.raises(ModelError, match="UserCustomOpLibPath"):  # nothing in it that could be loaded
            quantized(layer, proto, **{name: "folder"})
        return
    result = quantized(layer, proto, feeds, **{**beside, name: value})
    assert proto.SerializeToString() == before
    assert result.proto is not None
    if name == "ConvertNCHWToNHWC":
        assert [d.dim_value for d in result.proto.graph.input[0].type.tensor_type.shape.dim][1:] == [9, 7, 6]
    elif name == "FixShapes":
        assert models.session(result.proto).get_inputs()[0].shape == [2, 6, 9, 7]
    elif name in HALF:
        kind = np.float32 if name == "ConvertFP16ToFP32" else np.float16
        feed = {key: array.astype(kind) for key, array in samples()[0].items()}
        exact = models.run(network(), samples()[0])[0]
        assert np.abs(models.run(result.proto, feed)[0] - exact).max() < 0.05
    else:
        assert decibels(result.proto) > ROUGH.get(name, 20.0)


def test_samples_of_different_batches_are_taken() -> None:
    assert {sample["x"].shape[0] for sample in samples()} == {1, 2, 3}
