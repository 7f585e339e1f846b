"""The presets: one row per name. A row is plain data; the dialects turn it into their own configuration objects.

Every name is accepted as it stands and with ``_CONFIG`` or ``_QCONFIG`` behind it. Beside the names two data types are
a preset, ``ACTIVATION[:METHOD]/WEIGHT[@SCALES]``:

    uint8/int4       data types of ``quark.numerics.formats``; types below 8 bits have a scale per channel, others one
    uint8/int4@32    a scale for every 32 elements along the axis that is summed; also @channel and @tensor
    uint8:mse/int4   the range of activations by that method of ``quark.observers.SEARCHES``; else by their extremes

Signed types are symmetric, unsigned activations have a zero point. ``float/int4`` is for single layers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from types import MappingProxyType
from typing import Any, Literal

from quark.config.job import Target
from quark.config.tensor import LayerSpec, TensorSpec, no_range
from quark.dataclass import dataclass
from quark.errors import ConfigError, unknown
from quark.numerics.blocks import Block
from quark.numerics.elements import Int
from quark.numerics.formats import FORMATS, get_format
from quark.numerics.granularity import Channel, Granularity, Group, Tensor
from quark.observers import SEARCHES

FLOAT = "float"
#: Integers of fewer bits get a scale per channel when nothing is said.
_COARSE_BITS = 8
#: What a preset can be for.
HARDWARE = ("cpu", "npu", "gpu")
_CPU = ("cpu",)
_INTEGER_KERNELS = ("cpu", "npu")
_FLOAT_KERNELS = ("npu", "gpu")
_GPU = ("gpu",)


@dataclass(frozen=True)
class Preset:
    """One named configuration: specs of activations and weights, options, target, and a line saying what it is for.

    Attributes:
        mixed: what automatic mixed precision gives the layers with weights instead.
        hardware: the kinds of device whose compilers or runtimes have kernels for it, of ``HARDWARE``.
    """

    doc: str
    activation: TensorSpec
    weight: TensorSpec
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    target: Target = "any"
    tuning: Literal["", "adaround", "adaquant"] = ""
    mixed: LayerSpec | None = None
    hardware: tuple[str, ...] = ("npu",)

    @property
    def types(self) -> str:
        """Types of activations and weights, ``uint8/int8``, or the one of both; those of mixed layers in front."""
        plain = _pair("float" if self.options.get("UseMatMulNBits") else self.activation.format, self.weight.format)
        if self.mixed is None or self.mixed.inputs is None or self.mixed.weight is None:
            return plain
        return f"{_pair(self.mixed.inputs.format, self.mixed.weight.format)}+{plain}"

    @property
    def cle(self) -> bool:
        """Whether cross-layer equalization is on: where one fixed-point scale covers all channels of a weight."""
        return _is_whole_integer(self.weight)


def _pair(activation: str, weight: str) -> str:
    return weight if activation == weight else f"{activation}/{weight}"


def _act(format: str, symmetric: bool, method: str, scale_rule: str = "float32") -> TensorSpec:
    return TensorSpec(format, symmetric, method=method, scale_rule=scale_rule)


_S8 = TensorSpec("int8")
_S8_CHANNEL = TensorSpec("int8", granularity=Channel(-1))
_S4_CHANNEL = TensorSpec("int4", granularity=Channel(-1))
_S16 = TensorSpec("int16")
_U8 = TensorSpec("uint8", symmetric=False)
_POW2 = TensorSpec("int8", scale_rule="power_of_two", method="mse")
_FORCE = MappingProxyType({"ForceQuantizeNoInputCheck": True})
_TAIL = MappingProxyType({"ForceQuantizeNoInputCheck": True, "Percentile": 99.9999})
_NPU = MappingProxyType({"ForceQuantizeNoInputCheck": True, "AlignSlice": False, "AlignConcat": True})
_AVERAGE = MappingProxyType({"EnableNPUTransformer": True, "CalibMovingAverage": True})
_VINT8 = MappingProxyType(
    {
        "OptimizeModel": False,
        "EnableNPUCnn": False,
        "UseRandomData": True,
        "ConvertBNToConv": True,
        "ConvertSigmoidToHardSigmoid": False,
        "ConvertClipToRelu": True,
        "ConvertSplitToSlice": True,
        "SplitLargeKernelPool": False,
        "ReplaceClip6Relu": True,
        "ConvertReduceMeanToGlobalAvgPool": False,
        "RemoveQDQConvClip": False,
        "RemoveQDQConvPRelu": False,
        "RemoveQDQConvRelu": False,
        "RemoveQDQConvLeakyRelu": False,
        "Int32Bias": False,
        "DedicatedQDQPair": True,
        "QuantizeAllOpTypes": True,
    }
)


def _both(format: str, doc: str, hardware: tuple[str, ...] = ("npu",), **options: bool) -> Preset:
    """Activations and weights in one format; in blocks, operators that only move values take no part of their own."""
    force = {} if isinstance(get_format(format), Block) else _FORCE
    spec = TensorSpec(format)
    return Preset(doc, spec, spec, MappingProxyType({**force, **options}), hardware=hardware)


PRESETS: dict[str, Preset] = {
    "MATMUL_NBITS": Preset(
        "4-bit weights in groups of 128 for MatMul, Gemm and Gather; activations stay float",
        TensorSpec("float16"),
        TensorSpec("uint4", granularity=Group(0, 128)),
        MappingProxyType({"UseMatMulNBits": True, "MatMulNBitsParams": {"AccuracyLevel": 1}}),
        hardware=("cpu", "gpu"),
    ),
    "UINT8_DYNAMIC_QUANT": Preset(
        "uint8 weights, activations quantized at run time: no calibration data",
        TensorSpec("uint8", symmetric=False, dynamic=True),
        TensorSpec("uint8", symmetric=False, granularity=Channel(-1)),
        hardware=_CPU,
    ),
    "A8W8": Preset("int8 activations and weights, for NPU compilers", _act("int8", True, "minmax"), _S8, _NPU),
    "A16W8": Preset("int16 activations, int8 weights, for NPU compilers", _act("int16", True, "minmax"), _S8, _NPU),
    "XINT8": Preset(
        "int8 with power-of-two scales, for the Ryzen AI NPU",
        _act("uint8", True, "mse", "power_of_two"),
        _POW2,
        _FORCE,
    ),
    "VINT8": Preset(
        "int8 with power-of-two scales and a Q/DQ pair of its own for every reader, for Versal AI compilers",
        _act("int8", True, "mse", "power_of_two"),
        _POW2,
        _VINT8,
    ),
    "A8W8_CPU": Preset(
        "uint8 activations, int8 weights per channel: fast on ONNX Runtime's CPU provider",
        _act("uint8", False, "minmax"),
        _S8_CHANNEL,
        {},
        "cpu",
        hardware=_CPU,
    ),
    "S8S8_AAWS": Preset("asymmetric int8 activations, int8 weights", _act("int8", False, "percentile"), _S8, _TAIL),
    "U8S8_AAWS": Preset(
        "asymmetric uint8 activations, int8 weights",
        _act("uint8", False, "percentile"),
        _S8,
        _FORCE,
        hardware=_INTEGER_KERNELS,
    ),
    "U8U8_AAWA": Preset(
        "asymmetric uint8 activations and weights",
        _act("uint8", False, "percentile"),
        _U8,
        _FORCE,
        hardware=_INTEGER_KERNELS,
    ),
    "S16S8_ASWS": Preset("int16 activations, int8 weights", _act("int16", True, "percentile"), _S8, _FORCE),
    "U16S8_AAWS": Preset(
        "asymmetric uint16 activations, int8 weights", _act("uint16", False, "percentile"), _S8, _FORCE
    ),
    "INT8_CNN_DEFAULT": Preset(
        "uint8 activations, int8 weights, CNNs",
        _act("uint8", False, "minmax"),
        _S8,
        _FORCE,
        hardware=_INTEGER_KERNELS,
    ),
    "INT16_CNN_DEFAULT": Preset(
        "uint16 activations, int16 weights, CNNs", _act("uint16", False, "minmax"), _S16, _FORCE
    ),
    "INT8_TRANSFORMER_DEFAULT": Preset(
        "uint8 activations, int8 weights of MatMul and Gemm",
        _act("uint8", False, "minmax"),
        _S8,
        _AVERAGE,
        hardware=_INTEGER_KERNELS,
    ),
    "INT16_TRANSFORMER_DEFAULT": Preset(
        "uint16 activations, int16 weights of MatMul and Gemm", _act("uint16", False, "minmax"), _S16, _AVERAGE
    ),
    "FP16": _both("float16", "float16 activations and weights", _FLOAT_KERNELS),
    "BF16": _both("bfloat16", "bfloat16 activations and weights, of every operator", QuantizeAllOpTypes=True),
    "FP8E4M3": _both("fp8_e4m3", "FP8 E4M3 activations and weights", _GPU),
    "FP8E5M2": _both("fp8_e5m2", "FP8 E5M2 activations and weights", _GPU),
    "BFP16": _both("bfp16", "block floating point, blocks of 8 with 8-bit mantissas"),
    "MX4": _both("mx4", "two-level blocks of 16 with 2-bit mantissas"),
    "MX6": _both("mx6", "two-level blocks of 16 with 4-bit mantissas"),
    "MX9": _both("mx9", "two-level blocks of 16 with 7-bit mantissas"),
    "MXFP8E5M2": _both("mxfp8_e5m2", "OCP MX blocks of 32 FP8 E5M2 elements", _FLOAT_KERNELS),
    "MXFP8E4M3": _both("mxfp8_e4m3", "OCP MX blocks of 32 FP8 E4M3 elements", _FLOAT_KERNELS),
    "MXFP6E3M2": _both("mxfp6_e3m2", "OCP MX blocks of 32 FP6 E3M2 elements", _FLOAT_KERNELS),
    "MXFP6E2M3": _both("mxfp6_e2m3", "OCP MX blocks of 32 FP6 E2M3 elements", _FLOAT_KERNELS),
    "MXFP4E2M1": _both("mxfp4", "OCP MX blocks of 32 FP4 E2M1 elements", _FLOAT_KERNELS),
    "MXINT8": _both("mxint8", "OCP MX blocks of 32 int8 elements"),
    "NVFP4": _both("nvfp4", "blocks of 16 FP4 elements with FP8 scales under one float32 scale", _GPU),
    "AMDFP4": _both("amdfp4", "blocks of 16 FP4 elements with unsigned E5M3 scales", _GPU),
    "A8W4": Preset("uint8 activations, int4 weights per channel", _U8, _S4_CHANNEL, _FORCE),
    "BF16_BFP16": Preset("bfloat16 activations, BFP16 weights", TensorSpec("bfloat16"), TensorSpec("bfp16")),
    "BF16_MXINT8": Preset("bfloat16 activations, MXINT8 weights", TensorSpec("bfloat16"), TensorSpec("mxint8")),
    "MX9_INT8": Preset("MX9 activations, int8 weights", TensorSpec("mx9"), _S8),
}


def _mixed(format: str) -> Preset:
    """bfloat16 everywhere but in the layers with weights, and two pairs where the two meet."""
    spec = TensorSpec(format)
    doc = f"{format} activations and weights of layers with weights, bfloat16 everything else"
    options = {"QuantizeBias": False, "DedicatedQDQPair": True, "CalibDataSize": 1}
    plain = TensorSpec("bfloat16")
    return Preset(doc, plain, plain, MappingProxyType(options), mixed=LayerSpec(spec, spec, None, spec))


_S8_PERCENTILE = _act("int8", True, "percentile")
PRESETS |= {
    "S16S16_MIXED_S8S8": Preset(
        "int8 activations and weights of layers with weights, int16 everything else",
        _act("int16", False, "percentile"),
        _S16,
        MappingProxyType({**_TAIL, "Int32Bias": False, "Int16Bias": False}),
        mixed=LayerSpec(_S8_PERCENTILE, _S8, None, _S8_PERCENTILE),
    ),
    "BF16_MIXED_BFP16": _mixed("bfp16"),
    "BF16_MIXED_MXINT8": _mixed("mxint8"),
}


def _per_channel(preset: Preset) -> Preset:
    """The same with a scale for every channel of a weight, for runtimes that have them."""
    weight = replace(preset.weight, granularity=Channel(-1))
    return replace(preset, doc=f"{preset.doc}; weights per channel", weight=weight)


def _is_whole_integer(spec: TensorSpec) -> bool:
    return isinstance(spec.granularity, Tensor) and isinstance(get_format(spec.format), Int)


def _tuned(preset: Preset, tuning: Literal["adaround", "adaquant"]) -> Preset:
    """The same with its weights fine-tuned layer by layer."""
    return replace(preset, doc=f"{preset.doc}; weights tuned by {tuning}", tuning=tuning)


_INTEGER_ROWS = ("XINT8", "S8S8_AAWS", "U8S8_AAWS", "S16S8_ASWS", "A8W8", "A16W8", "U16S8_AAWS")
_FLOAT_ROWS = ("FP16", "BF16", "BFP16", "MX4", "MX6", "MX9", "MXFP8E5M2", "MXFP8E4M3", "MXFP6E3M2", "MXFP6E2M3")
_ACCURATE_ROWS = ("INT8_CNN", "INT16_CNN", "INT8_TRANSFORMER", "INT16_TRANSFORMER")


def _accurate(name: str) -> Preset:
    """The default row with ranges that drop one value in a million, and AdaRound."""
    row = PRESETS[f"{name}_DEFAULT"]
    options = {key: value for key, value in row.options.items() if key != "CalibMovingAverage"}
    accurate = replace(
        row,
        doc=row.doc.replace(", CNNs", "") + ", ranges by percentile",
        activation=replace(row.activation, method="percentile"),
        options=MappingProxyType({**options, "Percentile": 99.9999}),
    )
    return _tuned(accurate, "adaround")


PRESETS |= {f"{name}_ADAROUND": _tuned(PRESETS[name], "adaround") for name in _INTEGER_ROWS}
PRESETS |= {
    f"{name}_ADAQUANT": _tuned(PRESETS[name], "adaquant")
    for name in (*_INTEGER_ROWS, *_FLOAT_ROWS, "MXFP4E2M1", "MXINT8", "BF16_MIXED_BFP16", "BF16_MIXED_MXINT8")
}
PRESETS |= {f"{name}_ACCURATE": _accurate(name) for name in _ACCURATE_ROWS}
#: Beside every preset with integer weights per tensor, which a depthwise layer of unlike channels cannot live with.
PRESETS |= {f"{name}_PER_CHANNEL": _per_channel(row) for name, row in PRESETS.items() if _is_whole_integer(row.weight)}


def get_preset(name: str) -> Preset:
    """The row of a preset name, with or without ``_CONFIG`` or ``_QCONFIG``; or one of two data types.

    Raises:
        ConfigError: no such preset or data type; the nearest name is shown.
    """
    if isinstance(name, str) and "/" in name:
        return _of_types(name)
    for suffix in ("_QCONFIG", "_CONFIG", ""):
        if isinstance(name, str) and name.endswith(suffix) and name.removesuffix(suffix) in PRESETS:
            return PRESETS[name.removesuffix(suffix)]
    raise ConfigError(unknown("preset", name, PRESETS))


def _of_types(name: str) -> Preset:
    layer = layer_of_types(name, "the preset")
    if layer.inputs is None or layer.weight is None:
        raise ConfigError(f"the preset {name!r}: float activations are for single layers, under layers of --config")
    return Preset("Two data types.", layer.inputs, layer.weight, hardware=())


def layer_of_types(name: str, what: str = "the candidate") -> LayerSpec:
    """The specs that two data types stand for.

    Args:
        name: as above.
        what: it is, for errors.

    Raises:
        ConfigError: no such data type or method, or scales that the type does not have.
    """
    whole = f"{what} {name!r}"
    first, _, second = name.partition("/")
    activation, _, method = first.partition(":")
    weight, _, scales = second.partition("@")
    inputs = None if activation == FLOAT else calibrated(_activation(activation, whole), method, whole)
    if inputs is None and method:
        raise ConfigError(f"{whole}: float activations have no range that {method!r} could find")
    return LayerSpec(inputs, _weight(weight, scales, whole), None, inputs)


def calibrated(spec: TensorSpec, method: str, whole: str) -> TensorSpec:
    """The spec with another calibration method, where one is named.

    Args:
        method: empty, or a name of ``quark.observers.SEARCHES``.
        whole: what is asked for, in words, for errors.

    Raises:
        ConfigError: no such method.
    """
    if not method:
        return spec
    if method not in SEARCHES:
        raise ConfigError(f"{whole}: {unknown('calibration method', method, SEARCHES)}")
    if not spec.searchable:
        raise ConfigError(f"{whole}: {no_range(spec.format, method)}")
    return replace(spec, method=method, settings=())


def _format(name: str, whole: str) -> str:
    if name not in FORMATS:
        raise ConfigError(f"{whole}: {unknown('data type', name, FORMATS)}")
    return name


def _activation(name: str, whole: str) -> TensorSpec:
    return TensorSpec(_format(name, whole), symmetric=not name.startswith("uint"))


def _weight(name: str, scales: str, whole: str) -> TensorSpec:
    row = get_format(_format(name, whole))
    if isinstance(row, Block):
        if scales:
            raise ConfigError(f"{whole}: blocks of {name} bring their own scales; leave @{scales} out")
        return TensorSpec(name)
    if not scales:
        scales = "channel" if isinstance(row, Int) and row.bits < _COARSE_BITS else "tensor"
    return TensorSpec(name, symmetric=True, granularity=_granularity(scales, whole))


def _granularity(scales: str, whole: str) -> Granularity:
    known: dict[str, Granularity] = {"tensor": Tensor(), "channel": Channel(-1)}
    if scales in known:
        return known[scales]
    if scales.isdigit() and int(scales) > 0:
        return Group(-1, int(scales))
    raise ConfigError(f"{whole}: {unknown('scales', scales, [*known, '32 (elements per scale)'])}")
