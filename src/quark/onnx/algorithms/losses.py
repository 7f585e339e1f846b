"""What a float model answers, kept to be compared with, and how far quantized models are from it.

The loss is that of ``quark.measure.outputs``; what a lead is worth says ``quark.measure.gain``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import onnx_ir as ir

from quark.config.options import Options
from quark.measure.outputs import Loss, Values, loss_of
from quark.onnx.graph.run import Feed, Runner, trim_heap
from quark.onnx.graph.session import Runtime

#: Bytes of answers that are kept, and samples that are kept in any case.
BUDGET, FEWEST = 1 << 26, 8


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
    return loss_of((expected, runner.run(feed).values) for feed, expected in reference)


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
    runner = Runner(model, list(expected[0]), (), replace(Runtime.of(options), as_given=True))
    loss = loss_of((one, runner.run(feed).values) for one, feed in zip(expected, feeds, strict=False))
    del runner
    trim_heap()
    return loss
