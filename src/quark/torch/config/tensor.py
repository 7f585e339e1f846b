"""``QTensorConfig``: how one tensor is quantized, in the words of the torch dialect.

A configuration compiles to a ``Stage`` when it is made, so that a combination which cannot work is an error there. It
is never changed when it is used. Fields that are None take what the data type suggests:

    symmetric     True, but False for unsigned integers
    round_method  half_even          is_dynamic  False
    scale_type    float              observer    min/max of the scheme

Group-wise scales by ``scale_format``: "e8m0" is the OCP MX family, "e4m3" NVFP4 (E4M3 block scales under one float32
scale taken from the data), "e5m3" AMD FP4, "float32" or None plain scales of ``scale_type``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NoReturn

from quark.config.known_fields import KnownFields
from quark.config.tensor import TensorSpec, narrow_of, scale_rule_of
from quark.dataclass import dataclass
from quark.errors import ConfigError, check_name, check_names, unknown
from quark.numerics.blocks import BLOCKS
from quark.numerics.elements import Element
from quark.numerics.formats import Block, Float, Int
from quark.numerics.ggml import Ggml
from quark.numerics.granularity import WHOLE, Block2D, Channel, Granularity, Group, Tensor
from quark.observers import SEARCHES
from quark.torch import observer as observers
from quark.torch.config.qat import QATSpec, trained_observer
from quark.torch.config.type import Dtype, QSchemeType, RoundType, ScaleType, ZeroPointType, member
from quark.torch.observer import ObserverBase
from quark.torch.stage import Stage

SCALE_OF = {"e4m3": "e4m3", "e5m3": "e5m3"}  # scale format of blocks -> scale rule
MX_SIZE = 32
ROUNDINGS = {RoundType.round: "half_away", RoundType.floor: "floor", RoundType.half_even: "half_even"}
SCALE_RULES = {
    ScaleType.float: "float32",
    ScaleType.float32: "float32",
    ScaleType.float16: "float16",
    ScaleType.bfloat16: "bfloat16",
    ScaleType.pof2: "power_of_two",
    ScaleType.float8_e5m3: "e5m3",
    ScaleType.float8_e8m0fnu: "e8m0",
}
SCALE_FORMATS = ("e8m0", "e4m3", "e5m3", "float32")
MODES = ("even", "floor", "ceil")  # of e8m0
OBSERVERS: dict[QSchemeType, type[ObserverBase]] = {
    QSchemeType.per_tensor: observers.PerTensorMinMaxObserver,
    QSchemeType.per_channel: observers.PerChannelMinMaxObserver,
    QSchemeType.per_group: observers.PerGroupMinMaxObserver,
    QSchemeType.per_block: observers.PerBlock2DMinMaxObserver,
}
OWN_FIELDS = ("narrow", "scale_rule", "calibration_method", "calibration_settings")  # the peer's files have none
LEGACY = {"dynamic": "is_dynamic", "axis": "ch_axis"}
ENUMS = {
    "dtype": Dtype,
    "qscheme": QSchemeType,
    "round_method": RoundType,
    "scale_type": ScaleType,
    "zero_point_type": ZeroPointType,
    "mx_element_dtype": Dtype,
}


@dataclass(eq=True)
class QTensorConfig(KnownFields):
    """How one tensor is quantized.

    Attributes:
        dtype: data type of the codes.
        observer_cls: class that finds the range, a subclass of ``ObserverBase``.
        is_dynamic: the range is taken from each tensor as it comes, instead of from calibration data.
        qscheme: which elements share a scale.
        ch_axis: per_channel: the axis with one scale per index; per_group and block types: the axis cut into groups. On
            the input or output of a linear layer, a dynamic per_channel scheme with axis 1 means one scale per token.
        group_size: elements per scale along ``ch_axis``; -1: all of them.
        block_size: rows and columns of a two-dimensional block (per_block).
        symmetric: the zero point is the middle of the codes.
        round_method: rounding of the elements.
        scale_type: which numbers a scale may be.
        scale_format: of group scales: "e8m0", "e4m3", "e5m3" or "float32".
        scale_calculation_mode: how e8m0 is chosen: "even" (default), "floor" or "ceil".
        qat_spec: settings of training, for a scale that is learned: a ``TQTSpec``. Not in ``to_dict``.
        mx_element_dtype: element type, for ``Dtype.mx``.
        zero_point_type: integer, or real.
        is_scale_quant: this stage quantizes the scales of the stage before it.
        enable_buffer_reuse, max_input_numel: kept for files of the peer; they change no result.
        narrow: symmetric integers leave the lowest code out, scale = amax / 127 for int8, as in the ONNX flow; None:
            False, scale = amax / 127.5. Not in ``to_dict`` where it is None.
        scale_rule: which numbers a scale may be, by the name of a row of ``quark.numerics.scales.SCALE_RULES``; more
            than ``scale_type`` has a word for. Not in ``to_dict`` where it is None.
        calibration_method: how the range is found, by the name of a row of ``quark.observers.SEARCHES``, instead of
            ``observer_cls``: one statistic per scale, for every ``qscheme``. Not in ``to_dict`` where it is None.
        calibration_settings: of that method, by name. Not in ``to_dict`` where it is None.
    """

    dtype: Dtype
    observer_cls: type[ObserverBase] | None = None
    is_dynamic: bool | None = None
    qscheme: QSchemeType | None = None
    ch_axis: int | None = None
    group_size: int | None = None
    block_size: tuple[int, int] | None = None
    symmetric: bool | None = None
    round_method: RoundType | None = None
    scale_type: ScaleType | None = None
    scale_format: str | None = None
    scale_calculation_mode: str | None = None
    qat_spec: QATSpec | None = None
    mx_element_dtype: Dtype | None = None
    zero_point_type: ZeroPointType = ZeroPointType.int32
    is_scale_quant: bool = False
    enable_buffer_reuse: bool = False
    max_input_numel: int = 4194304
    narrow: bool | None = None
    scale_rule: str | None = None
    calibration_method: str | None = None
    calibration_settings: Mapping[str, Any] | None = None

    def __setattr__(self, field: str, value: Any) -> None:
        """Fields of names take strings, when the configuration is made and later."""
        super().__setattr__(field, member(ENUMS[field], field, value) if field in ENUMS else value)

    def __post_init__(self) -> None:
        if self.block_size is not None:
            object.__setattr__(self, "block_size", tuple(self.block_size))
        self.to_stage()

    def set_group_size(self, group_size: int) -> None:
        """Set ``group_size`` to a positive number, or to -1 for the whole axis."""
        replace(self, group_size=group_size)
        self.group_size = group_size

    def is_ocp_mxfp4(self) -> bool:
        """Whether this is the OCP MXFP4 format: blocks of 32 FP4 elements under E8M0 scales, ``even`` mode."""
        return (
            self.dtype is Dtype.fp4
            and (self.qscheme, self.group_size, self.scale_format) == (QSchemeType.per_group, 32, "e8m0")
            and self.scale_calculation_mode in (None, "even")
        )

    def to_stage(self) -> Stage:
        """What runs.

        Raises:
            ConfigError: a field that cannot be, or fields that do not go together.
        """
        check_values(self)
        spec = block_spec(self) if is_block(self) else element_spec(self)
        stage = Stage(with_method(spec, self), chosen_observer(self))
        if stage.needs_range and stage.observer is observers.PlaceholderObserver:
            refuse(f"{self.dtype.name} needs a range, which PlaceholderObserver does not find: use a min/max observer")
        return stage

    def to_dict(self) -> dict[str, Any]:
        """Plain values: enumeration members and the observer by name."""
        values = {field.name: plain(getattr(self, field.name)) for field in fields(self) if field.name != "qat_spec"}
        return {name: value for name, value in values.items() if name not in OWN_FIELDS or value is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QTensorConfig:
        """The configuration that ``to_dict`` described; legacy keys ``dynamic`` and ``axis`` too.

        Raises:
            ConfigError: an unknown key or name; the nearest is shown. Or no dictionary.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(f"a tensor configuration is a dictionary, not {data!r:.80}")
        values = {LEGACY.get(name, name): value for name, value in data.items()}
        allowed = [field.name for field in fields(cls) if field.name != "qat_spec"]
        check_names("field of a tensor configuration", values, allowed)
        observer = values.get("observer_cls")
        if isinstance(observer, str):
            values["observer_cls"] = find_observer(observer)
        values["zero_point_type"] = values.get("zero_point_type") or ZeroPointType.int32
        return cls(**values)


QuantizationSpec = QTensorConfig


def refuse(sentence: str) -> NoReturn:
    """Raise ``ConfigError``."""
    raise ConfigError(sentence)


def plain(value: Any) -> Any:
    """A field as JSON holds it."""
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else getattr(value, "name", value)


def find_observer(name: str) -> type[ObserverBase]:
    """The observer class called ``name``; a user's class is known once it is defined."""
    public = {key: cls for key, cls in ObserverBase.registry.items() if not key.startswith("_")}
    check_name("observer", name, public)
    return public[name]


def check_values(config: QTensorConfig) -> None:
    """Each field for itself."""
    if config.dtype is None:
        refuse(f"the field dtype must be one of {', '.join(Dtype.__members__)}, not None")
    cls = config.observer_cls
    if cls is not None and not (isinstance(cls, type) and issubclass(cls, ObserverBase)):
        refuse(f"the field observer_cls must be a class derived from ObserverBase, not {cls!r}")
    for field in ("is_dynamic", "symmetric", "is_scale_quant"):
        if getattr(config, field) not in (None, True, False):
            refuse(f"the field {field} must be True or False, not {getattr(config, field)!r}")
    for field, value, allowed in (
        ("scale_format", config.scale_format, SCALE_FORMATS),
        ("scale_calculation_mode", config.scale_calculation_mode, MODES),
    ):
        if value is not None:
            check_name(f"value of the field {field}", value, allowed)
    if config.ch_axis is not None and (isinstance(config.ch_axis, bool) or not isinstance(config.ch_axis, int)):
        refuse(f"the field ch_axis must be an integer, not {config.ch_axis!r}")
    size = config.group_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not (size > 0 or size == -1)):
        refuse(f"the field group_size must be a positive integer, or -1 for the whole axis, not {size!r}")
    if config.qat_spec is not None and not isinstance(config.qat_spec, QATSpec):
        refuse(f"the field qat_spec must be a TQTSpec or None, not {config.qat_spec!r}")


def is_block(config: QTensorConfig) -> bool:
    """Whether the format finds its block scales itself."""
    if config.dtype is Dtype.mx or isinstance(config.dtype.row, Block):
        return True
    if config.observer_cls is observers.PerBlockMXDiffsObserver or config.qscheme is not QSchemeType.per_group:
        return False
    row, rule = config.dtype.row, block_rule(config)
    return isinstance(row, Float) and rule is not None and bool(blocks_of(row, rule))


def block_rule(config: QTensorConfig) -> str | None:
    """The rule of the block scales that the scale format and its mode name."""
    mode = config.scale_calculation_mode or "even"
    shared = config.scale_format == "e8m0" or config.dtype is Dtype.mx
    return f"e8m0_{mode}" if shared else SCALE_OF.get(config.scale_format or "")


def blocks_of(element: Element, rule: str) -> list[Block]:
    """The block formats of plain elements under scales of this rule."""
    rows = [row for row in BLOCKS.values() if row.element == element and row.rule == rule]
    return [row for row in rows if not (row.narrow or row.sub_block or row.tensor_scale != (rule == "e4m3"))]


def block_spec(config: QTensorConfig) -> TensorSpec:
    """The spec of a block format: MX, BFP16, MX6, MX9, AMD FP4, NVFP4."""
    block = block_row(config)
    name, size = config.dtype.name, config.group_size or block.size
    if (config.dtype is Dtype.bfp16 or isinstance(block, Ggml)) and size != block.size:
        refuse(f"a {name} block has {block.size} elements; group_size={size} is another format")
    if block.sub_block and (size < block.sub_block or size % block.sub_block):
        refuse(f"{name} shares one bit between two elements: group_size={size} must be even")
    if config.ch_axis is None:
        refuse(f"{name} blocks lie along an axis: give ch_axis, for instance -1")
    if config.symmetric is False:
        refuse(f"{name} has no zero point: symmetric must be True or None, not False")
    narrow_of(config.narrow, False, True, block.name)
    if config.scale_rule is not None and config.scale_calculation_mode is not None:
        refuse("scale_rule and scale_calculation_mode both say how the scales of blocks are chosen: give one of them")
    return TensorSpec(
        block.name,
        granularity=Group(config.ch_axis, WHOLE if size == -1 else size),
        scale_rule=scale_rule_of(config.scale_rule, None, "", block.name),
        rounding=ROUNDINGS[config.round_method or RoundType.half_even],
        dynamic=bool(config.is_dynamic),
    )


def block_row(config: QTensorConfig) -> Block:
    """The row of a block format."""
    own = config.dtype.row
    if isinstance(own, Block):
        return own
    if config.dtype is Dtype.mx and config.scale_format not in (None, "e8m0"):
        refuse(f"dtype mx has e8m0 scales: scale_format must be 'e8m0' or None, not {config.scale_format!r}")
    rule = block_rule(config) or ""
    found = {dtype: blocks_of(dtype.row, rule) for dtype in Dtype if isinstance(dtype.row, Int | Float)}
    element = config.mx_element_dtype if config.dtype is Dtype.mx else config.dtype
    rows = found.get(element, []) if element is not None else []
    if not rows:
        allowed = [dtype.name for dtype, kept in found.items() if kept]
        raise ConfigError(unknown("mx_element_dtype of dtype mx", getattr(element, "name", element), allowed))
    return min(rows, key=lambda row: (row.size != MX_SIZE if config.scale_format == "e8m0" else row.size, row.size))


def element_of(dtype: Dtype) -> Element:
    """The row of a data type whose scales come from outside."""
    if dtype.row is None or isinstance(dtype.row, Block):
        refuse(f"{dtype.name} finds its scales itself")
    return dtype.row


def is_cast(dtype: Dtype) -> bool:
    """Whether a type is wide enough to need no scale: a cast and back."""
    return dtype.row is not None and dtype.row.unit_scale and not isinstance(dtype.row, Block)


def element_spec(config: QTensorConfig) -> TensorSpec:
    """The spec of codes with scales from outside."""
    row = element_of(config.dtype)
    granularity = Tensor() if is_cast(config.dtype) and config.qscheme is None else granularity_of(config)
    symmetric = config.symmetric
    if symmetric is None:
        symmetric = not (isinstance(row, Int) and not row.signed)
    if not symmetric and not row.has_zero_point:
        refuse(f"{config.dtype.name} has no zero point: symmetric must be True or None, not False")
    return TensorSpec(
        row.name,
        symmetric=bool(symmetric),
        narrow=narrow_of(config.narrow, False, symmetric, row.name),
        granularity=granularity,
        scale_rule=scale_rule_of(config.scale_rule, *implied_rule(config), row.name),
        rounding=ROUNDINGS[config.round_method or RoundType.half_even],
        dynamic=bool(config.is_dynamic),
        real_zero=config.zero_point_type is ZeroPointType.float32 and not symmetric,
    )


def granularity_of(config: QTensorConfig) -> Granularity:
    """Which elements share a scale."""
    scheme = config.qscheme
    if scheme is None:
        allowed = ", ".join(QSchemeType.__members__)
        refuse(f"{config.dtype.name} needs the field qscheme; one of {allowed}")
    if scheme is QSchemeType.per_block:
        size = config.block_size
        if size is None or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            refuse(f"per_block needs block_size=(rows, columns), two positive integers, not {size!r}")
        return Block2D(*size)
    if scheme is QSchemeType.per_tensor:
        return Tensor()
    if config.ch_axis is None:
        refuse(f"{scheme.name} needs the field ch_axis, the axis that has the scales")
    if scheme is QSchemeType.per_channel:
        return Channel(config.ch_axis)
    if config.group_size is None:
        refuse("per_group needs the field group_size, the number of elements that share a scale (-1: the whole axis)")
    return Group(config.ch_axis, WHOLE if config.group_size == -1 else config.group_size)


def implied_rule(config: QTensorConfig) -> tuple[str | None, str]:
    """Name of the scale rule that the observer, the scale format or the scale type means, and which of them does."""
    if config.observer_cls is not None and config.observer_cls.rule is not None:
        return config.observer_cls.rule, f"observer_cls={config.observer_cls.__name__}"
    by = f"scale_format={config.scale_format!r}"
    if config.scale_format == "e8m0":
        mode = {"even": "_even", "floor": "_floor", "ceil": "_ceil"}[config.scale_calculation_mode or "even"]
        return f"e8m0{mode}", by
    if config.scale_format == "e5m3":
        return "e5m3", by
    if config.scale_format == "e4m3":
        refuse(f"scale_format 'e4m3' works for dtype fp4 with qscheme per_group, and this is {config.dtype.name}")
    said = config.scale_type
    return (None, "") if said is None else (SCALE_RULES[said], f"scale_type={said.name}")


def with_method(spec: TensorSpec, config: QTensorConfig) -> TensorSpec:
    """``spec`` with the method that the configuration names, if it names one.

    Raises:
        ConfigError: an unknown method or setting, one beside an observer class, or for a format without a range.
    """
    method, settings = config.calibration_method, config.calibration_settings or {}
    if method is None:
        if config.calibration_settings is not None:
            refuse("calibration_settings are those of a calibration_method, and there is none")
        return spec
    check_name("calibration_method", method, SEARCHES)
    if config.observer_cls is not None:
        refuse(f"calibration_method={method!r} and observer_cls={config.observer_cls.__name__}: give one of them")
    if spec.row.unit_scale:
        refuse(f"{config.dtype.name} has no range to find: calibration_method must be None")
    SEARCHES[method].check(settings)
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return replace(spec, method=method, settings=tuple(sorted(values.items())))


def chosen_observer(config: QTensorConfig) -> type[ObserverBase]:
    """The class that finds the range, checked against the scheme."""
    if config.calibration_method is not None:
        return observers.SearchObserver
    scheme = config.qscheme or QSchemeType.per_tensor
    cls = config.observer_cls or OBSERVERS[scheme]
    if cls.trained:
        check_trained(config, cls)
        cls = trained_observer(cls, config.qat_spec)
    elif config.qat_spec is not None:
        refuse(f"qat_spec={config.qat_spec!r} belongs to observers that learn (TQTObserver), not to {cls.__name__}")
    if is_cast(config.dtype) or is_block(config) or issubclass(cls, observers.UniformScalingObserver):
        return cls  # running extremes work for every scheme
    if cls.schemes and scheme.name not in cls.schemes:
        allowed = [name for name, other in ObserverBase.registry.items() if scheme.name in other.schemes]
        refuse(f"{cls.__name__} works for {' and '.join(cls.schemes)}, not {scheme.name}; {', '.join(allowed)} would")
    return cls


def check_trained(config: QTensorConfig, cls: type[ObserverBase]) -> None:
    """A scale can be learned: of static integers, and of the kind that the method has."""
    if config.is_dynamic or is_block(config) or not isinstance(config.dtype.row, Int):
        refuse(f"{cls.__name__} learns the scale of static integers; {config.dtype.name} is in blocks, dynamic or none")
    if config.narrow or config.scale_rule not in (None, "float32", cls.rule):
        refuse(f"{cls.__name__} learns scales of all codes: narrow and scale_rule must be None")
    if config.zero_point_type is ZeroPointType.float32:
        refuse(f"{cls.__name__} needs an integer zero point: zero_point_type must be int32")
    if cls.rule is not None:
        if config.symmetric is False or (config.symmetric is None and "uint" in config.dtype.name):
            refuse(f"{cls.__name__} has one threshold for both sides: symmetric must be True")
    elif config.scale_type not in (None, ScaleType.float, ScaleType.float32):
        refuse(f"{cls.__name__} learns float scales, not {config.scale_type.name}; TQTObserver learns powers of two")
