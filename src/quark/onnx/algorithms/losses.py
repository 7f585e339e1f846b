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
        self._model, self._feeds, self._options = model, feeds, options
        self._kept: list[Values] = []
        self.left = BUDGET

    def __iter__(self) -> Iterator[tuple[Feed, Values]]:
        runner = None
        for number, feed in enumerate(self._feeds):
            if number < len(self._kept):
                yield feed, self._kept[number]
                continue
            runner = runner or _runner(self._model, self._options)
            values = runner.run(feed).values
            self.left -= _bytes(values)
            if self.left >= 0:
                self._kept.append(values)
            yield feed, values


def answers(model: ir.Model, feeds: Sequence[Feed], options: Options) -> list[tuple[Feed, Values]]:
    """The same of a float model that will change: no more samples than fit ``BUDGET``, and at least ``FEWEST``."""
    reference, found = Reference(model, feeds, options), list[tuple[Feed, Values]]()
    for pair in reference:
        found.append(pair)
        if reference.left <= 0 and len(found) >= FEWEST:
            break
    trim_heap()
    return found


def distance(
    expected: Iterable[tuple[Feed, Values]], model: ir.Model, options: Options, as_given: bool = False
) -> Loss:
    """The loss of a quantized model.

    Args:
        expected: a ``Reference``, or ``answers``.
        model: it.
        options: how to run it.
        as_given: its float weights count as they are.
    """
    runner = _runner(model, options, as_given)
    loss = loss_of((values, runner.run(feed).values) for feed, values in expected)
    del runner
    trim_heap()
    return loss


def _runner(model: ir.Model, options: Options, as_given: bool = False) -> Runner:
    names = [str(value.name) for value in model.graph.outputs]
    return Runner(model, names, (), replace(Runtime.of(options), as_given=as_given))


def _bytes(values: Values) -> int:
    return sum(array.nbytes for array in values.values())
