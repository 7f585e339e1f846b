"""How far a quantized model is from the float one, output by output and sample by sample.

    loss(model)  Σ over outputs  N / S       N = Σ (x − y)², S = Σ x²      x: float, y: quantized; sums over the samples

What a lead is worth says ``quark.measure.gain``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from quark.config.options import Options
from quark.dataclass import dataclass
from quark.measure.distance import Distance
from quark.onnx.graph.run import Feed, Runner, trim_heap
from quark.onnx.graph.session import Runtime

#: Bytes of answers that are kept, and samples that are kept in any case.
BUDGET, FEWEST = 1 << 26, 8
#: Tensors of one sample, by name.
Values = Mapping[str, np.ndarray]


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
