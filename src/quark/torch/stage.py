"""``Stage``: one quantization of one tensor, compiled from the configuration; a tensor has one stage, or two in a
row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from quark.config.tensor import TensorSpec
from quark.numerics.affine import Grid
from quark.numerics.formats import Block, Format, get_format
from quark.numerics.granularity import Group
from quark.torch.observer import ObserverBase


@dataclass(frozen=True)
class Stage:
    """How a tensor is quantized and how its range is found.

    Attributes:
        spec: format, granularity, scale rule, rounding. Of a block format, the granularity gives axis and block length,
            and a scale rule other than float32 replaces that of the block scales.
        observer: finds the range.
        real_zero: the zero point is a real number: the lowest code means exactly the smallest value.
    """

    spec: TensorSpec
    observer: type[ObserverBase]
    real_zero: bool = False

    @cached_property
    def format(self) -> Format:
        """The row of the format table; of a block format, with the block length and scale rule of the spec."""
        row, spec = get_format(self.spec.format), self.spec
        if not isinstance(row, Block):
            return row
        size = spec.granularity.size if isinstance(spec.granularity, Group) else row.size
        rule = row.rule if spec.scale_rule == "float32" else spec.scale_rule
        return replace(row, size=size, rule=rule)

    @cached_property
    def is_block(self) -> bool:
        """Whether the format finds its block scales itself."""
        return isinstance(self.format, Block)

    @cached_property
    def grid(self) -> Grid:
        """How a range becomes scale and zero point."""
        spec = self.spec
        return Grid(self.format, spec.symmetric, spec.narrow, "float32" if self.is_block else spec.scale_rule)

    @property
    def needs_range(self) -> bool:
        """Whether there is a scale that depends on a range."""
        return not self.format.unit_scale

    @property
    def calibrated(self) -> bool:
        """Whether the range is found once, before the model runs."""
        return self.needs_range and not self.spec.dynamic


Stages = tuple[Stage, ...]
