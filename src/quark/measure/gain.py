"""Whether a change makes a model better, by more than chance: the one test of both flows.

    gain(o)      log(N_without / N_with)     of output o, N = Σ over samples of its noise

The standard error of a gain follows from the samples' parts of both sums (the ratio estimator): with
d_s = n_without,s / N_without − n_with,s / N_with it is sqrt(n / (n − 1) Σ d_s²). Each sample is compared with itself.
The gain of a model is the mean over its outputs, in which a large output counts no more than a small one.

Of fewer than ``FEW`` samples the spread says little: the noise has to fall by 2 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from quark.dataclass import dataclass
from quark.measure.score import WORTH

#: What one output may lose, as a part of what the outputs gain on average.
PRICE = 0.1
#: Samples below which their spread says little.
FEW = 4
#: Standard errors of a gain that leave no doubt.
CERTAIN = 3.0
TINY = 1e-30
Name = TypeVar("Name")


@dataclass(frozen=True)
class Gain:
    """log of the noise without over that with a change, and the standard error: of the model, and of every output."""

    mean: float
    error: float
    outputs: np.ndarray
    errors: np.ndarray

    @property
    def sure(self) -> bool:
        """Whether the model gains by more than chance, and no output pays for it."""
        return bool(self.mean > self.error and (self.outputs >= -PRICE * self.mean).all())

    @property
    def harmless(self) -> bool:
        """Whether the model does not lose, and no output loses by more than chance."""
        return bool(self.mean >= 0 and (self.outputs >= -np.maximum(self.errors, PRICE * self.mean)).all())


def gain(noise: np.ndarray, other: np.ndarray) -> Gain:
    """What a change brought.

    Args:
        noise, other: energies of the error with and without it, [samples, outputs], of the same samples.
    """
    with_it, without = (np.maximum(one.sum(0), TINY) for one in (noise, other))
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN where one is infinite, and then nothing is sure
        parts = other / without - noise / with_it
        outputs = np.log(without / with_it)
    return _gain(outputs, parts)


def gain_of(after: Sequence[float], before: Sequence[float]) -> Gain:
    """What a change brings, by one error a sample with and without it."""
    return gain(*(np.asarray(one, np.float64)[:, None] for one in (after, before)))


def certain(after: Sequence[float], before: Sequence[float]) -> bool:
    """Whether a change gains so much on the samples that no other need be tried."""
    found = gain_of(after, before)
    return len(before) >= FEW and found.mean > CERTAIN * found.error


def typical_gain(noise: np.ndarray, other: np.ndarray) -> Gain:
    """The same as the mean over the samples of the logs, to which no sample matters more than another: where outliers
    are what is decided about. All outputs count as one.

    Args:
        noise, other: losses with and without the change, [samples].
    """
    parts = np.log(np.maximum(other, TINY) / np.maximum(noise, TINY))[:, None]
    return _gain(parts.mean(0), (parts - parts.mean()) / len(parts))


def _gain(outputs: np.ndarray, parts: np.ndarray) -> Gain:
    error = float(_error(parts.mean(1)))
    error = max(error, -math.log(WORTH)) if len(parts) < FEW else error
    return Gain(float(outputs.mean()), error, outputs, _error(parts))


def _error(parts: np.ndarray) -> np.ndarray:
    """Of one sample, which is all of its sum, 0."""
    return np.asarray(np.sqrt(np.square(parts).sum(0) * len(parts) / max(len(parts) - 1, 1)))


def surest(gains: Mapping[Name, Gain]) -> Name | None:
    """The change that gains most of those that surely gain; None: none does."""
    sure = [name for name, one in gains.items() if one.sure]
    return max(sure, key=lambda name: gains[name].mean, default=None)
