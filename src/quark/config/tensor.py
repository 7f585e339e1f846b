"""What a tensor becomes: the small frozen values that every dialect compiles to.

A ``TensorSpec`` is the whole description of one tensor's quantization: format, granularity, how a range becomes a
scale, how the range is found. A ``LayerSpec`` gives one spec per slot of a node. Neither knows a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quark.errors import ConfigError, unknown
from quark.numerics.affine import Grid
from quark.numerics.formats import FORMATS, Block, get_format
from quark.numerics.granularity import Granularity, Group, Tensor
from quark.numerics.scales import SCALE_RULES
from quark.observers import SEARCHES


@dataclass(frozen=True)
class TensorSpec:
    """How one tensor is quantized.

    Attributes:
        format: name of a row of ``quark.numerics.formats.FORMATS``.
        symmetric: zero point fixed at the middle of the code range (0 for signed formats).
        narrow: symmetric signed integers use -qmax..qmax (scale = amax / qmax) instead of the full range.
        granularity: which elements share a scale.
        scale_rule: name of a row of ``quark.numerics.scales.SCALE_RULES``.
        rounding: rounding of the elements.
        method: name of a row of ``quark.observers.SEARCHES``; how the range is found.
        settings: settings of that method, as sorted (name, value) pairs so that the spec stays hashable.
        reduced: half of the codes only, for integer kernels that saturate (``reduce_range``).
        dynamic: the range is taken at run time instead of at calibration.
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

    def __post_init__(self) -> None:
        for kind, value, allowed in (
            ("data type", self.format, FORMATS),
            ("scale rule", self.scale_rule, SCALE_RULES),
            ("calibration method", self.method, SEARCHES),
        ):
            if value not in allowed:
                raise ConfigError(unknown(kind, value, allowed))

    @property
    def grid(self) -> Grid:
        """How a range becomes a scale and a zero point under this spec."""
        return Grid(get_format(self.format), self.symmetric, self.narrow, self.scale_rule)

    def describe(self) -> str:
        """One short line for tables: ``int8 symmetric per channel(0), power_of_two, mse``.

        A format says no more than it has: the blocks of ``mxfp4`` find their scales themselves, ``bfloat16`` has none.
        """
        row = get_format(self.format)
        if isinstance(row, Block):
            size = self.granularity.size if isinstance(self.granularity, Group) else row.size
            whole = f" under one float32 scale per tensor, {self.method}" if row.tensor_scale else ""
            return f"{self.format} in blocks of {size or 'a whole axis'}{whole}"
        if row.unit_scale:
            return self.format
        sides = "symmetric" if self.symmetric else "asymmetric"
        method = "dynamic" if self.dynamic else self.method
        return f"{self.format} {sides} {self.granularity}, {self.scale_rule}, {method}"


@dataclass(frozen=True)
class LayerSpec:
    """The specs of one node's slots; ``None`` in a slot means: as the global rule says for outputs and biases, float
    for inputs and weights."""

    inputs: TensorSpec | None = None
    weight: TensorSpec | None = None
    bias: TensorSpec | None = None
    outputs: TensorSpec | None = None
