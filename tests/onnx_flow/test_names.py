"""Every name of the published interface that stands for a data type exists, and means that data type.

The lists are those of the interface reference (spec and data type classes with bit width, range and ONNX type number;
preset names), and of the data types that only this project has.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import quark.onnx as q
from quark.config.presets import PRESETS
from quark.errors import ConfigError
from quark.numerics.blocks import BLOCKS
from quark.numerics.formats import FORMATS
from quark.numerics.granularity import Channel, Tensor
from quark.onnx.quantization.config import data_type, get_default_config_mapping, spec

#: class: (bit width, lowest, highest, number of the ONNX type), None where the interface gives none.
PUBLISHED: dict[str, tuple[int, float | None, float | None, int]] = {
    "Int8": (8, -128, 127, 3),
    "UInt8": (8, 0, 255, 2),
    "Int16": (16, -32768, 32767, 5),
    "UInt16": (16, 0, 65535, 4),
    "Int32": (32, -(2**31), 2**31 - 1, 6),
    "UInt32": (32, 0, 2**32 - 1, 12),
    "Float16": (16, None, None, 10),
    "BFloat16": (16, None, None, 16),
    "BFP16": (16, None, None, 0),
    "MX4": (11, None, None, 0),
    "MX6": (13, None, None, 0),
    "MX9": (16, None, None, 0),
    "MXFP4E2M1": (4, -6, 6, 0),
    "MXFP6E3M2": (6, -28, 28, 0),
    "MXFP6E2M3": (6, -7.5, 7.5, 0),
    "MXFP8E5M2": (8, -57344, 57344, 0),
    "MXFP8E4M3": (8, -448, 448, 0),
    "MXInt8": (8, -128, 127, 0),
}
#: The same for data types that the interface lists without a class, or not at all.
OURS: dict[str, tuple[int, float | None, float | None, int]] = {
    "Int2": (2, -2, 1, 26),
    "UInt2": (2, 0, 3, 25),
    "Int3": (3, -4, 3, 0),
    "UInt3": (3, 0, 7, 0),
    "Int4": (4, -8, 7, 22),
    "UInt4": (4, 0, 15, 21),
    "FP8E4M3": (8, -448, 448, 17),
    "FP8E5M2": (8, -57344, 57344, 19),
    "FP6E3M2": (6, -28, 28, 0),
    "FP6E2M3": (6, -7.5, 7.5, 0),
    "FP4E2M1": (4, -6, 6, 23),
    "NVFP4": (4, -6, 6, 0),
    "AMDFP4": (4, -6, 6, 0),
    "AMDFP4G32": (4, -6, 6, 0),
}

_TUNED = ["XINT8", "S8S8_AAWS", "U8S8_AAWS", "S16S8_ASWS", "A8W8", "A16W8", "U16S8_AAWS"]
_FLOAT = [
    "FP16",
    "BF16",
    "BFP16",
    "MX4",
    "MX6",
    "MX9",
    "MXFP8E5M2",
    "MXFP8E4M3",
    "MXFP6E3M2",
    "MXFP6E2M3",
    "MXFP4E2M1",
    "MXINT8",
]
_MIXED = ["BF16_MIXED_BFP16", "BF16_MIXED_MXINT8"]
#: Every preset name of the interface: 65.
PRESET_NAMES = {
    *_TUNED,
    *(f"{name}_{method}" for name in _TUNED for method in ("ADAROUND", "ADAQUANT")),
    *_FLOAT,
    *(f"{name}_ADAQUANT" for name in _FLOAT),
    *_MIXED,
    *(f"{name}_ADAQUANT" for name in _MIXED),
    *(f"INT{bits}_{kind}" for bits in (8, 16) for kind in ("CNN_DEFAULT", "CNN_ACCURATE")),
    *(f"INT{bits}_{kind}" for bits in (8, 16) for kind in ("TRANSFORMER_DEFAULT", "TRANSFORMER_ACCURATE")),
    *[
        "UINT8_DYNAMIC_QUANT",
        "VINT8",
        "U8U8_AAWA",
        "S16S16_MIXED_S8S8",
        "BF16_BFP16",
        "BF16_MXINT8",
        "MX9_INT8",
        "MATMUL_NBITS",
    ],
}


@pytest.mark.parametrize("name", [*PUBLISHED, *OURS])
def test_a_data_type_class_has_its_width_range_and_onnx_type(name: str) -> None:
    bits, lowest, highest, number = {**PUBLISHED, **OURS}[name]
    found = getattr(q, name)
    assert found is getattr(data_type, name) and issubclass(found, q.DataType)
    assert (found.bitwidth, found.onnx_proto_dtype) == (bits, number)
    if lowest is not None:
        assert (found.min_value, found.max_value) == (lowest, highest)


@pytest.mark.parametrize("name", [*PUBLISHED, *OURS])
def test_a_spec_class_has_its_defaults(name: str) -> None:
    found = getattr(q, f"{name}Spec")()
    assert getattr(spec, f"{name}Spec") is type(found)
    assert found.data_type is getattr(q, name)
    assert found.symmetric is not name.startswith("UInt")
    assert found.quant_granularity is q.QuantGranularity.Tensor and found.scale_type is q.ScaleType.Float32
    method = "Percentile" if "Int" in name and name != "MXInt8" else "MinMax"
    assert found.calibration_method is q.CalibMethod[method]


def test_the_power_of_two_spec_is_an_int8_spec() -> None:
    found = q.XInt8Spec()
    assert isinstance(found, q.Int8Spec)
    assert (found.scale_type, found.calibration_method) == (q.ScaleType.PowerOf2, q.CalibMethod.MinMSE)


def test_every_row_of_the_table_has_a_data_type_class() -> None:
    """Scale formats aside; shared exponents rounded otherwise are a scale type of the same class."""
    named = {value.format for value in data_type.data_types().values()}
    left = {name for name in FORMATS if name.removesuffix("_even").removesuffix("_ceil") not in named}
    assert left == {"e8m0", "e5m3"}


def test_the_numbers_of_onnx_types_are_those_of_onnx() -> None:
    from onnx import TensorProto

    assert {name: TensorProto.DataType.Value(name) for name in data_type._PROTO} == data_type._PROTO


def test_every_preset_name_is_known() -> None:
    assert len(PRESET_NAMES) == 65
    assert set() == PRESET_NAMES - set(PRESETS)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("suffix", ["_CONFIG", "_QCONFIG"])
def test_a_preset_has_its_older_spellings(name: str, suffix: str) -> None:
    assert vars(q.get_default_config(name + suffix).layer) == vars(q.get_default_config(name).layer)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name.startswith("MX") and len(name) > 3])
def test_the_shared_exponent_follows_the_scale_type(name: str) -> None:
    row = getattr(q, name).format
    for scale_type, end in (("E8M0Floor", ""), ("E8M0Even", "_even"), ("E8M0Ceil", "_ceil")):
        made = getattr(q, f"{name}Spec")(scale_type=q.ScaleType[scale_type]).to_spec()
        assert made.format == row + end and made.scale_rule == "float32"
        assert BLOCKS[made.format].rule == f"e8m0_{scale_type[4:].lower()}"


def test_a_scale_type_that_a_block_format_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scale_type cannot be ScaleType.E8M0Even for the data type 'nvfp4'"):
        q.NVFP4Spec(scale_type=q.ScaleType.E8M0Even).to_spec()


def test_blocks_have_the_size_of_their_format() -> None:
    group = q.QuantGranularity.Group
    assert (
        q.MXFP4E2M1Spec(quant_granularity=group).to_spec()
        == q.MXFP4E2M1Spec(quant_granularity=group, group_size=32).to_spec()
    )
    longer = q.MXFP4E2M1Spec(quant_granularity=group, group_size=64).to_spec()
    assert longer.row.size == 64 and longer.row.name == "mxfp4"


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "32"])
def test_a_group_size_that_is_no_size_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="group_size must be a positive number"):
        q.Int4Spec(group_size=size)  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def mapping() -> dict[str, q.QuantizationConfig]:
    return get_default_config_mapping()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_is_also_an_object(name: str, mapping: dict[str, q.QuantizationConfig]) -> None:
    made = getattr(q, f"{name}_CONFIG")
    assert vars(made) == vars(q.get_default_config(name)) and made is not getattr(q, f"{name}_CONFIG")
    assert vars(mapping[name]) == vars(made)


def test_every_preset_with_one_scale_per_integer_weight_has_one_per_channel_beside_it() -> None:
    whole = {name for name, row in PRESETS.items() if "int" in row.weight.format and row.weight.granularity == Tensor()}
    assert {"A8W8", "A16W8", "XINT8", "XINT8_ADAROUND", "U8S8_AAWS", "VINT8", "INT8_CNN_ACCURATE"} <= whole
    assert {f"{name}_PER_CHANNEL" for name in whole if "mx" not in PRESETS[name].weight.format} <= set(PRESETS)
    assert PRESETS["XINT8_PER_CHANNEL"].weight == replace(PRESETS["XINT8"].weight, granularity=Channel(-1))
    assert PRESETS["XINT8_PER_CHANNEL"].options == PRESETS["XINT8"].options


def test_vint8_is_power_of_two_without_the_npus_limits() -> None:
    job = q.VINT8_QCONFIG.compile()
    assert job.power_of_two and not job.npu and job.options.DedicatedQDQPair
