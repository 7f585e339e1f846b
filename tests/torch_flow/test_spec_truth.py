"""A quantizer says what really finds its range: every observer class, scheme and block format, and classes of users."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from quark.config.tensor import TensorSpec
from quark.errors import ConfigError
from quark.numerics.blocks import BLOCKS
from quark.numerics.granularity import Group
from quark.observers import SEARCHES
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig
from quark.torch.quantization.config.type import Dtype, QSchemeType, ScaleType, ZeroPointType
from quark.torch.quantization.observer import observer as observers

BASES = (observers.ObserverBase, observers.UniformScalingObserver)
CLASSES = [cls for name in observers.__all__ if (cls := getattr(observers, name)) not in BASES]
FIELDS: dict[QSchemeType, dict[str, Any]] = {
    QSchemeType.per_tensor: {},
    QSchemeType.per_channel: {"ch_axis": 0},
    QSchemeType.per_group: {"ch_axis": -1, "group_size": 8},
    QSchemeType.per_block: {"block_size": (4, 4)},
}
X = torch.randn(16, 32, generator=torch.Generator().manual_seed(4)) ** 3


def printed(config: QTensorConfig, x: torch.Tensor = X) -> tuple[str, Any]:
    """What the weight quantizer of a layer prints, and the quantizer."""
    layer = nn.Linear(x.shape[1], x.shape[0], bias=False)
    layer.weight.data = x.clone()
    model = nn.Sequential(layer)
    ModelQuantizer(QConfig(QLayerConfig(weight=config))).quantize_model(model)
    return repr(model[0].weight_quantizer), model[0].weight_quantizer


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_and_scheme_prints_what_finds_its_range(cls: type[observers.ObserverBase]) -> None:
    made = 0
    for scheme, dynamic, symmetric in itertools.product(QSchemeType, (False, True), (True, False)):
        fields = {"qscheme": scheme, "is_dynamic": dynamic, "symmetric": symmetric, **FIELDS[scheme]}
        try:
            config = QTensorConfig(Dtype.int8, cls, **fields)
        except ConfigError:
            continue
        made += 1
        text, quantizer = printed(config)
        spec = config.to_stage().spec
        assert text.count("dynamic") == dynamic
        if not (dynamic and spec.method == "minmax"):
            assert spec.method in text
        if spec.method not in SEARCHES:
            assert spec.method == cls.__name__
            continue
        if spec.method in ("minmax", "moving_minmax") and not dynamic:  # one sample: the average is the sample
            lo, hi = spec.granularity.tile(X).amin(-1), spec.granularity.tile(X).amax(-1)
        elif scheme is QSchemeType.per_tensor and not dynamic:
            row, settings = SEARCHES[spec.method], dict(spec.settings)
            statistic = row.observe(settings)
            statistic.update(X.numpy())
            found = row.find(statistic, spec.grid, settings)
            if row.rows is not None:  # a weight is searched on its own values
                found = row.of_rows(X.numpy().reshape(1, -1), spec.grid, settings)
            lo, hi = (torch.as_tensor(bound) for bound in found)
        else:
            continue
        scale = torch.as_tensor(spec.grid.parameters(lo.numpy(), hi.numpy())[0])
        assert torch.equal(quantizer.scale.reshape(-1), scale.reshape(-1)), (text, "is not what the scale comes from")
    assert made or cls in (observers.PlaceholderObserver, observers.PerBlockMXDiffsObserver)


def test_settings_of_subclasses_are_printed_and_code_of_their_own_is_named() -> None:
    class Tight(observers.PerTensorPercentileObserver):
        percentile = 97.0

    class Mine(observers.PerTensorMSEObserver):
        def range(self) -> Any:
            lo, hi = super().range()
            return lo / 2, hi / 2

    assert "percentile (percentile=97.0" in printed(QTensorConfig(Dtype.int8, Tight, qscheme="per_tensor"))[0]
    text = printed(QTensorConfig(Dtype.int8, Mine, qscheme="per_tensor"))[0]
    assert "Mine" in text and "mse" not in text


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("size", [2, 64])
def test_blocks_print_the_length_and_the_rule_that_they_have(name: str, size: int) -> None:
    spec = TensorSpec(name, granularity=Group(-1, size))
    assert spec.row.size == size and f"in blocks of {size}" in spec.describe()  # type: ignore[union-attr]
    other = TensorSpec(name, scale_rule="e5m3" if BLOCKS[name].rule != "e5m3" else "e4m3")
    assert f"with {other.scale_rule} scales" in other.describe()
    assert other.row.rule == other.scale_rule  # type: ignore[union-attr]
    assert "with" not in spec.describe()


def test_other_things_that_change_codes_are_printed() -> None:
    config = QTensorConfig(
        Dtype.uint8, qscheme="per_channel", ch_axis=0, zero_point_type=ZeroPointType.float32, round_method="floor",
        scale_type=ScaleType.float16,
    )  # fmt: skip
    text = printed(config)[0]
    for word in ("real zero", "floor", "float16", "per channel (axis 0)", "asymmetric"):
        assert word in text
    whole = QTensorConfig(Dtype.int4, qscheme="per_group", ch_axis=-1, group_size=-1)
    assert "per whole axis" in printed(whole)[0]
    fp4 = QTensorConfig(Dtype.fp4, qscheme="per_group", ch_axis=-1, group_size=-1, scale_format="e8m0", is_dynamic=True)
    assert "a whole axis" in printed(fp4)[0]
