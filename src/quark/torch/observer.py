"""Observers: what is remembered of a tensor during calibration, and the range it comes to.

An observer is made with the ``TensorSpec`` of its tensor, is called with every sample, and answers ``range()``: the
lowest and the highest value per scale. A class of your own plugs in where these do: subclass ``ObserverBase``, write
``observe`` and ``range``, and name the class in ``QTensorConfig(observer_cls=...)``.

The scheme (``qscheme``) says which elements share a scale; an observer only says how the range is found. So a
per-channel min/max observer in a per-group configuration finds the minima and maxima of the groups.

``Histogram`` statistics and the searches over them are those of ``quark.observers``; running minima and maxima are
collected here on the tensor's own device. ``LSQObserver`` and ``TQTObserver`` find where a scale starts that training
learns (``quark.torch.learned``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from quark.config.tensor import TensorSpec
from quark.deferred import when_used
from quark.errors import ConfigError, DataError
from quark.numerics.affine import Coding
from quark.numerics.granularity import Tensor
from quark.observers.entropy import search_both
from quark.observers.histogram import Histogram
from quark.observers.registry import OWN_METHODS, SEARCHES, count, rows_of
from quark.observers.statistics import Statistic

if TYPE_CHECKING:
    import torch

    Range = tuple[torch.Tensor, torch.Tensor]
else:
    torch = when_used("torch")  # configurations name these classes before a tensor is there

#: A subclass that writes one of these finds ranges its own way.
OWN_CODE = ("__init__", "__call__", "observe", "range", "settings")
PIECE = (1 << 15) - 1  # elements that torch works on in one thread, and that stay in the cache


class ObserverBase:
    """How the range of one tensor is found; the base of every observer.

    Attributes:
        registry: every subclass by its name, those of users too; configurations store the name.
        schemes: names of the ``QSchemeType`` members it works for; empty: all.
        rule: the scale rule that it implies, or None.
        trained: training changes the scale.
        method: the row of ``quark.observers.SEARCHES`` that finds the range; empty for code of its own.
        spec: how the tensor is quantized.
        count: values seen.
        of_weight: what is seen is a weight, which is seen once.
    """

    registry: ClassVar[dict[str, type[ObserverBase]]] = {}
    schemes: ClassVar[tuple[str, ...]] = ()
    rule: ClassVar[str | None] = None
    trained: ClassVar[bool] = False
    method: ClassVar[str] = ""
    of_weight: bool = False
    _own: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        ObserverBase.registry[cls.__name__] = cls
        written = any(name in vars(cls) for name in OWN_CODE)
        cls._own = not cls.method or ("method" not in vars(cls) and (cls._own or written))
        if cls._own:
            OWN_METHODS.add(cls.__name__)

    @classmethod
    def told(cls, spec: TensorSpec) -> TensorSpec:
        """``spec`` with the method and the settings by which this class finds a range; its name for code of its own."""
        method = cls.__name__ if cls._own else cls.method
        return replace(spec, method=method, settings=tuple(sorted(cls.settings_of(spec).items())))

    @classmethod
    def settings_of(cls, spec: TensorSpec) -> Mapping[str, Any]:
        """Settings of the method for a tensor of this spec."""
        return {}

    def __init__(self, spec: TensorSpec, device: torch.device | str | None = None) -> None:
        self.spec = spec
        self.device = device
        self.count = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See one sample, which is returned unchanged; an empty one (an expert without tokens) is nothing seen."""
        if x.numel():
            self.observe(x.detach())
            self.count += x.numel()
        return x

    def observe(self, x: torch.Tensor) -> None:
        """Take in a non-empty sample."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it observes")

    def range(self) -> Range:
        """Lowest and highest value, each of the shape of the scales."""
        raise NotImplementedError(f"{type(self).__name__} does not say which range it found")


class UniformScalingObserver(ObserverBase):
    """Base of the observers that keep ``min_val`` and ``max_val`` per scale.

    Attributes:
        min_val, max_val: float32 of the shape of the scales, or None before the first sample.
    """

    def __init__(self, spec: TensorSpec, device: torch.device | str | None = None) -> None:
        super().__init__(spec, device)
        self.min_val: torch.Tensor | None = None
        self.max_val: torch.Tensor | None = None

    def range(self) -> Range:
        """The values kept."""
        if self.min_val is None or self.max_val is None:
            raise DataError(f"{type(self).__name__} has seen no values")
        return self.min_val, self.max_val


class _MinMax(UniformScalingObserver):
    """Smallest and largest value of each scale's elements over all samples."""

    method = "minmax"

    def observe(self, x: torch.Tensor) -> None:
        """Widen the range by one sample."""
        lo, hi = extremes(x, self.spec)
        if self.min_val is None or self.max_val is None:
            self.min_val, self.max_val = lo, hi
            return
        if lo.shape != self.min_val.shape:
            raise DataError(
                f"scales {self.spec.granularity} cannot be static here: one sample has {list(self.min_val.shape)} of "
                f"them and another {list(lo.shape)}; use is_dynamic=True, or another axis"
            )
        self.min_val, self.max_val = torch.minimum(self.min_val, lo), torch.maximum(self.max_val, hi)


class PlaceholderObserver(ObserverBase):
    """Observes nothing: for data types that need no range."""

    def observe(self, x: torch.Tensor) -> None:
        """Nothing."""

    def range(self) -> Range:
        """There is none."""
        raise ConfigError(
            f"PlaceholderObserver finds no range, and {self.spec.format} needs one: use a min/max observer"
        )


class PerTensorMinMaxObserver(_MinMax):
    """The smallest and the largest value."""

    schemes = ("per_tensor",)


class PerChannelMinMaxObserver(_MinMax):
    """The smallest and the largest value of each channel (or group)."""

    schemes = ("per_channel", "per_group")


class PerGroupMinMaxObserver(_MinMax):
    """The smallest and the largest value of each group."""

    schemes = ("per_group",)


class PerBlockMXObserver(_MinMax):
    """The largest magnitude of each block."""

    schemes = ("per_group",)


class PerBlockMXBufferReuseObserver(PerBlockMXObserver):
    """``PerBlockMXObserver``; buffers are always reused."""

    schemes = ("per_group",)


class PerBlockBFPObserver(_MinMax):
    """The largest magnitude of each block of a block floating point format."""

    schemes = ("per_group",)


class PerBlock2DMinMaxObserver(_MinMax):
    """The smallest and the largest value of each two-dimensional block."""

    schemes = ("per_block",)


class PerTensorMovingAverageMinMaxObserver(ObserverBase):
    """The average over samples of the smallest and of the largest value, newer samples counting more.

    Attributes:
        constant: weight of the newest sample, 0..1; 1 keeps the last sample only. Subclass to choose.
    """

    schemes = ("per_tensor",)
    method = "moving_minmax"
    constant: ClassVar[float] = 0.01

    def __init__(self, spec: TensorSpec, device: torch.device | str | None = None) -> None:
        super().__init__(spec, device)
        self.statistic = SEARCHES["moving_minmax"].observe(self.settings_of(spec))

    @classmethod
    def settings_of(cls, spec: TensorSpec) -> Mapping[str, Any]:
        """The weight of the newest sample."""
        return {"constant": cls.constant}

    def observe(self, x: torch.Tensor) -> None:
        """Add one sample."""
        self.statistic.update(torch.stack(extremes(x, self.spec)).cpu().numpy())

    def range(self) -> Range:
        """The averages."""
        return scalar(self.statistic.lo), scalar(self.statistic.hi)


class SearchObserver(ObserverBase):
    """The range that a row of ``quark.observers.SEARCHES`` finds, for each scale by itself.

    The method is that of the spec (``QTensorConfig(calibration_method=...)``); a subclass may fix one.
    """

    def __init__(self, spec: TensorSpec, device: torch.device | str | None = None) -> None:
        super().__init__(spec, device)
        self.statistics: list[Statistic] = []
        self.shape: tuple[int, ...] = ()
        self.found: Range | None = None

    @classmethod
    def told(cls, spec: TensorSpec) -> TensorSpec:
        """``spec`` as it is, which names the method; what a subclass fixes."""
        return spec if cls is SearchObserver else super().told(spec)

    def settings(self) -> dict[str, Any]:
        """Settings of the search."""
        return dict(self.settings_of(self.spec) if self.method else self.spec.settings)

    def observe(self, x: torch.Tensor) -> None:
        """Count the values of one sample, those of every scale by themselves; of a weight, find all scales at once."""
        granularity, x = self.spec.granularity, x.float()
        row = SEARCHES[self.method or self.spec.method]
        if self.of_weight and row.rows is not None:
            if self.found is not None:
                raise DataError(f"{type(self).__name__} takes one sample, a weight; static activations give many")
            extremes(x, self.spec)
            lo, hi = row.of_rows(granularity.tile(x).cpu().numpy(), self.spec.grid, self.settings())
            self.found = torch.from_numpy(lo), torch.from_numpy(hi)
            return
        shape = granularity.parameter_shape(tuple(x.shape))
        if self.statistics and shape != self.shape:
            counts = f"samples have {list(self.shape)} and {list(shape)} of them"
            raise DataError(f"scales {granularity} cannot be static here: {counts}; use is_dynamic=True")
        if not self.statistics:
            self.row, self.told_settings, self.statistics = rows_of(
                self.method or self.spec.method, math.prod(shape), self.spec.grid, self.settings()
            )
            self.shape = shape
        values = x.cpu().numpy()
        for statistic, part in zip(self.statistics, granularity.elements(values) if shape else [values], strict=True):
            count(statistic, part)

    def range(self) -> Range:
        """The outcome of the search."""
        if self.found is not None:
            return self.found
        found = [self.row.find(one, self.spec.grid, self.told_settings) for one in self.statistics]
        lo, hi = torch.tensor(found, dtype=torch.float64).T
        return lo.reshape(self.shape), hi.reshape(self.shape)


class _Searched(SearchObserver):
    """A range searched in a histogram of all values."""

    schemes = ("per_tensor",)
    method = "mse"


class PerTensorHistogramObserver(_Searched):
    """The range of least squared error over a histogram of all values, each side for itself."""


class PerTensorHistogramObserverPro(_Searched):
    """The same as ``PerTensorHistogramObserver``."""


class PerTensorMSEObserver(_Searched):
    """The range of least squared error over a histogram of all values, each side for itself."""


class PerTensorPercentileObserver(_Searched):
    """The range that keeps ``percentile`` percent of the values: of |x| for a symmetric tensor, else of both tails.

    Attributes:
        percentile: 0..100. Subclass to choose another.
    """

    method = "percentile"
    percentile: ClassVar[float] = 99.999

    @classmethod
    def settings_of(cls, spec: TensorSpec) -> Mapping[str, Any]:
        """The percentile, and whether both sides are judged together."""
        return {"percentile": cls.percentile, "symmetric": spec.symmetric}


class PerTensorPowOf2MinMaxObserver(PerTensorMinMaxObserver):
    """The smallest and the largest value, under a power-of-two scale."""

    rule = "power_of_two"


class PerChannelPowOf2MinMaxObserver(PerChannelMinMaxObserver):
    """The smallest and the largest value of each channel, under power-of-two scales."""

    rule = "power_of_two"


class PerTensorPowOf2MinMSEObserver(_Searched):
    """The power-of-two scale of least squared error."""

    rule = "power_of_two"


class _SearchedRows(SearchObserver):
    """The scales of least squared error, for weights: one sample."""

    schemes = ("per_channel", "per_group")
    method = "mse"
    of_weight = True


class PerChannelPowOf2MinMSEObserver(_SearchedRows):
    """The power-of-two scales of least squared error, for weights: one sample."""

    rule = "power_of_two"


class PerBlockMXDiffsObserver(ObserverBase):
    """Of the two shared exponents at and below the one that clips nothing, that of less squared error in the block."""

    schemes = ("per_group",)
    rule = "e8m0_ceil"
    found: torch.Tensor | None = None

    def observe(self, x: torch.Tensor) -> None:
        """Try both exponents on a sample; the newest sample counts."""
        grid, granularity = self.spec.grid, self.spec.granularity
        lo, hi = extremes(x, self.spec)
        amax = torch.maximum(-lo, hi)
        errors, candidates = [], []
        for factor in (1.0, 0.5):
            scale = torch.from_numpy(grid.parameters(-amax.cpu().numpy(), amax.cpu().numpy())[0]).to(x.device) * factor
            off = Coding(grid.format, granularity).fake_quantize(x.float(), scale, torch.zeros_like(scale)) - x.float()
            errors.append(granularity.tile(off).square().sum(-1))
            candidates.append(scale)
        self.found = torch.where(errors[1] < errors[0], candidates[1], candidates[0]) * self.largest

    @property
    def largest(self) -> float:
        """The power of two at or below the largest element: what a shared exponent is counted from."""
        return 2.0 ** torch.tensor(float(self.spec.grid.format.max)).log2().floor().item()

    def range(self) -> Range:
        """Ranges whose scales are the exponents found."""
        if self.found is None:
            raise DataError("PerBlockMXDiffsObserver has seen no values")
        return -self.found, self.found


class LSQObserver(ObserverBase):
    """The scale of least squared error, from which training learns on (``quark.torch.learned``)."""

    schemes = ("per_tensor", "per_channel", "per_group")
    trained = True

    def __init__(self, spec: TensorSpec, device: torch.device | str | None = None) -> None:
        super().__init__(spec, device)
        cls = PerTensorMSEObserver if isinstance(spec.granularity, Tensor) else _SearchedRows
        self.searched: ObserverBase = cls(spec, device)

    def observe(self, x: torch.Tensor) -> None:
        """Count the values of one sample."""
        self.searched.of_weight |= self.of_weight
        self.searched.observe(x)

    def range(self) -> Range:
        """The outcome of the search."""
        return self.searched.range()


class TQTObserver(ObserverBase):
    """The threshold |mean| + 3 standard deviations, no wider than the data, from which training learns on."""

    schemes = ("per_tensor",)
    rule = "power_of_two"
    trained = True

    def __init__(self, spec: TensorSpec, device: torch.device | str | None = None) -> None:
        super().__init__(spec, device)
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.values = 0
        self.largest = 0.0

    def observe(self, x: torch.Tensor) -> None:
        """Add one sample to the sums of x and x^2."""
        lo, hi = extremes(x, self.spec)
        self.largest = max(self.largest, float(-lo), float(hi))
        wide = x.double()
        self.sums += torch.stack([wide.sum(), wide.square().sum()]).cpu()
        self.values += x.numel()

    def range(self) -> Range:
        """The threshold to both sides."""
        mean, square = (self.sums / self.values).tolist()
        threshold = min(abs(mean) + 3 * math.sqrt(max(square - mean * mean, 0.0)), self.largest)
        return scalar(-threshold), scalar(threshold)


class TQTDivergenceObserver(TQTObserver):
    """The threshold of least Jeffreys divergence, KL(p || q) + KL(q || p), from which training learns on."""

    def __init__(self, spec: TensorSpec, device: torch.device | str | None = None) -> None:
        super().__init__(spec, device)
        self.statistic = Histogram()

    def observe(self, x: torch.Tensor) -> None:
        """Count the values of one sample."""
        extremes(x, self.spec)
        self.statistic.update(x.float().cpu().numpy())

    def range(self) -> Range:
        """The threshold to both sides."""
        lo, hi = search_both(self.statistic, self.spec.grid)
        threshold = max(-lo, hi)
        return scalar(-threshold), scalar(threshold)


def refuses_infinity(observer: type[ObserverBase]) -> bool:
    """Whether observers of a class are known to raise for NaN and infinity."""
    return observer.__call__ is ObserverBase.__call__ and getattr(observer, "observe", None) is _MinMax.observe


def row_extremes(rows: torch.Tensor) -> Range:
    """Smallest and largest value of each row (the last axis); on the CPU in float32, a piece of the cache at a time."""
    count = rows.shape[-1]
    if rows.device.type != "cpu" or rows.dtype is torch.float64 or not rows.numel():
        return rows.amin(-1), rows.amax(-1)
    flat = rows.detach().reshape(-1, count)
    lo, hi = (torch.empty(len(flat), dtype=torch.float32) for _ in range(2))
    step = max(1, PIECE // count)
    for k in range(0, len(flat), step):
        part = flat[k : k + step].float()
        torch.amin(part, -1, out=lo[k : k + step])
        torch.amax(part, -1, out=hi[k : k + step])
    return lo.reshape(rows.shape[:-1]), hi.reshape(rows.shape[:-1])


def scalar(value: float) -> torch.Tensor:
    """A float64 scalar, so that a search keeps its precision."""
    return torch.tensor(value, dtype=torch.float64)


def extremes(x: torch.Tensor, spec: TensorSpec) -> Range:
    """Smallest and largest value per scale, float32.

    Raises:
        DataError: NaN or infinity.
    """
    if isinstance(spec.granularity, Tensor):
        lo, hi = torch.aminmax(x)
    else:
        lo, hi = row_extremes(spec.granularity.tile(x))
    lo, hi = lo.float(), hi.float()
    if not bool((torch.isfinite(lo) & torch.isfinite(hi)).all()):
        nans, infinities = int(x.isnan().sum()), int(x.isinf().sum())
        raise DataError(f"{nans} NaN and {infinities} infinite values among {x.numel()}")
    return lo, hi
