"""Tensor and layer specifications of the ONNX dialect, and their translation into the one language.

``QTensorConfig`` is open: a user may subclass it with an ``__init__`` of their own. Nothing here is changed when it is
used; ``to_spec`` makes a fresh frozen ``TensorSpec``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import cache
from typing import Any

from quark.config.algorithm import Allowed
from quark.config.known_fields import KnownFields
from quark.config.tensor import LayerSpec, TensorSpec, narrow_of, scale_rule_of
from quark.errors import ConfigError, check_names, unknown
from quark.numerics.blocks import BLOCKS
from quark.numerics.formats import Format, Int, get_format
from quark.numerics.granularity import Channel, Granularity, Group, Tensor
from quark.observers import SEARCHES
from quark.observers.registry import BUILT_IN
from quark.onnx.quantization.config import data_type as types
from quark.onnx.quantization.config.data_type import BaseDataType, Int8


class CalibMethod(enum.Enum):
    """How the range of a tensor is found."""

    MinMax = 0
    MinMSE = 1
    Percentile = 2
    Entropy = 3
    LayerwisePercentile = 4
    Distribution = 5


class ScaleType(enum.Enum):
    """How the scale is represented."""

    Float32 = 0
    PowerOf2 = 1
    Int16 = 2
    E8M0Floor = 3
    E8M0Even = 4
    E8M0Ceil = 5


class QuantGranularity(enum.Enum):
    """Which elements share a scale."""

    Tensor = 0
    Channel = 1
    Group = 2


METHODS = {
    CalibMethod.MinMax: "minmax",
    CalibMethod.MinMSE: "mse",
    CalibMethod.Percentile: "percentile",
    CalibMethod.Entropy: "entropy",
    CalibMethod.LayerwisePercentile: "layerwise_percentile",
    CalibMethod.Distribution: "distribution",
}
SCALES = {
    ScaleType.Float32: "float32",
    ScaleType.PowerOf2: "power_of_two",
    ScaleType.Int16: "int16",
    ScaleType.E8M0Floor: "e8m0_floor",
    ScaleType.E8M0Even: "e8m0_even",
    ScaleType.E8M0Ceil: "e8m0_ceil",
}
_GROUP_SIZE = 128
_OWN_FIELDS = ("narrow", "scale_rule", "calibration_settings")
_ENUMERATIONS: dict[str, type[enum.Enum]] = {
    "scale_type": ScaleType,
    "calibration_method": CalibMethod,
    "quant_granularity": QuantGranularity,
}
_LAYER_FIELDS = ("input_tensors", "weight", "bias", "output_tensors", "activation")
_FIELDS = ("symmetric", *_ENUMERATIONS, "data_type", "group_size", *_OWN_FIELDS)
#: What a shared exponent is rounded by, as the end of a block format's name.
_BLOCK_SUFFIXES = {ScaleType.E8M0Floor: "", ScaleType.E8M0Even: "_even", ScaleType.E8M0Ceil: "_ceil"}

#: Axis -1 of Channel and Group stands for "the operator's own": placement puts the axis of the weight's operator there.
GRANULARITIES: dict[QuantGranularity, Any] = {
    QuantGranularity.Tensor: lambda size: Tensor(),
    QuantGranularity.Channel: lambda size: Channel(-1),
    QuantGranularity.Group: lambda size: Group(-1, size),
}


def _member(field: str, value: Any, allowed: type[enum.Enum]) -> Any:
    if not isinstance(value, allowed):
        raise ConfigError(unknown(f"{allowed.__name__} in the field {field}", value, [str(m) for m in allowed]))
    return value


def _is_group(size: Any) -> bool:
    return size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0)


def _is_data_type(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseDataType)


#: What fields may be that are no members of enumerations.
_ALLOWED = {
    "symmetric": Allowed("True or False", lambda value: isinstance(value, bool)),
    "data_type": Allowed("a data type class such as Int8", _is_data_type),
    "group_size": Allowed("a positive number of elements", _is_group),
}


def _named(field: str, text: str, values: Mapping[str, Any], owner: str = "") -> Any:
    """The value of a name, which its class may stand before."""
    name = text.removeprefix(f"{owner}.") if owner else text
    if name not in values:
        raise ConfigError(unknown(f"value of the field {field}", text, values))
    return values[name]


def _method_name(method: CalibMethod | str) -> str:
    return METHODS[method] if isinstance(method, CalibMethod) else method


class QTensorConfig(KnownFields):
    """How one tensor is quantized.

    Args:
        symmetric: zero point in the middle of the codes.
        scale_type: how the scale is represented.
        calibration_method: how the range is found; a string names a row of ``quark.observers.SEARCHES``, for instance
            one that ``quark.register_calibration`` added.
        quant_granularity: which elements share a scale.
        data_type: a data type class such as ``Int8``.
        group_size: elements per scale along the reduction axis, for ``QuantGranularity.Group``: 128 when omitted, of a
            block format the length of its standard blocks.
        narrow: symmetric integers leave the lowest code out, scale = amax / 127 for int8. None: True; False: scale =
            amax / 127.5, as in the torch flow.
        scale_rule: how the scale is represented, by the name of a row of ``quark.numerics.scales.SCALE_RULES``; more
            than ``scale_type`` has a word for.
        calibration_settings: of a method that ``quark.register_calibration`` added, by name; those of the others are
            options, such as ``Percentile``.
    """

    def __init__(
        self,
        symmetric: bool = True,
        scale_type: ScaleType = ScaleType.Float32,
        calibration_method: CalibMethod | str = CalibMethod.MinMax,
        quant_granularity: QuantGranularity = QuantGranularity.Tensor,
        data_type: type[BaseDataType] = Int8,
        group_size: int | None = None,
        narrow: bool | None = None,
        scale_rule: str | None = None,
        calibration_settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.set_symmetric(symmetric)
        self.set_scale_type(scale_type)
        self.set_calibration_method(calibration_method)
        self.set_quant_granularity(quant_granularity)
        self.set_data_type(data_type)
        self.set_group_size(group_size)
        self.narrow = narrow
        self.scale_rule = scale_rule
        self.calibration_settings = None if calibration_settings is None else dict(calibration_settings)

    def __setattr__(self, name: str, value: Any) -> None:
        """Fields are checked when the configuration is made and later."""
        searched = name == "calibration_method" and isinstance(value, str) and value in SEARCHES
        if name in _ENUMERATIONS and not searched:
            _member(name, value, _ENUMERATIONS[name])
        if name in _ALLOWED and not _ALLOWED[name].holds(value):
            raise ConfigError(f"the field {name} must be {_ALLOWED[name].words}, not {value!r}")
        super().__setattr__(name, value)

    def set_symmetric(self, symmetric: bool) -> None:
        """Set the field ``symmetric``."""
        self.symmetric = symmetric

    def set_scale_type(self, scale_type: ScaleType) -> None:
        """Set the field ``scale_type``."""
        self.scale_type = scale_type

    def set_calibration_method(self, calibration_method: CalibMethod | str) -> None:
        """Set the field ``calibration_method``; a string names a row of ``quark.observers.SEARCHES``."""
        self.calibration_method = calibration_method

    def set_quant_granularity(self, quant_granularity: QuantGranularity) -> None:
        """Set the field ``quant_granularity``."""
        self.quant_granularity = quant_granularity

    def set_data_type(self, data_type: type[BaseDataType]) -> None:
        """Set the field ``data_type``."""
        self.data_type = data_type

    def set_group_size(self, group_size: int | None) -> None:
        """Set the field ``group_size``."""
        self.group_size = group_size

    def to_spec(self) -> TensorSpec:
        """The frozen value of the one language that this configuration stands for."""
        blocks = BLOCKS.get(self.data_type.format)
        size = self.group_size or (blocks.size if blocks else _GROUP_SIZE)
        granularity: Granularity = GRANULARITIES[self.quant_granularity](size)
        shared = blocks is not None and self.scale_type in _BLOCK_SUFFIXES
        format = self._block_format() if blocks else self.data_type.format
        said = None if shared or self.scale_type is ScaleType.Float32 else SCALES[self.scale_type]
        told = {name: getattr(self, name, None) for name in _OWN_FIELDS}  # a user's class may have set none
        narrow, rule = told["narrow"], told["scale_rule"]
        if rule == "float16":
            raise ConfigError("scale_rule='float16' is UseFP32Scale=False here: ONNX wants one type for all of a model")
        return TensorSpec(
            format=format,
            symmetric=self.symmetric,
            narrow=narrow_of(narrow, True, self.symmetric, format),
            granularity=granularity,
            scale_rule=scale_rule_of(rule, said, f"scale_type={self.scale_type}", format),
            method=_method_name(self.calibration_method),
            settings=self._settings(told["calibration_settings"]),
        )

    def _settings(self, given: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
        """Those of the calibration method.

        Raises:
            ConfigError: one that it does not have, or a method whose settings are options.
        """
        method = _method_name(self.calibration_method)
        if given is None:
            return ()
        if method in BUILT_IN:
            said = f"those of {self.calibration_method} are options, such as Percentile"
            raise ConfigError(f"calibration_settings are for methods of quark.register_calibration: {said}")
        SEARCHES[method].check(given)
        return tuple(sorted(given.items()))

    def _block_format(self) -> str:
        """The row of a block format, whose shared exponent follows the rule that ``scale_type`` names.

        Raises:
            ConfigError: the blocks of this format have no such scale.
        """
        block = BLOCKS[self.data_type.format]
        suffix = _BLOCK_SUFFIXES.get(self.scale_type, "")
        if self.scale_type in _BLOCK_SUFFIXES and f"{block.name}_even" not in BLOCKS:
            raise ConfigError(f"the field scale_type cannot be {self.scale_type} for the data type {block.name!r}")
        return block.name + suffix

    def to_dict(self) -> dict[str, Any]:
        """Field names to values; enums as ``Class.Member``, the data type by name."""
        told = {name: getattr(self, name, None) for name in _OWN_FIELDS}
        return {
            "symmetric": self.symmetric,
            "scale_type": str(self.scale_type),
            "calibration_method": str(self.calibration_method),
            "quant_granularity": str(self.quant_granularity),
            "data_type": self.data_type.__name__,
            **({} if self.group_size is None else {"group_size": self.group_size}),
            **{name: value for name, value in told.items() if value is not None},
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> QTensorConfig:
        """A spec of what ``to_dict`` gives.

        Args:
            fields: field names to values; a member of an enumeration by name, with or without its class
                (``"ScaleType.Float32"``, ``"Float32"``), a data type by name. Fields that are left out keep their
                defaults.

        Raises:
            ConfigError: an unknown field, member or data type; the message names the nearest.
        """
        read = dict(fields)
        check_names(f"field of {cls.__name__}", read, _FIELDS)
        for name, members in _ENUMERATIONS.items():
            if isinstance(read.get(name), str) and read[name] not in SEARCHES:
                read[name] = _named(name, read[name], {member.name: member for member in members}, members.__name__)
        if isinstance(read.get("data_type"), str):
            read["data_type"] = _named("data_type", read["data_type"], types.data_types())
        return cls(**read)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in self.to_dict().items())
        return f"{type(self).__name__}({fields})"


def _spec_class(
    data_type: type[BaseDataType],
    symmetric: bool,
    method: CalibMethod = CalibMethod.Percentile,
    scale_type: ScaleType = ScaleType.Float32,
    name: str = "",
    base: type[QTensorConfig] = QTensorConfig,
) -> type[QTensorConfig]:
    """A spec class that differs from its base only in its defaults."""

    def __init__(
        self: QTensorConfig,
        symmetric: bool = symmetric,
        scale_type: ScaleType = scale_type,
        calibration_method: CalibMethod | str = method,
        quant_granularity: QuantGranularity = QuantGranularity.Tensor,
        data_type: type[BaseDataType] = data_type,
        group_size: int | None = None,
        narrow: bool | None = None,
        scale_rule: str | None = None,
        calibration_settings: Mapping[str, Any] | None = None,
    ) -> None:
        method, shared = calibration_method, quant_granularity
        own = narrow, scale_rule, calibration_settings
        QTensorConfig.__init__(self, symmetric, scale_type, method, shared, data_type, group_size, *own)

    doc = f"``QTensorConfig`` for the data type {data_type.__name__}."
    if isinstance(get_format(data_type.format), Int):
        signs = "symmetric" if symmetric else "with a zero point"
        doc = f"{doc[:-1]}: {signs}, {scale_type.name} scales, ranges by {method.name} unless told otherwise."
    name = name or f"{data_type.__name__}Spec"
    return type(name, (base,), {"__init__": __init__, "__doc__": doc, "__module__": __name__})


@cache
def _spec_of(row: Format) -> type[QTensorConfig]:
    """The spec class of a format: unsigned integers have zero points, ranges of integers are cut at a percentile."""
    method = CalibMethod.Percentile if isinstance(row, Int) else CalibMethod.MinMax
    return _spec_class(types.class_of(row), not isinstance(row, Int) or row.signed, method)


def __getattr__(name: str) -> Any:
    data_type = types.data_types().get(name.removesuffix("Spec"))
    if data_type is None or not name.endswith("Spec"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _spec_of(get_format(data_type.format))


def __dir__() -> list[str]:
    return [*globals(), *(f"{name}Spec" for name in types.data_types())]


Int8Spec = _spec_of(get_format(Int8.format))
XInt8Spec = _spec_class(Int8, True, CalibMethod.MinMSE, ScaleType.PowerOf2, "XInt8Spec", Int8Spec)


class QLayerConfig(KnownFields):
    """The specs of one layer's tensors. Compared by identity, so that equal ones can be keys of one dictionary.

    Args:
        input_tensors: activations read by the layer.
        weight: constant weights.
        bias: biases; ``None`` means the rule of the flow (int32 with scale input x weight).
        output_tensors: activations written by the layer; ``None`` means as ``input_tensors``.
        activation: older name of ``input_tensors``.
    """

    def __init__(
        self,
        input_tensors: QTensorConfig | None = None,
        weight: QTensorConfig | None = None,
        bias: QTensorConfig | None = None,
        output_tensors: QTensorConfig | None = None,
        activation: QTensorConfig | None = None,
    ) -> None:
        if activation is not None and input_tensors is not None:
            raise ConfigError("QLayerConfig: activation is an older name of input_tensors; give only one of them")
        self.input_tensors = input_tensors if activation is None else activation
        self.weight = weight
        self.bias = bias
        self.output_tensors = output_tensors

    def __setattr__(self, name: str, value: Any) -> None:
        """Fields are checked when the configuration is made and later."""
        if name in _LAYER_FIELDS and value is not None and not isinstance(value, QTensorConfig):
            raise ConfigError(f"QLayerConfig: the field {name} must be a spec such as Int8Spec(), not {value!r}")
        super().__setattr__(name, value)

    def to_dict(self) -> dict[str, Any]:
        """Field names to the dictionaries of the specs; fields that are None are left out."""
        return {name: config.to_dict() for name, config in vars(self).items() if config is not None}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> QLayerConfig:
        """The specs of what ``to_dict`` gives: field names to dictionaries for ``QTensorConfig.from_dict``, or to None.

        Raises:
            ConfigError: an unknown field; ``activation`` says something else than ``input_tensors``.
        """
        check_names("field of QLayerConfig", fields, _LAYER_FIELDS)
        read = dict(fields)
        if read.get("activation") == read.get("input_tensors"):
            read.pop("activation", None)
        return cls(**{name: None if one is None else QTensorConfig.from_dict(one) for name, one in read.items()})

    def to_layer(self) -> LayerSpec:
        """The frozen value of the one language that this configuration stands for."""
        inputs, weight, bias, outputs = (
            None if config is None else config.to_spec()
            for config in (self.input_tensors, self.weight, self.bias, self.output_tensors)
        )
        return LayerSpec(inputs, weight, bias, outputs or inputs)
