"""``Stage``: one quantization of one tensor, compiled from the configuration; a tensor has one stage, or two in a
row."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from quark.config.tensor import TensorSpec
from quark.dataclass import dataclass
from quark.numerics.affine import Grid
from quark.numerics.formats import Block, Format
from quark.numerics.granularity import Tensor
from quark.torch.observer import ObserverBase


@dataclass(frozen=True)
class Stage:
    """How a tensor is quantized and how its range is found.

    Attributes:
        spec: everything about it; its method and settings become those of the observer.
        observer: finds the range.
    """

    spec: TensorSpec
    observer: type[ObserverBase]

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", self.observer.told(self.spec))

    @property
    def real_zero(self) -> bool:
        """The zero point is a real number: the lowest code means exactly the smallest value."""
        return self.spec.real_zero

    @cached_property
    def format(self) -> Format:
        """The row of the format table; of a block format, with the block length and scale rule of the spec."""
        return self.spec.row

    @cached_property
    def observed(self) -> TensorSpec:
        """What the observer is told: a block format has one range for the whole tensor, if any."""
        granularity = Tensor() if self.is_block else self.spec.granularity
        return replace(self.spec, granularity=granularity, scale_rule=self.grid.scale_rule)

    @cached_property
    def is_block(self) -> bool:
        """Whether the format finds its block scales itself."""
        return isinstance(self.format, Block)

    @cached_property
    def grid(self) -> Grid:
        """How a range becomes scale and zero point."""
        return self.spec.grid

    @property
    def needs_range(self) -> bool:
        """Whether there is a scale that depends on a range."""
        return not self.format.unit_scale

    @property
    def calibrated(self) -> bool:
        """Whether the range is found once, before the model runs."""
        return self.needs_range and not self.spec.dynamic


Stages = tuple[Stage, ...]
