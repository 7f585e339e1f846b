"""Options of calibration, each by its effect on a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.onnx_flow import models

from quark.config.options import parse_options
from quark.config.plan import Plan
from quark.errors import ConfigError
from quark.observers import Memory
from quark.observers.tails import Tails
from quark.onnx import ModelQuantizer, QConfig, QLayerConfig, data
from quark.onnx.quantization.config.spec import CalibMethod, FP8E4M3Spec, Int8Spec, UInt8Spec
from quark.onnx.scratch import PART, Scratch, Spilled, aes


def samples(count: int = 4) -> list[dict[str, np.ndarray]]:
    return [models.feeds(models.cnn(), index) for index in range(count)]


def plan_of(method: str = "Percentile", spec: Any = Int8Spec, **options: Any) -> Plan:
    inputs = spec(calibration_method=CalibMethod[method])
    config = QConfig(
        QLayerConfig(input_tensors=inputs, weight=Int8Spec()), extra_options={"PrintSummary": False, **options}
    )
    return ModelQuantizer(config).run(models.cnn(), None, samples()).plan


def test_num_bins_sets_how_near_a_percentile_comes() -> None:
    x = np.sort(np.abs(np.concatenate([sample["x"].ravel() for sample in samples()])))
    exact = float(x[int(np.ceil(0.6 * x.size)) - 1])
    off = [abs(plan_of(NumBins=bins, Percentile=60.0).tensors["x"].range[1] - exact) for bins in (16, 8192, 0)]
    assert off[0] > off[1] > off[2] == 0


def test_percentiles_of_a_known_number_of_samples_need_only_the_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown:
        """A reader that does not say how many samples it has."""

        def __init__(self) -> None:
            self.left = samples()

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop(0) if self.left else None

    inputs = UInt8Spec(calibration_method=CalibMethod.Percentile)
    options = {"PrintSummary": False, "Percentile": 99.9}
    config = QConfig(QLayerConfig(input_tensors=inputs, weight=Int8Spec()), extra_options=options)
    made: list[int] = []
    monkeypatch.setattr(Tails, "__init__", _noted(made, Tails.__init__))
    plans, counts = [], [0]
    for reader, room in ((samples(), 0), (Unknown(), data.AHEAD), (Unknown(), 0)):
        monkeypatch.setattr(data, "AHEAD", room)
        plans.append(ModelQuantizer(config).run(models.cnn(), None, reader).plan)
        counts.append(len(made) - sum(counts))
    assert counts[1] == counts[2] > 3 == counts[3] + 3  # few samples are read ahead and counted, many are not
    for name, tensor in plans[0].tensors.items():
        if tensor.range is not None:
            assert tensor.range == plans[1].tensors[name].range
            assert np.allclose(tensor.range, plans[2].tensors[name].range, rtol=1e-3)


def _noted(made: list[int], function: Any) -> Any:
    def wrapper(self: Tails, outside: float, samples: int) -> None:
        made.append(samples)
        function(self, outside, samples)

    return wrapper


@pytest.mark.parametrize("method", ["Entropy"])
def test_methods_that_are_defined_on_a_histogram_refuse_zero_bins(method: str) -> None:
    with pytest.raises(ConfigError, match="NumBins=0 keeps the values, and the method 'entropy'"):
        plan_of(method, NumBins=0)


@pytest.mark.parametrize(
    ("method", "options", "kept"),
    [
        ("MinMSE", {}, None),
        ("MinMSE", {"CalibOptimizeMem": False}, "memory"),
        ("MinMSE", {"CalibOptimizeDisk": False}, "disk"),
        ("LayerwisePercentile", {"CalibOptimizeDisk": False, "CalibOptimizeMem": False}, "memory"),
        ("Percentile", {"CalibOptimizeDisk": False}, None),  # looks once
        ("Percentile", {"NumBins": 0}, "disk"),
        ("Percentile", {"NumBins": 0, "CalibOptimizeMem": False}, "memory"),
        ("MinMax", {"NumBins": 0, "CalibOptimizeMem": False}, None),
    ],
)
def test_where_values_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: dict, kept: str | None
) -> None:
    used: set[str] = set()
    for kind, name in ((Memory, "memory"), (Spilled, "disk")):
        append = kind.append

        def noting(self: Any, values: np.ndarray, append: Any = append, name: str = name) -> None:
            used.add(name)
            append(self, values)
            if name == "disk":
                assert list((tmp_path / "scratch").rglob("*.values"))

        monkeypatch.setattr(kind, "append", noting)
    plan_of(method, TmpDir=str(tmp_path / "scratch"), **options)
    assert used == ({kept} if kept else set())
    assert not (tmp_path / "scratch").exists() or not list((tmp_path / "scratch").iterdir())


def test_the_folder_is_left_empty_after_an_error(tmp_path: Path) -> None:
    config = QConfig(
        QLayerConfig(input_tensors=Int8Spec(calibration_method=CalibMethod.MinMSE), weight=Int8Spec()),
        extra_options={"PrintSummary": False, "CalibOptimizeDisk": False, "TmpDir": str(tmp_path)},
    )
    bad = {"x": np.full_like(samples()[0]["x"], np.nan)}
    with pytest.raises(ValueError, match="NaN"):
        ModelQuantizer(config).quantize_model(models.cnn(), None, [*samples(), bad])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cipher", [None, "aes"])
def test_values_come_back_from_a_file_in_limited_parts(tmp_path: Path, cipher: str | None) -> None:
    store = Spilled(tmp_path / "v", aes() if cipher else None)
    written = [models.normal(PART // 2 + 3, seed=index) for index in range(4)]
    for values in written:
        store.append(values)
    for _ in range(2):
        parts = list(store.parts())
        np.testing.assert_array_equal(np.concatenate(parts), np.concatenate(written))
        assert max(part.size for part in parts) <= PART and len(parts) == 3
    plain = np.concatenate(written)[:64].tobytes()
    assert (plain in (tmp_path / "v").read_bytes()) == (cipher is None)


def test_crypto_mode_keeps_values_in_memory_or_encrypted(tmp_path: Path) -> None:
    with Scratch(parse_options({"CryptoMode": True, "TmpDir": str(tmp_path)})) as scratch:
        assert isinstance(scratch.store(), Memory) and not list(tmp_path.iterdir())
        with pytest.raises(ConfigError, match="CryptoMode: a test would write model data to disk"):
            scratch.folder("a test")
    options = {"CryptoMode": True, "EncryptionAlgorithm": "AES-256", "TmpDir": str(tmp_path)}
    with Scratch(parse_options(options)) as scratch:
        store = scratch.store()
        store.append(np.arange(1000, dtype=np.float32))
        (file,) = tmp_path.rglob("*.values")
        assert np.arange(8, dtype=np.float32).tobytes()[4:] not in file.read_bytes()
        np.testing.assert_array_equal(next(store.parts()), np.arange(1000))
    assert not list(tmp_path.iterdir())


def test_passthrough_operators_share_the_range_of_what_they_read() -> None:
    observed = plan_of()
    shared = plan_of(CalibPassthroughOpTypes=["GlobalAveragePool", "Relu"])
    assert observed.tensors["g"].observed and observed.tensors["g"].range != observed.tensors["r2"].range
    assert not shared.tensors["g"].observed
    assert shared.tensors["g"].range == shared.tensors["r2"].range == observed.tensors["r2"].range
    assert "CalibPassthroughOpTypes" in shared.explain("g")


def test_an_unknown_passthrough_operator_shows_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"CalibPassthroughOpTypes: the operator type 'Maxpol'.*Did you mean 'MaxPool'"
    ):
        plan_of(CalibPassthroughOpTypes=["Maxpol"])


def test_figures_are_written_into_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_of()
    assert not list(tmp_path.iterdir())
    plan_of(SaveTensorHistFig=True)
    page = (tmp_path / "tensor_hist" / "index.html").read_text(encoding="utf-8")
    figures = json.loads(page.split('id="data">', 1)[1].split("</script>", 1)[0])["tensors"]
    observed = [tensor.name for tensor in plan.of_role("activation") if tensor.observed]
    assert observed and all(sum(figures[name][0]["counts"]) > 0 for name in observed)
    with pytest.raises(ConfigError, match="no tensor is calibrated with a histogram; choose Percentile"):
        plan_of("MinMax", SaveTensorHistFig=True)


def test_distribution_on_other_types_names_the_fp8_specs() -> None:
    with pytest.raises(ConfigError, match=r"(?s)Distribution.*FP8.*FP8E4M3Spec.*FP8E5M2Spec"):
        plan_of("Distribution")
    assert plan_of("Distribution", FP8E4M3Spec).tensors["x"].range[1] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"CryptoMode": True, "SaveAndRestore": "x.json"},
        {"CryptoMode": True, "SaveTensorHistFig": True},
        {"CryptoMode": True, "DebugMode": True},
        {"EncryptionAlgorithm": "AES-256"},
        {"SaveAndRestore": "x.json", "NumBins": 0},
        {"SaveAndRestore": "x.json", "CalibOptimizeDisk": False},
        {"SaveAndRestore": "x.json", "CalibOptimizeMem": False},
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        parse_options(options)


@pytest.mark.parametrize("method", ["MinMax", "MinMSE", "Entropy", "Percentile", "LayerwisePercentile"])
def test_ranges_are_symmetric_on_request_with_every_method(method: str) -> None:
    lo, hi = plan_of(method, UInt8Spec, CalibTensorRangeSymmetric=True).tensors["x"].range
    assert -lo == hi > 0
    assert plan_of(method, UInt8Spec, CalibTensorRangeSymmetric=True).tensors["x"].zero_point in (127, 128)
    assert plan_of(method, UInt8Spec, CalibTensorRangeSymmetric=False).tensors["x"].range[1] > 0


def test_distribution_is_symmetric_whatever_is_asked() -> None:
    ranges = {
        plan_of("Distribution", FP8E4M3Spec, CalibTensorRangeSymmetric=is_so).tensors["x"].range
        for is_so in (False, True)
    }
    assert len(ranges) == 1


def test_a_reader_is_asked_for_its_length_a_few_times_whatever_the_model_and_the_data() -> None:
    class Counting:
        def __init__(self, samples: list[dict[str, np.ndarray]]) -> None:
            self.samples, self.asked, self.next = samples, 0, iter(samples)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.next, None)

        def __len__(self) -> int:
            self.asked += 1
            return len(self.samples)

    asked = []
    for length, count in ((2, 2), (12, 9)):
        proto = models.conv_chain(length)
        reader = Counting([models.feeds(proto, seed=k) for k in range(count)])
        config = QConfig.get_default_config("XINT8")
        config.global_quant_config.extra_options["PrintSummary"] = False
        ModelQuantizer(config).quantize_model(proto, None, reader)
        asked.append(reader.asked)
    assert asked[0] == asked[1] <= 4
