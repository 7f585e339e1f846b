"""What a tensor becomes: the small frozen values that every dialect compiles to.

A ``TensorSpec`` is the whole description of one tensor's quantization: format, granularity, how a range becomes a
scale, how the range is found. A ``LayerSpec`` gives one spec per slot of a node. Neither knows a model.
"""

from __future__ import annotations

from dataclasses import field, replace
from functools import cache
from typing import Any

from quark.config.known_fields import check_switches
from quark.dataclass import dataclass
from quark.errors import ConfigError, as_a, check_name
from quark.numerics.affine import Coding, Grid
from quark.numerics.blocks import BLOCK_RULES
from quark.numerics.elements import Power
from quark.numerics.formats import FORMATS, Block, Float, Format, Int, get_format
from quark.numerics.ggml import GGML
from quark.numerics.granularity import WHOLE, Granularity, Group, Tensor
from quark.numerics.rounding import ROUNDINGS
from quark.numerics.scales import SCALE_RULES
from quark.observers.registry import BUILT_IN, OWN_METHODS, SEARCHES


@dataclass(frozen=True)
class TensorSpec:
    """How one tensor is quantized.

    Attributes:
        format: name of a row of ``quark.numerics.formats.FORMATS``, or (torch) of ``quark.numerics.ggml.GGML``.
        symmetric: zero point fixed at the middle of the code range (0 for signed formats).
        narrow: symmetric signed integers use -qmax..qmax (scale = amax / qmax) instead of the full range.
        granularity: which elements share a scale; of a block format, the axis and the length of its blocks (any
            other than ``Group``: the length of the format's row).
        scale_rule: name of a row of ``quark.numerics.scales.SCALE_RULES``. Of a block format, a rule of
            ``quark.numerics.blocks.BLOCK_RULES`` replaces that of its block scales; any other is for the scale above.
        rounding: rounding of the elements.
        method: how the range is found: name of a row of ``quark.observers.SEARCHES``, or of an observer class with a
            search of its own (``quark.observers.registry.OWN_METHODS``).
        settings: settings of that method, as sorted (name, value) pairs so that the spec stays hashable.
        reduced: half of the codes only, for integer kernels that saturate (``reduce_range``).
        dynamic: the range is taken at run time instead of at calibration.
        real_zero: the zero point is a real number: the lowest code means exactly the smallest value.
        second: how the values that this makes are quantized once more (torch: int4 on FP8); None: they are not.
    """

    format: str = "int8"
    symmetric: bool = True
    narrow: bool = True
    granularity: Granularity = field(default_factory=Tensor)
    scale_rule: str = "float32"
    rounding: str = "half_even"
    method: str = "minmax"
    settings: tuple[tuple[str, Any], ...] = ()
    dynamic: bool = False
    reduced: bool = False
    real_zero: bool = False
    second: TensorSpec | None = None

    def __post_init__(self) -> None:
        check_switches(self, "symmetric", "narrow", "dynamic", "reduced", "real_zero")
        for name, types, words in (
            ("granularity", Granularity, "Tensor(), Channel(axis) or Group(axis, size)"),
            ("settings", tuple, "a tuple of (name, value) pairs"),
            ("second", TensorSpec | None, "a TensorSpec or None"),
        ):
            if not isinstance(getattr(self, name), types):
                raise ConfigError(f"the field {name} of a TensorSpec must be {words}, not {getattr(self, name)!r}")
        if self.second is not None and self.second.second is not None:
            raise ConfigError("a tensor is quantized in two stages at most, and these are three")
        for kind, value, allowed in (
            ("data type", self.format, {**FORMATS, **GGML}),
            ("scale rule", self.scale_rule, SCALE_RULES),
            ("calibration method", self.method, {**SEARCHES, **dict.fromkeys(OWN_METHODS)}),
            ("rounding", self.rounding, ROUNDINGS),
        ):
            check_name(kind, value, allowed)
        row = self.row
        if self.method in SEARCHES and self.method not in BUILT_IN and not self.searchable:
            raise ConfigError(no_range(self.format, self.method))
        if isinstance(row, Block) and row.sub_block and row.size % row.sub_block:
            raise ConfigError(
                f"{self.format} shares its shifts between {row.sub_block} elements: a block of {row.size} must be a "
                f"multiple of {row.sub_block}"
            )

    @property
    def row(self) -> Format:
        """The row of the format table; of a block format, with the block length and the scale rule of this spec."""
        return _row(self.format, self.granularity, self.scale_rule)

    @property
    def first(self) -> TensorSpec:
        """The first of two stages; the spec itself where there is one."""
        return self if self.second is None else replace(self, second=None)

    @property
    def grid(self) -> Grid:
        """How a range becomes a scale and a zero point under this spec."""
        inside = isinstance(self.row, Block) and self.scale_rule in BLOCK_RULES
        return Grid(self.row, self.symmetric, self.narrow, "float32" if inside else self.scale_rule)

    @property
    def coding(self) -> Coding:
        """How values become codes under scales, and codes values, as nodes of ONNX do it."""
        return Coding(self.row, self.granularity, self.rounding, self.narrow_codes)

    @property
    def ranged(self) -> bool:
        """Whether there is a range that calibration data give: not for scales made at run time, or formats without."""
        return not self.dynamic and not self.row.unit_scale

    @property
    def searchable(self) -> bool:
        """Whether a calibration method may have a range to find: not for blocks that bring all of their scales."""
        return not (isinstance(self.row, Block) and self.row.unit_scale)

    @property
    def narrow_codes(self) -> bool:
        """Whether stored codes leave the lowest one unused; at run time activations use all of them."""
        return self.narrow and self.symmetric

    def describe(self, given: bool = False) -> str:
        """One short line for tables: ``int8 symmetric per channel (axis 0), power_of_two, mse``.

        A format says no more than it has: the blocks of ``mxfp4`` find their scales themselves, ``bfloat16`` has none.
        ``given``: nothing finds the scale, it is told. Of two stages: the second on the first.
        """
        if self.second is not None:
            return f"{self.second.describe(given)} on {self.first.describe(given)}"
        row = self.row
        rounding = "" if self.rounding == "half_even" else f", rounded {self.rounding}"
        if isinstance(row, Block):
            size = "a whole axis" if row.size == WHOLE else row.size
            rule = f" with {row.rule} scales" if row.rule != as_a(Block, get_format(self.format)).rule else ""
            whole = f" under one float32 scale per tensor, {self._found()}" if row.tensor_scale else ""
            return f"{self.format} in blocks of {size}{rule}{whole}{rounding}"
        if row.unit_scale:
            return self.format + rounding
        sides = "symmetric" if self.symmetric else "asymmetric"
        codes = " full range" if isinstance(row, Int) and self.symmetric and not self.narrow else ""
        zero = " with real zero points" if self.real_zero else ""
        scales = f"{self.granularity}, {self.scale_rule}"
        found = "given" if given and not self.dynamic else self._found()
        return f"{self.format} {sides}{codes}{zero} {scales}, {found}{rounding}"

    def _found(self) -> str:
        """How the range is found, in words."""
        told = ", ".join(f"{name}={value}" for name, value in self.settings)
        method = f"{self.method} ({told})" if told else self.method
        if not self.dynamic:
            return method
        return "dynamic" if method == "minmax" else f"dynamic {method}"


def no_range(format: str, method: str) -> str:
    """Why a calibration method cannot be named."""
    return f"{format} brings the scales of its blocks: the calibration method {method!r} has no range to find"


def narrow_of(given: bool | None, default: bool, symmetric: bool, format: str) -> bool:
    """The field ``narrow`` of a dialect's configuration: ``given``, or the dialect's default where it is None.

    Raises:
        ConfigError: no bool, or a tensor whose codes have no lowest one to leave out.
    """
    if given is None:
        return default
    if not isinstance(given, bool):
        raise ConfigError(f"the field narrow must be True, False or None, not {given!r}")
    if given and not (symmetric and isinstance(get_format(format), Int)):
        kind = format if symmetric else f"asymmetric {format}"
        raise ConfigError(f"the field narrow leaves out the lowest code of symmetric integers, and this is {kind}")
    return given


def scale_rule_of(given: str | None, implied: str | None, by: str, format: str) -> str:
    """The field ``scale_rule`` of a dialect's configuration: ``given``, or what its other fields say where it is None.

    Args:
        given: name of a row of ``SCALE_RULES``.
        implied: what another field says, or None where nothing was said.
        by: that field and its value, for the error.
        format: of the codes; the scales of blocks have rules of their own.

    Raises:
        ConfigError: an unknown rule, one that contradicts the other field, or one that blocks cannot have.
    """
    if given is None:
        return implied or "float32"
    check_name("value of the field scale_rule", given, SCALE_RULES)
    if implied not in (None, given):
        raise ConfigError(f"scale_rule={given!r} contradicts {by}, which means {implied!r}: give one of them")
    if isinstance(get_format(format), Block) and given not in BLOCK_RULES and given != "float32":
        allowed = ", ".join(sorted(BLOCK_RULES))
        raise ConfigError(f"scale_rule={given!r} is not a rule for the blocks of {format}; allowed are {allowed}")
    return given


def check_sign(what: str, spec: TensorSpec) -> None:
    """Refuse floats without a sign, which scales have: they would make zeros of what is below 0.

    Raises:
        ConfigError: such a format, of ``what``.
    """
    if isinstance(spec.row, Float | Power) and not spec.row.signed:
        raise ConfigError(f"{what}: {spec.format} has no sign, so numbers below 0 would be lost: it is for scales")


@cache
def _row(format: str, granularity: Granularity, scale_rule: str) -> Format:
    """See ``TensorSpec.row``."""
    row = get_format(format)
    if not isinstance(row, Block):
        return row
    size = granularity.size if isinstance(granularity, Group) else row.size
    return replace(row, size=size, rule=scale_rule if scale_rule in BLOCK_RULES else row.rule)


@dataclass(frozen=True)
class LayerSpec:
    """The specs of one node's slots; ``None`` in a slot means: as the global rule says for outputs and biases, float
    for inputs and weights."""

    inputs: TensorSpec | None = None
    weight: TensorSpec | None = None
    bias: TensorSpec | None = None
    outputs: TensorSpec | None = None

    def __post_init__(self) -> None:
        for name in ("inputs", "weight", "bias", "outputs"):
            if not isinstance(value := getattr(self, name), TensorSpec | None):
                raise ConfigError(f"the field {name} of a LayerSpec must be a TensorSpec or None, not {value!r}")
