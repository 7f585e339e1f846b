"""How far a quantized model is from the float one, output by output and sample by sample, and what a lead is worth.

    loss(model)  Σ over outputs  N / S       N = Σ (x − y)², S = Σ x²      x: float, y: quantized; sums over the samples
    gain(o)      log(N_without / N_with)     of output o

The standard error of a gain follows from the samples' parts of both sums (the ratio estimator): with
d_s = n_without,s / N_without − n_with,s / N_with it is sqrt(n / (n − 1) Σ d_s²). The gain of a model is the mean over
its outputs, in which a large output counts no more than a small one. One sample knows no chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.dataclass import dataclass
from quark.measure.distance import Distance
from quark.onnx.graph.run import Feed, Runner, trim_heap
from quark.onnx.graph.session import Runtime

#: What one output may lose, as a part of what the outputs gain on average.
PRICE = 0.1
#: Bytes of answers that are kept, and samples that are kept in any case.
BUDGET, FEWEST = 1 << 26, 8
#: Tensors of one sample, by name.
Values = Mapping[str, np.ndarray]
_TINY = 1e-30


@dataclass(frozen=True)
class Loss:
    """Energies of the difference and of the float model's answer, [samples, outputs]."""

    noise: np.ndarray
    signal: np.ndarray

    @property
    def total(self) -> float:
        """The loss over all samples."""
        return float(_relative(self.noise.sum(0), self.signal.sum(0)).sum())

    @property
    def each(self) -> np.ndarray:
        """[samples]: the loss of every sample alone."""
        return np.asarray(_relative(self.noise, self.signal).sum(1))


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


def gain(loss: Loss, other: Loss) -> Gain:
    """What a change brought: ``loss`` with it against ``other`` without it, on the same samples."""
    with_it, without = (np.maximum(one.noise.sum(0), _TINY) for one in (loss, other))
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN where one is infinite, and then nothing is sure
        parts = other.noise / without - loss.noise / with_it
        outputs = np.log(without / with_it)
    return Gain(float(outputs.mean()), float(_error(parts.mean(1))), outputs, np.asarray(_error(parts)))


def _error(parts: np.ndarray) -> np.ndarray:
    count = len(parts)
    return np.sqrt(np.square(parts).sum(0) * count / max(count - 1, 1)) * (count > 1)


def compared(loss: Loss, other: Loss) -> tuple[float, float]:
    """The mean of log(loss / other) over the samples, and its standard error (0 of one sample)."""
    ratios = np.log(np.maximum(loss.each, _TINY) / np.maximum(other.each, _TINY))
    error = 0.0 if len(ratios) < 2 else float(ratios.std(ddof=1)) / math.sqrt(len(ratios))
    return float(ratios.mean()), error


def joined(losses: Iterable[Loss]) -> Loss:
    """The loss over the samples of several."""
    parts = list(losses)
    return Loss(np.concatenate([one.noise for one in parts]), np.concatenate([one.signal for one in parts]))


class Reference:
    """What a float model says on samples, to be compared with more than once: up to ``BUDGET`` bytes are kept, what
    does not fit is computed again."""

    def __init__(self, model: ir.Model, feeds: Sequence[Feed], options: Options) -> None:
        self.names, self.runtime = [str(value.name) for value in model.graph.outputs], Runtime.of(options)
        self._model, self._feeds = model, feeds
        self._kept: list[Values] = []
        self._left = BUDGET

    def __iter__(self) -> Iterator[tuple[Feed, Values]]:
        runner = None
        for number, feed in enumerate(self._feeds):
            if number < len(self._kept):
                yield feed, self._kept[number]
                continue
            runner = runner or Runner(self._model, self.names, (), self.runtime)
            values = runner.run(feed).values
            self._left -= sum(array.nbytes for array in values.values())
            if self._left >= 0:
                self._kept.append(values)
            yield feed, values


def distance(reference: Reference, quantized: ir.Model) -> Loss:
    """The loss of a quantized model."""
    runner = Runner(quantized, reference.names, (), reference.runtime)
    return _loss(_row(reference.names, expected, runner.run(feed).values) for feed, expected in reference)


def answers(model: ir.Model, feeds: Iterable[Feed], options: Options) -> list[Values]:
    """What the outputs of a float model are, sample by sample, to be compared with more than once.

    No more samples than fit ``BUDGET``, and at least ``FEWEST`` of them.
    """
    names = [str(value.name) for value in model.graph.outputs]
    runner = Runner(model, names, (), Runtime.of(options))
    found: list[Values] = []
    size = 0
    for feed in feeds:
        found.append(dict(runner.run(feed).values))
        size += sum(array.nbytes for array in found[-1].values())
        if size >= BUDGET and len(found) >= FEWEST:
            break
    del runner
    trim_heap()
    return found


def distance_to(expected: Sequence[Values], model: ir.Model, feeds: Iterable[Feed], options: Options) -> Loss:
    """The loss of a model whose float weights count as they are, on the first samples of ``feeds``.

    Args:
        expected: of ``answers``.
    """
    names = list(expected[0])
    runner = Runner(model, names, (), replace(Runtime.of(options), as_given=True))
    loss = _loss(_row(names, one, runner.run(feed).values) for one, feed in zip(expected, feeds, strict=False))
    del runner
    trim_heap()
    return loss


def _loss(rows: Iterable[list[tuple[float, float]]]) -> Loss:
    energies = np.array(list(rows), np.float64)
    return Loss(energies[..., 0], energies[..., 1])


def _row(names: Iterable[str], expected: Values, found: Values) -> list[tuple[float, float]]:
    """(noise, signal) of every output; nothing of those that are not floats or change their shape."""
    row = []
    for name in names:
        here = Distance()
        if expected[name].dtype.kind == "f" and expected[name].shape == found[name].shape:
            here.update(expected[name], found[name])
        row.append((here.noise, here.signal))
    return row


def _relative(noise: np.ndarray, signal: np.ndarray) -> np.ndarray:
    return np.where(signal > 0, noise / np.where(signal > 0, signal, 1), noise > 0)
