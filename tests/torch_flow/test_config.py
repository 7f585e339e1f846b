"""The torch dialect: spec helpers, what is refused when a configuration is made, JSON."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import ConfigError
from quark.numerics.ggml import GGML
from quark.torch import quantization as package
from quark.torch.config.tensor import ENUMS
from quark.torch.quantization.config import config as names
from quark.torch.quantization.config.config import (
    Config,
    DataTypeSpec,
    FP4PerGroupSpec,
    FP8E4M3PerTensorSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
    QTensorConfig,
    ScaleQuantSpec,
)
from quark.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    QuantFlow,
    RoundType,
    ScaleType,
    ZeroPointType,
)
from quark.torch.quantization.observer import observer as observers
from quark.torch.quantization.observer.observer import ObserverBase, PerTensorMinMaxObserver

TENSOR, CHANNEL = QSchemeType.per_tensor, QSchemeType.per_channel
GROUP, BLOCK = QSchemeType.per_group, QSchemeType.per_block
ARGUMENTS = {"ch_axis": -1, "group_size": 32, "block_size": 16}
TWO_STAGES = {"first_stage": FP4PerGroupSpec(-1, 16), "second_stage": FP8E4M3PerTensorSpec()}
HELPERS = [
    name
    for name, value in vars(names).items()
    if isinstance(value, type) and issubclass(value, DataTypeSpec) and value is not DataTypeSpec
]


def helper(name: str) -> Any:
    """The helper with the arguments it requires."""
    cls = getattr(names, name)
    available = {**ARGUMENTS, **TWO_STAGES}
    required = (
        [field.name for field in fields(cls) if field.name in available] if hasattr(cls, "__dataclass_fields__") else []
    )
    return cls(**{key: available[key] for key in required})


def test_every_helper_of_the_peer_exists() -> None:
    scheme = {
        "PerTensor": ["Int4", "Int8", "Uint4", "Uint8", "FP8E4M3", "FP8E5M2", "FP8E5M3"],
        "PerChannel": ["Int3", "Int4", "Int8", "Uint4", "Uint8", "FP8E4M3", "FP8E5M2"],
        "PerGroup": [
            "Int2",
            "Int3",
            "Int4",
            "Int8",
            "Uint4",
            "Uint8",
            "FP8E4M3",
            "FP8E5M2",
            "FP6E2M3",
            "FP6E3M2",
            "FP4",
        ],
        "": ["AmdFP4", "BFP16", "MX6", "MX9", "Float16", "Bfloat16", "Progressive", "ScaleQuant"],
    }
    ocp = ["FP8E4M3", "FP8E5M2", "FP6E3M2", "FP6E2M3", "FP4", "FP4Diffs", "INT8"]
    expected = [f"{name}{kind}Spec" for kind, listed in scheme.items() for name in listed]
    ours = ["FP8E4M3PerBlockSpec"]
    assert sorted(HELPERS) == sorted([*expected, *ours, *(f"OCP_MX{name}Spec" for name in ocp)])
    assert all(getattr(package, name) is getattr(names, name) for name in HELPERS)


@pytest.mark.parametrize("name", HELPERS)
def test_every_helper_makes_a_configuration_that_survives_json(name: str) -> None:
    made = helper(name).to_quantization_spec()
    layer = QLayerConfig(weight=made)
    assert QLayerConfig.from_dict(json.loads(json.dumps(layer.to_dict()))) == layer
    assert layer.stages("weight")


@pytest.mark.parametrize(
    ("name", "dtype", "scheme", "symmetric", "dynamic"),
    [
        ("Int8PerTensorSpec", "int8", "per_tensor", True, False),
        ("Uint8PerTensorSpec", "uint8", "per_tensor", False, False),
        ("Int8PerChannelSpec", "int8", "per_channel", False, False),
        ("Uint8PerChannelSpec", "uint8", "per_channel", True, False),
        ("Uint4PerChannelSpec", "uint4", "per_channel", False, False),
        ("Int4PerGroupSpec", "int4", "per_group", True, False),
        ("Uint4PerGroupSpec", "uint4", "per_group", False, False),
        ("FP8E4M3PerTensorSpec", "fp8_e4m3", "per_tensor", True, False),
        ("FP4PerGroupSpec", "fp4", "per_group", None, True),
        ("OCP_MXFP4Spec", "fp4", "per_group", None, True),
    ],
)
def test_defaults_of_helpers(name: str, dtype: str, scheme: str, symmetric: bool, dynamic: bool) -> None:
    made = helper(name).to_quantization_spec().to_dict()
    assert (made["dtype"], made["qscheme"], made["symmetric"], made["is_dynamic"]) == (
        dtype,
        scheme,
        symmetric,
        dynamic,
    )


def test_the_documented_strings_of_helpers() -> None:
    made = Int8PerTensorSpec("percentile", False, "power_of_2", "floor", True).to_quantization_spec()
    assert made.observer_cls is observers.PerTensorPercentileObserver
    assert (made.symmetric, made.scale_type, made.round_method) == (False, ScaleType.pof2, RoundType.floor)
    with pytest.raises(ConfigError, match=r"unknown observer_method 'minmax'. Did you mean 'min_max'\?"):
        Int8PerTensorSpec(observer_method="minmax").to_quantization_spec()


def test_ocp_mxfp4_is_recognised() -> None:
    assert OCP_MXFP4Spec(-1).to_quantization_spec().is_ocp_mxfp4()
    assert not FP4PerGroupSpec(-1, 32).to_quantization_spec().is_ocp_mxfp4()


def test_group_size_can_be_set_and_is_checked() -> None:
    config = QTensorConfig(Dtype.int4, qscheme=GROUP, ch_axis=-1, group_size=32)
    config.set_group_size(-1)
    assert config.group_size == -1
    with pytest.raises(ConfigError, match="group_size"):
        config.set_group_size(0)
    assert config.group_size == -1


# ---- combinations that cannot work -----------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"dtype": "int9"}, ["Dtype", "'int9'", "Did you mean"]),
    ({"dtype": None}, ["dtype", "None"]),
    ({"dtype": "int8"}, ["int8", "qscheme", "per_tensor"]),
    ({"dtype": "int8", "qscheme": "per_tenser"}, ["QSchemeType", "'per_tenser'", "Did you mean 'per_tensor'"]),
    ({"dtype": "int8", "qscheme": "per_channel"}, ["per_channel", "ch_axis"]),
    ({"dtype": "int8", "qscheme": "per_group", "ch_axis": 0}, ["per_group", "group_size"]),
    ({"dtype": "int8", "qscheme": "per_group", "group_size": 8}, ["per_group", "ch_axis"]),
    ({"dtype": "int8", "qscheme": "per_group", "ch_axis": 0, "group_size": 0}, ["group_size", "positive"]),
    ({"dtype": "int8", "qscheme": "per_block"}, ["block_size", "(rows, columns)"]),
    ({"dtype": "int8", "qscheme": "per_block", "block_size": (4, 0)}, ["block_size", "(4, 0)"]),
    ({"dtype": "int8", "qscheme": "per_channel", "ch_axis": 1.0}, ["ch_axis", "1.0"]),
    ({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": False}, ["fp8_e4m3", "no zero point"]),
    ({"dtype": "mx6", "ch_axis": -1, "symmetric": False}, ["mx6", "no zero point"]),
    ({"dtype": "mx6"}, ["mx6", "ch_axis"]),
    ({"dtype": "mx9", "ch_axis": -1, "group_size": 15}, ["mx9", "even"]),
    ({"dtype": "bfp16", "ch_axis": -1, "group_size": 16}, ["bfp16", "8 elements"]),
    ({"dtype": "mx", "ch_axis": -1}, ["mx_element_dtype", "int8"]),
    ({"dtype": "mx", "ch_axis": -1, "mx_element_dtype": "int4"}, ["mx_element_dtype", "int4"]),
    ({"dtype": "int8", "qscheme": "per_tensor", "scale_format": "e8m1"}, ["scale_format", "'e8m1'", "'e8m0'"]),
    ({"dtype": "int8", "qscheme": "per_tensor", "scale_calculation_mode": "evn"}, ["scale_calculation_mode", "'even'"]),
    ({"dtype": "fp6_e2m3", "qscheme": "per_tensor", "scale_format": "e4m3"}, ["e4m3", "fp4", "fp6_e2m3"]),
    ({"dtype": "int8", "qscheme": "per_tensor", "scale_type": "flat"}, ["ScaleType", "'float'"]),
    ({"dtype": "int8", "qscheme": "per_tensor", "round_method": "even"}, ["RoundType", "'half_even'"]),
    ({"dtype": "int8", "qscheme": "per_tensor", "symmetric": "yes"}, ["symmetric", "'yes'"]),
    (
        {"dtype": "int8", "qscheme": "per_tensor", "observer_cls": PerTensorMinMaxObserver(None)},
        ["class", "observer_cls"],
    ),
    ({"dtype": "fp4", "qscheme": "per_tensor", "observer_cls": observers.LSQObserver}, ["LSQObserver", "integers"]),
    ({"dtype": "int8", "qscheme": "per_tensor", "observer_cls": observers.PlaceholderObserver}, ["int8", "range"]),
    (
        {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "observer_cls": observers.PerTensorMSEObserver},
        ["PerTensorMSEObserver", "per_tensor", "PerChannelMinMaxObserver"],
    ),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=[str(index) for index in range(len(REFUSED))])
def test_what_cannot_work_is_refused_when_it_is_made(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        QTensorConfig(**values)
    assert all(word in str(error.value) for word in words), str(error.value)


INT8 = Int8PerTensorSpec().to_quantization_spec()
MARKED = QTensorConfig(Dtype.fp8_e4m3, qscheme=TENSOR, is_scale_quant=True)


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        ({"weight": Int8PerTensorSpec()}, TypeError, ["weight", "to_quantization_spec"]),
        ({"weight": []}, TypeError, ["weight"]),
        ({"weight": [INT8, INT8, INT8]}, ConfigError, ["weight", "3"]),
        ({"weight": [MARKED]}, ConfigError, ["weight", "second of two"]),
        ({"weight": [INT8, MARKED]}, ConfigError, ["weight", "fp4 per_group", "int8"]),
        ({"input_tensors": [INT8, INT8]}, ConfigError, ["input_tensors", "is_dynamic=True"]),
        (
            {"output_tensors": QTensorConfig(Dtype.int4, is_dynamic=False, qscheme=GROUP, ch_axis=-1, group_size=8)},
            ConfigError,
            ["output_tensors", "per_group", "is_dynamic=True"],
        ),
        ({"target_device": "GPU"}, ConfigError, ["target_device", "'GPU'", "CPU"]),
    ],
)
def test_layers_that_cannot_work_are_refused(values: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as error:
        QLayerConfig(**values)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("values", "kind", "word"),
    [
        ({"global_quant_config": INT8}, TypeError, "global_quant_config"),
        ({"layer_quant_config": {"a": INT8}}, TypeError, r"layer_quant_config\['a'\]"),
        ({"exclude": "lm_head"}, TypeError, "exclude"),
        ({"layer_type_quant_config": {"Linea": QLayerConfig()}}, ConfigError, "Did you mean 'Linear'"),
        ({"quant_mode": "eager"}, ConfigError, "Did you mean 'eager_mode'"),
    ],
)
def test_model_configurations_that_cannot_work_are_refused(values: dict, kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        QConfig(**{"global_quant_config": QLayerConfig(), **values})


# ---- JSON ------------------------------------------------------------------------------------------------------------


def full() -> QConfig:
    nvfp4 = ScaleQuantSpec(FP4PerGroupSpec(-1, 16, is_dynamic=False), FP8E4M3PerTensorSpec())
    return QConfig(
        QLayerConfig(input_tensors=INT8, weight=nvfp4.to_quantization_spec(), target_device="CPU"),
        exclude=["lm_head", "*gate"],
        layer_quant_config={"*fc1": QLayerConfig(weight=QTensorConfig(Dtype.int4, qscheme=BLOCK, block_size=(8, 8)))},
        layer_type_quant_config={nn.Conv2d: QLayerConfig(bias=INT8)},
        kv_cache_quant_config={"*k_proj": QLayerConfig(output_tensors=INT8)},
        softmax_quant_spec=INT8,
        min_kv_scale=0.5,
        log_severity_level=2,
    )


def test_a_configuration_survives_json() -> None:
    config = full()
    text = json.dumps(config.to_dict())
    assert QConfig.from_dict(json.loads(text)) == config
    assert Config is QConfig


def test_keys_of_the_file() -> None:
    """The keys and the spelling of values that checkpoints of the peer have."""
    data = QConfig(QLayerConfig(weight=QTensorConfig(Dtype.uint4, qscheme=GROUP, ch_axis=-1, group_size=32))).to_dict()
    assert sorted(data) == [
        "algo_config", "exclude", "global_quant_config", "kv_cache_post_rope", "kv_cache_quant_config",
        "layer_quant_config", "layer_type_quant_config", "quant_mode", "softmax_quant_spec", "version",
    ]  # fmt: skip
    assert sorted(data["global_quant_config"]) == ["bias", "input_tensors", "output_tensors", "target_device", "weight"]
    assert data["global_quant_config"]["weight"] == {
        "dtype": "uint4", "is_dynamic": None, "qscheme": "per_group", "ch_axis": -1, "group_size": 32,
        "block_size": None, "symmetric": None, "round_method": None, "scale_type": None, "zero_point_type": "int32",
        "scale_format": None, "scale_calculation_mode": None, "mx_element_dtype": None, "observer_cls": None,
        "is_scale_quant": False, "enable_buffer_reuse": False, "max_input_numel": 4194304,
    }  # fmt: skip


def test_files_of_the_peer_are_read() -> None:
    """A checkpoint's dictionary, with legacy keys, nulls and the keys that belong to the export."""
    weight = {"dtype": "int8", "dynamic": False, "qscheme": "per_channel", "axis": 0, "symmetric": True,
              "observer_cls": "PerChannelMinMaxObserver", "zero_point_type": None}  # fmt: skip
    config = QConfig.from_dict(
        {
            "quant_method": "quark",
            "export": {"pack_method": "reorder"},
            "global_quant_config": {"weight": weight, "input_tensors": None},
            "layer_type_quant_config": None,
            "layer_quant_config": None,
            "exclude": None,
        }
    )
    expected = QTensorConfig(Dtype.int8, observers.PerChannelMinMaxObserver, False, CHANNEL, 0, symmetric=True)
    assert config.global_quant_config.weight == expected
    assert config.exclude == []


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ({}, "global_quant_config"),
        ({"global_quant_config": {"wieght": None}}, "Did you mean 'weight'"),
        ({"global_quant_config": {"weight": {"dtype": "int8", "qschem": 1}}}, "Did you mean 'qscheme'"),
        ({"global_quant_config": {"weight": None, "bias": None}, "exlude": []}, "Did you mean 'exclude'"),
        ({"global_quant_config": {"weight": {"dtype": "int8", "observer_cls": "MinMaxObserver"}}}, "MinMaxObserver"),
    ],
)
def test_unknown_keys_are_errors_with_the_nearest_name(data: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        QConfig.from_dict(data)


def test_an_observer_of_ones_own_is_found_by_its_name() -> None:
    class Median(ObserverBase):
        pass

    config = QTensorConfig(Dtype.int8, observer_cls=Median, qscheme=TENSOR)
    assert QTensorConfig.from_dict(config.to_dict()).observer_cls is Median


# ---- enumerations ----------------------------------------------------------------------------------------------------


def test_members_of_the_enumerations() -> None:
    assert {item.name: item.value for item in RoundType} == {"round": 2, "floor": 3, "half_even": 8}
    assert [item.name for item in ZeroPointType] == ["int32", "float32"]
    assert [item.name for item in QuantFlow] == ["standard", "file2file", "per_block"]
    assert len([item for item in Dtype if item.name not in GGML]) == 22


def test_dtype_helpers() -> None:
    assert Dtype.from_str("INT8") is Dtype.int8
    assert Dtype.from_torch_dtype(torch.float8_e4m3fn) is Dtype.fp8_e4m3
    assert [Dtype[name].to_bitwidth() for name in ("uint2", "int3", "fp6_e2m3", "bfloat16")] == [2, 3, 6, 16]
    assert Dtype.int4.to_torch_packed_dtype() is torch.int32
    assert Dtype.fp4.to_torch_packed_dtype() is torch.uint8
    with pytest.raises(ConfigError, match="mx6"):
        Dtype.mx6.to_torch_packed_dtype()
    with pytest.raises(ConfigError, match="complex64"):
        Dtype.from_torch_dtype(torch.complex64)
    with pytest.raises(ConfigError, match="Did you mean 'int8'"):
        Dtype.from_str("int88")


@pytest.mark.parametrize("field", sorted(ENUMS))
def test_names_are_taken_as_strings_after_construction_too(field: str) -> None:
    config = QTensorConfig(Dtype.int8, qscheme="per_tensor")
    for one in ENUMS[field]:
        setattr(config, field, one.name)
        assert getattr(config, field) is one
    with pytest.raises(ConfigError, match=f"{field}.*nonsense"):
        setattr(config, field, "nonsense")
