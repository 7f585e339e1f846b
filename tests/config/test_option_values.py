"""Every form in which the interface lets an option be written, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quark.config.options import OPTIONS, Options, parse_options
from quark.errors import ConfigError
from quark.onnx import CalibMethod, Config, ExtendedCalibrationMethod, QConfig, get_default_config
from quark.onnx import CalibrationMethod as Old

#: Options whose type or default the interface states with "or None", and what None means.
NOTHING: dict[str, Any] = {
    **{key: [] for key in ("NodesToQuantize", "OpTypesToQuantize", "ExtraOpTypesToQuantize", "RemoveQDQBetweenOps")},
    **{key: [] for key in ("OpTypesToExcludeOutputQuantization", "NodesToExcludeOutputQuantization")},
    **dict.fromkeys(("PreprocessYAML", "ConvertOpsetVersion", "RandomDataReaderInputDataRange", "SaveAndRestore")),
    **dict.fromkeys(("CopySharedInit", "CopyBiasInit", "TmpDir", "UserCustomOpLibPath", "EncryptionAlgorithm")),
    **dict.fromkeys(("WeightCalibrateMethod", "CalibDataSize", "EvalDataReader", "FixShapes")),
    "SkipPreprocess": False,
}
#: A value of every option that is a list, or holds lists.
LISTS: dict[str, Any] = {
    **{name: ["Conv", "Gemm"] for name in OPTIONS if "OpTypes" in name and "Axis" not in name},
    **{name: ["n"] for name in ("NodesToQuantize", "NodesToExcludeOutputQuantization", "TunedFloat")},
    **{name: ["Conv"] for name in ("CopySharedInit", "CopyBiasInit")},
    "RemoveQDQBetweenOps": [["Conv", "Relu"], ["Add", "Mul"]],
    "ExecutionProviders": ["CPUExecutionProvider"],
    "PercentileCandidates": [99.0, 99.9],
    "RandomDataReaderInputShape": {"x": [1, 3, 8, 8]},
    "RandomDataReaderInputDataRange": {"x": [0.0, 1.0]},
    "FixShapes": {"x": [1, 3, 8, 8]},
    "TensorQuantOverrides": {"w": [{"axis": 1}]},
    "UserCustomOpLibPath": ["a.so"],
}


def as_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_tuples(entry) for key, entry in value.items()}
    return tuple(as_tuples(entry) for entry in value) if isinstance(value, list) else value


def test_every_option_that_holds_lists_is_in_the_table() -> None:
    lists = {
        name for name, kind in Options.__annotations__.items() if "list[" in str(kind) and name != "QuantizeAllOpTypes"
    }
    assert lists <= LISTS.keys() | {"QuantizeAllOpTypes"}


@pytest.mark.parametrize("name", list(NOTHING))
def test_none_is_what_the_interface_says(name: str) -> None:
    assert getattr(parse_options({name: None}), name) == NOTHING[name]


@pytest.mark.parametrize("name", [name for name in LISTS if name != "QuantizeAllOpTypes"])
def test_a_tuple_is_a_list(name: str) -> None:
    listed, given = (parse_options({name: form}) for form in (LISTS[name], as_tuples(LISTS[name])))
    assert getattr(listed, name) == getattr(given, name)


def test_paths_and_numbers_of_numpy_are_texts_and_numbers(tmp_path: Path) -> None:
    found = parse_options(
        {
            "TmpDir": tmp_path,
            "SaveAndRestore": tmp_path / "s.json",
            "Percentile": np.float32(99),
            "MaxLoopNum": np.int64(3),
        }
    )
    assert (found.TmpDir, found.SaveAndRestore) == (str(tmp_path), str(tmp_path / "s.json"))
    assert (found.Percentile, found.MaxLoopNum) == (99.0, 3)


@pytest.mark.parametrize(
    "prefix", ["quark.onnx.CalibrationMethod.", "quark.onnx.ExtendedCalibrationMethod.", "CalibMethod.", ""]
)
@pytest.mark.parametrize("name", ["MinMax", "MinMSE"])
def test_the_weight_search_may_be_a_text(prefix: str, name: str) -> None:
    assert parse_options({"WeightCalibrateMethod": f"{prefix}{name}"}).WeightCalibrateMethod == name
    QConfig(extra_options={"WeightCalibrateMethod": f"{prefix}{name}"})


@pytest.mark.parametrize("member", [Old.MinMax, ExtendedCalibrationMethod.MinMSE, CalibMethod.MinMSE])
def test_the_weight_search_may_be_a_member(member: Any) -> None:
    assert parse_options({"WeightCalibrateMethod": member}).WeightCalibrateMethod == member.name


@pytest.mark.parametrize("wrong", ["quark.onnx.CalibrationMethod.Entropy", "numpy.MinMax", "minmax", Old.Percentile, 3])
def test_no_other_weight_search_exists(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="the option WeightCalibrateMethod cannot be"):
        QConfig(extra_options={"WeightCalibrateMethod": wrong})


def test_an_unknown_mode_of_the_float_search_falls_back_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_options({"MinMSEModeFloatScale": "percentile"}).MinMSEModeFloatScale == "Percentile"
    assert "MinMSEModeFloatScale has no mode 'percentile'" in caplog.text and "'Percentile'?" in caplog.text
    with pytest.raises(ConfigError, match="MinMSEModeFloatScale"):
        parse_options({"MinMSEModeFloatScale": 3})


@pytest.mark.parametrize(("given", "used"), [(1, 16), (8, 16), (16, 16), (2048, 2048), (1 << 20, 1 << 16), (0, 0)])
def test_a_number_of_bins_that_histograms_do_not_have_is_told(
    given: int, used: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert parse_options({"NumBins": given}).NumBins == used
    assert (f"NumBins={given}" in caplog.text) == (given != used)


@pytest.mark.parametrize("wrong", [-1, 2.5, True, "8"])
def test_no_other_number_of_bins(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="NumBins"):
        parse_options({"NumBins": wrong})


def test_the_older_configuration_reads_the_same_forms() -> None:
    older = get_default_config("A8W8")
    older.extra_options.update(SkipPreprocess=None, RemoveQDQBetweenOps=None, PercentileCandidates=(99.0,))
    options = Config(older).compile().options
    assert (options.SkipPreprocess, options.RemoveQDQBetweenOps, options.PercentileCandidates) == (False, [], [99.0])
